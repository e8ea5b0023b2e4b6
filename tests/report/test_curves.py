"""Curves as numbers: nothing that a reader would miss is lost; and how numbers are written."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.plain_text import bytes_text, number_text, ranges_text, seconds_text
from longspan.report.gantt import ticks
from longspan.report.page import curve, smooth, thin_curve
from tests.plan.cases import bounded


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_smooth_is_the_mean_of_the_window(window: int) -> None:
    values = np.random.default_rng(0).normal(size=40)
    values[[3, 4, 20]] = np.nan
    for i, mean in enumerate(smooth(values, window)):
        here = values[max(0, i - window // 2) : i + (window + 1) // 2]
        here = here[np.isfinite(here)]
        assert mean == pytest.approx(here.mean(), abs=1e-12) if len(here) else math.isnan(mean)


@bounded
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80), st.integers(4, 10))
def test_thinning_keeps_ends_and_extremes(values: list[float], limit: int) -> None:
    x, y = np.arange(len(values)), np.array(values)
    tx, ty = thin_curve(x, y, limit)
    assert len(tx) <= limit + 2 and (np.diff(tx) > 0).all()
    assert (tx[0], tx[-1]) == (0, len(values) - 1) and (ty.min(), ty.max()) == (y.min(), y.max())
    assert (y[tx] == ty).all()


def test_values_of_a_curve_that_are_not_finite_are_left_out() -> None:
    drawn = curve("loss", range(5), [1.0, math.nan, math.inf, 2.0, 0.123456789], 7)
    assert (drawn["x"], drawn["y"], drawn["color"]) == ([0, 3, 4], [1, 2, 0.1234568], 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ticks(0, 300, 5), [0, 100, 200, 300]),
        (ticks(3.9, 7.7, 4), [4, 5, 6, 7]),
        (ticks(1, 1), [1]),
        (number_text(1234567), "1.23M"),
        (number_text(12345), "12.3K"),
        (number_text(1024), "1,024"),
        (number_text(0.25), "0.25"),
        (number_text(1e-7), "1e-07"),
        (number_text(float("nan")), "nan"),
        (bytes_text(3 * 2**30), "3 GiB"),
        (bytes_text(10), "10 B"),
        (seconds_text(3720), "1 h 02 min"),
        (seconds_text(185), "3 min 05 s"),
        (seconds_text(12.34), "12.3 s"),
        (seconds_text(0.0451), "45.1 ms"),
        (ranges_text((5, 0, 1, 2)), "0–2, 5"),
        (ranges_text(range(0, 20, 2)), "0, 2, 4, 6, 8, 10, … (10 in all)"),
    ],
)
def test_written_values(value: object, expected: object) -> None:
    assert value == (pytest.approx(expected) if isinstance(expected, list) else expected)
