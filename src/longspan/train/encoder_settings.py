"""What [encoder] means for a run's model: which parts are trained, the encoder's home, and its learning rate."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.config.defaults import encoder_default
from longspan.config.sections import RunConfig
from longspan.layout import Layout
from longspan.model import EncoderHome
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.take_apart import freeze_images


def freeze_as_asked(config: RunConfig, model: PreTrainedModel) -> None:
    """Freeze what [encoder] does not train of the tower and projector of a model that is not prepared yet."""
    freeze_images(model, config.encoder.train or encoder_default(config))


def encoder_home(config: RunConfig, world: World, **same: Any) -> EncoderHome:
    """The home of a model's tower and projector."""
    encoder = config.encoder
    return EncoderHome(
        home=Layout(world.home.ranks, tp=encoder.tp),
        max_rows_per_slot=encoder.max_rows or None,
        recompute=encoder.recompute,
        **same,
    )


def learning_rates(config: RunConfig, model: nn.Module) -> dict[str, float] | None:
    """The learning rates of modules by name where the encoder has one of its own; None: one for all."""
    if not isinstance(model, MultimodalModel) or not config.encoder.lr:
        return None
    return {"encoders": config.encoder.lr, "language_model": config.train.lr}


def share_of_rate(config: RunConfig, model: nn.Module, group: Mapping[str, Any]) -> float:
    """The learning rate of a group of an optimizer's parameters, as a share of train.lr."""
    if learning_rates(config, model) is None or not group["params"]:
        return 1.0
    assert isinstance(model, MultimodalModel)
    of_encoder = {id(parameter) for parameter in model.encoders.parameters()}
    return config.encoder.lr / config.train.lr if id(group["params"][0]) in of_encoder else 1.0
