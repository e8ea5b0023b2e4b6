"""Triton kernels of states: decayed sums over chunks (`decay.py`) and maps of runs of delta rules (`delta.py`).

Imported only where Triton is installed.

In the kernels of delta rules states lie transposed, columns before key numbers, so that they stay in registers from
chunk to chunk: as the sum of one product, and as the first factor of the next. Whatever else a chunk reads is loaded
while the chunk before it is computed.
"""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def scan_chunks_kernel(
    added,
    decays,
    states,
    final,
    into,
    chunk_ends,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Scan the chunks of a run, S ← 2^decay S + addition for each, from `states` to `final`.

    One program does BLOCK numbers of one head's state, for one run, chunk after chunk. KEEP stores the state before
    each chunk in `into`; BACKWARDS goes from the last chunk to the first. States are (SIZE, WIDTH) a head; in `added`
    SHARED heads of one key lie next to each other: (HEADS / SHARED, SIZE, SHARED, WIDTH) a chunk.
    """
    head = tl.program_id(1)
    run = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE * WIDTH
    row = place // WIDTH
    column = place % WIDTH
    added_offsets = (
        (head // SHARED) * SIZE * SHARED * WIDTH + row * SHARED * WIDTH + (head % SHARED) * WIDTH + column
    )
    state_offsets = head * SIZE * WIDTH + place
    first_chunk = tl.load(chunk_ends + run)
    end_chunk = tl.load(chunk_ends + run + 1)
    state = tl.load(states + run * HEADS * SIZE * WIDTH + state_offsets, mask=inside, other=0.0)
    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if BACKWARDS else first_chunk + step
        if KEEP:
            state_before = into + chunk * HEADS * SIZE * WIDTH + state_offsets
            tl.store(state_before, state.to(state_before.dtype.element_ty), mask=inside)
        fading = tl.exp2(tl.load(decays + chunk * HEADS + head))
        addition = tl.load(added + chunk * HEADS * SIZE * WIDTH + added_offsets, mask=inside, other=0.0)
        state = fading * state + addition
    tl.store(final + run * HEADS * SIZE * WIDTH + state_offsets, state, mask=inside)


@triton.jit
def maps_kernel(
    k,
    w,
    u,
    g,
    states,
    transitions,
    ends,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Compute B and M of each run, where S_out = M S_in + B.

    One program does COLUMNS columns of one head's B or M, for one run, chunk after chunk: S ← decay · S + kᵀ (u − w S),
    k by the decay to the chunk's end; with a decay by channel (BY_CHANNEL) k comes decayed already. `g` are log-decays
    (base 2) summed from each chunk's start; SHARED heads have one key in common. Columns of B begin at zeros and take
    the values u. Columns of M begin as those of the identity, and take no values. What the next chunk reads is loaded
    while this one is computed.
    """
    first_unit: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS * COLUMNS
    head = tl.program_id(1)
    run = tl.program_id(2).to(tl.int64)
    first_row = tl.load(ends + run)
    length = (tl.load(ends + run + 1) - first_row).to(tl.int32)
    value = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # columns of B, then those of M
    unit = value - first_unit
    key = tl.arange(0, KEYS)
    row = tl.arange(0, CHUNK)
    key_mask = (key < SIZE)[None, :]
    inside = (value < WIDTH)[:, None]

    keys = k + ((first_row + row)[:, None] * (HEADS // SHARED) + head // SHARED) * SIZE + key[None, :]
    weights = w + ((first_row + row)[:, None] * HEADS + head) * SIZE + key[None, :]
    values = u + ((first_row + row)[None, :] * HEADS + head) * WIDTH + value[:, None]
    decays = g + (first_row * HEADS + head) * (SIZE if BY_CHANNEL else 1)

    state = tl.where(unit[:, None] == key[None, :], 1.0, 0.0)
    b_u = tl.load(values, mask=inside & (row < length)[None, :], other=0.0)
    chunk_decay, decay = _load_decays(decays, length, HEADS, SIZE, CHUNK, KEYS, BY_CHANNEL)
    for start in range(0, length, CHUNK):
        rows_left = length - start
        mask = (row < rows_left)[:, None] & key_mask
        b_w = tl.load(weights, mask=mask, other=0.0)
        b_k = tl.load(keys, mask=mask, other=0.0)
        values += CHUNK * HEADS * WIDTH
        decays += CHUNK * HEADS * (SIZE if BY_CHANNEL else 1)
        next_u = tl.load(values, mask=inside & (row < rows_left - CHUNK)[None, :], other=0.0)
        next_chunk_decay, next_decay = _load_decays(decays, rows_left - CHUNK, HEADS, SIZE, CHUNK, KEYS, BY_CHANNEL)
        new_values = b_u - tl.dot(state.to(b_w.dtype), tl.trans(b_w))
        if not BY_CHANNEL:
            new_values *= tl.exp2(chunk_decay - decay)[None, :]
        state = tl.dot(new_values.to(b_k.dtype), b_k, state * _chunk_fading(chunk_decay, BY_CHANNEL))
        b_u = next_u
        chunk_decay = next_chunk_decay
        decay = next_decay
        weights += CHUNK * HEADS * SIZE
        keys += CHUNK * (HEADS // SHARED) * SIZE

    state_rows = (run * HEADS + head) * SIZE + key[None, :]
    tl.store(states + state_rows * WIDTH + value[:, None], state, mask=inside & key_mask)
    is_unit = (unit >= 0)[:, None] & (unit < SIZE)[:, None]
    tl.store(transitions + state_rows * SIZE + unit[:, None], state, mask=is_unit & key_mask)


@triton.jit
def initial_state_gradients_kernel(
    q,
    k,
    w,
    g,
    do,
    dv,
    initial_state_gradients,
    ends,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    Q_SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Compute COLUMNS of the gradient of a head's outputs by the state that entered a run, last chunk first.

    Through a chunk the gradient G (`state` here) becomes decay · G + scale · qᵀ do − wᵀ (k G + dv): q by the decay from
    the chunk's start, k G by the decay to its end. `do` and `dv` (T, HEADS, WIDTH) are gradients of the outputs and of
    the values that rows add; SHARED and Q_SHARED heads have one key and one query in common. One program does COLUMNS
    value columns of one head's G, for one run. With a decay by channel (BY_CHANNEL) q and k come decayed already. What
    the chunk before reads is loaded while this one is computed.
    """
    head = tl.program_id(1)
    run = tl.program_id(2).to(tl.int64)
    first_row = tl.load(ends + run)
    length = (tl.load(ends + run + 1) - first_row).to(tl.int32)
    value = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.arange(0, KEYS)
    row = tl.arange(0, CHUNK)
    key_mask = (key < SIZE)[None, :]
    inside = (value < WIDTH)[:, None]

    begin = tl.maximum((length - 1) // CHUNK, 0) * CHUNK  # first row of the last chunk, which may be shorter
    rows = first_row + begin + row
    keys = k + (rows[:, None] * (HEADS // SHARED) + head // SHARED) * SIZE + key[None, :]
    queries = q + (rows[:, None] * (HEADS // Q_SHARED) + head // Q_SHARED) * SIZE + key[None, :]
    weights = w + (rows[:, None] * HEADS + head) * SIZE + key[None, :]
    value_offsets = (rows[None, :] * HEADS + head) * WIDTH + value[:, None]
    outputs = do + value_offsets
    values = dv + value_offsets
    decays = g + ((first_row + begin) * HEADS + head) * (SIZE if BY_CHANNEL else 1)

    state = tl.zeros((COLUMNS, KEYS), dtype=tl.float32)
    rows_left = length - begin
    b_do = tl.load(outputs, mask=inside & (row < rows_left)[None, :], other=0.0)
    b_dv = tl.load(values, mask=inside & (row < rows_left)[None, :], other=0.0)
    chunk_decay, decay = _load_decays(decays, rows_left, HEADS, SIZE, CHUNK, KEYS, BY_CHANNEL)
    for rows_done in range(0, length, CHUNK):
        mask = (row < length - begin + rows_done)[:, None] & key_mask  # only the run's last chunk may be short
        b_k = tl.load(keys, mask=mask, other=0.0)
        b_q = tl.load(queries, mask=mask, other=0.0)
        b_w = tl.load(weights, mask=mask, other=0.0)
        outputs -= CHUNK * HEADS * WIDTH
        values -= CHUNK * HEADS * WIDTH
        decays -= CHUNK * HEADS * (SIZE if BY_CHANNEL else 1)
        rows_left = tl.minimum(begin - rows_done, CHUNK)  # rows of the chunk before, which is whole, or 0
        next_do = tl.load(outputs, mask=inside & (row < rows_left)[None, :], other=0.0)
        next_dv = tl.load(values, mask=inside & (row < rows_left)[None, :], other=0.0)
        next_chunk_decay, next_decay = _load_decays(decays, rows_left, HEADS, SIZE, CHUNK, KEYS, BY_CHANNEL)
        gradient = tl.dot(state.to(b_k.dtype), tl.trans(b_k))
        decayed_do = b_do.to(tl.float32) * scale
        if not BY_CHANNEL:
            gradient *= tl.exp2(chunk_decay - decay)[None, :]
            decayed_do *= tl.exp2(decay)[None, :]
        state = tl.dot(decayed_do.to(b_q.dtype), b_q, state * _chunk_fading(chunk_decay, BY_CHANNEL))
        state = tl.dot((-gradient - b_dv).to(b_w.dtype), b_w, state)
        b_do = next_do
        b_dv = next_dv
        chunk_decay = next_chunk_decay
        decay = next_decay
        keys -= CHUNK * (HEADS // SHARED) * SIZE
        queries -= CHUNK * (HEADS // Q_SHARED) * SIZE
        weights -= CHUNK * HEADS * SIZE

    tl.store(
        initial_state_gradients + ((run * HEADS + head) * SIZE + key[None, :]) * WIDTH + value[:, None],
        state,
        mask=inside & key_mask,
    )


@triton.jit
def _load_decays(
    decays,
    rows_left,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Log-decays to base 2. With BY_CHANNEL rows come decayed already, so that only the last row's are needed, one for
    each key number, and both results are these. A chunk without rows, past the run's end, has zeros."""
    last_row = tl.minimum(rows_left, CHUNK) - 1
    if BY_CHANNEL:
        key = tl.arange(0, KEYS)
        last = tl.load(
            decays + last_row * HEADS * SIZE + key, mask=key < tl.where(rows_left > 0, SIZE, 0), other=0.0
        )
        row_decays = last
    else:
        row = tl.arange(0, CHUNK)
        last = tl.load(decays + last_row * HEADS, mask=rows_left > 0, other=0.0)
        row_decays = tl.load(decays + row * HEADS, mask=row < rows_left, other=0.0)
    return last, row_decays


@triton.jit
def _chunk_fading(last, BY_CHANNEL: tl.constexpr):
    """A number, or (1, K) by channel."""
    fading = tl.exp2(last)
    return fading[None, :] if BY_CHANNEL else fading


@triton.jit
def _sum_taps(
    x,
    arrived,
    weight,
    bias,
    table,
    start,
    channel,
    inside,
    stride_row,
    stride_channel,
    ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ weight · row over BEFORE + 1 rows up to row ROW of the run, which begins at row `start` of x; weight i
    multiplies the row BEFORE − i rows back. In `table` −1 stands for no row, which counts as zeros."""
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(BEFORE + 1):
        if ROW + i < BEFORE:
            source = tl.load(table + ROW + i)
            value = tl.load(arrived + source * CHANNELS + channel, mask=inside & (source >= 0), other=0.0)
        else:
            row = start + ROW + i - BEFORE
            value = tl.load(x + row * stride_row + channel * stride_channel, mask=inside, other=0.0)
        factor = tl.load(weight + channel * (BEFORE + 1) + i, mask=inside, other=0.0)
        y += factor.to(tl.float32) * value.to(tl.float32)
    if BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def write_first_rows_kernel(
    y,
    x,
    arrived,
    weight,
    bias,
    starts,
    counts,
    tables,
    stride_y,
    stride_y_channel,
    stride_x,
    stride_x_channel,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the outputs of the first rows of each run that reads rows of other members.

    y and x (rows, channels), arrived (rows of others, channels), weight (channels, BEFORE + 1), starts and counts
    (runs,), tables (runs, BEFORE). One program does BLOCK channels of the first BEFORE rows of one run.
    """
    run = tl.program_id(1)
    # 64 bits: in a transposed tensor channels lie as far apart as there are rows, and channel times stride passes 2^31.
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + run)
    count = tl.load(counts + run)
    table = tables + run * BEFORE
    for row in tl.static_range(BEFORE):
        inside = (channel < CHANNELS) & (count > row)
        result = _sum_taps(
            x, arrived, weight, bias, table, start, channel, inside, stride_x, stride_x_channel,
            row, CHANNELS, BEFORE, BIAS, BLOCK,
        )  # fmt: skip
        if SILU:
            result = result * tl.sigmoid(result)
        into = y + (start + row) * stride_y + channel * stride_y_channel
        tl.store(into, result.to(into.dtype.element_ty), mask=inside)


@triton.jit
def arrived_gradients_kernel(
    arrived_gradients,
    dout,
    x,
    arrived,
    weight,
    bias,
    starts,
    counts,
    tables,
    stride_dout,
    stride_dout_channel,
    stride_x,
    stride_x_channel,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of rows that arrived for a run; each is read by this run alone, and so written once.

    The gradient of the row in column c before the run is Σ weight[c − row] · dy[row] over the run's rows 0 to c, where
    dy is dout, or with SILU dout · σ(y) (1 + y (1 − σ(y))), for which y is computed again. One program does BLOCK
    channels of all (up to COLUMNS) rows before one run.
    """
    run = tl.program_id(1)
    # 64 bits, as in `write_first_rows_kernel`
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + run)
    count = tl.load(counts + run)
    table = tables + run * BEFORE
    # These columns are the rows before the run.
    column = tl.arange(0, COLUMNS)[:, None]
    total = tl.zeros((COLUMNS, BLOCK), dtype=tl.float32)
    for row in tl.static_range(BEFORE):
        inside = (channel < CHANNELS) & (count > row)
        source_rows = dout + (start + row) * stride_dout + channel * stride_dout_channel
        gradient = tl.load(source_rows, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            y = _sum_taps(
                x, arrived, weight, bias, table, start, channel, inside, stride_x, stride_x_channel,
                row, CHANNELS, BEFORE, BIAS, BLOCK,
            )  # fmt: skip
            sigmoid = tl.sigmoid(y)
            gradient = gradient * sigmoid * (1 + y * (1 - sigmoid))
        reads = (column >= row) & (column < BEFORE) & inside[None, :]
        factor = tl.load(weight + channel[None, :] * (BEFORE + 1) + column - row, mask=reads, other=0.0)
        total += factor.to(tl.float32) * gradient[None, :]
    source = tl.load(table + column, mask=column < BEFORE, other=-1)
    into = arrived_gradients + source * CHANNELS + channel[None, :]
    tl.store(into, total.to(into.dtype.element_ty), mask=(source >= 0) & (channel < CHANNELS)[None, :])
