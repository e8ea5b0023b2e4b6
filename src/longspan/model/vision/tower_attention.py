"""Attention of a tower over packed images: one call for all images of a wave, in place of one for each.

Towers of images of any size (Qwen-VL) pack their patches, and tell segments (images, frames or windows) by cu_seqlens.
Under a name that holds "flash" transformers gives such a tower's attention function all rows in one call, under any
other it splits them image by image, reading their lengths from the device in every layer. The call is an `attend` over
one slot, so that its kernel is one of the support table's.
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface

from longspan.attention import attend
from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.plan import Group, MicroBatch

IMPLEMENTATION = "longspan_packed_flash"
_NO_WORLD = -1  # a group of one slot talks to nobody
_shards = WeakIdKeyDictionary()  # by the tensor of cu_seqlens, which all layers of a call share


def pack_attention(encoder: nn.Module) -> None:
    """Have a tower that packs its images attend to all of them in one call; other towers stay as they are.

    So does one whose attention function was chosen, other than transformers' default on torch.
    """
    for module in _packing_modules(encoder):
        module.config._attn_implementation = IMPLEMENTATION


def _packing_modules(encoder: nn.Module) -> Iterator[Any]:
    """The modules whose attention takes segments, and whose configuration names the function that computes it."""
    for module in encoder.modules():
        config = getattr(module, "config", None)
        usual = config is not None and getattr(config, "_attn_implementation", None) in ("sdpa", None)
        if usual and "cu_seqlens" in signature(module.forward).parameters:
            yield module


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Rows (1, N, T, H) -> (1, T, N, H), of every segment by itself; what transformers calls for each layer."""
    if cu_seq_lens_q is None or attention_mask is not None or dropout or is_causal or len(query) != 1:
        raise ModelError(
            f"{type(module).__name__} asked {IMPLEMENTATION} for other attention than among the rows of each segment: "
            f"cu_seq_lens_q {'missing' if cu_seq_lens_q is None else 'given'}, dropout {dropout}, is_causal "
            f"{is_causal}, batch {len(query)}; give its vision_config attn_implementation 'eager'"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, _shard(cu_seq_lens_q, q.device), causal=False, scale=scaling)[None], None


def _shard(cu_seqlens: Tensor, device: torch.device) -> SequenceShard:
    """The segments as documents of one slot. Their lengths are read from the device once a call of the tower."""
    if cu_seqlens not in _shards:
        lengths = tuple(length for length in cu_seqlens.diff().tolist() if length)
        group = Group((0,), tuple(range(len(lengths))), lengths, partition="contiguous")
        _shards[cu_seqlens] = SequenceShard(MicroBatch((group,)), 0, _NO_WORLD, device)
    return _shards[cu_seqlens]


AttentionInterface.register(IMPLEMENTATION, _forward)
