"""Triton kernels of `triton_blocks.py`, their only importer: CPU builds of torch lack triton.

A program of `forward` and `query_gradients` owns one row and the query heads of a key/value head, and reads the keys
that they chose; one of `key_gradients` owns keys of a block, and reads the rows that chose it.
"""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl

from longspan.attention.kernels.triton_flash_kernels import _LOG2_E, _NO_KEY, _is_visible
from longspan.attention.kernels.triton_gathered_kernels import (
    _add_keys,
    _load_heads,
    _load_keys,
    _store_heads,
    list_keys as list_keys,
)


@triton.jit
def _find_row(lists, counts, blocks, q_ends, width, group, choices, HEADS: tl.constexpr):
    """Return this program's row, its heads and their end, and how many keys it has listed where."""
    program = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    head = kv_head * group + tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    row = (tl.load(q_ends + tl.load(blocks + 2 * program)) + tl.load(blocks + 2 * program + 1)).to(tl.int64)
    choice = program * choices + tl.minimum(kv_head, choices - 1)
    return row, kv_head, head, (kv_head + 1) * group, tl.load(counts + choice), lists + choice * width


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
    width,
    group,
    choices,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute out and lse of one row's heads of a key/value head over its listed keys, KEYS at a time.

    As in `triton_gathered_kernels.py`, keys are the rows of products, and exponentials powers of 2. `blocks` has the
    tile and row of each program, `lists` (rows, choices, width) their keys; a key/value head has a choice of its own or
    all have one. `*_row` and `*_head` are strides; out and lse are contiguous.
    """
    row, kv_head, head, end, count, lists = _find_row(lists, counts, blocks, q_ends, width, group, choices, HEADS)
    heads = tl.num_programs(1) * group
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    q_block = _load_heads(q + row * q_row, head, end, q_head, column, SIZE)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((V_WIDTH, HEADS), tl.float32)
    for start in range(0, count, KEYS):
        exists = start + tl.arange(0, KEYS) < count
        place = tl.load(lists + start + tl.arange(0, KEYS), mask=exists, other=0)
        k_block = _load_keys(k + kv_head * k_head, place, exists, k_row, column, SIZE)
        scores = tl.dot(k_block, tl.trans(q_block))
        scores = tl.where(exists[:, None], scores * (scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp2(scores - higher[None, :])
        rescale = tl.exp2(largest - higher)
        total = total * rescale + tl.sum(weights, 0)
        v_block = _load_keys(v + kv_head * v_head, place, exists, v_row, v_column, V_SIZE)
        result = tl.dot(tl.trans(v_block), weights.to(v_block.dtype), result * rescale[None, :])
        largest = higher
    largest = tl.where(count == 0, _NO_KEY * _LOG2_E, largest)
    total = tl.where(count == 0, 1.0, total)
    _store_heads(out + row * heads * V_SIZE, head, end, V_SIZE, v_column, V_SIZE, result / total[None, :])
    tl.store(lse + row * heads + head, largest / _LOG2_E + tl.log(total), mask=head < end)


@triton.jit
def query_gradients(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    lists,
    counts,
    blocks,
    q_ends,
    width,
    group,
    choices,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute dq of one row's heads of a key/value head: scale · Σ keys w · (dout · v − delta) · k.

    The weights are w = exp(score − lse), with the log-sum-exp over the keys of all launches. Arguments are those of
    `forward`.
    """
    row, kv_head, head, end, count, lists = _find_row(lists, counts, blocks, q_ends, width, group, choices, HEADS)
    heads = tl.num_programs(1) * group
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    q_block = _load_heads(q + row * q_row, head, end, q_head, column, SIZE)
    dout_block = _load_heads(dout + row * dout_row, head, end, dout_head, v_column, V_SIZE)
    row_lse = tl.load(lse + row * heads + head, mask=head < end, other=0.0) * _LOG2_E
    row_delta = tl.load(delta + row * heads + head, mask=head < end, other=0.0)
    result = tl.zeros((WIDTH, HEADS), tl.float32)
    for start in range(0, count, KEYS):
        exists = start + tl.arange(0, KEYS) < count
        place = tl.load(lists + start + tl.arange(0, KEYS), mask=exists, other=0)
        k_block = _load_keys(k + kv_head * k_head, place, exists, k_row, column, SIZE)
        v_block = _load_keys(v + kv_head * v_head, place, exists, v_row, v_column, V_SIZE)
        scores = tl.dot(k_block, tl.trans(q_block))
        weights = tl.exp2(scores * (scale * _LOG2_E) - row_lse[None, :])
        weights = tl.where(exists[:, None] & (head < end)[None, :], weights, 0.0)
        slopes = weights * (tl.dot(v_block, tl.trans(dout_block)) - row_delta[None, :])
        result = tl.dot(tl.trans(k_block), slopes.to(k_block.dtype), result)
    _store_heads(dq + row * heads * SIZE, head, end, SIZE, column, SIZE, result * scale)


