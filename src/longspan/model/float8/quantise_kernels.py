"""Triton kernels of `products.py`, the only importer of this module: it needs triton, which CPU builds lack."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def quantise_rows_kernel(
    x,
    values,
    scales,
    width,
    x_row,
    LARGEST: tl.constexpr,
    OF_LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_ONE: tl.constexpr,
):
    """Divide a row by its scale, its largest absolute value divided by LARGEST, and store both; one program for a row.

    Rows of x lie `x_row` elements apart. A row of at most COLUMNS numbers (IN_ONE) is read once, a wider one twice:
    for its largest value, and to divide. OF_LARGEST is 1 / LARGEST.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    if IN_ONE:
        inside = column < width
        number = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        row_largest = tl.maximum(tl.max(tl.abs(number), 0), LEAST)
        quantised = (number * tl.div_rn(tl.full([], LARGEST, tl.float32), row_largest)).to(values.dtype.element_ty)
        tl.store(values + row * width + column, quantised, mask=inside)
    else:
        largest = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, width, COLUMNS):
            inside = first + column < width
            number = tl.load(x + row * x_row + first + column, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(number))
        row_largest = tl.maximum(tl.max(largest, 0), LEAST)
        factor = tl.div_rn(tl.full([], LARGEST, tl.float32), row_largest)
        for first in range(0, width, COLUMNS):
            inside = first + column < width
            number = tl.load(x + row * x_row + first + column, mask=inside, other=0.0).to(tl.float32)
            quantised = (number * factor).to(values.dtype.element_ty)
            tl.store(values + row * width + first + column, quantised, mask=inside)
    tl.store(scales + row, row_largest * OF_LARGEST)


@triton.jit
def largest_of_columns_kernel(x, parts, rows, width, x_row, x_matrix, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the largest absolute value of each column, over one part of a matrix's rows, in `parts`.

    Programs are (blocks of COLUMNS columns, parts of the rows, matrices); part p of P has the blocks of ROWS rows
    p, p + P, p + 2 P and so on. Matrices of x lie `x_matrix` elements apart.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_part = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(row_part, tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        block_at = x + matrix * x_matrix + row[:, None] * x_row + column[None, :]
        largest = tl.maximum(largest, tl.abs(tl.load(block_at, mask=inside, other=0.0).to(tl.float32)))
    part_at = parts + (matrix * tl.num_programs(1) + row_part) * width + column
    tl.store(part_at, tl.max(largest, 0), mask=column < width)


@triton.jit
def quantise_columns_kernel(
    x, values, factors, rows, width, x_row, x_matrix, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Multiply the columns of matrices by their factors, and store them as rows of `values`.

    Programs are (blocks of ROWS rows, blocks of COLUMNS columns, matrices).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    block_at = x + matrix * x_matrix + row[:, None] * x_row + column[None, :]
    number = tl.load(block_at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factors + matrix * width + column, mask=column < width, other=0.0)
    quantised = tl.trans((number * factor[None, :]).to(values.dtype.element_ty))
    # the same block transposed: its columns are rows of `values`
    inside_transposed = (column < width)[:, None] & (row < rows)[None, :]
    transposed_at = values + matrix * rows * width + column[:, None] * rows + row[None, :]
    tl.store(transposed_at, quantised, mask=inside_transposed)
