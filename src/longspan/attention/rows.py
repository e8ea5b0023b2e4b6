"""Copies, sums and merges of rows between tensors that lie differently: by heads, by member, in document order.

On GPUs each copy, sum and merge is one pass over memory, by Triton's kernels (`row_kernels.py`), which come with
torch's CUDA builds; elsewhere torch's own operations take several.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.comm import Addend
from longspan.comm.ring import Block
from longspan.lazy import import_triton_kernels

RowIndex = slice | Tensor
Move = tuple[Tensor, Tensor]  # (source, into)

NO_KEY = -1e30  # log-sum-exp of a row that has chosen no key of a block: finite, so that blocks are merged by it
# The products of this many numbers (rows, heads, head size) are held at a time: 32 MiB in float32.
NUMBERS_AT_ONCE = 1 << 23
ALIGNED_BYTES = 16  # Triton compiles a kernel for addresses that this divides, and another for those it does not
_PAIRS_AT_ONCE = 16  # (row, head) pairs that one program merges, or whose products it sums
# One launch makes at most this many moves.
_MOST_MOVES = 3
_MOST_COMPILED = 4096  # entries of `_compiled`; one micro-batch has some dozens
_KERNELS = "longspan.attention.row_kernels"
_compiled: dict[Hashable, Any] = {}  # kernels, by all that their compiled form depends on


def launch_row_copies(moves: Sequence[tuple[Tensor, Tensor]], index: Tensor | None) -> None:
    """Do what `copy_rows` does, on a GPU, in launches of at most _MOST_MOVES moves; columns are contiguous.

    A launch always gets arguments for _MOST_MOVES moves. Where it has fewer, the first is repeated in their place, and
    the kernel copies only the first COUNT.
    """
    rows, members, _ = moves[0][1].shape
    assert all(into.shape[:2] == (rows, members) for _, into in moves)
    for first in range(0, len(moves) if rows and members else 0, _MOST_MOVES):
        launched = [
            (x, x.stride(0), x.stride(1), into, into.stride(0), into.stride(1), into.shape[2])
            for x, into in moves[first : first + _MOST_MOVES]
        ]
        a, b, c = (*launched, *[launched[0]] * (_MOST_MOVES - len(launched)))
        widths = {"A": _padded_width(a[-1]), "B": _padded_width(b[-1]), "C": _padded_width(c[-1])}
        constants = {"COUNT": len(launched), "HAS_INDEX": index is not None} | widths
        _launch_kernel("copy_rows_kernel", (rows, members, 1), (index, *a, *b, *c), constants)


def launch_deltas(dout: Tensor, out: Tensor) -> Tensor:
    """Do what `deltas` does, on a GPU in one launch, for dout and out with contiguous heads: (T, N) float32."""
    rows, heads, size = out.shape
    sums = out.new_empty((rows, heads), dtype=torch.float32)
    if sums.numel():
        arguments = (dout, out, sums, rows * heads, heads, size, *dout.stride()[:2], *out.stride()[:2])
        _launch_kernel(
            "deltas_kernel",
            (-(-rows * heads // _PAIRS_AT_ONCE), 1, 1),
            arguments,
            {"PAIRS": _PAIRS_AT_ONCE, "WIDTH": _padded_width(size)},
        )
    return sums


def _launch_kernel(
    name: str,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    constants: dict[str, Any],
) -> None:
    """Triton would look for the compiled form in every launch, which takes the host several times as long as the
    launch. The form depends on whether 16 divides each address: only launches where it divides all are remembered."""
    addresses = 0
    key = [name, grid]
    values = constants.values()
    for x in arguments:
        if type(x) is int or x is None:
            key.append(x)
        else:
            key += (x.dtype, x.get_device())
            addresses |= x.data_ptr()  # 16 divides their union if it divides each
    launch_key = (*key, *values)
    compiled_kernel = None if addresses % ALIGNED_BYTES else _compiled.get(launch_key)
    if compiled_kernel is not None:
        compiled_kernel[grid](*arguments, *values)
        return
    compiled_kernel = getattr(import_triton_kernels(_KERNELS), name)[grid](*arguments, **constants)
    if not addresses % ALIGNED_BYTES:
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[launch_key] = compiled_kernel


def _padded_width(size: int) -> int:
    """Triton's ranges must be powers of two."""
    return 1 << (size - 1).bit_length()


def are_all_rows(rows: RowIndex, count: int) -> bool:
    """Whether an index takes all of `count` rows in their order."""
    return isinstance(rows, slice) and rows.start == 0 and rows.stop == count


