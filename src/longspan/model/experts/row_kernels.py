"""Triton kernels of `visits.py` and `expert_products.py`: they need triton, which CPU builds of torch lack."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


# Numbers of a micro-batch's rows are read one by one, from any address: otherwise a kernel would be compiled anew for
# each way in which 16 divides the address.
@triton.jit(do_not_specialize_on_alignment=("place", "weights"))
def sum_visits_kernel(
    out,
    outputs,
    weights,
    place,
    width,
    output_row,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute out[r] = sum over j of outputs[place[r · TOP_K + j]] (times weights[r, j]).

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
        if WEIGHTED:
            x = x * tl.load(weights + row * TOP_K + j).to(tl.float32)
        total += x
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=("order", "weights", "weight_gradients"))
def visit_gradients_kernel(
    output_gradients,
    weight_gradients,
    dout,
    outputs,
    weights,
    order,
    width,
    output_row,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of `sum_visits_kernel`: of the rows of `outputs`, and of the weights.

    One program handles row p of `outputs`: with n = order[p] and r = n // TOP_K it stores output_gradients[p] =
    weights[n] dout[r] and weight_gradients[n] = <outputs[p], dout[r]>, COLUMNS columns at a time.
    """
    place = tl.program_id(0).to(tl.int64)
    number = tl.load(order + place).to(tl.int64)
    row = number // TOP_K
    weight = tl.load(weights + number).to(tl.float32)
    product = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < width
        dout_block = tl.load(dout + row * width + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(outputs + place * output_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            output_gradients + place * width + column,
            (dout_block * weight).to(output_gradients.dtype.element_ty),
            mask=inside,
        )
        product += dout_block * x
    tl.store(weight_gradients + number, tl.sum(product, 0).to(weight_gradients.dtype.element_ty))


@triton.jit
def silu_gate_kernel(x, out, x_row, width, COLUMNS: tl.constexpr):
    """Compute out = SiLU(x[:, :width]) · x[:, width:].

    One program computes COLUMNS columns of one row; rows of x lie `x_row` elements apart.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = x + row * x_row + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_gate_backward_kernel(x, dout, dx, x_row, width, COLUMNS: tl.constexpr):
    """Compute the gradient dx (S, 2 width) of `silu_gate_kernel`, COLUMNS columns of one row in each program.

    With σ the sigmoid of the gate, SiLU's slope is σ (1 + gate (1 − σ)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = x + row * x_row + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    dout_block = tl.load(dout + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    into = dx + row * 2 * width + column
    gate_gradient = dout_block * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(into, gate_gradient.to(dx.dtype.element_ty), mask=inside)
    tl.store(into + width, (dout_block * gate * sigmoid).to(dx.dtype.element_ty), mask=inside)
