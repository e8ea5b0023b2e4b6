"""Triton kernels of `index_scores.py`, their only importer: CPU builds of torch lack triton."""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def score_keys(
    q,
    weights,
    index_keys,
    scores,
    rows,
    keys,
    first_position,
    stride,
    heads,
    q_row,
    q_head,
    weights_row,
    keys_row,
    scores_row,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the scores of ROWS rows and KEYS keys in each program: Σ over heads of weight · relu(q · key), in float32.

    Row r stands at position `first_position` + r, key j at j · `stride` + `stride` − 1; scores of later keys are −∞.
    SIZE is the size of a head, WIDTH the power of two that holds it; `q_row`, `q_head`, `weights_row`, `keys_row` and
    `scores_row` are strides of tensors.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64)
    keys_at = index_keys + key.to(tl.int64)[:, None] * keys_row + column[None, :]
    block = tl.load(keys_at, mask=(key < keys)[:, None] & (column < SIZE)[None, :], other=0.0)
    total = tl.zeros((ROWS, KEYS), tl.float32)
    # Nothing is multiplied where all keys of the block are later than all of its rows.
    last_position = first_position + tl.program_id(0) * ROWS + ROWS - 1
    if tl.program_id(1) * KEYS * stride + stride - 1 <= last_position:
        for head in range(heads):
            q_at = q + at[:, None] * q_row + head * q_head + column[None, :]
            q_block = tl.load(q_at, mask=(row < rows)[:, None] & (column < SIZE)[None, :], other=0.0)
            products = tl.dot(q_block, tl.trans(block), input_precision="ieee")
            weight = tl.load(weights + at * weights_row + head, mask=row < rows, other=0.0)
            total += weight[:, None] * tl.maximum(products, 0.0)
    position = key[None, :] * stride + stride - 1
    total = tl.where(position <= first_position + row[:, None], total, float("-inf"))
    tl.store(
        scores + at[:, None] * scores_row + key[None, :], total, mask=(row < rows)[:, None] & (key < keys)[None, :]
    )


@triton.jit
def score_key_blocks(
    q,
    index_keys,
    scores,
    rows,
    keys,
    blocks,
    first_position,
    q_head,
    q_row,
    keys_row,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the best score, the largest q · key, of BLOCKS blocks for ROWS rows of one head in each program.

    Row r stands at position `first_position` + r, and block b begins with key b · BLOCK; a block of which a row sees no
    key has −∞. Scores (heads, `rows`, `blocks`) are float32 without gaps. KEYS keys are multiplied at a time.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64)
    q_at = q + head * q_head + at[:, None] * q_row + column[None, :]
    q_rows = tl.load(q_at, mask=(row < rows)[:, None] & (column < SIZE)[None, :], other=0.0)
    scores_at = scores + (head * rows + at) * blocks
    position = first_position + row
    first = tl.program_id(1) * BLOCKS
    last = tl.minimum(first + BLOCKS, blocks)
    # Nothing is multiplied of blocks that are later than all of these rows.
    seen = tl.minimum(last, (first_position + tl.program_id(0) * ROWS + ROWS - 1) // BLOCK + 1)
    for block in range(first, seen):
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        for start in tl.static_range(0, BLOCK, KEYS):
            place = start + tl.arange(0, KEYS)
            key = block * BLOCK + place
            is_key = (place < BLOCK) & (key < keys)
            keys_at = index_keys + key.to(tl.int64)[None, :] * keys_row + column[:, None]
            key_columns = tl.load(keys_at, mask=is_key[None, :] & (column < SIZE)[:, None], other=0.0)
            products = tl.dot(q_rows, key_columns, input_precision="ieee")
            is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
            best = tl.maximum(best, tl.max(tl.where(is_seen, products, float("-inf")), 1))
        tl.store(scores_at + block, best, mask=row < rows)
    for block in range(tl.maximum(first, seen), last):
        tl.store(scores_at + block, tl.full((ROWS,), float("-inf"), tl.float32), mask=row < rows)


@triton.jit
def write_best_keys(scores, least, ties, chosen, keys, k, scores_row, chosen_row, KEYS: tl.constexpr):
    """Write the keys of one row whose score is above `least`, and the first `ties` of those equal to it, into `chosen`.

    They are ascending; −1 fills the rest of the row's `k` columns. Each program does one row, KEYS keys at a time.
    """
    at = tl.program_id(0).to(tl.int64)
    row_scores = scores + at * scores_row
    row_chosen = chosen + at * chosen_row
    row_least = tl.load(least + at)
    ties_left = tl.load(ties + at)
    written = tl.zeros((), tl.int32)
    for start in range(0, keys, KEYS):
        key = start + tl.arange(0, KEYS)
        score = tl.load(row_scores + key, mask=key < keys, other=float("-inf"))
        is_equal = ((score == row_least) & (score > float("-inf"))).to(tl.int32)
        is_chosen = (score > row_least) | ((is_equal != 0) & (tl.cumsum(is_equal, 0) <= ties_left))
        place = written + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(row_chosen + place, key, mask=is_chosen)
        written += tl.sum(is_chosen.to(tl.int32), 0)
        ties_left -= tl.sum(is_equal, 0)
    for start in range(0, k, KEYS):
        column = start + tl.arange(0, KEYS)
        tl.store(row_chosen + column, -1, mask=(column >= written) & (column < k))
