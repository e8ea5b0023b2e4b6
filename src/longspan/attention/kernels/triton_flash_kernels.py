"""Triton kernels of `triton_flash.py`, their only importer: CPU builds of torch lack triton.

A program owns a block of rows (or keys) of one tile and head, and walks the keys (or rows) that it meets; `blocks` (n,
2) lists tile and first row. A row sees `left` keys before and `right` after the one that it is aligned to.
"""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources as OutOfResources

_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_KEY = tl.constexpr(-1e30)  # `rows.NO_KEY`


@triton.jit
def _cap_scores(scores, softcap):
    """softcap · tanh(scores / softcap), by the sigmoid that Triton has."""
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


@triton.jit
def _align_to_key(row, rows, keys, STRIDE: tl.constexpr):
    """Return the key that a row is aligned to: one more every STRIDE rows, and the last key for the last row alone."""
    if STRIDE == 1:
        return row + (keys - rows)
    return keys - 1 - (rows - 1 - row + STRIDE - 1) // STRIDE


@triton.jit
def _is_visible(aligned, key, keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    seen = key < keys
    if HAS_LEFT:
        seen = seen & (key >= aligned - left)
    if HAS_RIGHT:
        seen = seen & (key <= aligned + right)
    return seen


@triton.jit
def _load_rows(x, row, row_stride, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = x + row.to(tl.int64)[:, None] * row_stride + column[None, :]  # heads may lie a whole tensor of rows apart
    return tl.load(at, mask=(row < rows)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _store_rows(x, row, row_stride, rows, values, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = x + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=(row < rows)[:, None] & (column < SIZE)[None, :])


@triton.jit
def find_tile(blocks, q_ends, k_ends):
    """Return this program's tile, the first row (or key) of its block in it, and the tile's first row and key, and how
    many of both it has.
    """
    tile = tl.load(blocks + 2 * tl.program_id(0).to(tl.int64))
    start = tl.load(blocks + 2 * tl.program_id(0).to(tl.int64) + 1)
    q_start, k_start = tl.load(q_ends + tile), tl.load(k_ends + tile)
    rows, keys = tl.load(q_ends + tile + 1) - q_start, tl.load(k_ends + tile + 1) - k_start
    return tile, start, q_start, k_start, rows, keys


@triton.jit
def _find_visible_keys(
    start,
    rows,
    keys,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The beginning is rounded down to a whole number of blocks of KEYS; the end is that of the block's last row."""
    first_key = 0
    end_key = keys
    if HAS_LEFT:
        first_key = tl.maximum(_align_to_key(start, rows, keys, STRIDE) - left, 0) // KEYS * KEYS
    if HAS_RIGHT:
        last_row = tl.minimum(start + ROWS, rows) - 1
        end_key = tl.minimum(_align_to_key(last_row, rows, keys, STRIDE) + 1 + right, keys)
    return first_key, end_key


@triton.jit
def pack_bits(
    indices,
    bits,
    blocks,
    q_ends,
    k_ends,
    places,
    place_starts,
    bit_starts,
    bits_head,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the bit of each key that ROWS rows of a tile have chosen; `bits` are zeros before.

    `indices` (rows, choices, columns) are the numbers of chosen blocks of BLOCK positions; the second program id is one
    of the choices, whose bits begin `bits_head` words after those of the choice before. `places`, `place_starts` and
    `bit_starts` are those of `KeyBits` in `tiles.py`. A position at which the tile has no key sets no bit.
    """
    tile, start, q_start, _, rows, keys = find_tile(blocks, q_ends, k_ends)
    choice = tl.program_id(1).to(tl.int64)
    first_place = tl.load(place_starts + tile)
    positions = tl.load(place_starts + tile + 1) - first_place
    row = start + tl.arange(0, ROWS).to(tl.int64)
    row_bits = bits + choice * bits_head + tl.load(bit_starts + tile) + row * tl.cdiv(keys, 64)
    indices += ((q_start + row) * tl.num_programs(1) + choice)[:, None] * columns
    for first in range(0, columns * BLOCK, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        exists = (row < rows)[:, None] & (column < columns * BLOCK)[None, :]
        block = tl.load(indices + (column // BLOCK)[None, :], mask=exists, other=-1)
        index = block * BLOCK + (column % BLOCK)[None, :]
        is_key = (block >= 0) & (index < positions)
        place = tl.load(places + first_place + index, mask=is_key, other=-1)
        bit = tl.full(place.shape, 1, tl.int64) << (place % 64)
        tl.atomic_or(row_bits[:, None] + place // 64, bit, mask=place >= 0, sem="relaxed")


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    lse,
    blocks,
    q_ends,
    k_ends,
    bits,
    bit_starts,
    bits_head,
    group,
    scale,
    softcap,
    left,
    right,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute out and lse of ROWS rows of a head in one pass over their keys with a running largest score.

    It is the forward pass of FlashAttention 2 (arXiv:2307.08691, algorithm 1). Exponentials are powers of 2, so scores
    are multiplied by log₂ e. The first program id is a block of rows in `blocks`, the second a head. `*_ends` are the
    boundaries of tiles among the rows and among the keys, `*_row` and `*_head` strides (results, lse and delta are
    contiguous), `group` the query heads of a key/value head. With HAS_BITS a row sees those keys of its window whose
    bit is set (`pack_bits`; a tile's begin at the word `bit_starts`, those of a key/value head `bits_head` words after
    those of the one before). Blocks without a bit are computed too: a branch
    around them costs 30 %, as loads are not made ahead through it (bench/records/indexed-attention-2xH200.md).
    """
    tile, start, q_start, k_start, rows, keys = find_tile(blocks, q_ends, k_ends)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    kv_head = head // group
    q += q_start.to(tl.int64) * q_row + head * q_head
    k += k_start.to(tl.int64) * k_row + kv_head * k_head
    v += k_start.to(tl.int64) * v_row + kv_head * v_head
    out += (q_start.to(tl.int64) * heads + head) * V_SIZE
    lse += q_start.to(tl.int64) * heads + head

    row = start + tl.arange(0, ROWS)
    aligned = _align_to_key(row, rows, keys, STRIDE)
    q_block = _load_rows(q, row, q_row, rows, SIZE, WIDTH)
    first_key, end_key = _find_visible_keys(start, rows, keys, left, right, HAS_LEFT, HAS_RIGHT, STRIDE, ROWS, KEYS)
    if HAS_BITS:
        row_bits = bits + kv_head * bits_head + tl.load(bit_starts + tile) + row.to(tl.int64) * tl.cdiv(keys, 64)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, V_WIDTH), tl.float32)
    for block_start in range(first_key, end_key, KEYS):
        key = block_start + tl.arange(0, KEYS)
        k_block = _load_rows(k, key, k_row, keys, SIZE, WIDTH)
        scores = tl.dot(q_block, tl.trans(k_block)) * scale
        if HAS_CAP:
            scores = _cap_scores(scores, softcap)
        seen = _is_visible(aligned[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
        if HAS_BITS:
            word = tl.load(row_bits + block_start // 64, mask=row < rows, other=0)
            seen = seen & (((word[:, None] >> key[None, :] % 64) & 1) != 0)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        top = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
        weights = tl.exp2(scores - top[:, None])
        rescale = tl.exp2(largest - top)  # the sums so far were taken with the largest score so far
        total = total * rescale + tl.sum(weights, 1)
        v_block = _load_rows(v, key, v_row, keys, V_SIZE, V_WIDTH)
        result = tl.dot(weights.to(v_block.dtype), v_block, result * rescale[:, None])
        largest = higher
    if HAS_BITS:  # rows that have chosen no key of this launch
        largest = tl.where(total == 0.0, _NO_KEY * _LOG2_E, largest)
        total = tl.where(total == 0.0, 1.0, total)
    _store_rows(out, row, heads * V_SIZE, rows, result / total[:, None], V_SIZE, V_WIDTH)
    tl.store(lse + row.to(tl.int64) * heads, largest / _LOG2_E + tl.log(total), mask=row < rows)


@triton.jit
def query_gradients(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    blocks,
    q_ends,
    k_ends,
    bits,
    bit_starts,
    bits_head,
    group,
    scale,
    softcap,
    left,
    right,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute dq of ROWS rows of one head, KEYS keys at a time, from the log-sum-exp over the keys of all blocks.

    Weights are w = exp(score − lse); dq = scale · Σ keys w · (dout · v − delta) · k, times the soft cap's slope, where
    delta is dout · out. The cap makes a score s of cap · tanh(s / cap), whose slope is 1 − (capped / cap)².
    Exponentials are powers of 2, so scores and lse are multiplied by log₂ e. `first_key` and `end_key` leave out the
    blocks of keys that the window hides from all of these rows. Arguments are those of `forward`.
    """
    tile, start, q_start, k_start, rows, keys = find_tile(blocks, q_ends, k_ends)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    kv_head = head // group
    q += q_start.to(tl.int64) * q_row + head * q_head
    k += k_start.to(tl.int64) * k_row + kv_head * k_head
    v += k_start.to(tl.int64) * v_row + kv_head * v_head
    dout += q_start.to(tl.int64) * dout_row + head * dout_head
    dq += (q_start.to(tl.int64) * heads + head) * SIZE
    lse += q_start.to(tl.int64) * heads + head
    delta += q_start.to(tl.int64) * heads + head

    row = start + tl.arange(0, ROWS)
    aligned = _align_to_key(row, rows, keys, STRIDE)
    q_block = _load_rows(q, row, q_row, rows, SIZE, WIDTH)
    dout_block = _load_rows(dout, row, dout_row, rows, V_SIZE, V_WIDTH)
    row_lse = tl.load(lse + row.to(tl.int64) * heads, mask=row < rows, other=0.0) * _LOG2_E
    row_delta = tl.load(delta + row.to(tl.int64) * heads, mask=row < rows, other=0.0)
    first_key, end_key = _find_visible_keys(start, rows, keys, left, right, HAS_LEFT, HAS_RIGHT, STRIDE, ROWS, KEYS)
    if HAS_BITS:
        row_bits = bits + kv_head * bits_head + tl.load(bit_starts + tile) + row.to(tl.int64) * tl.cdiv(keys, 64)
    result = tl.zeros((ROWS, WIDTH), tl.float32)
    for block_start in range(first_key, end_key, KEYS):
        key = block_start + tl.arange(0, KEYS)
        k_block = _load_rows(k, key, k_row, keys, SIZE, WIDTH)
        scores = tl.dot(q_block, tl.trans(k_block)) * scale
        slope = 1.0
        if HAS_CAP:
            scores = _cap_scores(scores, softcap)
            slope = 1.0 - (scores / softcap) * (scores / softcap)
        seen = _is_visible(aligned[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
        if HAS_BITS:
            word = tl.load(row_bits + block_start // 64, mask=row < rows, other=0)
            seen = seen & (((word[:, None] >> key[None, :] % 64) & 1) != 0)
        weights = tl.where(seen, tl.exp2(scores * _LOG2_E - row_lse[:, None]), 0.0)
        v_block = _load_rows(v, key, v_row, keys, V_SIZE, V_WIDTH)
        dscores = weights * (tl.dot(dout_block, tl.trans(v_block)) - row_delta[:, None]) * slope
        result = tl.dot(dscores.to(k_block.dtype), k_block, result)
    _store_rows(dq, row, heads * SIZE, rows, result * scale, SIZE, WIDTH)


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
    tiles,
    blocks,
    q_ends,
    k_ends,
    bits,
    bit_starts,
    bits_head,
    group,
    scale,
    softcap,
    left,
    right,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    WANTS_K: tl.constexpr,
    WANTS_V: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute dk, dv or both of KEYS keys, their query heads one after another: no other program adds to them.

    The third program id is a share of the query heads, whose sums lie a whole dk and dv after those of the share
    before.

    With the weights w of `query_gradients`, dv = Σ rows w · dout and dk = scale · Σ rows w · (dout · v − delta) · q,
    times the soft cap's slope. `first_row` and `end_row` leave out the blocks of rows that see none of these keys.
    WANTS_K and WANTS_V leave out what needs no gradient. Arguments are those of `forward`; blocks are of keys.
    """
    tile, start, q_start, k_start, rows, keys = find_tile(blocks, q_ends, k_ends)
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)
    heads = kv_heads * group
    q += q_start.to(tl.int64) * q_row
    k += k_start.to(tl.int64) * k_row + kv_head * k_head
    dout += q_start.to(tl.int64) * dout_row
    lse += q_start.to(tl.int64) * heads
    delta += q_start.to(tl.int64) * heads

    key = start + tl.arange(0, KEYS)
    shift = keys - rows
    k_block = _load_rows(k, key, k_row, keys, SIZE, WIDTH)
    first_row = 0
    end_row = rows
    if HAS_RIGHT:
        # The first row that is aligned to key start − right, or to a later one.
        first_row = rows - 1 - (keys - 1 - start + right) * STRIDE
        first_row = tl.maximum(first_row, 0) // ROWS * ROWS
    if HAS_LEFT:
        end_row = tl.minimum(start + KEYS - shift + left, rows)
    if WANTS_K:
        v += k_start.to(tl.int64) * v_row + kv_head * v_head
        v_block = _load_rows(v, key, v_row, keys, V_SIZE, V_WIDTH)
        dk_sum = tl.zeros((KEYS, WIDTH), tl.float32)
    if WANTS_V:
        dv_sum = tl.zeros((KEYS, V_WIDTH), tl.float32)
    if HAS_BITS:
        first_bits = bits + kv_head * bits_head + tl.load(bit_starts + tile) + start // 64
    share = tl.program_id(2).to(tl.int64)
    heads_of_share = tl.cdiv(group, tl.num_programs(2))
    for member in range(share * heads_of_share, tl.minimum((share + 1) * heads_of_share, group)):
        head = kv_head * group + member
        for block_start in range(first_row, end_row, ROWS):
            row = block_start + tl.arange(0, ROWS)
            aligned = _align_to_key(row, rows, keys, STRIDE)
            q_block = _load_rows(q + head * q_head, row, q_row, rows, SIZE, WIDTH)
            dout_block = _load_rows(dout + head * dout_head, row, dout_row, rows, V_SIZE, V_WIDTH)
            row_lse = tl.load(lse + row.to(tl.int64) * heads + head, mask=row < rows, other=0.0) * _LOG2_E
            scores = tl.dot(k_block, tl.trans(q_block)) * scale
            slope = 1.0
            if HAS_CAP:
                scores = _cap_scores(scores, softcap)
                slope = 1.0 - (scores / softcap) * (scores / softcap)
            seen = _is_visible(aligned[None, :], key[:, None], keys, left, right, HAS_LEFT, HAS_RIGHT)
            if HAS_BITS:
                word = tl.load(first_bits + row.to(tl.int64) * tl.cdiv(keys, 64), mask=row < rows, other=0)
                seen = seen & (((word[None, :] >> key[:, None] % 64) & 1) != 0)
            weights = tl.where(seen, tl.exp2(scores * _LOG2_E - row_lse[None, :]), 0.0)
            if WANTS_V:
                dv_sum = tl.dot(weights.to(dout_block.dtype), dout_block, dv_sum)
            if WANTS_K:
                row_delta = tl.load(delta + row.to(tl.int64) * heads + head, mask=row < rows, other=0.0)
                dscores = weights * (tl.dot(v_block, tl.trans(dout_block)) - row_delta[None, :]) * slope
                dk_sum = tl.dot(dscores.to(q_block.dtype), q_block, dk_sum)
    all_keys = tl.load(k_ends + tiles).to(tl.int64)
    if WANTS_K:
        dk += share * all_keys * kv_heads * SIZE
        dk += (k_start.to(tl.int64) * kv_heads + kv_head) * SIZE
        _store_rows(dk, key, kv_heads * SIZE, keys, dk_sum * scale, SIZE, WIDTH)
    if WANTS_V:
        dv += share * all_keys * kv_heads * V_SIZE
        dv += (k_start.to(tl.int64) * kv_heads + kv_head) * V_SIZE
        _store_rows(dv, key, kv_heads * V_SIZE, keys, dv_sum, V_SIZE, V_WIDTH)
