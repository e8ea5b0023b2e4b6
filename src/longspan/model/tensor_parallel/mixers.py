"""Mixers under tensor parallelism: each rank computes its heads or channels, with the mixer's own code.

A parameter is sharded in equal slices of its rows, in the order of checkpoints. A rank may work with other rows, for
example of a projection that makes several things for all heads: then the slices are gathered when the mixer runs and
the rank takes its rows; gradients go back the same way, summed where several ranks have a row. While the mixer runs,
its parameters are this rank's rows and its numbers of heads are this rank's. A norm over groups of features, if a group
lies on several ranks, sums squares over these ranks: one number for each token and group. An adapter's second matrix is
split as the projection that it adapts; its first is whole on every rank.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from longspan.comm import World
from longspan.comm.tp_collectives import tp_copy, tp_copy_parameter, tp_place, tp_sum
from longspan.errors import ModelError, plural
from longspan.model.adapters import is_adapted
from longspan.model.tensor_parallel.mixer_parts import MixerParts, find_tensors, is_first_adapter_matrix, mixer_parts
from longspan.model.tensor_parallel.plan import ROWWISE
from longspan.model.tensor_parallel.split_adapters import split_adapted_linear
from longspan.model.tensor_parallel.styles import ReplacedAttributes, View, shard_and_view_rows, split_rows

Means = Callable[[Tensor], Tensor]  # (…, features) -> the mean square of each feature's group, for each feature


def _count_groups(norm: Any) -> int:
    if size := getattr(norm, "group_size", None):
        return norm.weight.numel() // size
    return getattr(norm, "n_groups", None) or 1


def refuse_unknown_norm(name: str, norm: Any) -> None:
    """Raise ModelError for a norm that gives something else than `_apply_norm` for random numbers."""
    features, groups = norm.weight.numel(), _count_groups(norm)
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = torch.randn(3, 1, 2, features, dtype=torch.float64, generator=generator).unbind()
    try:
        norm_output = functional_call(norm, {"weight": weight[0, 0]}, (x, gate))
        ours = _apply_norm(norm, x, gate, weight[0, 0], partial(_local_means, groups=groups))
        equal = torch.allclose(norm_output, ours, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a norm raises that takes other arguments
        equal = False
    if not equal:
        raise ModelError(
            f"{name} ({type(norm).__name__}) is not an RMS norm over {plural(groups, 'group')} of features, before or "
            "after its gate, and its features would be on several tensor-parallel ranks; use tp 1"
        )


def split_norm(norm: Any, world: World) -> None:
    """Have a norm take means of this rank's features by group, over the ranks that share a group.

    Where tp does not divide the groups, a rank's range of features may begin or end inside a group: `sizes` are its
    numbers of features in the groups that it has a part of. The norm's weight is still whole here; when the norm runs,
    its caller must have replaced the weight by this rank's part.
    """
    groups = _count_groups(norm)
    key, tp, total = world.key, world.home.tp, norm.weight.numel()
    means: Means = partial(_local_means, groups=groups // tp)
    if groups % tp:  # some groups lie on several ranks
        size, features = total // groups, total // tp
        first = world.coordinates.tp * features
        groups_here = range(first // size, (first + features - 1) // size + 1)
        sizes = [min((g + 1) * size, first + features) - max(g * size, first) for g in groups_here]
        means = partial(_means_over_ranks, groups=groups_here, sizes=sizes, count=groups, key=key)

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _apply_norm(norm, hidden_states, gate, norm.weight, means)

    norm.forward = forward


def _apply_norm(norm: Any, x: Tensor, gate: Tensor | None, weight: Tensor, means: Means) -> Tensor:
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    y, gates = x.to(wide_dtype), None if gate is None else F.silu(gate.to(wide_dtype))
    gate_first = not getattr(norm, "norm_before_gate", False)
    if gates is not None and gate_first:
        y = y * gates
    y = weight * (y * torch.rsqrt(means(y) + norm.variance_epsilon))
    if gates is not None and not gate_first:
        y = y * gates
    return y.to(x.dtype)


def _local_means(y: Tensor, groups: int) -> Tensor:
    means = y.unflatten(-1, (groups, -1)).square().mean(-1)
    return means.repeat_interleave(y.shape[-1] // groups, -1)


def _means_over_ranks(y: Tensor, groups: range, sizes: list[int], count: int, key: int) -> Tensor:
    """Compute the mean square (…, features here) of each feature's group, over all ranks that share it.

    y (…, features here) has `sizes` features of each of this rank's `groups`, a range of all `count`. Each rank's sums
    of squares are padded with zeros to all groups and summed over tp. A group has (size of y) · tp / `count` features.
    Each rank uses the means for its own features, so that their gradients are summed over tp too (`tp_copy`).
    """
    sums_of_groups = [group_features.square().sum(-1) for group_features in y.split(sizes, -1)]
    sums = torch.stack(sums_of_groups, -1)  # (…, groups here)
    sums = F.pad(sums, (groups.start, count - groups.stop))  # (…, count)
    means = tp_copy(tp_sum(sums, key), key) / (y.shape[-1] * tp_place(key)[1] // count)
    means_here = means[..., groups.start : groups.stop].split(1, -1)
    return torch.cat([mean.expand(*mean.shape[:-1], size) for mean, size in zip(means_here, sizes, strict=True)], -1)


Views = dict[nn.Module, dict[str, View]]


def check_mixer(name: str, mixer: nn.Module, tp: int) -> None:
    """Raise ModelError for a mixer that cannot be split here: an unknown one, or with an unknown norm over features.

    That tp divides its heads is checked elsewhere (`check_tp_sizes`).
    """
    parts = mixer_parts(name, mixer, tp)
    if norm := _find_feature_norm(mixer, parts):
        refuse_unknown_norm(f"{name}.norm", norm)


def split_mixer(name: str, mixer: nn.Module, world: World, *, sequence_parallel: bool) -> None:
    """Split a mixer over the tensor-parallel ranks; its input's gradient is partial (to be summed), its output whole.

    With `sequence_parallel` the output is this rank's part of the rows.
    """
    tp = world.home.tp
    parts = mixer_parts(name, mixer, tp)
    if norm := _find_feature_norm(mixer, parts):
        split_norm(norm, world)
    views: Views = {}
    for owner, attribute, view in _shard_and_view_parts(mixer, parts, world):
        views.setdefault(owner, {})[attribute] = view
    output: Any = mixer.get_submodule(parts.output)
    if is_adapted(output):
        split_adapted_linear(output, ROWWISE, world, sequence_parallel=sequence_parallel)
    else:
        split_rows(output, world, sequence_parallel=sequence_parallel)
    _apply_views(mixer, views)


def _find_feature_norm(mixer: nn.Module, parts: MixerParts) -> nn.Module | None:
    norm: Any = getattr(mixer, "norm", None)
    return norm if "norm" in parts.rows and getattr(norm, "weight", None) is not None else None


def _shard_and_view_parts(mixer: nn.Module, parts: MixerParts, world: World) -> Iterator[tuple[nn.Module, str, View]]:
    """A view is a function from an attribute to what this rank's forward sees of it."""
    whole_view: View = partial(tp_copy_parameter, world_key=world.key)  # unchanged; its gradient is summed over tp
    for name, value in parts.attributes.items():
        owner, _, attribute = name.rpartition(".")
        number: Any = value  # a view gives a tensor otherwise
        yield mixer.get_submodule(owner), attribute, lambda _, number=number: number
    for part_name, rows in parts.rows.items():
        for name, owner, attribute in find_tensors(mixer, part_name):
            view = whole_view if is_first_adapter_matrix(name) else shard_and_view_rows(owner, attribute, rows, world)
            yield owner, attribute, view
    for part_name in parts.whole:
        for _, owner, attribute in find_tensors(mixer, part_name):
            yield owner, attribute, whole_view


def _apply_views(mixer: nn.Module, views: Mapping[nn.Module, Mapping[str, View]]) -> None:
    """A view is a function from an attribute to this rank's value of it."""
    inner: Any = mixer.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            # a view may name an attribute that only some mixers of a kind have
            for owner, attributes in views.items():
                values = {name: view(getattr(owner, name)) for name, view in attributes.items() if hasattr(owner, name)}
                stack.enter_context(ReplacedAttributes(owner, values))
            return inner(*args, **kwargs)

    mixer.forward = forward
