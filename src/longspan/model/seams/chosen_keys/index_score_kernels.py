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
