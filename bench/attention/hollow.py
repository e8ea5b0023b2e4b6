"""An attention kernel that is called and computes nothing: what is left is everything around it."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.kernels import HeadSizes, Kernel


def hollow_kernel(device: str, counts: Counter[str] | None = None) -> Kernel:
    """Gives tensors laid out like FlashAttention-4's, with whatever was in memory; `counts` its calls."""
    calls: Counter[str] = Counter() if counts is None else counts

    def forward(q: Tensor, k: Tensor, v: Tensor, launch: Any, call: AttendCall) -> tuple[Tensor, Tensor]:
        calls["forward"] += 1
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return q.new_empty((*q.shape[:2], v.shape[2])), lse.transpose(0, 1)

    def backward(dout: Tensor, saved: Saved, launch: Any, call: AttendCall) -> tuple[Tensor, ...]:
        calls["backward"] += 1
        return torch.empty_like(saved.q), torch.empty_like(saved.k), torch.empty_like(saved.v)

    features = frozenset({"window", "softcap"})
    return Kernel("hollow", (device,), (torch.bfloat16,), forward, backward, features, HeadSizes())  # pyright: ignore[reportArgumentType]
