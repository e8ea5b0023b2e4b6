"""The gated RMS norm of Mamba 2 on a rank's features: it takes means of groups of them, or of all.

Where a rank has whole groups nothing travels. Otherwise every rank sums the squares of its features by group, the sums
are added over the ranks, and each rank scales its own: one number a row and group. The gradient of these sums is
partial on every rank, and summed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from longspan.comm import World
from longspan.comm.moves.tp_collectives import tp_copy, tp_place, tp_sum
from longspan.errors import ModelError, counted

Means = Callable[[Tensor], Tensor]  # (…, features) -> the mean square of each feature's group, for each feature


def _groups_of(norm: Any) -> int:
    """How many equal groups of features a norm takes means of: one in transformers 5.17's Mamba 2."""
    if size := getattr(norm, "group_size", None):
        return norm.weight.numel() // size
    return getattr(norm, "n_groups", None) or 1


def refuse_unknown_norm(name: str, norm: Any) -> None:
    """Raise ModelError, naming it, for a norm that computes something else than this module; shown with numbers."""
    features, groups = norm.weight.numel(), _groups_of(norm)
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = torch.randn(3, 1, 2, features, dtype=torch.float64, generator=generator).unbind()
    try:
        wanted = functional_call(norm, {"weight": weight[0, 0]}, (x, gate))
        ours = _gated(norm, x, gate, weight[0, 0], partial(_means_here, groups=groups))
        equal = torch.allclose(wanted, ours, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a norm raises that takes other arguments
        equal = False
    if not equal:
        raise ModelError(
            f"{name} ({type(norm).__name__}) is not an RMS norm over {counted(groups, 'group')} of features, before or "
            "after its gate, and its features would be on several tensor-parallel ranks; use tp 1"
        )


def norm_over_ranks(norm: Any, world: World) -> None:
    """Have a norm take means of this rank's features by group, over the ranks that share a group.

    Its weight is whole here, and must be this rank's while it runs.
    """
    groups = _groups_of(norm)
    key, tp, total = world.key, world.home.tp, norm.weight.numel()
    means: Means = partial(_means_here, groups=groups // tp)
    if groups % tp:
        size, features = total // groups, total // tp
        first = world.coordinates.tp * features
        here = range(first // size, (first + features - 1) // size + 1)
        sizes = [min((g + 1) * size, first + features) - max(g * size, first) for g in here]
        means = partial(_means_over_ranks, groups=here, sizes=sizes, count=groups, key=key)

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _gated(norm, hidden_states, gate, norm.weight, means)

    norm.forward = forward


def _gated(norm: Any, x: Tensor, gate: Tensor | None, weight: Tensor, means: Means) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y, gates = x.to(wide), None if gate is None else F.silu(gate.to(wide))
    gate_first = not getattr(norm, "norm_before_gate", False)
    if gates is not None and gate_first:
        y = y * gates
    y = weight * (y * torch.rsqrt(means(y) + norm.variance_epsilon))
    if gates is not None and not gate_first:
        y = y * gates
    return y.to(x.dtype)


def _means_here(y: Tensor, groups: int) -> Tensor:
    means = y.unflatten(-1, (groups, -1)).square().mean(-1)
    return means.repeat_interleave(y.shape[-1] // groups, -1)


def _means_over_ranks(y: Tensor, groups: range, sizes: list[int], count: int, key: int) -> Tensor:
    """`sizes`: how many of a group's features are here, for the groups here, of `count`."""
    sums = torch.stack([part.square().sum(-1) for part in y.split(sizes, -1)], -1)  # (…, groups here)
    sums = F.pad(sums, (groups.start, count - groups.stop))
    means = tp_copy(tp_sum(sums, key), key) / (y.shape[-1] * tp_place(key)[1] // count)
    here = means[..., groups.start : groups.stop].split(1, -1)
    return torch.cat([mean.expand(*mean.shape[:-1], size) for mean, size in zip(here, sizes, strict=True)], -1)
