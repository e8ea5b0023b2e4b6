"""The Triton kernel of `one_pass_adamw.py`, imported where Triton is installed: CPU builds of torch lack it."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl

# A tensor's row of the table has columns of 8 bytes: addresses of parameter, gradient, mean and mean square (0 to 3),
# how many numbers they have (4), the two words of the key (5, 6) and the six fields of `Places` (7 to 12) of rounding,
# the words of the key (13, 14) and the first place (15) of moments in eight bits, and float32 factors, two in each.
COLUMNS = tl.constexpr(20)
FACTORS = tl.constexpr(16)  # the column with which float32 factors begin
# As in stochastic_rounding.py.
GOLDEN = tl.constexpr(0x9E3779B9)
FAR = tl.constexpr(0x85EBCA6B)
FIRST = tl.constexpr(0x21F0AAAD)
SECOND = tl.constexpr(0xD35A2D97)
THIRD = tl.constexpr(0xB5297A4D)
# As in moment_codes.py.
SIZE = tl.constexpr(256)
LEVELS = tl.constexpr(127)
OCTAVES = tl.constexpr(32 << 23)


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
    """Update the numbers of many tensors: of P programs a tensor, program (p, t) does blocks p, p + P, … of tensor t.

    The factors of a row are those of `update_block`. FLAT numbers lie one after another in the whole tensor too, so
    that an offset gives their places. Whole blocks need no mask; the numbers left at the end are a masked block, done
    by the program that would do the next whole one. A `scale` that is not a number (the gradients' norm was not finite)
    leaves everything as it is.
    """
    factor = 1.0
    if SCALED:
        factor = tl.load(scale).to(tl.float32)
    if factor == factor:  # not for NaN
        row = table + tl.program_id(1).to(tl.int64) * COLUMNS
        parameter = tl.multiple_of(tl.load(row + 0).to(tl.pointer_type(PARAMETER)), ALIGNMENT)
        gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRADIENT)), ALIGNMENT)
        mean = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), ALIGNMENT)
        square = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(MOMENT)), ALIGNMENT)
        numel = tl.load(row + 4)
        factors = (row + FACTORS).to(tl.pointer_type(tl.float32))
        decay = tl.load(factors)
        mean_weight = tl.load(factors + 1)
        square_decay, square_weight = tl.load(factors + 2), tl.load(factors + 3)
        root_scale = tl.load(factors + 4)
        eps = tl.load(factors + 5)
        rate = tl.load(factors + 6)
        sign = tl.load(factors + 7)
        # Not read unless BY_CHANCE, which sets them; `offset` needs an int64, as `numel` is.
        offset = numel
        start_key = 0
        middle_key = 0
        if BY_CHANCE:
            start_key, middle_key = tl.load(row + 5).to(tl.uint32), tl.load(row + 6).to(tl.uint32)
            offset = tl.load(row + 7)
            if FLAT:
                offset += tl.load(row + 12)
        whole = numel // BLOCK * BLOCK
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, whole, step):
            update_block(
                *(parameter + first, gradient + first, mean + first, square + first),
                *(factor, decay, mean_weight, square_decay, square_weight, root_scale, eps, rate, sign),
                *(row, first, numel, offset, start_key, middle_key, BY_CHANCE, FLAT, BLOCK, False),
            )
        if (whole < numel) & (whole % step == start):
            update_block(
                *(parameter + whole, gradient + whole, mean + whole, square + whole),
                *(factor, decay, mean_weight, square_decay, square_weight, root_scale, eps, rate, sign),
                *(row, whole, numel, offset, start_key, middle_key, BY_CHANCE, FLAT, BLOCK, True),
            )


@triton.jit
def update_block(
    parameter,
    gradient,
    mean,
    square,
    scale,
    decay,
    mean_weight,
    square_decay,
    square_weight,
    root_scale,
    eps,
    rate,
    sign,
    row,
    first,
    numel,
    offset,
    start_key,
    middle_key,
    BY_CHANCE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update BLOCK numbers of a tensor, of which `first` is the first; with MASKED up to `numel`.

    p, g, m and v are parameter, gradient, mean and mean square: m += (g − m) · mean_weight,
    v = v · square_decay + g² · square_weight, and p = p · decay − m / (√v · root_scale + eps) · rate. `scale` is that
    of clipping, `sign` −1 to maximise. All is computed in float32, and each operation rounds by itself (none are
    fused), so that torch's operations give the same bits. BY_CHANCE rounds results to bfloat16 stochastically, by
    bits that follow from the two words of a `RandomKey` and each number's place in the whole tensor; only then are
    these words, `row` (the tensor's row of the table) and `offset` used.
    """
    lane = tl.arange(0, BLOCK)
    if MASKED:
        inside = first + lane < numel
        p = tl.load(parameter + lane, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + lane, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(mean + lane, mask=inside, other=0)
        v = tl.load(square + lane, mask=inside, other=0)
    else:
        p = tl.load(parameter + lane).to(tl.float32)
        g = tl.load(gradient + lane).to(tl.float32)
        m = tl.load(mean + lane)
        v = tl.load(square + lane)
    EIGHT_BITS: tl.constexpr = mean.dtype.element_ty == tl.uint8
    if EIGHT_BITS:
        scales = (numel + 15) // 16 * 16  # bytes from the first code
        units = (tl.load(row + 2) + scales).to(tl.pointer_type(tl.float32)) + first // SIZE
        bounds = (tl.load(row + 3) + scales).to(tl.pointer_type(tl.int32)) + first // SIZE * 2
        left = numel - first
        v = decode_square(v, bounds, lane, left)
        m = decode_mean(m, units, v, lane, left)
    m = m.to(tl.float32)
    v = v.to(tl.float32)
    g = g * scale * sign
    m = m + (g - m) * mean_weight
    v = v * square_decay + g * g * square_weight
    root = tl.sqrt_rn(v)
    denominator = root * root_scale + eps
    p = p * decay - tl.div_rn(m, denominator) * rate
    if BY_CHANCE:
        place = offset + (first + lane if FLAT else places_in_rows(row, first, lane, BLOCK))
        word = random_words(place, start_key, middle_key)
        p = round_by_bits(p, word & 0xFFFF, parameter.dtype.element_ty)
        m = round_by_bits(m, word >> 16, mean.dtype.element_ty)
        v = round_by_bits(v, word * THIRD >> 16, square.dtype.element_ty)
    if EIGHT_BITS:
        place = tl.load(row + 15) + first + lane
        word = random_words(place, tl.load(row + 13).to(tl.uint32), tl.load(row + 14).to(tl.uint32))
        share = tl.where(v > 0, tl.div_rn(m, root), 0.0)
        m = encode_share(share, (word & 0xFFFF).to(tl.int32), units, left, BLOCK)
        v = encode_square(v, (word >> 16).to(tl.int32), bounds, left, BLOCK)
    if MASKED:
        tl.store(parameter + lane, p.to(parameter.dtype.element_ty), mask=inside)
        tl.store(mean + lane, m.to(mean.dtype.element_ty), mask=inside)
        tl.store(square + lane, v.to(square.dtype.element_ty), mask=inside)
    else:
        tl.store(parameter + lane, p.to(parameter.dtype.element_ty))
        tl.store(mean + lane, m.to(mean.dtype.element_ty))
        tl.store(square + lane, v.to(square.dtype.element_ty))


@triton.jit
def decode_mean(code, scales, square, lane, left):
    """Return means of `lane`'s numbers of a block from their codes, `decode_mean` of moment_codes.py.

    `scales` points to those of the lanes' blocks, `square` are the mean squares, `left` is how many lanes are numbers.
    """
    code = code.to(tl.int32)
    level = code & 127
    share = (level * level).to(tl.float32) * tl.load(scales + lane // SIZE, mask=lane < left, other=0.0)
    return tl.where(code > 127, -share, share) * tl.sqrt_rn(square)


@triton.jit
def decode_square(code, scales, lane, left):
    """Return mean squares of `lane`'s numbers from their codes, `decode_square` of moment_codes.py.

    `scales` points to pairs of bits, the smallest and largest of each block; `left` is how many lanes are numbers.
    """
    code = code.to(tl.int32)
    low = tl.load(scales + lane // SIZE * 2, mask=lane < left, other=0)
    high = tl.load(scales + lane // SIZE * 2 + 1, mask=lane < left, other=0)
    step = tl.div_rn((high - low).to(tl.float32), tl.full(low.shape, 254.0, tl.float32))
    bits = low + ((code - 1).to(tl.float32) * step).to(tl.int32)
    return tl.where(code > 0, tl.minimum(bits, high), 0).to(tl.float32, bitcast=True)


@triton.jit
def encode_share(share, noise, scales, left, BLOCK: tl.constexpr):
    """Write the scales of a block's BLOCK shares (means over roots of mean squares), and return their codes, as
    `encode_mean` of moment_codes.py does. `noise` and `left` as of `encode_square`.
    """
    largest = tl.max(tl.reshape(tl.abs(share), (BLOCK // SIZE, SIZE)), 1)
    unit = tl.div_rn(largest, tl.full(largest.shape, LEVELS * LEVELS, tl.float32))
    rows = tl.arange(0, BLOCK // SIZE)
    tl.store(scales + rows, unit, mask=rows * SIZE < left)
    x = tl.div_rn(tl.abs(share), spread(tl.where(unit > 0, unit, 1.0), BLOCK))
    level = tl.sqrt_rn(x).to(tl.int32)
    above = tl.div_rn(x - (level * level).to(tl.float32), (2 * level + 1).to(tl.float32))
    above += noise.to(tl.float32) * 0.0000152587890625  # 2^-16
    return tl.minimum(level + above.to(tl.int32), LEVELS) + tl.where(share < 0, 128, 0)


@triton.jit
def encode_square(square, noise, scales, left, BLOCK: tl.constexpr):
    """Write the scales of a block's BLOCK mean squares, and return their codes: `encode_square` of moment_codes.py.

    `noise` are sixteen random bits of each number, `left` is how many lanes are numbers.
    """
    bits = square.to(tl.int32, bitcast=True)
    shaped = tl.reshape(bits, (BLOCK // SIZE, SIZE))
    high = tl.max(shaped, 1)
    low = tl.min(tl.where(shaped > 0, shaped, high[:, None]), 1)
    low = tl.maximum(low, high - OCTAVES)
    rows = tl.arange(0, BLOCK // SIZE)
    tl.store(scales + 2 * rows, low, mask=rows * SIZE < left)
    tl.store(scales + 2 * rows + 1, high, mask=rows * SIZE < left)
    span = tl.maximum(high - low, 1).to(tl.float32)
    per_bit = tl.div_rn(tl.full(span.shape, 254.0, tl.float32), span)
    steps = (bits - spread(low, BLOCK)).to(tl.float32) * spread(per_bit, BLOCK) + noise.to(
        tl.float32
    ) * 0.0000152587890625
    steps = tl.minimum(tl.maximum(steps, 0.0), 254.0)
    return tl.where(bits > 0, steps.to(tl.int32) + 1, 0)


@triton.jit
def spread(x, BLOCK: tl.constexpr):
    """Repeat each of the values (BLOCK / SIZE,) for the numbers of its block."""
    return tl.reshape(tl.broadcast_to(x[:, None], (BLOCK // SIZE, SIZE)), (BLOCK,))


@triton.jit
def places_in_rows(row, first, lane, BLOCK: tl.constexpr):
    """Compute where numbers of a block are in the whole parameter, without its offset; `Places` has the formula.

    `row` is the tensor's row of the table, `first` the block's first number. Rows of `inner` numbers each begin where
    `start_of_row` says. Divisions are slow: the block's first number takes one, of 32 bits if that is enough. A block
    no longer than such a row touches two of them at most and needs no other division; where rows are shorter than a
    block, each number takes one.
    """
    inner = tl.load(row + 8)
    rows = tl.load(row + 9)
    near = tl.load(row + 10)
    far = tl.load(row + 11)
    first += tl.load(row + 12)  # where a part of a tensor starts
    if first < 4294967296:  # noqa: SIM108  (a division of 32 bits takes a fifth of the instructions)
        first_row = (first.to(tl.uint32) // inner.to(tl.uint32)).to(tl.int64)
    else:
        first_row = first // inner
    column = first - first_row * inner
    if inner >= BLOCK:  # then there are two rows at most, and no number takes a division
        left = inner - column
        place = start_of_row(first_row, rows, near, far) + column
        following = start_of_row(first_row + 1, rows, near, far) - left
        place = tl.where(lane < left, place, following) + lane
    else:
        columns = column.to(tl.uint32) + lane.to(tl.uint32)  # less than a row and a block
        further = columns // inner.to(tl.uint32)
        columns -= further * inner.to(tl.uint32)
        place = start_of_row(first_row + further, rows, near, far) + columns
    return place


@triton.jit
def start_of_row(at_row, rows, near, far):
    """Compute where row `at_row` begins: rows are `near` numbers apart, groups of `rows` rows `far` (0: one group)."""
    start = at_row * near
    if far != 0:
        start = at_row // rows * far + at_row % rows * near
    return start


@triton.jit
def random_words(place, start_key, middle_key):
    """Compute a word of 32 random bits for each place; `random_words` of stochastic_rounding.py is the same hash."""
    word = place.to(tl.uint32) * GOLDEN + start_key
    word = word ^ (word >> 16) ^ ((place >> 32).to(tl.uint32) * FAR + middle_key)
    word *= FIRST
    word ^= word >> 15
    word *= SECOND
    return word ^ (word >> 15)


@triton.jit
def round_by_bits(x, noise, DTYPE: tl.constexpr):
    """Round finite numbers to bfloat16, up or down, by sixteen random bits; return x itself for another DTYPE."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        noise = tl.where(tl.abs(x) < float("inf"), noise, 0)  # infinities and NaN keep their upper bits
        bits = (x.to(tl.uint32, bitcast=True) + noise) >> 16
        x = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x