def can_run_row_kernels(x: Tensor) -> bool:
    """Whether this tensor is on a GPU and Triton is installed."""
    return x.is_cuda and import_triton_kernels(_KERNELS) is not None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_rows_(total_out: Tensor, total_lse: Tensor, rows: RowIndex, out: Tensor, lse: Tensor) -> None:
    """Merge (out, lse) into some rows of the totals, in place.

    With l and L the log-sum-exp of both, out ← (e^L · total + e^l · out) / (e^L + e^l), written as a step of size
    σ(l − L) from the total to out: exact at L = −inf, and without an exponential that could overflow.
    """
    if total_out.dtype == torch.float32 and can_run_row_kernels(total_out):
        count, heads, size = out.shape
        index = rows if isinstance(rows, Tensor) else None
        if index is None:
            total_out, total_lse = total_out[rows], total_lse[rows]
        strides = (*total_out.stride()[:2], *total_lse.stride(), *out.stride()[:2], *lse.stride())
        arguments = (total_out, total_lse, out, lse, index, count * heads, heads, size, *strides)
        constants = {"HAS_INDEX": index is not None, "PAIRS": _PAIRS_AT_ONCE, "WIDTH": _padded_width(size)}
        if count:
            _launch_kernel("merge_rows_kernel", (-(-count * heads // _PAIRS_AT_ONCE), 1, 1), arguments, constants)
        return
    rows_out, rows_lse = total_out[rows], total_lse[rows]
    step = torch.sigmoid(lse - rows_lse)
    rows_out = rows_out.lerp_(out.to(rows_out.dtype), step.unsqueeze(-1))
    rows_lse = torch.logaddexp(rows_lse, lse)
    if isinstance(rows, slice):  # rows_out is a view, which lerp_ has written
        total_lse[rows] = rows_lse
    else:
        total_out.index_copy_(0, rows, rows_out)
        total_lse.index_copy_(0, rows, rows_lse)


def copy_rows(moves: Sequence[Move], index: Tensor | None = None) -> None:
    """Copy into[r] ← source[index[r]], or source[r] without an index, for pairs (source, into) of (rows, members,
    width).
    """
    if can_run_row_kernels(moves[0][1]):
        launch_row_copies(moves, index)
        return
    for source, into in moves:
        into.copy_(source if index is None else source.index_select(0, index))


def add_rows(moves: Sequence[Move], rows: RowIndex) -> None:
    """Add into[rows] += source, for pairs (source, into) of (rows, …), with distinct rows, the same for all pairs.

    A launch takes two pairs; an odd last one is passed twice, and HAS_B leaves the second out.
    """
    index = rows if isinstance(rows, Tensor) else None
    # `into`: the rows themselves of a slice, which are a view; all rows where an index picks them
    row_moves = [(source, into if index is not None else take_rows(into, rows)) for source, into in moves]
    if all(into.dtype == torch.float32 and can_run_row_kernels(into) for _, into in row_moves):
        count = len(row_moves[0][0])
        for first in range(0, len(row_moves) if count else 0, 2):
            pair_arguments = [
                (x, x.stride(0), into, into.stride(0), into.shape[1:].numel())
                for x, into in ((_flat_rows(source), into) for source, into in row_moves[first : first + 2])
            ]
            a = pair_arguments[0]
            b = pair_arguments[-1]
            widths = {"A": _padded_width(a[-1]), "B": _padded_width(b[-1])}
            constants = {"HAS_B": len(pair_arguments) > 1, "HAS_INDEX": index is not None} | widths
            _launch_kernel("add_rows_kernel", (count, 1, 1), (index, *a, *b), constants)
        return
    for source, into in row_moves:
        if index is None:
            into += source
        else:
            into.index_add_(0, index, source.to(into.dtype))


def add_addends(total: Block, addends: Sequence[Addend], *, fresh: bool) -> None:
    """Add parts of a block's gradient to its sum `total` in place; a `fresh` sum has no values yet, and is
    overwritten.
    """
    if fresh and len(addends) == 1 and are_all_rows(addends[0].rows, len(total[0])):
        _copy_pairs(list(zip(addends[0].tensors, total, strict=True)))
        return
    for into in total if fresh else ():
        into.zero_()
    for rows, gradients in addends:
        add_rows(list(zip(gradients, total, strict=True)), rows)


def cast_rows(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors (rows, …) to `dtype` and make them contiguous; those that are so already are returned themselves,
    uncopied.
    """
    converted = [
        x
        if x.dtype == dtype and x.is_contiguous()
        else torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        for x in tensors
    ]
    conversions = [(x, into) for x, into in zip(tensors, converted, strict=True) if into is not x]
    # A launch moves equally many rows of each tensor: queries and entries differ.
    for count in dict.fromkeys(len(x) for x, _ in conversions):
        _copy_pairs([move for move in conversions if len(move[0]) == count])
    return converted


def _copy_pairs(moves: Sequence[Move]) -> None:
    copy_rows([(_flat_rows(x).unsqueeze(1), into.flatten(1).unsqueeze(1)) for x, into in moves])


def _flat_rows(x: Tensor) -> Tensor:
    return contiguous_heads(x.flatten(1))


def take_rows(x: Tensor, rows: RowIndex) -> Tensor:
    """Return x[rows]; x itself where that is all of it, which costs the host nothing."""
    return x if are_all_rows(rows, x.shape[0]) else x[rows]


def join_columns(
    tensors: Sequence[Tensor], index: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Join rows of tensors (rows, …) of one dtype side by side: (rows, columns), in `dtype` (None: the tensors' own).

    With `index` only the rows that it lists are joined, in its order. A single contiguous tensor without `index` comes
    back as a view: only read what is returned.
    """
    if len(tensors) == 1 and index is None and dtype in (None, tensors[0].dtype) and tensors[0].is_contiguous():
        return tensors[0].flatten(1)
    rows = tensors[0].shape[0] if index is None else index.shape[0]
    flat = [x.flatten(1).unsqueeze(1) for x in tensors]
    widths = [x.shape[2] for x in flat]
    matrix = tensors[0].new_empty((rows, sum(widths)), dtype=dtype)
    copy_rows(list(zip(flat, views_by_member(matrix, 1, widths), strict=True)), index)
    return matrix


def views_by_member(matrix: Tensor, members: int, widths: Sequence[int]) -> list[Tensor]:
    """View the columns of a contiguous matrix (members × rows, columns), whose rows lie member after member.

    There is a view (rows, members, width) for each of `widths`, into which the columns are cut from left to right. It
    takes the host a third of the time of `view` and `split`.
    """
    columns = matrix.shape[1]
    start = matrix.storage_offset()
    views = list[Tensor]()
    rows = matrix.shape[0] // members
    for width in widths:
        views.append(matrix.as_strided((rows, members, width), (columns, rows * columns, 1), start))
        start += width
    return views


def head_slice_by_member(x: Tensor, members: int, slices: int, slice_index: int) -> Tensor:
    """Return one slice of every member's heads in x (T, N, size), as (T, members, columns).

    Where a row's heads follow each other it is a view, which may be written to: members lie `slices · width` columns
    apart, this slice of the first one `slice_index · width` from the row's start. Elsewhere it may be a copy.
    """
    rows, heads, size = x.shape
    count = heads // (members * slices)
    row, head, column = x.stride()
    if head != size or column != 1:
        return x.unflatten(1, (members, slices, count))[:, :, slice_index].flatten(2)
    width = count * size
    return x.as_strided((rows, members, width), (row, slices * width, 1), x.storage_offset() + slice_index * width)


def contiguous_heads(x: Tensor) -> Tensor:
    """Return x, or a copy where its last dim is not contiguous, as kernels want the numbers of a head."""
    return x if x.stride(-1) == 1 else x.contiguous()


def concat_heads(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors (rows, heads, …) along their heads; a single one is returned itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def sum_rows(total: Tensor, addends: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Overwrite total (R, W): total[r] is the sum of x[index[r]] over the addends (x, index); an index of −1 adds
    nothing.

    A launch adds two addends; the first of all overwrites the total. An odd last one is passed twice, added once.
    """
    if addends and can_run_row_kernels(total) and total.dtype == torch.float32:
        total_rows, width = total.shape
        for first in range(0, len(addends) if total_rows else 0, 2):
            a, a_index = addends[first]
            b, b_index = addends[min(first + 1, len(addends) - 1)]
            arguments = (total, total.stride(0), a, a_index, a.stride(0), b, b_index, b.stride(0), width)
            constants = {"HAS_B": first + 1 < len(addends), "FRESH": first == 0, "WIDTH": _padded_width(width)}
            _launch_kernel("sum_rows_kernel", (total_rows, 1, 1), arguments, constants)
        return
    total.zero_()
    for x, index in addends:
        rows = (index >= 0).nonzero().squeeze(1)
        total.index_add_(0, rows, x.index_select(0, index.index_select(0, rows)).to(total.dtype))


def deltas(dout: Tensor, out: Tensor) -> Tensor:
    """Return dout · out of each row and head (T, N), in the accumulation dtype, for dout and out (T, N, Hv).

    Without the fused kernel a few rows are multiplied at a time: the products of all would take several times the
    memory of the queries.
    """
    dtype = accumulation_dtype(dout.dtype)
    if dtype == torch.float32 and can_run_row_kernels(dout):
        return launch_deltas(contiguous_heads(dout), contiguous_heads(out))
    at_once = max(1, NUMBERS_AT_ONCE // out.shape[1:].numel())
    sums = [
        (dout_rows.to(dtype) * out_rows.to(dtype)).sum(-1)
        for dout_rows, out_rows in zip(dout.split(at_once), out.split(at_once), strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def pad_heads(x: Tensor, size: int) -> Tensor:
    """Fill up the heads of x (rows, heads, H) with zeros to `size` numbers each; x itself where they have as many."""
    return x if x.shape[2] == size else pad(x, (0, size - x.shape[2]))
