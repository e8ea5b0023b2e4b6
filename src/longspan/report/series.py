"""Curves as numbers: smoothing, thinning, axis ticks and how a value is written."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the `window` values around each one, fewer at the ends; those that are not finite are left out."""
    finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    here = np.arange(len(values))
    start, stop = np.maximum(here - window // 2, 0), np.minimum(here + (window + 1) // 2, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[stop] - total[start]) / (count[stop] - count[start])


def thin(x: np.ndarray, y: np.ndarray, limit: int) -> Curve:
    """At most `limit` points of a curve: first, last, and the least and greatest value of each stretch between.

    Spikes survive, which an average would hide. Values that are not finite are dropped.
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
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) from `low` to `high`, about `count` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def byte_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers of the binary unit that suits `high`."""
    unit = 1024.0 ** min(4, int(math.log2(max(1.0, high)) // 10))
    return [unit * t for t in ticks(low / unit, high / unit, count)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], with 2 and 5 between them where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, round(len(powers) / 6))
    inner = (1, 2, 5) if high / low <= 300 else (1,)
    values = [m * 10.0**p for p in powers if p % every == 0 for m in inner]
    return [t for t in values if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]


def number_text(value: float, digits: int = 3) -> str:
    """A number for people: 1234567 → '1.23M', 0.25 → '0.25', 1e-7 → '1e-07', 1024 → '1,024'."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.{digits}g}"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e4)):
        if size >= scale:
            return f"{value / (1e3 if unit == 'K' else scale):.{digits}g}{unit}"
    if value == int(value) or (size >= 100 and digits <= 3):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def bytes_text(value: float) -> str:
    """Bytes in binary units: 3 * 2**30 → '3 GiB'."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    """A duration: '1 h 02 min', '3 min 05 s', '12.3 s', '45 ms', '80 µs'."""
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min"
    if value >= 120:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.2g} s"


def ranges_text(numbers: Sequence[int]) -> str:
    """Integers as ranges: (0, 1, 2, 5) → '0–2, 5'; long lists are cut after six ranges."""
    ranges: list[list[int]] = []
    for n in sorted(numbers):
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    text = [str(a) if a == b else f"{a}–{b}" for a, b in ranges[:6]]
    return ", ".join(text) + (f", … ({len(numbers)} in all)" if len(ranges) > 6 else "")
