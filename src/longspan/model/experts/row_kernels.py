"""Triton kernels of `visits.py` and `expert_products.py`: they need triton, which CPU builds of torch lack."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def _find_rows(ends, BIASED: tl.constexpr, SPLITS: tl.constexpr):
    """Return the first of a program's rows, where they end, and their expert, whose bias they get.

    SPLITS programs take turns at the rows of an expert, which end at `ends[expert]`; without biases each has one row.
    """
    program = tl.program_id(0).to(tl.int64)
    first = program
    end = program + 1
    expert = program
    if BIASED:
        expert = program // SPLITS
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0) + program % SPLITS
        end = tl.load(ends + expert)
    return first, end, expert


# Numbers of a micro-batch's rows are read one by one, from any address: otherwise a kernel would be compiled anew for
# each way in which 16 divides the address.
@triton.jit(do_not_specialize_on_alignment=("place", "weights", "experts"))
def sum_visits_kernel(
    out,
    outputs,
    weights,
    bias,
    experts,
    place,
    width,
    output_row,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute out[r] = sum over j of outputs[p] (plus bias[experts[p]], times weights[r, j]), p = place[r · TOP_K + j].

    One program computes COLUMNS columns of one row. `outputs` has a row for each visit of an expert, `output_row`
    elements apart; `place` has the index in `outputs` of each visit's row (`Visits` of `visits.py`).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for j in range(TOP_K):
        at = tl.load(place + row * TOP_K + j).to(tl.int64)
        x = tl.load(outputs + at * output_row + column, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            expert = tl.load(experts + at).to(tl.int64)
            x += tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weights + row * TOP_K + j).to(tl.float32)
        total += x
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=("order", "weights", "weight_gradients"))
def visit_gradients_kernel(
    output_gradients,
    weight_gradients,
    bias_parts,
    dout,
    outputs,
    weights,
    bias,
    ends,
    order,
    width,
    output_row,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of `sum_visits_kernel`: of the rows of `outputs`, of the weights and of biases.

    Of each of its rows p of `outputs` (`_find_rows`) a program stores, with n =
    order[p] and r = n // TOP_K, output_gradients[p] = weights[n] dout[r], and weight_gradients[n] = <outputs[p] +
    bias, dout[r]>. `bias_parts` gets each program's sum of output_gradients. COLUMNS columns are a whole row.
    """
    first, end, expert = _find_rows(ends, BIASED, SPLITS)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    if WEIGHTED and BIASED:
        offset = tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
    for place in range(first, end, SPLITS):
        number = tl.load(order + place).to(tl.int64)
        dout_row = tl.load(dout + number // TOP_K * width + column, mask=inside, other=0.0).to(tl.float32)
        gradient = dout_row
        if WEIGHTED:
            x = tl.load(outputs + place * output_row + column, mask=inside, other=0.0).to(tl.float32)
            if BIASED:
                x += offset
            product = tl.sum(dout_row * x, 0)
            tl.store(weight_gradients + number, product.to(weight_gradients.dtype.element_ty))
            gradient = dout_row * tl.load(weights + number).to(tl.float32)
        tl.store(
            output_gradients + place * width + column,
            gradient.to(output_gradients.dtype.element_ty),
            mask=inside,
        )
        if SUMS_BIAS:
            total += gradient
    if SUMS_BIAS:
        tl.store(bias_parts + tl.program_id(0).to(tl.int64) * width + column, total, mask=inside)


@triton.jit
def _load_halves(x, width, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a program's COLUMNS gates and values of a row of 2 · width elements, in float32."""
    first = tl.program_id(1) * COLUMNS
    if INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * COLUMNS)
        pairs = tl.load(x + column, mask=column < 2 * width, other=0.0).to(tl.float32)
        gate, value = tl.split(tl.reshape(pairs, [COLUMNS, 2]))
    else:
        column = first + tl.arange(0, COLUMNS)
        gate = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
        value = tl.load(x + width + column, mask=column < width, other=0.0).to(tl.float32)
    return gate, value


@triton.jit
def _store_halves(x, gate, value, width, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    first = tl.program_id(1) * COLUMNS
    if INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * COLUMNS)
        tl.store(x + column, tl.interleave(gate, value).to(x.dtype.element_ty), mask=column < 2 * width)
    else:
        column = first + tl.arange(0, COLUMNS)
        tl.store(x + column, gate.to(x.dtype.element_ty), mask=column < width)
        tl.store(x + width + column, value.to(x.dtype.element_ty), mask=column < width)


@triton.jit
def gate_kernel(
    x,
    bias,
    ends,
    out,
    x_row,
    width,
    slope,
    limit,
    offset,
    INTERLEAVED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `GateFormula` of rows of x, which lie `x_row` elements apart, plus their expert's bias.

    One program computes COLUMNS columns of each of its rows (`_find_rows`).
    """
    first, end, expert = _find_rows(ends, BIASED, SPLITS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if BIASED:
        gate_bias, value_bias = _load_halves(bias + expert * 2 * width, width, INTERLEAVED, COLUMNS)
    for row in range(first, end, SPLITS):
        gate, value = _load_halves(x + row * x_row, width, INTERLEAVED, COLUMNS)
        if BIASED:
            gate += gate_bias
            value += value_bias
        # Numbers that are none stay so, unlike in minima and maxima.
        gate = tl.where(gate > limit, limit, gate)
        value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
        result = gate * tl.sigmoid(slope * gate) * (value + offset)
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def gate_backward_kernel(
    x,
    bias,
    ends,
    dout,
    dx,
    bias_parts,
    x_row,
    width,
    slope,
    limit,
    offset,
    INTERLEAVED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient dx (S, 2 width) of `gate_kernel`, and in `bias_parts` each program's sum of it.

    With σ the sigmoid, gate · σ(slope · gate) has the slope σ (1 + slope · gate (1 − σ)); what is clamped has none.
    """
    first, end, expert = _find_rows(ends, BIASED, SPLITS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate_total = tl.zeros([COLUMNS], tl.float32)
    value_total = tl.zeros([COLUMNS], tl.float32)
    if BIASED:
        gate_bias, value_bias = _load_halves(bias + expert * 2 * width, width, INTERLEAVED, COLUMNS)
    for row in range(first, end, SPLITS):
        raw_gate, raw_value = _load_halves(x + row * x_row, width, INTERLEAVED, COLUMNS)
        if BIASED:
            raw_gate += gate_bias
            raw_value += value_bias
        gate = tl.where(raw_gate > limit, limit, raw_gate)
        value = tl.where(raw_value > limit, limit, tl.where(raw_value < -limit, -limit, raw_value))
        sigmoid = tl.sigmoid(slope * gate)
        gradient = tl.load(dout + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        dgate = gradient * (value + offset) * sigmoid * (1.0 + slope * gate * (1.0 - sigmoid))
        dgate = tl.where(raw_gate > limit, 0.0, dgate)
        dvalue = tl.where((raw_value > limit) | (raw_value < -limit), 0.0, gradient * gate * sigmoid)
        _store_halves(dx + row * 2 * width, dgate, dvalue, width, INTERLEAVED, COLUMNS)
        if SUMS_BIAS:
            gate_total += dgate
            value_total += dvalue
    if SUMS_BIAS:
        parts = bias_parts + tl.program_id(0).to(tl.int64) * 2 * width
        _store_halves(parts, gate_total, value_total, width, INTERLEAVED, COLUMNS)
