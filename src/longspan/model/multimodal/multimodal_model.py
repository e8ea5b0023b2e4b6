"""A language model with encoders of other modalities, each under its own home over the same ranks.

    encoder = Encoder(module=prepare_encoder(tower, encoder_world), world=encoder_world)
    model = MultimodalModel({"image": encoder}, prepare(language_model, world), world)
    run_step(model, plan, documents, world, optimizer=optimizer)        # documents: ItemDocuments

How a step goes through both is in `longspan.train.encoding`. Rows of items reach the language model by a hook on its
input embedding, so that its own forward is untouched.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.bridge.splice import add_rows, splice
from longspan.comm import SequenceShard, World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.layout.layout import short
from longspan.model.adapters import Adapter, adapter_of
from longspan.model.execution import execution_of
from longspan.model.layers import decoder_layers
from longspan.model.multimodal.prepare_encoder import check_prepared
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules, is_prepared
from longspan.model.seams.layer_arguments import shard_of_layer
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.cost.model_shape import SEEN_BY_IMAGES


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder with its projector, its world, and how its items are dealt out.

    `module(inputs)` takes a list of what the documents' `read` gives for each item, and returns their rows (n, D) end
    to end, D being the language model's width; where several slots may share an item (`max_cp` above 1), it is called
    with `shard=` too and returns this rank's rows. `world` is of the encoder's own Layout, without pipeline stages,
    over the language model's ranks.

    Items are dealt to the encoder's slots by `plan_dynamic`, priced by `cost`, an item being a document of its rows:
    in waves of at most `max_rows_per_slot` rows a slot. `recompute` encodes each wave again before its backward pass
    instead of keeping what that needs. An encoder of which no parameter requires a gradient is frozen: nothing flows
    back to it, and in training it stays in the mode that it is in.

    With `deep_layers` L its rows are (n, D · (1 + L)): the first D enter at the input embedding, and part k is added to
    what decoder layer k returns, k from 0 (DeepStack, https://arxiv.org/abs/2406.04334).

    `in_spans`: in every layer of the language model the rows of an item see each other in both directions, those of
    items side by side too, as Gemma 3's images do.
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
    def frozen(self) -> bool:
        """Whether no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.module.parameters())


class MultimodalModel(nn.Module):
    """A prepared language model and its encoders by modality; train and evaluate it with `run_step` and `evaluate`.

    Parameters are named `encoders.MODALITY.…` and `language_model.…`. Raises ModelError where a module is not
    prepared, or an encoder's world is not over the language model's ranks.
    """

    def __init__(
        self, encoders: Mapping[str, Encoder], language_model: PreTrainedModel | PipelineModel, world: World
    ) -> None:
        super().__init__()
        if not is_prepared(language_model):
            raise ModelError(
                f"{type(language_model).__name__} was not prepared; build MultimodalModel(encoders, "
                "longspan.prepare(language_model, world), world)"
            )
        for modality, encoder in encoders.items():
            _check_encoder(modality, encoder)
            check_encoder_home(modality, encoder.world.home, world)
            check_prepared(encoder.module, encoder.world)
        _check_spans(encoders, language_model)
        _check_shared({**{f"the encoder of {name}": x.module for name, x in encoders.items()}, _MODEL: language_model})
        self.encoder_settings, self.world = dict(encoders), world
        self.encoders = nn.ModuleDict({modality: encoder.module for modality, encoder in encoders.items()})
        self.language_model = language_model
        self.config: Any = language_model.config
        rules: Any = language_model
        rules.call_rules = replace(call_rules(language_model), in_spans=modalities_in_spans(encoders))
        self.training = language_model.training  # encoders keep the modes of their modules
        _ = world.channels.everyone  # makes its group, on all ranks together
        _check_deep_layers(encoders, language_model)
        for root, inside in _first_parts(language_model):
            _SpliceHook(root, inside.get_input_embeddings(), tuple(encoders.values()))
            _add_after_layers(inside, max((encoder.deep_layers for encoder in encoders.values()), default=0))

    @property
    def execution(self) -> Any:
        """What the language model computes with."""
        return execution_of(self.language_model)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the language model; None where it has none."""
        return adapter_of(self.language_model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ModelError: a step goes through both modules with `run_step` or `evaluate`."""
        raise ModelError(
            "a MultimodalModel is run with longspan.run_step(model, plan, documents, world) or longspan.evaluate; call "
            "model.language_model for text alone"
        )


def _check_encoder(modality: str, encoder: object) -> None:
    if not isinstance(encoder, Encoder):
        raise ModelError(
            f"the encoder of {modality} is a {type(encoder).__name__}; give Encoder(module=prepare_encoder(module, "
            "encoder_world), world=encoder_world)"
        )
    if "." in modality or not modality:
        raise ModelError(f"{modality!r} names a modality, and parameters; give a name without dots")


