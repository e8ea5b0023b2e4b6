"""A language model with encoders of other modalities, each under its own home over the same ranks.

    encoder = Encoder(module=prepare_encoder(tower, encoder_world), world=encoder_world)
    model = MultimodalModel({"image": encoder}, prepare(language_model, world), world)
    run_step(model, plan, documents, world, optimizer=optimizer)        # documents: MediaDocuments

How a step goes through both is in `longspan.train.terms`. Rows of items reach the language model by a hook on its
input embedding, those of DeepStack by hooks on the first layers too, so that its own forward is untouched.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.bridge.item_rows import AHEAD, add_rows, splice_rows
from longspan.comm import SequenceShard, World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.adapters.adapter import Adapter
from longspan.model.exactness.image_trial import try_images
from longspan.model.execution import Execution, model_execution
from longspan.model.layers import decoder_layers
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.attention_calls import set_spans_of_layers
from longspan.model.seams.call_rules import call_rules, is_prepared
from longspan.model.seams.running_layer import running_layer
from longspan.plain_text import excerpt
from longspan.plan.cost.cost import DEFAULT_COST, Cost

IMAGE = "image"  # the modality
_ENCODER = f"encoders.{IMAGE}."
_LANGUAGE_MODEL = "language_model."


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder with its projector, its world, and how its items are dealt out.

    `module(inputs)` takes a list of what the documents' `read` gives for each item, and returns their rows (n, D) end
    to end; with `max_cp` above 1 it is called with `shard=` too and returns this rank's rows. `world` is of the
    encoder's own Layout, without stages, over the language model's ranks. Items are dealt out by `plan_dynamic`, priced
    by `cost`, in waves of at most `max_rows_per_slot` rows a slot; `recompute` encodes each wave again before its
    backward pass. An encoder is frozen if none of its parameters requires a gradient. With `deep_layers` L rows are (n,
    D · (1 + L)): part k from 0 is added to what decoder layer k returns (DeepStack, https://arxiv.org/abs/2406.04334).
    `in_spans`: the rows of an item, and of items side by side, see each other in both directions, as Gemma 3's images
    do.
    """

    module: nn.Module
    world: World
    max_rows_per_slot: int | None = None
    max_cp: int = 1
    cost: Cost = DEFAULT_COST
    recompute: bool = False
    deep_layers: int = 0
    in_spans: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.module.parameters())


class MultimodalModel(nn.Module):
    """A prepared language model and its encoders by modality; train and evaluate it with `run_step` and `evaluate`.

    Parameters are named `encoders.MODALITY.…` and `language_model.…`. Raises ModelError where a module is not
    prepared, or an encoder's world is not over the language model's ranks.
    """

    # `is_multimodal` knows it by this attribute.
    holds_encoders = True

    def __init__(
        self, encoders: Mapping[str, Encoder], language_model: PreTrainedModel | PipelineModel, world: World
    ) -> None:
        """Join encoders and language model, and check that they fit; all ranks enter.

        The language model is changed: its embedding, and with DeepStack its first layers, get hooks for rows of items,
        and its `call_rules` the modalities whose rows see each other.
        """
        from longspan.model.multimodal.prepare_encoder import check_encoder_prepared

        super().__init__()
        if not is_prepared(language_model):
            raise ModelError(
                f"{type(language_model).__name__} was not prepared; build MultimodalModel(encoders, "
                "longspan.prepare(language_model, world), world)"
            )
        for modality, encoder in encoders.items():
            if not isinstance(encoder, Encoder):
                raise ModelError(
                    f"the encoder of {modality} is a {type(encoder).__name__}; give Encoder(module=prepare_encoder("
                    "module, encoder_world), world=encoder_world)"
                )
            check_encoder_home(modality, encoder.world.home, world)
            check_encoder_prepared(encoder.module, encoder.world)
        span_modalities = tuple(modality for modality, encoder in encoders.items() if encoder.in_spans)
        config = language_model.config
        spans = try_images(config).spans if getattr(config, "vision_config", None) is not None else {}
        if spans and not span_modalities:
            raise ModelError(
                f"tokens of an image see each other in {config.model_type}, and none of its {len(encoders)} encoders "
                "says so; give Encoder(..., in_spans=True), or use prepare(model, world, encoder=Layout(...))"
            )
        for part in _whole_or_stages(language_model):
            set_spans_of_layers(part, spans)
        modules = {f"the encoder of {modality}": encoder.module for modality, encoder in encoders.items()}
        refuse_shared_parameters({**modules, "the language model": language_model})
        self.encoder_settings: dict[str, Encoder] = dict(encoders)
        self.world: World = world
        self.encoders: nn.ModuleDict = nn.ModuleDict(
            {modality: encoder.module for modality, encoder in encoders.items()}
        )
        self.language_model = language_model
        self.config: Any = language_model.config
        prepared: Any = language_model
        prepared.call_rules = replace(call_rules(language_model), in_spans=span_modalities)
        self.training: bool = language_model.training  # encoders keep the modes of their modules
        _ = world.channels.everyone  # makes its group, on all ranks together
        check_deepstack_layers(encoders, language_model)
        hook_item_rows(language_model, tuple(encoders.values()))

    @property
    def execution(self) -> Execution:
        """The kernels and dtypes with which the language model computes."""
        return model_execution(self.language_model)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the language model; None if it has none."""
        return adapter_of_prepared_model(self.language_model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ModelError: a step goes through both modules with `run_step` or `evaluate`."""
        raise ModelError(
            "a MultimodalModel is run with longspan.run_step(model, plan, documents, world) or longspan.evaluate; call "
            "model.language_model for text alone"
        )


