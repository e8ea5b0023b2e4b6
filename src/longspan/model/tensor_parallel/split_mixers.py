"""Mixers (state-space layers) split over tensor-parallel ranks, with the norms over their features.

Parameters are even slices, as checkpoints have them: other rows are gathered when the mixer runs. Norms over groups
that lie on several ranks sum squares over these.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from longspan.comm import World
from longspan.comm.tp_collectives import tp_copy, tp_copy_parameter, tp_index_and_degree, tp_sum
from longspan.errors import ModelError, plural
from longspan.model.seams.norms import count_groups
from longspan.model.tensor_parallel.mixer_parts import (
    MixerParts,
    is_first_adapter_matrix,
    mixer_parts,
    tensors_of_part,
)
from longspan.model.tensor_parallel.module_styles import ROWWISE
from longspan.model.tensor_parallel.split_modules import View, shard_and_view_rows, split_linear, wrap_forward

Means = Callable[[Tensor], Tensor]  # (…, features) -> the mean square of each feature's group, for each feature


def split_norm(norm: Any, world: World) -> None:
    """Replace a norm's forward by one for this rank's features: means of a group are over all ranks that share it.

    When it runs, a wrapper around the mixer has put this rank's part in place of the norm's weight.
    """
    groups = count_groups(norm)
    key = world.key
    tp = world.home.tp
    total = norm.weight.numel()
    means: Means = partial(_local_means, groups=groups // tp)
    # Some groups lie on several ranks.
    if groups % tp:
        size = total // groups
        features = total // tp
        first = world.coordinates.tp * features
        groups_here = range(first // size, (first + features - 1) // size + 1)
        # how many of this rank's features lie in each of these groups
        sizes = [min((g + 1) * size, first + features) - max(g * size, first) for g in groups_here]
        means = partial(_means_over_ranks, groups=groups_here, sizes=sizes, count=groups, key=key)

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _apply_norm(norm, hidden_states, gate, norm.weight, means)

    norm.forward = forward


def _apply_norm(norm: Any, x: Tensor, gate: Tensor | None, weight: Tensor, means: Means) -> Tensor:
    """weight * x / sqrt(mean square + epsilon), times silu(gate) before or after; x, gate (…, features here), weight
    (features here); computed in float32 or wider."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide_dtype)
    gates = None if gate is None else F.silu(gate.to(wide_dtype))
    gate_first = not getattr(norm, "norm_before_gate", False)
    if gates is not None and gate_first:
        y = y * gates
    y = weight * (y * torch.rsqrt(means(y) + norm.variance_epsilon))
    if gates is not None and not gate_first:
        y = y * gates
    return y.to(x.dtype)


def _local_means(y: Tensor, groups: int) -> Tensor:
    """y (…, features) has `groups` equal groups."""
    means = y.unflatten(-1, (groups, -1)).square().mean(-1)
    return means.repeat_interleave(y.shape[-1] // groups, -1)


def _means_over_ranks(y: Tensor, groups: range, sizes: list[int], count: int, key: int) -> Tensor:
    """y (…, features here) has `sizes` features of each of this rank's `groups`, a range of all `count`; `key` is
    the world's. Sums of squares are padded with zeros to all groups and summed over tp; a group has (size of y) ·
    tp / `count` features. Each rank uses the means for its own features: their gradients are summed over tp too."""
    sums_of_groups = [group_features.square().sum(-1) for group_features in y.split(sizes, -1)]
    sums = torch.stack(sums_of_groups, -1)  # (…, groups here)
    sums = F.pad(sums, (groups.start, count - groups.stop))  # (…, count)
    means = tp_copy(tp_sum(sums, key), key) / (y.shape[-1] * tp_index_and_degree(key)[1] // count)
    means_here = means[..., groups.start : groups.stop].split(1, -1)
    return torch.cat(
        [mean.expand(*mean.shape[:-1], size) for mean, size in zip(means_here, sizes, strict=True)], -1
    )


def refuse_unsplittable_mixer(name: str, mixer: nn.Module, tp: int) -> None:
    """Raise ModelError for an unknown mixer, or one whose norm over features is not that of `_apply_norm`.

    The norm is tried with random numbers on the host. That tp divides the heads is checked elsewhere.
    """
    norm: Any = _find_feature_norm(mixer, mixer_parts(name, mixer, tp))
    if norm is None:
        return
    features = norm.weight.numel()
    groups = count_groups(norm)
    generator = torch.Generator().manual_seed(0)
    x, gate, weights = torch.randn(3, 1, 2, features, dtype=torch.float64, generator=generator).unbind()
    weight = weights[0, 0]
    try:
        norm_output = functional_call(norm, {"weight": weight}, (x, gate))
        ours = _apply_norm(norm, x, gate, weight, partial(_local_means, groups=groups))
        equal = torch.allclose(norm_output, ours, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a norm raises that takes other arguments
        equal = False
    if not equal:
        raise ModelError(
            f"{name}.norm ({type(norm).__name__}) is not an RMS norm over {plural(groups, 'group')} of features, "
            "before or after its gate, and its features would be on several tensor-parallel ranks; use tp 1"
        )


def split_mixer(name: str, mixer: nn.Module, world: World, *, sequence_parallel: bool) -> None:
    """Split a mixer over the tensor-parallel ranks, in place: parameters are sharded, forwards see this rank's rows.

    The gradient of its input is partial then, and the caller sums it; its output is whole, or with `sequence_parallel`
    this rank's rows of it.
    """
    tp = world.home.tp
    parts = mixer_parts(name, mixer, tp)
    if norm := _find_feature_norm(mixer, parts):
        split_norm(norm, world)
    views = defaultdict[nn.Module, dict[str, View]](dict)
    for owner, attribute, view in _shard_and_view_parts(mixer, parts, world):
        if hasattr(owner, attribute):  # only some mixers of a kind may have it
            views[owner][attribute] = view
    split_linear(mixer.get_submodule(parts.output), ROWWISE, world, sequence_parallel=sequence_parallel)
    for owner, views_of_owner in views.items():
        wrap_forward(mixer, views=views_of_owner, owner=owner)


def _find_feature_norm(mixer: nn.Module, parts: MixerParts) -> nn.Module | None:
    """None also for a norm inside of heads (`parts.whole`)."""
    norm: Any = getattr(mixer, "norm", None)
    if "norm" in parts.rows and getattr(norm, "weight", None) is not None:
        return norm
    return None


def _shard_and_view_parts(
    mixer: nn.Module, parts: MixerParts, world: World
) -> Iterator[tuple[nn.Module, str, View]]:
    """A view is what the forward sees in place of (owner, attribute); of a number, as of heads, that on a rank."""
    whole_view: View = partial(tp_copy_parameter, world_key=world.key)  # unchanged; its gradient is summed over tp
    for name, value in parts.attributes.items():
        owner, _, attribute = name.rpartition(".")
        number: Any = value  # a view gives a tensor otherwise
        yield mixer.get_submodule(owner), attribute, lambda _, number=number: number
    for part_name, rows in parts.rows.items():
        for name, owner, attribute in tensors_of_part(mixer, part_name):
            view = (
                whole_view if is_first_adapter_matrix(name) else shard_and_view_rows(owner, attribute, rows, world)
            )
            yield owner, attribute, view
    for part_name in parts.whole:
        for _, owner, attribute in tensors_of_part(mixer, part_name):
            yield owner, attribute, whole_view
