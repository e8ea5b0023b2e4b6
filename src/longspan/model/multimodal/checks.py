"""Checks that encoders fit the language model: its ranks, number of layers and masks, and no shared parameters."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.layout.layout import excerpt
from longspan.model.multimodal.encoder import Encoder, span_modalities
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan.shape.model_shape import SEEN_BY_IMAGES


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
