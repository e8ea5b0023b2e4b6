"""One line chart as SVG, with the numbers that `page.js` needs for its crosshair.

The drawing is complete without a script: axes, units, curves, marks, labels and a legend. It covers curves over one x
axis, linear or logarithmic in y; nothing else.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longspan.plain_text import bytes_text, number_text
from longspan.report.markup import key, label, tag, text

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


Format = Literal["number", "loss", "percent", "bytes"]
COLORS = 6  # of page.css, and curves of a chart at most
MAX_POINTS = 900  # of one curve, in the drawing and under the crosshair
FLAT = 1e-9  # a relative difference that is rounding
MARK_SIZE = 5.0
LABEL_HEIGHT, LETTER_WIDTH = 10, 6.8  # pixels
NAME_ROOM = 0.03  # of the x axis, outside the first and the last of named places


@dataclass(frozen=True)
class Series:
    """A curve: `faint` is raw data behind a smoothed `line`; `marks` are few points that are joined."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    kind: Literal["line", "faint", "marks"] = "line"


@dataclass(frozen=True)
class Chart:
    """What to draw, in data units. `references` are horizontal lines with a label; `zero` puts 0 on the y axis.

    `events` are vertical lines at an x, with words at their foot ("": none); those outside of the curves are left out.
    `x_names` name x 0, 1, 2 and so on, in place of numbers; `notes` are words below a point (x, y).
    """

    title: str
    series: tuple[Series, ...]
    y_label: str
    x_label: str = "step"
    width: int = 370
    height: int = 190
    references: tuple[tuple[float, str], ...] = ()
    events: tuple[tuple[float, str], ...] = ()
    notes: tuple[tuple[float, float, str], ...] = ()
    x_names: tuple[str, ...] = ()
    y_format: Format = "number"
    log: bool = False
    zero: bool = False


@dataclass(frozen=True)
class _Frame:
    """Where data lands in the drawing: its sides in pixels, and the least and greatest `x` and `y` between them."""

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

    def to_x(self, x: np.ndarray | float) -> np.ndarray:
        low, high = self.x
        return self.left + (np.asarray(x, float) - low) / (high - low) * (self.right - self.left)

    def to_y(self, y: np.ndarray | float) -> np.ndarray:
        (low, high), y = self.y, np.asarray(y, float)
        share = np.log(y / low) / math.log(high / low) if self.log else (y - low) / (high - low)
        return self.bottom - np.clip(share, 0, 1) * (self.bottom - self.top)


def chart_figure(chart: Chart, *, css_class: str = "") -> str:
    """Return an HTML figure: title, legend, SVG and the crosshair's data, or "nothing recorded" without a value."""
    drawn = [series for series in (_thin_series(s, chart.log) for s in chart.series) if len(series.x)]
    title = tag("b", text(chart.title)) + tag("span", text(chart.y_label), class_="unit")
    empty_note = tag("p", "nothing recorded", class_="none")
    content = _series_legend(chart.series) + _chart_drawing(chart, drawn) if drawn else empty_note
    return tag("figure", tag("figcaption", title), content, class_=f"chart {css_class}".strip())


def _chart_elements(chart: Chart, drawn: Sequence[Series], frame: _Frame) -> Iterator[str]:
    yield _draw_axes(chart, frame)
    yield from _draw_events(chart, frame)
    yield from _draw_curves(drawn, frame)
    yield _draw_references(chart, frame)
    yield from _draw_notes(chart, frame)


def _chart_drawing(chart: Chart, drawn: Sequence[Series]) -> str:
    frame = _fit_frame(chart, drawn)
    return tag(
        "svg",
        *_chart_elements(chart, drawn, frame),
        viewBox=f"0 0 {chart.width} {chart.height}",
        tabindex=0,
        role="img",
        aria_label=f"{chart.title}: {chart.y_label} over {chart.x_label}. Arrow keys read the values.",
        data_chart=json.dumps(_crosshair_data(chart, drawn, frame), separators=(",", ":")),
    )


def _thin_series(series: Series, log: bool) -> Series:
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    if log:
        y = np.where(y > 0, y, math.nan)
    return Series(series.name, *thin_curve(x, y, MAX_POINTS), series.color, series.kind)


