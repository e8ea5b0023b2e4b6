"""What Llama 4's attention does by a row's place: chunks of positions, and a temperature that rises with the position.

Layers of type "chunked_attention" let a row see those of its own chunk of `attention_chunk_size` positions; stock
transformers says so in a mask, `attend` by its `chunk`. Layers without rotary positions scale their queries by
log(⌊(position + 1) / floor_scale⌋ + 1) · attn_scale + 1 (https://arxiv.org/abs/2501.19399), for which the stock module
counts the rows that it is given. Here that is left out of the module and done by the shard's positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

_BY_POSITION = "scales_queries_by_position"


def scale_queries_by_position(model: nn.Module) -> None:
    """Leave the temperature of every attention module that has one to our attention function."""
    for module in model.modules():
        if has_temperature(module):
            attention: Any = module
            attention.attn_temperature_tuning = False
            setattr(attention, _BY_POSITION, True)


def has_temperature(module: nn.Module) -> bool:
    """Whether this attention module scales queries by the number of a row among those that it is given."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def is_llama4_temperature(module: nn.Module) -> bool:
    """Whether it says by what numbers, as Llama 4's does."""
    return all(isinstance(getattr(module, name, None), int | float) for name in ("floor_scale", "attn_scale"))


def scaled_by_position(module: Any, query: Tensor, position_ids: Tensor) -> Tensor:
    """Queries (1, N, T, H) of an attention module, scaled by positions (T,) where it does that."""
    if not getattr(module, _BY_POSITION, False):
        return query
    steps = torch.floor((position_ids.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None]).to(query.dtype)


def chunk_of(module: nn.Module) -> int | None:
    """How many positions see each other in this attention module's layer; None where all earlier ones are seen."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if not types or not isinstance(layer, int) or not 0 <= layer < len(types) or types[layer] != "chunked_attention":
        return None
    return getattr(config, "attention_chunk_size", None)
