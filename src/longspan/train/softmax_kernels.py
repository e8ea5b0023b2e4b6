"""Triton kernels of `loss.py`, imported where Triton is installed: CPU builds of torch lack it."""

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
def logit_gradient_kernel(logits, ids, slopes, log_total, gradient, vocabulary, row_stride, COLUMNS: tl.constexpr):
    """Compute slope · (onehot − softmax) of one row, COLUMNS columns in each program.

    It is the gradient of slope · log p(target) at the logits; `log_total` is the row's log-sum-exp.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < vocabulary
    x = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    one_hot = tl.where(column == tl.load(ids + row), 1.0, 0.0)
    result = tl.load(slopes + row) * (one_hot - tl.exp(x - tl.load(log_total + row)))
    tl.store(gradient + row * vocabulary + column, result.to(gradient.dtype.element_ty), mask=inside)
