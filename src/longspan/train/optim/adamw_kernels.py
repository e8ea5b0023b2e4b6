"""The Triton kernel of `one_pass_adamw.py`, imported where Triton is installed: CPU builds of torch lack it."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl

COLUMNS = tl.constexpr(20)  # of a tensor's row in the table, 8 bytes each
FACTORS = tl.constexpr(16)  # the column with which float32 factors begin
GOLDEN, FIRST, SECOND = (tl.constexpr(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def adamw_kernel(
    table,
    scale,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    SCALED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the numbers of many tensors: program (p, t) does every so many blocks of tensor t, from block p on.

    A row of the table has addresses of parameter, gradient and both moments, how many numbers they have, the key and
    the places of the random bits, and float32 factors. A `scale` that is not a number leaves everything as it is.
    """
    factor = 1.0
    if SCALED:
        factor = tl.load(scale).to(tl.float32)
    if factor == factor:
        row = table + tl.program_id(1).to(tl.int64) * COLUMNS
        parameter = tl.multiple_of(tl.load(row + 0).to(tl.pointer_type(PARAMETER)), ALIGNMENT)
        gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRADIENT)), ALIGNMENT)
        mean = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), ALIGNMENT)
        square = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(MOMENT)), ALIGNMENT)
        numel = tl.load(row + 4)
        whole = numel // BLOCK * BLOCK
        start, step = tl.program_id(0).to(tl.int64) * BLOCK, tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, whole, step):
            update_block(
                *(parameter + first, gradient + first, mean + first, square + first),
                *(row, first, numel, factor, BY_CHANCE, FLAT, BLOCK, False),
            )
        if (whole < numel) & (whole % step == start):
            update_block(
                *(parameter + whole, gradient + whole, mean + whole, square + whole),
                *(row, whole, numel, factor, BY_CHANCE, FLAT, BLOCK, True),
            )


@triton.jit
def update_block(
    parameter,
    gradient,
    mean,
    square,
    row,
    first,
    numel,
    scale,
    BY_CHANCE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update BLOCK numbers of a tensor, of which `first` is the first; with MASKED up to `numel`. Each result rounds
    once: nothing is contracted."""
    factors = (row + FACTORS).to(tl.pointer_type(tl.float32))
    lane = tl.arange(0, BLOCK)
    if MASKED:
        inside = first + lane < numel
        p = tl.load(parameter + lane, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + lane, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(mean + lane, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(square + lane, mask=inside, other=0.0).to(tl.float32)
    else:
        p = tl.load(parameter + lane).to(tl.float32)
        g = tl.load(gradient + lane).to(tl.float32)
        m = tl.load(mean + lane).to(tl.float32)
        v = tl.load(square + lane).to(tl.float32)
    g = g * scale * tl.load(factors + 7)
    m = m + (g - m) * tl.load(factors + 1)
    v = v * tl.load(factors + 2) + g * g * tl.load(factors + 3)
    size = tl.sqrt_rn(v) * tl.load(factors + 4) + tl.load(factors + 5)
    p = p * tl.load(factors + 0) - tl.div_rn(m, size) * tl.load(factors + 6)
    if BY_CHANCE:
        word = random_words(row, first, lane, FLAT)
        p = round_by_word(p, word, parameter.dtype.element_ty)
        m = round_by_word(m, word >> 16, mean.dtype.element_ty)
        v = round_by_word(v, word >> 32, square.dtype.element_ty)
    if MASKED:
        tl.store(parameter + lane, p.to(parameter.dtype.element_ty), mask=inside)
        tl.store(mean + lane, m.to(mean.dtype.element_ty), mask=inside)
        tl.store(square + lane, v.to(square.dtype.element_ty), mask=inside)
    else:
        tl.store(parameter + lane, p.to(parameter.dtype.element_ty))
        tl.store(mean + lane, m.to(mean.dtype.element_ty))
        tl.store(square + lane, v.to(square.dtype.element_ty))


@triton.jit
def random_words(row, first, lane, FLAT: tl.constexpr):
    """Compute a word of 64 random bits for each number, from its place in the whole parameter."""
    first += tl.load(row + 12)  # of a part of a tensor
    place = first + lane
    if not FLAT:
        inner, rows, far = tl.load(row + 8), tl.load(row + 9), tl.load(row + 11)
        first_row = first // inner
        column = (first - first_row * inner + lane).to(tl.uint32)  # less than a row and a block
        at_row = first_row + column // inner.to(tl.uint32)
        column = column % inner.to(tl.uint32)
        if far != 0:
            place = at_row // rows * far + at_row % rows * tl.load(row + 10) + column
        else:
            place = at_row * tl.load(row + 10) + column
    place += tl.load(row + 7)
    word = place.to(tl.uint64) * GOLDEN + tl.load(row + 5).to(tl.uint64)
    word = (word ^ (word >> 30)) * FIRST
    word ^= tl.load(row + 6).to(tl.uint64)
    word = (word ^ (word >> 27)) * SECOND
    return word ^ (word >> 31)


@triton.jit
def round_by_word(x, word, DTYPE: tl.constexpr):
    """Round finite numbers to bfloat16, up or down, by sixteen random bits; others and other types stay."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        noise = (word & 0xFFFF).to(tl.int32)
        up_or_down = ((x.to(tl.int32, bitcast=True) + noise) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < float("inf"), up_or_down, x)
    return x
