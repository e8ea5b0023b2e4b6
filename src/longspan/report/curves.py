"""Curves as values: averaged, thinned to what a page can show, and put together as charts that page.js draws."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from longspan.report.page import Part

COLORS = 6  # of page.css
MAX_POINTS = 900  # of one curve


def finite(values: np.ndarray) -> np.ndarray:
    """Return the values that are finite: steps without a value have NaN."""
    return values[np.isfinite(values)]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the `window` values around each one, fewer at the ends.

    Values that are not finite are left out; where no value is finite the mean is NaN.
    """
    is_finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(is_finite, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(is_finite)))
    index = np.arange(len(values))
    start, stop = np.maximum(index - window // 2, 0), np.minimum(index + (window + 1) // 2, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[stop] - total[start]) / (count[stop] - count[start])


def thin_curve(x: np.ndarray, y: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `limit` points of a curve: first, last, and the least and greatest value of each stretch between.

    Spikes survive, which an average would hide. There are half as many stretches as points, because a stretch gives two
    points. Values that are not finite are dropped.
    """
    is_finite = np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(x) <= limit:
        return x, y
    edges = np.linspace(1, len(x) - 1, max(2, limit // 2)).astype(int)
    keep = {0, len(x) - 1}
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            keep |= {start + int(np.argmin(y[start:stop])), start + int(np.argmax(y[start:stop]))}
    index = np.array(sorted(keep))
    return x[index], y[index]


def curve(name: str, x: Iterable[float], y: Iterable[float], color: int = 0, kind: str = "line") -> Part:
    """Return a curve; its kind is "line", "faint" for raw data behind averages, or "marks" for few points."""
    points = thin_curve(np.array([*x], float), np.array([*y], float), MAX_POINTS)
    x_values, y_values = ([_rounded(value) for value in values.tolist()] for values in points)
    return {"name": name, "x": x_values, "y": y_values, "color": color % COLORS, "kind": kind}


def chart(title: str, unit: str, *curves: Part, format: str = "number", **options: Any) -> Part:
    """Return a chart of curves whose values are written as a "number", "loss", "percent" or "bytes".

    Options: `zero` puts 0 on the y axis, `log` makes it logarithmic, `tall` gives the chart a row of its own;
    `references` are horizontal lines [y, words], `events` vertical ones [x, words]; `x_label` is "step" if not given,
    and `x_names` name the places 0, 1, 2 and so on of the x axis.
    """
    return {"title": title, "unit": unit, "series": [*curves], "format": format} | options


def _rounded(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.7g}")
