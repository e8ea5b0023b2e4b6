"""Triton kernels of `log_probs.py` and `divergence.py`, imported where Triton is installed: CPU builds lack it."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def log_probs_kernel(logits, ids, log_probs, log_total, vocabulary, row_stride, COLUMNS: tl.constexpr):
    """Compute the log of the sum of exponentials of one row, and the log-probability of its token.

    Each of COLUMNS lanes keeps the largest logit that it saw and the sum of exponentials relative to it; the lanes are
    joined at the end. Rows of logits are `row_stride` numbers apart.
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, vocabulary, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(row_logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # Lanes that saw no logit yet, or only −inf, have nothing to scale.
        finite = larger > float("-inf")
        total = tl.where(finite, total * tl.exp(largest - larger) + tl.exp(x - larger), 0.0)
        largest = larger
    top = tl.max(largest, 0)
    logs = top + tl.log(tl.sum(tl.where(largest > float("-inf"), total * tl.exp(largest - top), 0.0), 0))
    target = tl.load(row_logits + tl.load(ids + row)).to(tl.float32)
    tl.store(log_total + row, logs)
    tl.store(log_probs + row, target - logs)


@triton.jit
def distribution_kernel(logits, ids, numbers, rows, vocabulary, row_stride, COLUMNS: tl.constexpr):
    """Compute the entropy, whether the token is the likeliest, the mean logit and log Σ p² of one row, in one pass.

    They go to `numbers` (4, rows). Each of COLUMNS lanes keeps the largest logit x that it saw and the first column
    that has it (`place`), and over its logits y the sums of e^(y−x) (`total`), of e^(y−x)·(y−x) (`weighted`), of
    e^(2(y−x)) (`squares`) and of y (`plain`); lanes are joined at the end. The first three skip logits of −∞.
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    total = tl.zeros([COLUMNS], tl.float32)
    weighted = tl.zeros([COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    plain = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, vocabulary, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < vocabulary
        x = tl.load(row_logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        plain += tl.where(inside, x, 0.0)
        larger = tl.maximum(largest, x)
        place = tl.where(x > largest, column, place)
        # Of lanes without a logit yet, and of −∞ itself, differences are not numbers.
        down = tl.where(largest > float("-inf"), largest - larger, 0.0)
        below = tl.where(x > float("-inf"), x - larger, 0.0)
        shrink = tl.exp(down)
        added = tl.where(x > float("-inf"), tl.exp(below), 0.0)
        weighted = shrink * (weighted + total * down) + added * below
        total = shrink * total + added
        squares = shrink * shrink * squares + added * added
        largest = larger
    top = tl.max(largest, 0)
    down = tl.where(largest > float("-inf"), largest - top, 0.0)
    shrink = tl.where(largest > float("-inf"), tl.exp(down), 0.0)
    whole = tl.sum(shrink * total, 0)
    entropy = tl.log(whole) - tl.sum(shrink * (weighted + total * down), 0) / whole
    likeliest = tl.min(tl.where(largest == top, place, vocabulary), 0)
    tl.store(numbers + row, entropy)
    tl.store(numbers + rows + row, tl.where(likeliest == tl.load(ids + row), 1.0, 0.0))
    tl.store(numbers + 2 * rows + row, tl.sum(plain, 0) / vocabulary)
    tl.store(numbers + 3 * rows + row, tl.log(tl.sum(shrink * shrink * squares, 0)) - 2 * tl.log(whole))


@triton.jit
def softmax_statistics_kernel(
    logits, log_totals, entropies, columns, row_stride, inverse_temperature, COLUMNS: tl.constexpr
):
    """Compute the log of the sum of exponentials of one row's logits over a temperature, and the softmax's entropy."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    weighted = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(row_logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        largest, total, weighted = _add_logits(x * inverse_temperature, largest, total, weighted)
    log_total, entropy = _join_lanes(largest, total, weighted)
    tl.store(log_totals + row, log_total)
    tl.store(entropies + row, entropy)


@triton.jit
def divergence_kernel(
    student,
    teacher,
    weights,
    losses,
    entropies,
    gradient,
    columns,
    student_columns,
    student_stride,
    teacher_stride,
    gradient_stride,
    beta,
    inverse_temperature,
    KIND: tl.constexpr,
    GRADIENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the divergence of one row's softmaxes p and q, the entropy of p, and weight · the divergence's gradient.

    Both softmaxes are over the first `columns` columns. KIND is 0 for KL(q‖p), 1 for KL(p‖q), 2 for the Jensen-Shannon
    divergence of `beta`. With GRADIENT the gradient goes to all `student_columns` columns, 0 behind those of the
    softmaxes. It may be written where the teacher's logits are: a tile is read before it is written, and never again.
    """
    row = tl.program_id(0).to(tl.int64)
    student_row = student + row * student_stride
    teacher_row = teacher + row * teacher_stride
    # The host may hand numbers over in float64.
    beta = tl.cast(beta, tl.float32)
    inverse_temperature = tl.cast(inverse_temperature, tl.float32)
    largest_s = tl.full([COLUMNS], float("-inf"), tl.float32)
    total_s = tl.zeros([COLUMNS], tl.float32)
    weighted_s = tl.zeros([COLUMNS], tl.float32)
    largest_t = tl.full([COLUMNS], float("-inf"), tl.float32)
    total_t = tl.zeros([COLUMNS], tl.float32)
    weighted_t = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        x = tl.load(student_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.load(teacher_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        largest_s, total_s, weighted_s = _add_logits(x * inverse_temperature, largest_s, total_s, weighted_s)
        largest_t, total_t, weighted_t = _add_logits(y * inverse_temperature, largest_t, total_t, weighted_t)
    log_total_s, entropy = _join_lanes(largest_s, total_s, weighted_s)
    log_total_t, _ = _join_lanes(largest_t, total_t, weighted_t)
    # Sums over columns of p log (p/·) and q log (q/·), of which each kind has one or both.
    of_student = tl.zeros([COLUMNS], tl.float32)
    of_teacher = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        x = tl.load(student_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.load(teacher_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        log_p, log_q, gap = _log_probs(x, y, log_total_s, log_total_t, inverse_temperature)
        if KIND == 2:
            of_student -= _product(log_p, _log_mixture(1 - beta, beta, gap))
            of_teacher -= _product(log_q, _log_mixture(beta, 1 - beta, -gap))
        elif KIND == 1:
            of_student -= _product(log_p, gap)
        else:
            of_teacher += _product(log_q, gap)
    student_sum = tl.sum(of_student, 0)
    loss = student_sum
    # The sum of the slopes by log p, which the softmax takes off.
    slope_sum = student_sum
    if KIND == 2:
        loss = beta * tl.sum(of_teacher, 0) + (1 - beta) * student_sum
        slope_sum = (1 - beta) * student_sum
    elif KIND == 0:
        loss = tl.sum(of_teacher, 0)
        slope_sum = -1.0
    tl.store(losses + row, loss)
    tl.store(entropies + row, entropy)
    if GRADIENT:
        factor = tl.load(weights + row).to(tl.float32) * inverse_temperature
        for first in range(0, student_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < columns
            x = tl.load(student_row + column, mask=inside, other=float("-inf")).to(tl.float32)
            y = tl.load(teacher_row + column, mask=inside, other=float("-inf")).to(tl.float32)
            log_p, log_q, gap = _log_probs(x, y, log_total_s, log_total_t, inverse_temperature)
            if KIND == 2:
                slopes = -(1 - beta) * _product(log_p, _log_mixture(1 - beta, beta, gap))
            elif KIND == 1:
                slopes = -_product(log_p, gap)
            else:
                slopes = -tl.exp(log_q)
            result = tl.where(inside, factor * (slopes - tl.exp(log_p) * slope_sum), 0.0)
            place = gradient + row * gradient_stride + column
            tl.store(place, result.to(gradient.dtype.element_ty), mask=column < student_columns)


@triton.jit
def _add_logits(x, largest, total, weighted):
    """Take one more logit x into each lane: the largest, the sum of e^(x−largest), and of e^(x−largest)·(x−largest)."""
    larger = tl.maximum(largest, x)
    # Of lanes without a logit yet, and of −∞ itself, differences are not numbers.
    down = tl.where(largest > float("-inf"), largest - larger, 0.0)
    below = tl.where(x > float("-inf"), x - larger, 0.0)
    shrink = tl.exp(down)
    added = tl.where(x > float("-inf"), tl.exp(below), 0.0)
    return larger, shrink * total + added, shrink * (weighted + total * down) + added * below


@triton.jit
def _join_lanes(largest, total, weighted):
    """Return the log of the sum of exponentials and the softmax's entropy; without a finite logit −∞ and NaN."""
    top = tl.max(largest, 0)
    down = tl.where(largest > float("-inf"), largest - top, 0.0)
    shrink = tl.where(largest > float("-inf"), tl.exp(down), 0.0)
    whole = tl.sum(shrink * total, 0)
    entropy = tl.log(whole) - tl.sum(shrink * (weighted + total * down), 0) / whole
    return top + tl.log(whole), entropy


@triton.jit
def _log_probs(x, y, log_total_s, log_total_t, inverse_temperature):
    """Return log p, log q and log(q/p) of logits. The last is of the logits' difference, which rounds less than log q
    and log p; it is NaN where both are 0.
    """
    log_p = x * inverse_temperature - log_total_s
    log_q = y * inverse_temperature - log_total_t
    return log_p, log_q, (y - x) * inverse_temperature + (log_total_s - log_total_t)


@triton.jit
def _log_mixture(share, other_share, gap):
    """Return log(share + other_share · e^gap): log(m/p) of p with `share` in m and of q, where gap is log(q/p)."""
    a = tl.log(share)
    b = gap + tl.log(other_share)
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _product(log_p, values):
    """Return p times values, 0 where p is 0."""
    p = tl.exp(log_p)
    return tl.where(p > 0, p * values, 0.0)


@triton.jit
def logit_gradient_kernel(
    logits, ids, slopes, log_total, gradient, vocabulary, row_stride, inverse_temperature, COLUMNS: tl.constexpr
):
    """Compute slope · (onehot − softmax) of one row, COLUMNS columns in each program.

    It is the gradient of slope · log p(target) at the logits over a temperature; `log_total` is their log-sum-exp.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < vocabulary
    x = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    one_hot = tl.where(column == tl.load(ids + row), 1.0, 0.0)
    result = tl.load(slopes + row) * (one_hot - tl.exp(x * inverse_temperature - tl.load(log_total + row)))
    tl.store(gradient + row * vocabulary + column, result.to(gradient.dtype.element_ty), mask=inside)
