"""Curves as numbers: smoothing, thinning and the ticks of axes."""

import itertools
import math

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the `window` values around each one, fewer at the ends.

    Values that are not finite are left out; where no value is finite the mean is NaN.
    """
    finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(len(values))
    start, stop = np.maximum(index - window // 2, 0), np.minimum(index + (window + 1) // 2, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[stop] - total[start]) / (count[stop] - count[start])


def thin_curve(x: np.ndarray, y: np.ndarray, limit: int) -> Curve:
    """Return at most `limit` points of a curve: first, last, and the least and greatest value of each stretch between.

    Spikes survive, which an average would hide. There are half as many stretches as points, because a stretch gives two
    points. Values that are not finite are dropped.
    """
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= limit:
        return x, y
    edges = np.linspace(1, len(x) - 1, max(2, limit // 2)).astype(int)
    keep = {0, len(x) - 1}
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            keep |= {start + int(np.argmin(y[start:stop])), start + int(np.argmax(y[start:stop]))}
    index = np.array(sorted(keep))
    return x[index], y[index]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten) from `low` to `high`, about `count` of them.

    They are multiples of the smallest round step of which at most `count` fit; 1e-9 forgives rounding.
    """
    if not high > low:
        return [low]
    least_step = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= least_step * (1 - 1e-9))
    first_multiple = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first_multiple, math.floor(high / step + 1e-9) + 1)]


def byte_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return ticks that are round numbers of bytes, KiB, MiB, GiB or TiB, whichever suits `high`."""
    unit = 1024.0 ** min(4, int(math.log2(max(1.0, high)) // 10))
    return [unit * t for t in ticks(low / unit, high / unit, count)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten inside [low, high], with 2 and 5 times these up to a ratio of 300.

    Over many powers only every second, third and so on is taken, so that there are about six.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    power_step = max(1, round(len(powers) / 6))
    inner = (1, 2, 5) if high / low <= 300 else (1,)
    values = [m * 10.0**p for p in powers if p % power_step == 0 for m in inner]
    return [t for t in values if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