def check_world_of_model(model: nn.Module, world: World) -> None:
    """Raise ModelError for a MultimodalModel over another world than this, such as an encoder's."""
    if isinstance(model, MultimodalModel) and model.world is not world:
        raise ModelError(
            f"the model was built over a world of {model.world.home}, but given one of {world.home}; pass the world of "
            "its language model, model.world"
        )


def check_encoder_home(modality: str, encoder_home: Layout, world: World) -> None:
    """Raise ModelError for an encoder's layout over other ranks than the language model's, or with pipeline stages."""
    home = world.home
    if sorted(home.ranks) != sorted(encoder_home.ranks):
        raise ModelError(
            f"the encoder of {modality} is over ranks {excerpt(encoder_home.ranks)}, the language model over "
            f"{excerpt(home.ranks)}; give both the same ranks, in any order"
        )
    if encoder_home.pp > 1:
        raise ModelError(
            f"the home of the encoder of {modality} has pp {encoder_home.pp}; an encoder is whole on every "
            "slot: use pp 1"
        )


def refuse_shared_parameters(modules: Mapping[str, nn.Module]) -> None:
    """Raise ModelError for a parameter that two modules share: each would sum its gradient over its own slots.

    `modules` are by their names in messages.
    """
    users: dict[int, str] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            if users.setdefault(id(parameter), name) != name:
                raise ModelError(
                    f"{name} and {users[id(parameter)]} share the parameter {path}; give items of one encoder one "
                    "modality, images and clips alike, and every other module parameters of its own"
                )


def check_deepstack_layers(encoders: Mapping[str, Encoder], model: PreTrainedModel | PipelineModel) -> None:
    """Raise ModelError, alike on every rank, where DeepStack needs more layers than the first pipeline stage has."""
    if isinstance(model, PipelineModel):
        first_layers = len(model.layers_of_stages[0])
        holder = f"the first of {len(model.layers_of_stages)} pipeline stages has"
    else:
        first_layers = model.config.get_text_config().num_hidden_layers
        holder = "the language model has"
    for modality, encoder in encoders.items():
        if encoder.deep_layers > first_layers:
            raise ModelError(
                f"rows of the encoder of {modality} are added after {encoder.deep_layers} decoder layers, and {holder} "
                f"{first_layers}; use fewer stages (pp x virtual stages)"
            )


def _whole_or_stages(model: PreTrainedModel | PipelineModel) -> list[Any]:
    return [stage.model for stage in model.stages] if isinstance(model, PipelineModel) else [model]


def hook_item_rows(model: PreTrainedModel | PipelineModel, encoders: Sequence[Encoder]) -> None:
    """Hook a prepared language model: rows of items enter at its embedding, those of DeepStack at its first layers."""
    parts: list[tuple[Any, bool]] = [(model, True)]
    if isinstance(model, PipelineModel):  # multi-token prediction embeds later tokens on the last stage
        parts = [(s.model, s.first) for s in model.stages if s.first or (s.last and model.depths)]
    for embedding_model, has_first_layers in parts:
        _SpliceHook(embedding_model.get_input_embeddings(), tuple(encoders))
        if has_first_layers:
            deep_layers = max((encoder.deep_layers for encoder in encoders), default=0)
            for index, layer in enumerate([*decoder_layers(embedding_model).values()][:deep_layers]):
                layer.register_forward_hook(partial(_add_deep_rows, index), with_kwargs=True)


def _add_deep_rows(index: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> Any:
    shard = running_layer().shard
    if not isinstance(shard, SequenceShard):
        return out
    if isinstance(out, tuple):
        return (add_rows(out[0], shard, index), *out[1:])
    return add_rows(out, shard, index)


class _SpliceHook:
    """Splices rows of items into an embedding's output while its model runs with a shard."""

    def __init__(self, embedding: nn.Module, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self._ahead = 0  # how many tokens ahead of its row the embedding is called now (multi-token prediction)
        embedding.register_forward_pre_hook(self._take_lookahead, with_kwargs=True)
        embedding.register_forward_hook(self._splice_rows)

    def _take_lookahead(
        self, embedding: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._ahead = kwargs.get(AHEAD, 0)
        return args, {name: value for name, value in kwargs.items() if name != AHEAD}

    def _splice_rows(self, embedding: nn.Module, args: Any, embeddings: Tensor) -> Tensor:
        shard = running_layer().shard
        if not isinstance(shard, SequenceShard):
            return embeddings
        if (
            torch.is_grad_enabled()
            and not embeddings.requires_grad
            and not all(x.is_frozen for x in self._encoders)
        ):
            # Under a frozen language model all ranks enter its backward pass, also those that got no rows.
            embeddings = embeddings.detach().requires_grad_()
        return splice_rows(embeddings, shard, self._ahead)


def map_stock_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of parameters in the model's own class to their names in a MultimodalModel.

    >>> map_stock_names(["encoders.image.model.visual.pos_embed.weight"])
    {'model.visual.pos_embed.weight': 'encoders.image.model.visual.pos_embed.weight'}

    Names of other models map to themselves.
    """
    names = list(names)
    if not are_multimodal(names):
        return {name: name for name in names}
    return {name.removeprefix(_ENCODER).removeprefix(_LANGUAGE_MODEL): name for name in names}


def are_multimodal(names: Iterable[str]) -> bool:
    """Return whether parameters of these names are a MultimodalModel's: of an encoder, and of a language model."""
    return all(name.startswith((_ENCODER, _LANGUAGE_MODEL)) for name in names)
