"""What a row of an image costs in its encoder, for dealing images out: by the shape of the tower, or its parameters.

How images are dealt out by their costs is `model/multimodal/encoder.py`'s business.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longspan.errors import PlanError
from longspan.model.multimodal.prepare_encoder import encoder_blocks
from longspan.plan.cost.cost import Cost
from longspan.plan.items.encoder_shape import EncoderShape, Trained, encoder_cost, window_layers
from longspan.plan.shape.config_reader import ConfigReader

_LAYERS = ("depth", "num_hidden_layers")
_WIDTHS = ("embed_dim", "hidden_size")  # embed_dim first: Qwen2-VL's hidden_size is the language model's width


def image_cost(config: PreTrainedConfig, encoder: nn.Module, *, again: int = 0, gpu: bool = False) -> Cost:
    """Price an image's rows, for `Encoder(cost=…)`: linear layers, attention in windows and over the whole image.

    `encoder` is the whole tower and projector, before it is sharded. Of frozen parts only the forward pass is priced.
    `again` is how many more forward passes recomputation makes for a backward pass; `gpu`: seconds are those of an
    H200, else of CPUs. A tower whose configuration does not give a price is priced by its parameters, as if all of it
    were trained without recomputation on GPUs.
    """
    try:
        return EncoderShape.of(config).cost(trained=find_trained_part(encoder), again=again, gpu=gpu)
    except PlanError:
        return _parameter_cost(config, encoder)


def find_trained_part(encoder: nn.Module) -> Trained:
    """Return which part of a tower and projector is trained ("all" if any block is), before or after sharding."""
    if any(p.requires_grad for block in encoder_blocks(encoder).values() for p in block.parameters()):
        return "all"
    return "projector" if any(p.requires_grad for p in encoder.parameters()) else "none"


def _parameter_cost(config: PreTrainedConfig, encoder: nn.Module) -> Cost:
    """Price a tower's rows by the numbers in its blocks' matrices, its width, and its layers with windows."""
    vision: Any = getattr(config, "vision_config", None)
    width, layers = _first_value(vision, _WIDTHS), _first_value(vision, _LAYERS)
    in_blocks = sum(p.numel() for block in encoder_blocks(encoder).values() for p in block.parameters() if p.ndim > 1)
    merge = getattr(vision, "spatial_merge_size", None) or 1
    windows, side = window_layers(ConfigReader.read_whole(config).section("vision_config"), layers)
    return encoder_cost(
        in_blocks,
        width,
        layers - windows,
        window_layers=windows,
        window=side**2,
        patches_per_row=merge**2,
    )


def _first_value(config: Any, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
