"""Charts of a run: where a value lands in the drawing, and that every element of a picture has its attributes."""

import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from longspan.report import gantt_svg
from longspan.report.chart import Chart, Series, chart_figure
from longspan.report.markup import PATTERNS
from tests.report.runs import mixed_plan

STEPS = np.arange(1, 6)
NEEDED = {
    "svg": {"class"},
    "path": {"class", "d"},
    "rect": {"x", "y", "width", "height"},
    "text": {"class", "x", "y"},
    "circle": {"cx", "cy", "r"},
    "pattern": {"id", "width", "height", "patternUnits"},
}


def _figure(values: list[float], **changes: bool) -> ElementTree.Element:
    chart = Chart("Loss", (Series("training", STEPS, np.array(values), 0),), "nats", **changes)
    return ElementTree.fromstring(chart_figure(chart))


def _points(figure: ElementTree.Element) -> list[tuple[float, float]]:
    (curve,) = [path.attrib["d"] for path in figure.iter("path") if "curve" in path.attrib["class"]]
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+)[ ,]([\d.]+)", curve)]


@pytest.mark.parametrize("log", [False, True])
def test_greater_values_are_higher_and_all_are_inside(log: bool) -> None:
    values = [3.0, 9.0, 1.0, 2.0, 4.0]
    figure = _figure(values, log=log)
    (svg,) = figure.iter("svg")
    _, _, width, height = (float(x) for x in svg.attrib["viewBox"].split())
    points = _points(figure)
    assert [x for x, _ in points] == sorted(x for x, _ in points) and len(points) == len(values)
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert np.argsort([-y for _, y in points]).tolist() == np.argsort(values).tolist()


@pytest.mark.parametrize("zero", [False, True])
def test_zero_is_on_the_axis_where_it_is_asked_for(zero: bool) -> None:
    ticks = {label.text for label in _figure([900.0, 910.0, 905.0, 907.0, 903.0], zero=zero).iter("text")}
    assert ("0" in ticks) == zero


@pytest.mark.parametrize(
    "picture",
    [lambda: gantt_svg(mixed_plan(16)), lambda: gantt_svg(mixed_plan(16), unit="rows", limit=20), lambda: PATTERNS],
    ids=["gantt", "gantt with summaries", "hatch"],
)
def test_every_element_has_what_it_is_drawn_by(picture: Callable[[], str]) -> None:
    for element in ElementTree.fromstring(picture()).iter():
        missing = NEEDED.get(element.tag, set()) - element.attrib.keys()
        assert not missing, (element.tag, element.attrib, missing)
        if element.attrib.get("role") == "img":
            assert {"aria-label", "tabindex", "viewBox"} <= element.attrib.keys()


def test_rounding_is_not_drawn_as_a_curve() -> None:
    heights = [y for _, y in _points(_figure([0.9, 0.9 + 1e-15, 0.9 - 1e-15, 0.9, 0.9]))]
    assert max(heights) - min(heights) < 0.2


def test_every_mark_is_where_its_value_is() -> None:
    """Also where several lie on each other: a mark beside its place would say another step."""
    x, y = np.array([10.0, 20.0]), np.array([5.0, 4.0])
    series = tuple(Series(f"cp {cp}", x, y + 1e-9 * cp, 0, "marks") for cp in range(3))
    drawing = chart_figure(Chart("Loss", series, "nats", width=480))
    places = [float(x) for x in re.findall(r'class="mark c0" cx="([\d.]+)"', drawing) if x != "11.0"]  # of the legend
    assert len(places) == 6 and len(set(places)) == 2


def test_named_places_leave_room_for_their_names_and_notes_stay_inside() -> None:
    series = (Series("planned", np.arange(4), np.array([4.0, 1.0, 2.0, 9.0]), 0, "marks"),)
    words = "degree 2 takes least, by far"
    names = ("1", "2", "4", "1024")
    for place in range(4):
        chart = Chart("Time", series, "s", width=480, x_names=names, notes=((place, 1.0, words),), log=True)
        (svg,) = ElementTree.fromstring(chart_figure(chart)).iter("svg")
        texts = {element.text: element for element in svg.iter("text")}
        assert float(texts["1024"].attrib["x"]) + 4 * 3.5 < 480
        note = texts[words]
        assert float(note.attrib["x"]) >= 52 and float(note.attrib["x"]) + 6.5 * len(words) < 480
        assert float(note.attrib["y"]) < chart.height - 36


def test_words_of_a_reference_do_not_lie_on_a_grid_line() -> None:
    for value in np.linspace(1.0, 9.0, 33).tolist():
        series = (Series("loss", STEPS, np.array([0.0, 10.0, 3.0, 4.0, 5.0])),)
        figure = ElementTree.fromstring(chart_figure(Chart("Loss", series, "nats", references=((value, "bound"),))))
        grid = [
            float(re.findall(r" ([\d.]+)H", e.attrib["d"])[0]) for e in figure.iter("path") if e.get("class") == "grid"
        ]
        (word,) = [float(e.attrib["y"]) for e in figure.iter("text") if e.text == "bound"]
        assert not [line for line in grid if word - 8 < line < word], value