def _fit_frame(chart: Chart, drawn: Sequence[Series]) -> _Frame:
    """Logarithmic axes get room as a factor, more where notes need it. Curves that vary by less than FLAT of their
    height are drawn flat, in the middle: the room is then 5 % of the height, or 1 at height 0. `zero` begins the
    axis at 0, without room below it. The x axis has room on both sides where it has one value, or values with names,
    whose words stand under the ends too.
    """
    x = np.concatenate([s.x for s in drawn])
    y = np.concatenate([*(s.y for s in drawn), np.array([value for value, _ in chart.references])])
    low, high = float(y.min()), float(y.max())
    if high - low < FLAT * abs(high):
        low = high  # drawn flat: the room below does not depend on rounding
    if chart.log:
        low, high = low / (2.2 if chart.notes else 1.15), high * 1.15
    else:
        low = min(low, 0.0) if chart.zero else low
        room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        low, high = low - (0 if chart.zero and low == 0 else room), high + room
    x_low, x_high = float(x.min()), float(x.max())
    if x_low == x_high or chart.x_names:
        room = 0.5 if x_low == x_high else NAME_ROOM * (x_high - x_low)
        x_low, x_high = x_low - room, x_high + room
    # 52 pixels are for the words of ticks on the y axis, 36 for those of the x axis and its name below them
    return _Frame(52, chart.width - 14, 10, chart.height - 36, (x_low, x_high), (low, high), chart.log)


def _draw_axes(chart: Chart, frame: _Frame) -> str:
    parts, y_values = list[str](), _y_ticks(chart, frame)
    digits = _tick_digits(y_values)
    for value in y_values:
        y = float(frame.to_y(value))
        parts.append(tag("path", class_="grid", d=f"M{frame.left} {y:.1f}H{frame.right}"))
        parts.append(label(_tick_text(value, chart.y_format, digits), frame.left - 7, y + 3.5, "end", "tick"))
    for value, name in _x_tick_names(chart, frame):
        x = float(frame.to_x(value))
        parts.append(tag("path", class_="grid short", d=f"M{x:.1f} {frame.bottom}v4"))
        parts.append(label(name, x, frame.bottom + 17, "middle", "tick"))
    parts.append(tag("path", class_="axis", d=f"M{frame.left} {frame.bottom}H{frame.right}"))
    parts.append(label(chart.x_label, frame.right, frame.bottom + 31, "end"))
    return "".join(parts)


