"""Llama 4's scaling of queries ("temperature") by the positions of rows, in place of their numbers within a call."""

from typing import Any

import torch
from torch import Tensor, nn

SCALES_BY_POSITION = "scales_queries_by_position"


def defer_query_scaling(model: nn.Module) -> None:
    """Turn off each attention module's own scaling of queries by position ("temperature"); `scale_queries` does it."""
    for module in model.modules():
        if scales_queries_by_row(module):
            attention: Any = module
            attention.attn_temperature_tuning = False
            setattr(attention, SCALES_BY_POSITION, True)


def scales_queries_by_row(module: nn.Module) -> bool:
    """Return whether this attention module scales queries by row numbers that it counts within a call (Llama 4)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def scale_queries(module: Any, query: Tensor, position_ids: Tensor) -> Tensor:
    """Scale queries (1, N, T, H) by positions (T,), by Llama 4's formula: of modules of `defer_query_scaling`."""
    steps = torch.floor((position_ids.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None]).to(query.dtype)
