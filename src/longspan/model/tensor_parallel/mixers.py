"""Mixers under tensor parallelism: each rank computes its heads or channels, with the mixer's own code.

A parameter is sharded as it lies in checkpoints, in equal slices of its rows. Where a rank works with other rows, as of
a projection that makes several things for all heads, the slices are gathered when the mixer runs and the rank takes its
rows; gradients go back the same way, summed where several ranks have a row. While the mixer runs its parameters are
this rank's rows, and its numbers of heads this rank's. A norm over groups of features whose features lie on several
ranks sums squares by group over them: one number a row and group. An adapter's second matrix has the rows of the
projection that it adapts, its first is whole on every rank.
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
from longspan.comm.moves.tp_collectives import tp_copy, tp_copy_parameter, tp_place, tp_sum
from longspan.errors import ModelError, plural
from longspan.model.adapters import is_adapted
from longspan.model.tensor_parallel.family_plans import ROWWISE
from longspan.model.tensor_parallel.mixer_parts import MixerParts, find_tensors, mixer_parts, reads_inputs
from longspan.model.tensor_parallel.split_adapters import split_adapted_linear
from longspan.model.tensor_parallel.styles import ReplacedAttributes, View, make_row_view, split_rows

Means = Callable[[Tensor], Tensor]  # (…, features) -> the mean square of each feature's group, for each feature


def _count_groups(norm: Any) -> int:
    """Return how many equal groups of features a norm takes means of: one in transformers 5.17's Mamba 2."""
    if size := getattr(norm, "group_size", None):
        return norm.weight.numel() // size
    return getattr(norm, "n_groups", None) or 1


def refuse_unknown_norm(name: str, norm: Any) -> None:
    """Raise ModelError, naming it, for a norm that computes something else than this module; shown with numbers."""
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

    Where tp does not divide the groups, a rank has a range of features that begins and ends inside groups: `sizes` are
    how many it has of each. The norm's weight is whole here, and must be this rank's while it runs.
    """
    groups = _count_groups(norm)
    key, tp, total = world.key, world.home.tp, norm.weight.numel()
    means: Means = partial(_local_means, groups=groups // tp)
    if groups % tp:
        size, features = total // groups, total // tp
        first = world.coordinates.tp * features
        groups_here = range(first // size, (first + features - 1) // size + 1)
        sizes = [min((g + 1) * size, first + features) - max(g * size, first) for g in groups_here]
        means = partial(_share_means, groups=groups_here, sizes=sizes, count=groups, key=key)

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _apply_norm(norm, hidden_states, gate, norm.weight, means)

    norm.forward = forward


def _apply_norm(norm: Any, x: Tensor, gate: Tensor | None, weight: Tensor, means: Means) -> Tensor:
    """Norm rows by these means, multiplied by SiLU of the gate before or after, as the norm's own forward does."""
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


def _share_means(y: Tensor, groups: range, sizes: list[int], count: int, key: int) -> Tensor:
    """Compute the mean square (…, features here) of each feature's group, over all ranks that share it.

    y (…, features here) has `sizes` features of each of this rank's `groups`, which are some of all `count`. Each
    rank's sums of squares are put in their places among all groups and summed over tp.
    """
    sums = torch.stack(
        [group_features.square().sum(-1) for group_features in y.split(sizes, -1)], -1
    )  # (…, groups here)
    sums = F.pad(sums, (groups.start, count - groups.stop))
    means = tp_copy(tp_sum(sums, key), key) / (y.shape[-1] * tp_place(key)[1] // count)
    means_here = means[..., groups.start : groups.stop].split(1, -1)
    return torch.cat([mean.expand(*mean.shape[:-1], size) for mean, size in zip(means_here, sizes, strict=True)], -1)


Views = dict[nn.Module, dict[str, View]]


def check_mixer(name: str, mixer: nn.Module, tp: int) -> None:
    """Raise ModelError for a mixer whose heads or channels are not split here; tp must divide them."""
    parts = mixer_parts(name, mixer, tp)
    if norm := _find_feature_norm(mixer, parts):
        refuse_unknown_norm(f"{name}.norm", norm)


def split_mixer(name: str, mixer: nn.Module, world: World, *, sequence_parallel: bool) -> None:
    """Split a mixer over the tensor-parallel ranks; the gradient of its input is partial, its output is whole.

    With `sequence_parallel` the output is this rank's part of the rows.
    """
    tp = world.home.tp
    parts = mixer_parts(name, mixer, tp)
    if norm := _find_feature_norm(mixer, parts):
        split_norm(norm, world)
    views: Views = {}
    for owner, attribute, view in _part_views(mixer, parts, world):
        views.setdefault(owner, {})[attribute] = view
    output: Any = mixer.get_submodule(parts.output)
    if is_adapted(output):
        split_adapted_linear(output, ROWWISE, world, sequence_parallel=sequence_parallel)
    else:
        split_rows(output, world, sequence_parallel=sequence_parallel)
    _show_views(mixer, views)


def _find_feature_norm(mixer: nn.Module, parts: MixerParts) -> nn.Module | None:
    """Find the norm of a mixer that takes means of features of several heads; None without one."""
    norm: Any = getattr(mixer, "norm", None)
    return norm if "norm" in parts.rows and getattr(norm, "weight", None) is not None else None


def _part_views(mixer: nn.Module, parts: MixerParts, world: World) -> Iterator[tuple[nn.Module, str, View]]:
    """Yield (module, attribute, view): the function from a mixer's attribute to what this rank's forward sees."""
    copied: View = partial(tp_copy_parameter, world_key=world.key)
    for name, value in parts.attributes.items():
        owner, _, attribute = name.rpartition(".")
        yield mixer.get_submodule(owner), attribute, partial(_return_constant, value)
    for place, rows in parts.rows.items():
        for name, owner, attribute in find_tensors(mixer, place):
            yield owner, attribute, copied if reads_inputs(name) else make_row_view(owner, attribute, rows, world)
    for place in parts.whole:
        for _, owner, attribute in find_tensors(mixer, place):
            yield owner, attribute, copied


def _return_constant(value: int, _: object) -> Any:
    return value


def _show_views(mixer: nn.Module, views: Mapping[nn.Module, Mapping[str, View]]) -> None:
    """Have the mixer's forward see attributes, its own and of modules inside it, as these views."""
    inner: Any = mixer.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, with local values in place of the attributes that it reads."""
        with ExitStack() as stack:
            for owner, attributes in views.items():
                values = {name: view(getattr(owner, name)) for name, view in attributes.items() if hasattr(owner, name)}
                stack.enter_context(ReplacedAttributes(owner, values))
            return inner(*args, **kwargs)

    mixer.forward = forward
