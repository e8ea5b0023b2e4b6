"""A language model with encoders of other modalities, each under its own home over the same ranks.

    encoder = Encoder(module=prepare_encoder(tower, encoder_world), world=encoder_world)
    model = MultimodalModel({"image": encoder}, prepare(language_model, world), world)
    run_step(model, plan, documents, world, optimizer=optimizer)        # documents: ItemDocuments

How a step goes through both is in `longspan.train.terms`. Rows of items reach the language model by a hook on its
input embedding, so that its own forward is untouched.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.layout.layout import excerpt
from longspan.model.adapters import Adapter, model_adapter
from longspan.model.execution import model_execution
from longspan.model.multimodal.encoder import Encoder, hook_item_rows, span_modalities
from longspan.model.multimodal.prepare_encoder import check_encoder_prepared
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules, is_prepared
from longspan.plan.shape.model_shape import SEEN_BY_IMAGES


class MultimodalModel(nn.Module):
    """A prepared language model and its encoders by modality; train and evaluate it with `run_step` and `evaluate`.

    Parameters are named `encoders.MODALITY.…` and `language_model.…`. Raises ModelError where a module is not
    prepared, or an encoder's world is not over the language model's ranks.
    """

    def __init__(
        self, encoders: Mapping[str, Encoder], language_model: PreTrainedModel | PipelineModel, world: World
    ) -> None:
        """Join encoders and a prepared language model, and check that they fit each other.

        The language model's call rules are replaced, so that rows of one image see each other if its encoder says so.
        """
        super().__init__()
        if not is_prepared(language_model):
            raise ModelError(
                f"{type(language_model).__name__} was not prepared; build MultimodalModel(encoders, "
                "longspan.prepare(language_model, world), world)"
            )
        for modality, encoder in encoders.items():
            check_encoder(modality, encoder)
            check_encoder_home(modality, encoder.world.home, world)
            check_encoder_prepared(encoder.module, encoder.world)
        check_image_mask(encoders, language_model)
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
        prepared.call_rules = replace(call_rules(language_model), in_spans=span_modalities(encoders))
        self.training: bool = language_model.training  # encoders keep the modes of their modules
        _ = world.channels.everyone  # makes its group, on all ranks together
        check_deep_layers(encoders, language_model)
        hook_item_rows(language_model, tuple(encoders.values()))

    @property
    def execution(self) -> Any:
        """The kernels and dtypes with which the language model computes."""
        return model_execution(self.language_model)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the language model; None if it has none."""
        return model_adapter(self.language_model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ModelError: a step goes through both modules with `run_step` or `evaluate`."""
        raise ModelError(
            "a MultimodalModel is run with longspan.run_step(model, plan, documents, world) or longspan.evaluate; call "
            "model.language_model for text alone"
        )


def check_world(model: nn.Module, world: World) -> None:
    """Raise ModelError for a MultimodalModel over another world than this, such as an encoder's."""
    if isinstance(model, MultimodalModel) and model.world is not world:
        raise ModelError(
            f"the model was built over a world of {model.world.home}, but given one of {world.home}; pass the world of "
            "its language model, model.world"
        )


def find_language_model(model: nn.Module) -> nn.Module:
    """Find the language model of a MultimodalModel; any other model is its own."""
    return model.language_model if isinstance(model, MultimodalModel) else model


def modules_and_worlds(model: nn.Module, world: World) -> list[tuple[nn.Module, World]]:
    """Return (module, its world) of each part of a model with a layout of its own, the language model first."""
    if not isinstance(model, MultimodalModel):
        return [(model, world)]
    encoders = [(encoder.module, encoder.world) for encoder in model.encoder_settings.values()]
    return [(model.language_model, world), *encoders]


def check_encoder(modality: str, encoder: object) -> None:
    """Raise ModelError for an object that is no Encoder, and for a modality that cannot begin parameters' names."""
    if not isinstance(encoder, Encoder):
        raise ModelError(
            f"the encoder of {modality} is a {type(encoder).__name__}; give Encoder(module=prepare_encoder(module, "
            "encoder_world), world=encoder_world)"
        )
    if "." in modality or not modality:
        raise ModelError(f"{modality!r} names a modality, and parameters; give a name without dots")


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


def check_image_mask(encoders: Mapping[str, Encoder], language_model: nn.Module) -> None:
    """Raise ModelError for a model whose images' tokens see each other, if no encoder has `in_spans`."""
    kind = getattr(getattr(language_model, "config", None), "model_type", None)
    if kind in SEEN_BY_IMAGES and not span_modalities(encoders):
        raise ModelError(
            f"tokens of an image see each other in {kind}, and none of its {len(encoders)} encoders says so; give "
            "Encoder(..., in_spans=True), or use prepare(model, world, encoder=Layout(...))"
        )


def refuse_shared_parameters(modules: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter that two modules share: each would sum its gradient over its own slots, and count its norm."""
    users: dict[int, str] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            if users.setdefault(id(parameter), name) != name:
                raise ModelError(
                    f"{name} and {users[id(parameter)]} share the parameter {path}; give items of one encoder one "
                    "modality, images and clips alike, and every other module parameters of its own"
                )


def check_deep_layers(encoders: Mapping[str, Encoder], model: PreTrainedModel | PipelineModel) -> None:
    """Raise ModelError where DeepStack's rows would be added to more layers than the first pipeline stage has.

    Only the first stage is given rows of items. The result is the same on every rank, also without the first stage.
    """
    if isinstance(model, PipelineModel):
        first_layers = len(model.layers_of_stages[0])
        holder = f"the first of {len(model.layers_of_stages)} pipeline stages has"
    else:
        first_layers, holder = model.config.get_text_config().num_hidden_layers, "the language model has"
    for modality, encoder in encoders.items():
        if encoder.deep_layers > first_layers:
            raise ModelError(
                f"rows of the encoder of {modality} are added after {encoder.deep_layers} decoder layers, and {holder} "
                f"{first_layers}; use fewer stages (pp x virtual stages)"
            )
