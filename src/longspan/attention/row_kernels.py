"""Triton kernels of `rows.py`, their only importer: CPU builds of torch lack triton."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl

# Numbers and addresses that follow the rows of a micro-batch and are read one by one: otherwise a kernel would be
# compiled anew for each way in which 16 divides them.
_OF_ROWS = ("total_lse", "lse", "index", "pairs", "total_lse_row", "total_lse_head", "lse_row", "lse_head")
_INDICES = ("index", "a_index", "b_index")


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def merge_rows_kernel(
    total_out,
    total_lse,
    out,
    lse,
    index,
    pairs,
    heads,
    size,
    total_row,
    total_head,
    total_lse_row,
    total_lse_head,
    out_row,
    out_head,
    lse_row,
    lse_head,
    HAS_INDEX: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Merge PAIRS (row, head) pairs of `size` columns each: total ← total + σ(lse − total_lse) · (out − total).

    The factor σ is the weight e^lse / (e^lse + e^total_lse) of the new block; the log-sum-exp becomes that of both,
    computed with the larger one taken out, so that nothing overflows. Strides are those of rows and heads; with
    HAS_INDEX, row r goes into row index[r].
    """
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    row = pair // heads
    head = pair % heads
    into = row
    if HAS_INDEX:
        into = tl.load(index + row, mask=real, other=0)
    lse_at = total_lse + into * total_lse_row + head * total_lse_head
    old_lse = tl.load(lse_at, mask=real, other=0.0)
    new_lse = tl.load(lse + row * lse_row + head * lse_head, mask=real, other=0.0)
    step = tl.sigmoid(new_lse - old_lse)
    top = tl.maximum(old_lse, new_lse)
    column = tl.arange(0, WIDTH)
    inside = real[:, None] & (column < size)[None, :]
    at = total_out + (into * total_row + head * total_head)[:, None] + column[None, :]
    old_out = tl.load(at, mask=inside, other=0.0)
    new_out = tl.load(out + (row * out_row + head * out_head)[:, None] + column[None, :], mask=inside, other=0.0)
    # In a small block several warps hold the same elements: none may store them before all have loaded them.
    tl.debug_barrier()
    tl.store(lse_at, top + tl.log(tl.exp(old_lse - top) + tl.exp(new_lse - top)), mask=real)
    tl.store(at, old_out + step[:, None] * (new_out.to(tl.float32) - old_out), mask=inside)


@triton.jit
def _move_columns(source, into, width, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    x = tl.load(source + column, mask=column < width)
    tl.store(into + column, x.to(into.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def copy_rows_kernel(
    index,
    a,
    a_row,
    a_member,
    a_into,
    a_into_row,
    a_into_member,
    a_width,
    b,
    b_row,
    b_member,
    b_into,
    b_into_row,
    b_into_member,
    b_width,
    c,
    c_row,
    c_member,
    c_into,
    c_into_row,
    c_into_member,
    c_width,
    COUNT: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Copy into[row, member] ← source[index[row], member] for up to three pairs of (rows, members, width).

    One program copies one row of one member; of the pairs a, b and c the first COUNT are copied. Each has strides of
    rows and members, and a width, up to the power of two A, B or C.
    """
    row = tl.program_id(0).to(tl.int64)
    member = tl.program_id(1).to(tl.int64)
    at = row
    if HAS_INDEX:
        at = tl.load(index + row)
    _move_columns(
        a + at * a_row + member * a_member, a_into + row * a_into_row + member * a_into_member, a_width, A
    )
    if COUNT > 1:
        _move_columns(
            b + at * b_row + member * b_member, b_into + row * b_into_row + member * b_into_member, b_width, B
        )
    if COUNT > 2:
        _move_columns(
            c + at * c_row + member * c_member, c_into + row * c_into_row + member * c_into_member, c_width, C
        )


@triton.jit
def _add_columns(source, into, width, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = column < width
    total = tl.load(into + column, mask=inside, other=0.0) + tl.load(source + column, mask=inside, other=0.0).to(
        tl.float32
    )
    # In a small block several warps hold the same elements: none may store them before all have loaded them.
    tl.debug_barrier()
    tl.store(into + column, total, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def add_rows_kernel(
    index,
    a,
    a_row,
    a_into,
    a_into_row,
    a_width,
    b,
    b_row,
    b_into,
    b_into_row,
    b_width,
    HAS_B: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """Add into[index[row]] += source[row] for one or two pairs of (rows, width), in float32; indices are distinct."""
    row = tl.program_id(0).to(tl.int64)
    at = row
    if HAS_INDEX:
        at = tl.load(index + row)
    _add_columns(a + row * a_row, a_into + at * a_into_row, a_width, A)
    if HAS_B:
        _add_columns(b + row * b_row, b_into + at * b_into_row, b_width, B)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def sum_rows_kernel(
    total,
    total_row,
    a,
    a_index,
    a_row,
    b,
    b_index,
    b_row,
    width,
    HAS_B: tl.constexpr,
    FRESH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum total[row] ← (0 if FRESH, else total[row]) + a[a_index[row]] + b[b_index[row]]; an index of −1 adds 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    at = total + row * total_row + column
    summed = tl.zeros([WIDTH], tl.float32)
    if not FRESH:
        summed += tl.load(at, mask=inside, other=0.0)
    from_a = tl.load(a_index + row)
    summed += tl.load(a + from_a * a_row + column, mask=inside & (from_a >= 0), other=0.0).to(tl.float32)
    if HAS_B:
        from_b = tl.load(b_index + row)
        summed += tl.load(b + from_b * b_row + column, mask=inside & (from_b >= 0), other=0.0).to(tl.float32)
    # In a small block several warps hold the same elements: none may store them before all have loaded them.
    tl.debug_barrier()
    tl.store(at, summed, mask=inside)


@triton.jit
def deltas_kernel(
    dout,
    out,
    delta,
    pairs,
    heads,
    size,
    dout_row,
    dout_head,
    out_row,
    out_head,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute delta (T, N), contiguous, in float32: dout · out of PAIRS rows and heads a program."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row = pair // heads
    head = pair % heads
    column = tl.arange(0, WIDTH)
    inside = (pair < pairs)[:, None] & (column < size)[None, :]
    dout_block = tl.load(
        dout + (row * dout_row + head * dout_head)[:, None] + column[None, :], mask=inside, other=0.0
    )
    out_block = tl.load(out + (row * out_row + head * out_head)[:, None] + column[None, :], mask=inside, other=0.0)
    products = dout_block.to(tl.float32) * out_block.to(tl.float32)
    tl.store(delta + pair, tl.sum(products, 1), mask=pair < pairs)
