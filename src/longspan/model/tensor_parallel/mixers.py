"""Mixers under tensor parallelism: each rank computes its heads or channels, with the mixer's own code.

A parameter is sharded as it lies in checkpoints, in equal slices of its rows. Where a rank works with other rows, as of
a projection that makes several things for all heads, the slices are gathered when the mixer runs and the rank takes its
rows; gradients go back the same way, summed where several ranks have a row. While the mixer runs its parameters are
this rank's rows, and its numbers of heads this rank's.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.comm.moves.tp_collectives import tp_copy_parameter, tp_gather_parameter
from longspan.model.local_tensors import local_tensor
from longspan.model.tensor_parallel.mixer_norms import norm_over_ranks, refuse_unknown_norm
from longspan.model.tensor_parallel.mixer_parts import Even, Fused, MixerParts, mixer_parts, packed, tensors_of
from longspan.model.tensor_parallel.styles import (
    View,
    attributes_replaced,
    rowwise,
    slice_parameter,
    wrap_forward,
)

Views = dict[nn.Module, dict[str, View]]


def check_mixer(name: str, mixer: nn.Module, tp: int) -> None:
    """Raise ModelError for a mixer whose heads or channels are not split here; tp must divide them."""
    parts = mixer_parts(name, mixer, tp)
    if norm := _norm_over_features(mixer, parts):
        refuse_unknown_norm(f"{name}.norm", norm)


def split_mixer(name: str, mixer: nn.Module, world: World, *, sequence_parallel: bool) -> None:
    """Split a mixer over the tensor-parallel ranks; the gradient of its input is partial, its output is whole.

    With `sequence_parallel` the output is this rank's part of the rows.
    """
    tp = world.home.tp
    parts = mixer_parts(name, mixer, tp)
    if norm := _norm_over_features(mixer, parts):
        norm_over_ranks(norm, world)
    views: Views = {}
    for owner, attribute, view in _views(mixer, parts, world):
        views.setdefault(owner, {})[attribute] = view
    output: Any = mixer.get_submodule(parts.output)
    rowwise(output, world, sequence_parallel=sequence_parallel)
    _show(mixer, views)


def columnwise_packed(linear: nn.Linear, world: World) -> None:
    """Each rank makes its slices of two things of equal width from the whole input."""
    rows = packed(linear.out_features, 2)
    names = ["weight"] if linear.bias is None else ["weight", "bias"]
    wrap_forward(linear, views={name: _rows_here(linear, name, rows, world) for name in names})


def _norm_over_features(mixer: nn.Module, parts: MixerParts) -> nn.Module | None:
    """The norm of a mixer that takes means of features of several heads; None without one."""
    norm: Any = getattr(mixer, "norm", None)
    return norm if "norm" in parts.rows and getattr(norm, "weight", None) is not None else None


def _views(mixer: nn.Module, parts: MixerParts, world: World) -> Iterator[tuple[nn.Module, str, View]]:
    for name, value in parts.attributes.items():
        owner, _, attribute = name.rpartition(".")
        yield mixer.get_submodule(owner), attribute, partial(_constant, value)
    for place, rows in parts.rows.items():
        for owner, attribute in tensors_of(mixer, place):
            yield owner, attribute, _rows_here(owner, attribute, rows, world)
    for place in parts.whole:
        for owner, attribute in tensors_of(mixer, place):
            yield owner, attribute, partial(tp_copy_parameter, world_key=world.key)


def _rows_here(owner: nn.Module, name: str, rows: Even | Fused, world: World) -> View:
    """How a parameter or buffer, which may be sharded from here on, becomes this rank's rows."""
    tensor, tp, key = getattr(owner, name), world.home.tp, world.key
    dim = tuple(tensor.shape).index(rows.size)
    if isinstance(rows, Even) and isinstance(tensor, nn.Parameter):
        slice_parameter(owner, name, dim, world)
        return local_tensor
    sizes, order = (Fused((rows,)) if isinstance(rows, Even) else rows).pieces(tp, world.coordinates.tp)
    if not isinstance(tensor, nn.Parameter):
        return partial(_take, dim=dim, sizes=sizes, order=order)
    assert dim == 0, (name, tensor.shape)
    if rows.size % tp:
        return lambda x: _take(tp_copy_parameter(x, key), 0, sizes, order)
    slice_parameter(owner, name, 0, world)
    return lambda x: _take(tp_gather_parameter(local_tensor(x), key), 0, sizes, order)


def _take(x: Tensor, dim: int, sizes: list[int], order: list[int]) -> Tensor:
    pieces = x.split(sizes, dim)
    return torch.cat([pieces[i] for i in order], dim)


def _constant(value: int, _: object) -> Any:
    return value


def _show(mixer: nn.Module, views: Mapping[nn.Module, Mapping[str, View]]) -> None:
    """Have the mixer's forward see attributes, its own and of modules inside it, as these views."""
    inner: Any = mixer.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for owner, shown in views.items():
                values = {name: view(getattr(owner, name)) for name, view in shown.items() if hasattr(owner, name)}
                stack.enter_context(attributes_replaced(owner, values))
            return inner(*args, **kwargs)

    mixer.forward = forward
