"""What encoding an image takes, by its rows, from a model's vision configuration and its tower."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longspan.errors import PlanError
from longspan.model.multimodal.blocks import encoder_blocks
from longspan.plan.cost.config_reader import ConfigReader
from longspan.plan.cost.cost import Cost
from longspan.plan.items.encoder_shape import EncoderShape, Trained, encoder_cost, window_layers

_LAYERS = ("depth", "num_hidden_layers")
_WIDTHS = ("embed_dim", "hidden_size")  # Qwen2-VL says hidden_size of the language model's width


def image_cost(config: PreTrainedConfig, encoder: nn.Module, *, again: int = 0, gpu: bool = False) -> Cost:
    """The cost of an image's rows, for `Encoder(cost=…)`: linear layers, attention in windows and over the whole image.

    `encoder` is the whole tower and projector, before it is sharded; of what is frozen forward alone is priced, and for
    the backward pass so many forward passes `again`. A tower that its configuration does not price is priced by its
    parameters, as if all of it were trained.
    """
    try:
        return EncoderShape.of(config).cost(trained=trained_part(encoder), again=again, gpu=gpu)
    except PlanError:
        return _by_parameters(config, encoder)


def trained_part(encoder: nn.Module) -> Trained:
    """What of a tower and projector is trained, before or after it is sharded."""
    if any(p.requires_grad for block in encoder_blocks(encoder).values() for p in block.parameters()):
        return "all"
    return "projector" if any(p.requires_grad for p in encoder.parameters()) else "none"


def _by_parameters(config: PreTrainedConfig, encoder: nn.Module) -> Cost:
    vision: Any = getattr(config, "vision_config", None)
    width, layers = _first(vision, _WIDTHS), _first(vision, _LAYERS)
    in_blocks = sum(p.numel() for block in encoder_blocks(encoder).values() for p in block.parameters() if p.ndim > 1)
    merge = getattr(vision, "spatial_merge_size", None) or 1
    windows, side = window_layers(ConfigReader.whole(config).inside("vision_config"), layers)
    return encoder_cost(
        in_blocks,
        width,
        layers - windows,
        window_layers=windows,
        window=side**2,
        patches_per_row=merge**2,
    )


def _first(config: Any, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
