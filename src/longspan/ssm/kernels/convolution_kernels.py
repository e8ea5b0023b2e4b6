"""Triton kernels of `convolutions.py` for the first rows of runs; imported only where Triton is installed."""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl


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
    """Convolve row ROW of a run, for BLOCK channels, without activation: Σ weight · row over BEFORE + 1 rows up to it.

    The run begins at row `start` of x; weight i multiplies the row BEFORE − i rows back. Rows before the run are in
    `arrived`, at the indices in `table`; −1 stands for none, which counts as zeros.
    """
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
def write_first_kernel(
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

    One program does BLOCK channels of the first BEFORE rows of one run.
    """
    run = tl.program_id(1)
    # 64 bits: in a transposed tensor channels lie as far apart as there are rows, and channel times stride passes 2^31.
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start, count, table = tl.load(starts + run), tl.load(counts + run), tables + run * BEFORE
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
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 64 bits, as in `write_first_kernel`
    start, count, table = tl.load(starts + run), tl.load(counts + run), tables + run * BEFORE
    column = tl.arange(0, COLUMNS)[:, None]  # of the rows before the run
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
