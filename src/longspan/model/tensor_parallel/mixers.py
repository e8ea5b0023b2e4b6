"""Mixers under tensor parallelism: each rank computes its heads or channels, with the mixer's own code.

A parameter is sharded as it lies in checkpoints, in equal slices of its rows. Where a rank works with other rows, as of
a projection that makes several things for all heads, the slices are gathered when the mixer runs and the rank takes its
rows; gradients go back the same way, summed where several ranks have a row. While the mixer runs its parameters are
this rank's rows, and its numbers of heads this rank's. An adapter's second matrix has the rows of the projection that
it adapts, its first is whole on every rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.comm.moves.tp_collectives import tp_copy_parameter
from longspan.model.adapters import is_adapted
from longspan.model.tensor_parallel.adapted import split_adapted
from longspan.model.tensor_parallel.family_plans import ROWWISE
from longspan.model.tensor_parallel.fused_rows import rows_here
from longspan.model.tensor_parallel.mixer_norms import norm_over_ranks, refuse_unknown_norm
from longspan.model.tensor_parallel.mixer_parts import MixerParts, mixer_parts, reads_inputs, tensors_of
from longspan.model.tensor_parallel.styles import View, attributes_replaced, rowwise

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
    if is_adapted(output):
        split_adapted(output, ROWWISE, world, sequence_parallel=sequence_parallel)
    else:
        rowwise(output, world, sequence_parallel=sequence_parallel)
    _show(mixer, views)


def _norm_over_features(mixer: nn.Module, parts: MixerParts) -> nn.Module | None:
    """The norm of a mixer that takes means of features of several heads; None without one."""
    norm: Any = getattr(mixer, "norm", None)
    return norm if "norm" in parts.rows and getattr(norm, "weight", None) is not None else None


def _views(mixer: nn.Module, parts: MixerParts, world: World) -> Iterator[tuple[nn.Module, str, View]]:
    whole: View = partial(tp_copy_parameter, world_key=world.key)
    for name, value in parts.attributes.items():
        owner, _, attribute = name.rpartition(".")
        yield mixer.get_submodule(owner), attribute, partial(_constant, value)
    for place, rows in parts.rows.items():
        for name, owner, attribute in tensors_of(mixer, place):
            yield owner, attribute, whole if reads_inputs(name) else rows_here(owner, attribute, rows, world)
    for place in parts.whole:
        for _, owner, attribute in tensors_of(mixer, place):
            yield owner, attribute, whole


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
