"""Merges, sums and copies of rows in one pass over memory, as Triton kernels for GPUs.

Triton comes with torch's CUDA builds. Where it is missing, and on CPUs, `rows.py` does the same with torch's own
operations in several passes.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PAIRS = 16  # (row, head) pairs that one program merges, or whose sums it takes
_COPIES = 3  # at most, in one launch
_ALIGNED = 16  # bytes: Triton compiles a kernel for addresses that this divides, and another for those it does not
_REMEMBERED = 4096  # launches with their numbers; those of one micro-batch are some dozens
_compiled: dict[Hashable, Any] = {}


@cache
def kernel_module() -> Any:
    """Return the module of the kernels; None without Triton."""
    return None if find_spec("triton") is None else import_module("longspan.attention.row_kernels")


def merge_rows_(total_out: Tensor, total_lse: Tensor, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge out (R, N, Hv) and lse (R, N) into some rows of total_out (T, N, Hv) and total_lse (T, N), in place.

    A program of the kernel takes _PAIRS pairs of row and head.
    """
    count, heads, size = out.shape
    if count == 0:
        return
    index = rows if isinstance(rows, Tensor) else None
    if index is None:
        total_out, total_lse = total_out[rows], total_lse[rows]
    strides = (*total_out.stride()[:2], *total_lse.stride(), *out.stride()[:2], *lse.stride())
    arguments = (total_out, total_lse, out, lse, index, count * heads, heads, size, *strides)
    constants = {"HAS_INDEX": index is not None, "PAIRS": _PAIRS, "WIDTH": _padded_width(size)}
    _launch_kernel("merge_rows", (-(-count * heads // _PAIRS), 1, 1), arguments, constants)


def copy_rows(moves: Sequence[tuple[Tensor, Tensor]], index: Tensor | None) -> None:
    """Copy into[r] ← source[index[r]] for pairs (source, into) of (rows, members, width) with contiguous columns."""
    rows, members, _ = moves[0][1].shape
    by_member = [
        _Move(source, source.stride(0), source.stride(1), into, into.stride(0), into.stride(1), into.shape[2])
        for source, into in moves
    ]
    _launch_copies(by_member, index, rows, members)


def copy_whole_rows(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into ← source for pairs (source, into) of (rows, …), all with one number of rows and elements in order."""
    whole_rows = [
        _Move(source, source.stride(0), 0, into, into.stride(0), 0, into.shape[1:].numel()) for source, into in moves
    ]
    _launch_copies(whole_rows, None, len(moves[0][1]), 1)


class _Move(NamedTuple):
    """A copy of (rows, members, width), as the kernel takes it."""

    source: Tensor
    source_row_stride: int
    source_member_stride: int
    into: Tensor
    into_row_stride: int
    into_member_stride: int
    width: int


def _launch_copies(moves: Sequence[_Move], index: Tensor | None, rows: int, members: int) -> None:
    """Launch copies of (rows, members, width), up to _COPIES at once.

    Where a launch has fewer, the others repeat its first, and COUNT leaves them out.
    """
    if not rows or not members:
        return
    for first in range(0, len(moves), _COPIES):
        launched = moves[first : first + _COPIES]
        a, b, c = (*launched, *[launched[0]] * (_COPIES - len(launched)))
        widths = {"A": _padded_width(a.width), "B": _padded_width(b.width), "C": _padded_width(c.width)}
        constants = {"COUNT": len(launched), "HAS_INDEX": index is not None} | widths
        distinct = 1 + len(a) * len(launched)  # the index, and the moves before those that repeat the first
        _launch_kernel("copy_rows", (rows, members, 1), (index, *a, *b, *c), constants, distinct)


def add_rows(moves: Sequence[tuple[Tensor, Tensor]], index: Tensor | None) -> None:
    """Add into[index[r]] += source[r] (into[r] without one) for pairs (source, into) of (rows, …), into in float32.

    Elements of a row are in order, indices distinct, and all sources have one number of rows. A launch takes two
    pairs; an odd last one is passed twice, and HAS_B leaves the second out.
    """
    rows = moves[0][0].shape[0]
    if not rows:
        return
    for first in range(0, len(moves), 2):
        pair_arguments = [_addition_arguments(source, into) for source, into in moves[first : first + 2]]
        a, b = pair_arguments[0], pair_arguments[-1]
        widths = {"A": _padded_width(a[-1]), "B": _padded_width(b[-1])}
        constants = {"HAS_B": len(pair_arguments) > 1, "HAS_INDEX": index is not None} | widths
        _launch_kernel("add_rows", (rows, 1, 1), (index, *a, *b), constants)


def _addition_arguments(source: Tensor, into: Tensor) -> tuple[Any, ...]:
    return (source, source.stride(0), into, into.stride(0), into.shape[1:].numel())


def sum_rows(total: Tensor, addends: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Sum into total[r] the x[index[r]] of addends (x, index), for total (R, W) in float32; index −1 adds nothing.

    A launch adds two addends; the first of all overwrites the total. An odd last one is passed twice, added once.
    """
    if not total.shape[0]:
        return
    for first in range(0, len(addends), 2):
        (a, a_index), (b, b_index) = addends[first], addends[min(first + 1, len(addends) - 1)]
        a_arguments, b_arguments = (a, a_index, a.stride(0)), (b, b_index, b.stride(0))
        constants = {
            "HAS_B": first + 1 < len(addends),
            "FRESH": first == 0,
            "WIDTH": _padded_width(total.shape[1]),
        }
        arguments = (total, total.stride(0), *a_arguments, *b_arguments, total.shape[1])
        _launch_kernel("sum_rows", (total.shape[0], 1, 1), arguments, constants)


def deltas(dout: Tensor, out: Tensor) -> Tensor:
    """Return dout · out (T, N) in float32, for dout and out (T, N, Hv) whose columns are contiguous."""
    rows, heads, size = out.shape
    sums = out.new_empty((rows, heads), dtype=torch.float32)
    if sums.numel():
        arguments = (dout, out, sums, rows * heads, heads, size, *dout.stride()[:2], *out.stride()[:2])
        _launch_kernel(
            "deltas",
            (-(-rows * heads // _PAIRS), 1, 1),
            arguments,
            {"PAIRS": _PAIRS, "WIDTH": _padded_width(size)},
        )
    return sums


def _launch_kernel(
    name: str,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    constants: dict[str, Any],
    distinct: int | None = None,
) -> None:
    """Launch a kernel; its compiled form is remembered by the launch's numbers, dtypes, devices and constants.

    Triton would look for the compiled form in every launch, which takes the host several times as long as the launch.
    The form depends on no more than that, and on whether 16 divides each address: only launches where it divides all
    are remembered, for others Triton chooses. With `distinct` only that many first arguments are looked at: the
    others repeat some of those.
    """
    addresses, key, values = 0, [name, grid], constants.values()
    for x in arguments[:distinct]:
        if type(x) is int or x is None:
            key.append(x)
        else:
            key += (x.dtype, x.get_device())
            addresses |= x.data_ptr()  # 16 divides their union if it divides each
    launch_key = (*key, *values)
    compiled_kernel = None if addresses % _ALIGNED else _compiled.get(launch_key)
    if compiled_kernel is not None:
        compiled_kernel[grid](*arguments, *values)
        return
    compiled_kernel = getattr(kernel_module(), name)[grid](*arguments, **constants)
    if not addresses % _ALIGNED:
        if len(_compiled) >= _REMEMBERED:
            _compiled.clear()
        _compiled[launch_key] = compiled_kernel


def _padded_width(size: int) -> int:
    """Return the next power of two, which Triton's ranges must be."""
    return 1 << (size - 1).bit_length()