def check_encoder_home(modality: str, encoder_home: Layout, world: World) -> None:
    """Raise ModelError for a home that is not over the language model's ranks, or has pipeline stages."""
    home = world.home
    if sorted(home.ranks) != sorted(encoder_home.ranks):
        raise ModelError(
            f"the encoder of {modality} is over ranks {short(encoder_home.ranks)}, the language model over "
            f"{short(home.ranks)}; give both the same ranks, in any order"
        )
    if encoder_home.pp > 1:
        raise ModelError(
            f"the home of the encoder of {modality} has pp {encoder_home.pp}; an encoder is whole on every "
            "slot: use pp 1"
        )


_MODEL = "the language model"


def modalities_in_spans(encoders: Mapping[str, Encoder]) -> tuple[str, ...]:
    """Those of which the rows of an item see each other."""
    return tuple(modality for modality, encoder in encoders.items() if encoder.in_spans)


def _check_spans(encoders: Mapping[str, Encoder], language_model: nn.Module) -> None:
    """Raise ModelError where the mask of a model's images would be left out."""
    kind = getattr(getattr(language_model, "config", None), "model_type", None)
    if kind in SEEN_BY_IMAGES and not modalities_in_spans(encoders):
        raise ModelError(
            f"tokens of an image see each other in {kind}, and none of its {len(encoders)} encoders says so; give "
            "Encoder(..., in_spans=True), or use prepare(model, world, encoder=Layout(...))"
        )


def _check_shared(modules: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter of two modules: each would sum its gradient over its own slots, and count it in the norm."""
    users: dict[int, str] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            if users.setdefault(id(parameter), name) != name:
                raise ModelError(
                    f"{name} and {users[id(parameter)]} share the parameter {path}; give items of one encoder one "
                    "modality, images and clips alike, and every other module parameters of its own"
                )


def check_world(model: nn.Module, world: World) -> None:
    """Raise ModelError for a MultimodalModel over another world than this, an encoder's say."""
    if isinstance(model, MultimodalModel) and model.world is not world:
        raise ModelError(
            f"the model was built over a world of {model.world.home}, but given one of {world.home}; pass the world of "
            "its language model, model.world"
        )


def language_model_of(model: nn.Module) -> nn.Module:
    """The language model of a MultimodalModel; any other model itself."""
    return model.language_model if isinstance(model, MultimodalModel) else model


def modules_and_worlds(model: nn.Module, world: World) -> list[tuple[nn.Module, World]]:
    """The modules of a model that lie in homes of their own, the language model first, each with its world."""
    if not isinstance(model, MultimodalModel):
        return [(model, world)]
    encoders = [(encoder.module, encoder.world) for encoder in model.encoder_settings.values()]
    return [(model.language_model, world), *encoders]


def _first_parts(model: PreTrainedModel | PipelineModel) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """What is called with a shard, and the model with the input embedding; nothing where the embedding is elsewhere."""
    if isinstance(model, PipelineModel):
        yield from ((stage, stage.model) for stage in model.stages if stage.first)
    else:
        yield model, model


def _check_deep_layers(encoders: Mapping[str, Encoder], model: PreTrainedModel | PipelineModel) -> None:
    """Raise ModelError, on every rank, where rows would be added to layers of a later pipeline stage."""
    if isinstance(model, PipelineModel):
        here, where = len(model.layers_of_stages[0]), f"the first of {len(model.layers_of_stages)} pipeline stages has"
    else:
        here, where = model.config.get_text_config().num_hidden_layers, "the language model has"
    for modality, encoder in encoders.items():
        if encoder.deep_layers > here:
            raise ModelError(
                f"rows of the encoder of {modality} are added after {encoder.deep_layers} decoder layers, and {where} "
                f"{here}; use fewer stages (pp x virtual stages)"
            )


def _add_after_layers(model: PreTrainedModel, count: int) -> None:
    """Have the first layers return their hidden states with the rows that their shard has for them added."""
    for index, layer in enumerate([*decoder_layers(model).values()][:count]):
        layer.register_forward_hook(partial(_add_to_output, index), with_kwargs=True)


def _add_to_output(index: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> Any:
    shard = kwargs.get("shard") or shard_of_layer()
    if not isinstance(shard, SequenceShard):
        return out
    if isinstance(out, tuple):
        return (add_rows(out[0], shard, index), *out[1:])
    return add_rows(out, shard, index)


class _SpliceHook:
    """Splices rows into what an embedding returns during a call of its model with a shard."""

    def __init__(self, root: nn.Module, embedding: nn.Module, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self._shard: SequenceShard | None = None
        root.register_forward_pre_hook(self._enter, with_kwargs=True)
        root.register_forward_hook(self._leave, always_call=True)
        embedding.register_forward_hook(self._splice)

    def _enter(self, root: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        shard = kwargs["stage_input"].shard if "stage_input" in kwargs else kwargs.get("shard")
        self._shard = shard if isinstance(shard, SequenceShard) else None

    def _leave(self, *_: Any) -> None:
        self._shard = None

    def _splice(self, embedding: nn.Module, args: Any, embeddings: Tensor) -> Tensor:
        if self._shard is None:
            return embeddings
        if torch.is_grad_enabled() and not embeddings.requires_grad and not all(x.frozen for x in self._encoders):
            # Under a frozen language model all ranks enter its backward pass, also those that got no rows.
            embeddings = embeddings.detach().requires_grad_()
        return splice(embeddings, self._shard)