def _y_ticks(chart: Chart, frame: _Frame) -> list[float]:
    linear_ticks = byte_ticks if chart.y_format == "bytes" else ticks
    return log_ticks(*frame.y) if frame.log else linear_ticks(*frame.y, chart.height // 40)


def _x_tick_names(chart: Chart, frame: _Frame) -> list[tuple[float, str]]:
    if chart.x_names:
        return list(enumerate(chart.x_names))
    values = [value for value in ticks(*frame.x, max(3, chart.width // 110)) if value == int(value)]
    return [(value, number_text(value, _tick_digits(values))) for value in values]


def _tick_text(value: float, y_format: Format, digits: int) -> str:
    if y_format == "percent":
        return f"{100 * value:g}%"
    return bytes_text(value) if y_format == "bytes" else number_text(value, digits)


def _tick_digits(values: Sequence[float]) -> int:
    """Return how many significant digits write every tick exactly, to a thousandth of the ticks' distance; 3 at least.

    A single tick, which has no distance, gets 4.
    """
    if len(values) < 2:
        return 4
    tolerance = 1e-3 * (values[1] - values[0])
    exact = (n for n in range(3, 16) if all(abs(float(f"{value:.{n}g}") - value) <= tolerance for value in values))
    return next(exact, 16)


def _draw_references(chart: Chart, frame: _Frame) -> str:
    """Return lines over the whole width, with their words at the right, LABEL_HEIGHT high, above the line or below it.

    Words go below where there is no room above, or where a grid line would cross them above and none would below.
    """
    parts, grid = list[str](), [float(frame.to_y(value)) for value in _y_ticks(chart, frame)]
    for value, words in chart.references:
        y = float(frame.to_y(value))
        crossed = any(y - LABEL_HEIGHT - 6 <= line <= y - 4 for line in grid)
        below = y < frame.top + 18 or (crossed and not any(y + 3 <= line <= y + LABEL_HEIGHT + 6 for line in grid))
        parts.append(tag("path", class_="reference", d=f"M{frame.left} {y:.1f}H{frame.right}"))
        parts.append(label(words, frame.right - 2, y + (14 if below else -6), "end", "label halo"))
    return "".join(parts)


def _draw_events(chart: Chart, frame: _Frame) -> Iterator[str]:
    """The longest words are placed first: right of their line if they fit there, else left; words that would cover
    others are left out.
    """
    used_spans = list[tuple[float, float]]()
    for x, words in sorted(chart.events, key=lambda event: (-len(event[1]), event[0])):
        if not frame.x[0] <= x <= frame.x[1]:
            continue
        line_x, width = float(frame.to_x(x)), LETTER_WIDTH * len(words)
        yield tag("path", class_="reference", d=f"M{line_x:.1f} {frame.top}V{frame.bottom}")
        start = line_x + 4 if line_x + 4 + width <= frame.right else line_x - 4 - width
        if words and start >= frame.left and all(start + width <= a or b <= start for a, b in used_spans):
            yield label(words, start, frame.bottom - 6, "start", "label halo")
            used_spans.append((start, start + width))


def _draw_notes(chart: Chart, frame: _Frame) -> Iterator[str]:
    for x, y, words in chart.notes:
        width = LETTER_WIDTH * len(words)
        start = max(frame.left + 4, min(float(frame.to_x(x)) - width / 2, frame.right - width))
        yield label(words, start, float(frame.to_y(y)) + 22, "start", "label halo strong")


def _draw_curves(drawn: Sequence[Series], frame: _Frame) -> Iterator[str]:
    marks = list[str]()
    for series in drawn:
        points = list(zip(frame.to_x(series.x).tolist(), frame.to_y(series.y).tolist(), strict=True))
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield tag("path", class_=f"curve {series.kind} c{series.color}", d=path)
        if series.kind != "marks" and len(points) > 1:
            continue
        marks += [mark(series.color, x, y, MARK_SIZE) for x, y in points]
    yield from marks


def mark(color: int, x: float, y: float, size: float = 4.0) -> str:
    """Return the mark of a colour at (x, y): one of four shapes, by which colours 0 to 3 differ without colour."""
    css, reach = f"mark c{color}", 1.25 * size  # from (x, y) to the farthest corners of the last two shapes
    match color % 4:
        case 0:
            return tag("circle", class_=css, cx=x, cy=y, r=size)
        case 1:
            return tag("rect", class_=css, x=x - size, y=y - size, width=2 * size, height=2 * size)
        case 2:  # a triangle, and last a diamond
            path = f"l{reach:.1f} {2 * size:.1f}h{-2 * reach:.1f}z"
        case _:
            path = f"l{reach:.1f} {reach:.1f}l{-reach:.1f} {reach:.1f}l{-reach:.1f} {-reach:.1f}z"
    return tag("path", class_=css, d=f"M{x:.1f} {y - reach:.1f}{path}")


def _series_legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = []
    for s in series:
        line = tag("path", class_=f"curve {s.kind} c{s.color}", d="M1 6H21")
        items.append(tag("li", key(line, mark(s.color, 11.0, 6.0) if s.kind == "marks" else ""), text(s.name)))
    return tag("ul", *items, class_="legend")


def _crosshair_data(chart: Chart, drawn: Sequence[Series], frame: _Frame) -> dict[str, object]:
    curves = [{"name": s.name, "color": s.color, "x": _round_values(s.x), "y": _round_values(s.y)} for s in drawn]
    axes = {"box": [frame.left, frame.right, frame.top, frame.bottom], "x": frame.x, "y": frame.y, "log": frame.log}
    return axes | {"xLabel": chart.x_label, "xNames": chart.x_names, "format": chart.y_format, "series": curves}


def _round_values(values: np.ndarray) -> list[float]:
    return [int(v) if v == int(v) else float(f"{v:.7g}") for v in values.tolist()]
