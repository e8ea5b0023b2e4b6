"""Triton kernels of `triton_gathered.py`, their only importer: CPU builds of torch lack triton.

A program owns one row and HEADS of its heads. Products have keys as rows, of which there are more than heads: so both
fill the multiprocessors' matrix units. A key is the numbers of its value v, and then those of k.
"""

# pyright: basic, reportMissingImports=false
# ruff: noqa: RUF005 (Triton takes no unpacking)
import triton
import triton.language as tl

from longspan.attention.kernels.triton_flash_kernels import _LOG2_E, _NO_KEY, _is_visible, find_tile


@triton.jit
def list_keys(
    indices,
    lists,
    counts,
    blocks,
    q_ends,
    k_ends,
    places,
    place_starts,
    columns,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write to `lists` which of its chosen keys one row sees, as rows of k and v, and to `counts` how many.

    `indices` (rows, choices, columns) are numbers of chosen blocks of BLOCK positions; the second program id is one of
    the choices. `places` and `place_starts` are those of `KeyBits` in `tiles.py`.
    """
    choices = tl.num_programs(1)
    choice = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0).to(tl.int64) * choices + choice
    tile, row, q_start, k_start, rows, keys = find_tile(blocks, q_ends, k_ends)
    first_place = tl.load(place_starts + tile)
    positions = tl.load(place_starts + tile + 1) - first_place
    aligned = row + keys - rows
    indices += ((q_start + row).to(tl.int64) * choices + choice) * columns
    lists += program * columns * BLOCK
    written = tl.zeros((), tl.int32)
    for start in range(0, columns * BLOCK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        block = tl.load(indices + column // BLOCK, mask=column < columns * BLOCK, other=-1)
        index = block * BLOCK + column % BLOCK
        is_key = (block >= 0) & (index < positions)
        place = tl.load(places + first_place + index, mask=is_key, other=-1)
        seen = (place >= 0) & _is_visible(aligned, place, keys, left, right, HAS_LEFT, HAS_RIGHT)
        at = written + tl.cumsum(seen.to(tl.int32), 0) - 1
        tl.store(lists + at, k_start + place, mask=seen)
        written += tl.sum(seen.to(tl.int32), 0)
    tl.store(counts + program, written)


@triton.jit
def _load_heads(x, head, heads, head_stride, column, size):
    at = x + head[:, None] * head_stride + column[None, :]
    return tl.load(at, mask=(head < heads)[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def _load_keys(x, place, exists, row_stride, column, size):
    at = x + place.to(tl.int64)[:, None] * row_stride + column[None, :]
    return tl.load(at, mask=exists[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def _add_keys(x, place, exists, values, column, size):
    at = x + place.to(tl.int64)[:, None] * size + column[None, :]
    tl.atomic_add(at, values, mask=exists[:, None] & (column < size)[None, :], sem="relaxed")


@triton.jit
def _store_heads(x, head, heads, head_stride, column, size, values):
    at = x + head[None, :] * head_stride + column[:, None]
    tl.store(at, values.to(x.dtype.element_ty), mask=(head < heads)[None, :] & (column < size)[:, None])


@triton.jit
def _find_row(lists, counts, blocks, q_ends, columns, HEADS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    row = (tl.load(q_ends + tl.load(blocks + 2 * program)) + tl.load(blocks + 2 * program + 1)).to(tl.int64)
    return row, head, tl.load(counts + program), lists + program * columns


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    lse,
    lists,
    counts,
    blocks,
    q_ends,
    columns,
    heads,
    scale,
    q_row,
    q_head,
    k_row,
    v_row,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute out and lse of one row's heads in one pass over its listed keys, KEYS at a time, as FlashAttention 2.

    Exponentials are powers of 2, so scores are multiplied by log₂ e. `blocks` has the tile and row of each program.
    """
    row, head, count, lists = _find_row(lists, counts, blocks, q_ends, columns, HEADS)
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    q_of_v = _load_heads(q + row * q_row, head, heads, q_head, v_column, V_SIZE)
    q_of_k = _load_heads(q + row * q_row + V_SIZE, head, heads, q_head, column, SIZE)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((V_WIDTH, HEADS), tl.float32)
    for start in range(0, count, KEYS):
        exists = start + tl.arange(0, KEYS) < count
        place = tl.load(lists + start + tl.arange(0, KEYS), mask=exists, other=0)
        v_block = _load_keys(v, place, exists, v_row, v_column, V_SIZE)
        k_block = _load_keys(k, place, exists, k_row, column, SIZE)
        scores = tl.dot(k_block, tl.trans(q_of_k), tl.dot(v_block, tl.trans(q_of_v)))
        scores = tl.where(exists[:, None], scores * (scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp2(scores - higher[None, :])
        rescale = tl.exp2(largest - higher)
        total = total * rescale + tl.sum(weights, 0)
        result = tl.dot(tl.trans(v_block), weights.to(v_block.dtype), result * rescale[None, :])
        largest = higher
    largest = tl.where(count == 0, _NO_KEY * _LOG2_E, largest)
    total = tl.where(count == 0, 1.0, total)
    _store_heads(out + row * heads * V_SIZE, head, heads, V_SIZE, v_column, V_SIZE, result / total[None, :])
    tl.store(lse + row * heads + head, largest / _LOG2_E + tl.log(total), mask=head < heads)


@triton.jit
def gradients(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    dk,
    dv,
    lists,
    counts,
    blocks,
    q_ends,
    columns,
    heads,
    scale,
    q_row,
    q_head,
    k_row,
    v_row,
    dout_row,
    dout_head,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Compute dq of one row's heads, and add their part to the float32 gradients of its listed keys and values.

    With the weights w = exp(score − lse) and s = scale · w · (dout · v − delta), dq = Σ keys s · key, the gradient of a
    key is Σ rows s · q and that of a value Σ rows w · dout: the numbers of v get both, PIECE columns at a time.
    """
    row, head, count, lists = _find_row(lists, counts, blocks, q_ends, columns, HEADS)
    column = tl.arange(0, WIDTH)
    piece = tl.arange(0, PIECE)
    q = q + row * q_row
    dout = dout + row * dout_row
    dq = dq + row * heads * (V_SIZE + SIZE)
    q_of_k = _load_heads(q + V_SIZE, head, heads, q_head, column, SIZE)
    dq_of_k = tl.zeros((WIDTH, HEADS), tl.float32)
    # The registers would not hold whole values, so these are tuples of pieces.
    q_of_v, dout_of_v, dq_of_v = (), (), ()
    for first in tl.static_range(0, V_WIDTH, PIECE):
        q_of_v = q_of_v + (_load_heads(q, head, heads, q_head, first + piece, V_SIZE),)
        dout_of_v = dout_of_v + (_load_heads(dout, head, heads, dout_head, first + piece, V_SIZE),)
        dq_of_v = dq_of_v + (tl.zeros((PIECE, HEADS), tl.float32),)
    row_lse = tl.load(lse + row * heads + head, mask=head < heads, other=0.0) * _LOG2_E
    row_delta = tl.load(delta + row * heads + head, mask=head < heads, other=0.0)
    for start in range(0, count, KEYS):
        exists = start + tl.arange(0, KEYS) < count
        place = tl.load(lists + start + tl.arange(0, KEYS), mask=exists, other=0)
        k_block = _load_keys(k, place, exists, k_row, column, SIZE)
        scores = tl.dot(k_block, tl.trans(q_of_k))
        products = tl.zeros((KEYS, HEADS), tl.float32)
        v_of = ()
        for i in tl.static_range(V_WIDTH // PIECE):
            v_of = v_of + (_load_keys(v, place, exists, v_row, i * PIECE + piece, V_SIZE),)
            scores = tl.dot(v_of[i], tl.trans(q_of_v[i]), scores)
            products = tl.dot(v_of[i], tl.trans(dout_of_v[i]), products)
        weights = tl.exp2(scores * (scale * _LOG2_E) - row_lse[None, :])
        weights = tl.where(exists[:, None] & (head < heads)[None, :], weights, 0.0)
        slopes = (weights * (products - row_delta[None, :]) * scale).to(k_block.dtype)
        weights = weights.to(k_block.dtype)
        dq_of_k = tl.dot(tl.trans(k_block), slopes, dq_of_k)
        added = ()
        for i in tl.static_range(V_WIDTH // PIECE):
            added = added + (tl.dot(tl.trans(v_of[i]), slopes, dq_of_v[i]),)
            sums = tl.dot(weights, dout_of_v[i], tl.dot(slopes, q_of_v[i]))
            _add_keys(dv, place, exists, sums, i * PIECE + piece, V_SIZE)
        dq_of_v = added
        _add_keys(dk, place, exists, tl.dot(slopes, q_of_k), column, SIZE)
    for i in tl.static_range(V_WIDTH // PIECE):
        _store_heads(dq, head, heads, V_SIZE + SIZE, i * PIECE + piece, V_SIZE, dq_of_v[i])
    _store_heads(dq + V_SIZE, head, heads, V_SIZE + SIZE, column, SIZE, dq_of_k)
