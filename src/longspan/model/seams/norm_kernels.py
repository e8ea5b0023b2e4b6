"""Triton kernels of `norms.py`, the only importer of this module: it needs triton, which CPU builds lack."""

import triton
import triton.language as tl

# pyright: basic, reportMissingImports=false


@triton.jit
def norm_rows_kernel(
    x,
    gate,
    weight,
    out,
    inverse,
    rows,
    width,
    x_row,
    gate_row,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    OFFSET: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GATE_LAST: tl.constexpr,
    SILU: tl.constexpr,
):
    """Norm `rows` rows of `width` features per group, and store 1 / √(mean of squares + eps) of each in `inverse`.

    One program does ROWS rows of one of the GROUPS groups, in a block of COLUMNS columns. A gate, its sigmoid or SiLU,
    multiplies features before the norm (GATE_FIRST) or after it (GATE_LAST). The weight is added to OFFSET, which is 1
    where a model keeps its weight around 0. `x_row` and `gate_row` are strides; `out` and `inverse` are contiguous.
    """
    group = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    real = row < rows
    inside = real[:, None] & (column < width)[None, :]
    feature = group * width + column
    y = tl.load(x + row[:, None] * x_row + feature[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = OFFSET + tl.load(weight + feature, mask=column < width, other=0.0).to(tl.float32)
    if GATE_FIRST or GATE_LAST:
        gate_block = tl.load(gate + row[:, None] * gate_row + feature[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        gate_factor = tl.sigmoid(gate_block)
        if SILU:
            gate_factor *= gate_block
        if GATE_FIRST:
            y *= gate_factor
    scale = 1.0 / tl.sqrt(tl.sum(y * y, 1) / width + eps)
    y = y * scale[:, None] * factor[None, :]
    if GATE_LAST:
        y *= gate_factor
    tl.store(inverse + row * GROUPS + group, scale, mask=real)
    tl.store(out + row[:, None] * GROUPS * width + feature[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_rows_backward_kernel(
    x,
    gate,
    weight,
    inverse,
    dout,
    dx,
    dgate,
    parts,
    rows,
    width,
    x_row,
    gate_row,
    dout_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    OFFSET: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GATE_LAST: tl.constexpr,
    SILU: tl.constexpr,
):
    """Compute the gradients of x and of the gate, and in `parts` each program's sum of the weight's gradient.

    With n = x / root and d = dout · weight, dx = (d − n · mean(d n)) / root; a gate multiplies x or the norm by SiLU or
    the sigmoid of it, whose derivative is `slope`. `dy` starts as dout and becomes the gradient of one factor after
    another, from the last to the first: the gate behind the norm, the weight, the norm, the gate before it. The
    programs of a group take turns at its blocks of ROWS rows.
    """
    group = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    valid = column < width
    feature = group * width + column
    factor = OFFSET + tl.load(weight + feature, mask=valid, other=0.0).to(tl.float32)
    weight_gradients = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        real = row < rows
        inside = real[:, None] & valid[None, :]
        into = row[:, None] * GROUPS * width + feature[None, :]
        raw = tl.load(x + row[:, None] * x_row + feature[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dout + row[:, None] * dout_row + feature[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row * GROUPS + group, mask=real, other=0.0)
        y = raw
        if GATE_FIRST or GATE_LAST:
            gate_block = tl.load(gate + row[:, None] * gate_row + feature[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            sigmoid = tl.sigmoid(gate_block)
            gate_factor = sigmoid
            slope = sigmoid * (1.0 - sigmoid)
            if SILU:
                gate_factor = gate_block * sigmoid
                slope = sigmoid + gate_block * slope
            if GATE_FIRST:
                y *= gate_factor
        normal = y * scale[:, None]
        if GATE_LAST:
            gate_gradient = dy * normal * factor[None, :] * slope
            tl.store(dgate + into, gate_gradient.to(dgate.dtype.element_ty), mask=inside)
            dy *= gate_factor
        weight_gradients += dy * normal
        dy *= factor[None, :]
        dy = scale[:, None] * (dy - normal * (tl.sum(dy * normal, 1) / width)[:, None])
        if GATE_FIRST:
            tl.store(dgate + into, (dy * raw * slope).to(dgate.dtype.element_ty), mask=inside)
            dy *= gate_factor
        tl.store(dx + into, dy.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * GROUPS * width + feature, tl.sum(weight_gradients, 0), mask=valid)
