"""Curves as numbers: nothing that a reader would miss is lost, and ticks are round."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.plain_text import bytes_text, number_text, ranges_text, seconds_text
from longspan.report.chart import _tick_digits, byte_ticks, log_ticks, smooth, thin_curve, ticks
from tests.plan.cases import bounded


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_smooth_is_the_mean_of_the_window(window: int) -> None:
    values = np.random.default_rng(0).normal(size=40)
    values[[3, 4, 20]] = np.nan
    for i, found in enumerate(smooth(values, window)):
        here = values[max(0, i - window // 2) : i + (window + 1) // 2]
        here = here[np.isfinite(here)]
        assert found == pytest.approx(here.mean(), abs=1e-12) if len(here) else math.isnan(found)


@bounded
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80), st.integers(4, 10))
def test_thinning_keeps_ends_and_extremes(values: list[float], limit: int) -> None:
    x, y = np.arange(len(values)), np.array(values)
    tx, ty = thin_curve(x, y, limit)
    assert len(tx) <= limit + 2 and (np.diff(tx) > 0).all()
    assert (tx[0], tx[-1]) == (0, len(values) - 1) and (ty.min(), ty.max()) == (y.min(), y.max())
    assert (y[tx] == ty).all()


def test_a_spike_survives_wherever_it_is() -> None:
    for at in range(50):
        assert thin_curve(np.arange(50), (np.arange(50) == at).astype(float), 6)[1].max() == 1.0, at


def test_thinning_drops_what_is_not_finite() -> None:
    x, y = thin_curve(np.arange(5), np.array([1.0, np.nan, np.inf, 2.0, 3.0]), 100)
    assert x.tolist() == [0, 3, 4] and y.tolist() == [1.0, 2.0, 3.0]


@bounded
@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_are_round_and_inside(low: float, width: float, count: int) -> None:
    high = low + width
    found = ticks(low, high, count)
    assert len(found) <= count + 1
    assert all(low - 1e-6 * width <= t <= high + 1e-6 * width for t in found)
    if len(found) > 2:
        step = found[1] - found[0]
        assert np.allclose(np.diff(found), step, rtol=1e-6)
    if width > 1e-2 * abs(low):
        assert len({number_text(t, _tick_digits(found)) for t in found}) == len(found)
    if len(found) > 1 and max(map(abs, found)) < 1e4:
        texts = [float(number_text(t, _tick_digits(found)).replace(",", "")) for t in found]
        assert np.allclose(texts, found, rtol=0, atol=2e-3 * (found[1] - found[0]))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (ticks(0, 300, 5), [0, 100, 200, 300]),
        (ticks(3.9, 7.7, 4), [4, 5, 6, 7]),
        (ticks(1, 1), [1]),
        (log_ticks(0.5, 20), [0.5, 1, 2, 5, 10, 20]),
        (log_ticks(1e-3, 1e6), [1e-2, 1, 1e2, 1e4, 1e6]),
        (byte_ticks(0, 600 * 2**20, 3), [0, 200 * 2**20, 400 * 2**20, 600 * 2**20]),
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
def test_written_values(found: object, wanted: object) -> None:
    assert found == (pytest.approx(wanted) if isinstance(wanted, list) else wanted)


def test_ticks_of_quarter_steps_are_written_in_full() -> None:
    """7.575 is not 7.58: labels at equal distances have equal differences."""
    found = ticks(7.57, 7.69, 5)
    assert [number_text(t, _tick_digits(found)) for t in found] == ["7.575", "7.6", "7.625", "7.65", "7.675"]