@triton.jit
def key_gradients(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    order,
    block_list,
    block_starts,
    rows_of_blocks,
    q_ends,
    k_ends,
    places,
    place_starts,
    group,
    choices,
    left,
    right,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Add to dk and dv of KEYS keys of a block what the rows that chose it give: PAIRS of rows and heads at a time.

    No other program of a launch adds to these keys of a key/value head. The first program id is a place in `order`,
    which has the blocks of a choice, those with the most rows first; the second a key/value head, the third a part of
    the block. `block_list` has the tile of each block, and its number in the document; `rows_of_blocks` from
    `block_starts` on the rows. dv = Σ pairs w · dout and dk = scale · Σ pairs w · (dout · v − delta) · q.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)
    heads = kv_heads * group
    choice = tl.minimum(kv_head, choices - 1)
    count = tl.num_programs(0).to(tl.int64)
    block = tl.load(order + choice * count + tl.program_id(0))
    tile = tl.load(block_list + 2 * block)
    number = tl.load(block_list + 2 * block + 1)
    # A choice has one more start: the rows from there on chose no block of these tiles.
    first_pair = tl.load(block_starts + choice * (count + 1) + block) * group
    end_pair = tl.load(block_starts + choice * (count + 1) + block + 1) * group
    q_start, k_start = tl.load(q_ends + tile), tl.load(k_ends + tile)
    rows, keys = tl.load(q_ends + tile + 1) - q_start, tl.load(k_ends + tile + 1) - k_start
    first_place = tl.load(place_starts + tile)
    positions = tl.load(place_starts + tile + 1) - first_place

    in_block = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    position = number * BLOCK + in_block
    place = tl.load(places + first_place + position, mask=(in_block < BLOCK) & (position < positions), other=-1)
    exists = place >= 0
    key = k_start + tl.maximum(place, 0)
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    k_block = _load_keys(k + kv_head * k_head, key, exists, k_row, column, SIZE)
    v_block = _load_keys(v + kv_head * v_head, key, exists, v_row, v_column, V_SIZE)
    dk_sum = tl.zeros((KEYS, WIDTH), tl.float32)
    dv_sum = tl.zeros((KEYS, V_WIDTH), tl.float32)
    for start in range(first_pair, end_pair, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        real = pair < end_pair
        row = tl.load(rows_of_blocks + pair // group, mask=real, other=0).to(tl.int64)
        head = kv_head * group + pair % group
        q_block = _load_pairs(q, row, head, real, q_row, q_head, column, SIZE)
        dout_block = _load_pairs(dout, row, head, real, dout_row, dout_head, v_column, V_SIZE)
        pair_lse = tl.load(lse + row * heads + head, mask=real, other=0.0) * _LOG2_E
        pair_delta = tl.load(delta + row * heads + head, mask=real, other=0.0)
        aligned = row - q_start + keys - rows
        seen = _is_visible(aligned[None, :], place[:, None], keys, left, right, HAS_LEFT, HAS_RIGHT)
        seen = seen & exists[:, None] & real[None, :]
        scores = tl.dot(k_block, tl.trans(q_block)) * (scale * _LOG2_E)
        weights = tl.where(seen, tl.exp2(scores - pair_lse[None, :]), 0.0)
        dv_sum = tl.dot(weights.to(dout_block.dtype), dout_block, dv_sum)
        slopes = weights * (tl.dot(v_block, tl.trans(dout_block)) - pair_delta[None, :])
        dk_sum = tl.dot(slopes.to(q_block.dtype), q_block, dk_sum)
    # Rows of `_add_keys` are as wide as a key/value head.
    at = key * kv_heads + kv_head
    _add_keys(dk, at, exists, dk_sum * scale, column, SIZE)
    _add_keys(dv, at, exists, dv_sum, v_column, V_SIZE)


@triton.jit
def _load_pairs(x, row, head, real, row_stride, head_stride, column, size):
    at = x + (row * row_stride + head * head_stride)[:, None] + column[None, :]
    return tl.load(at, mask=real[:, None] & (column < size)[None, :], other=0.0)
