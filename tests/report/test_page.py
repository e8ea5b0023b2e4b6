"""A page is one file that draws itself: its JSON is safe, its script runs, and nothing in it is drawn wrong."""

import base64
import json
import math
import re
from hashlib import sha256
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longspan.plain_text import bytes_text, number_text, ranges_text, seconds_text
from longspan.report import plan_page, write_report
from longspan.report.evaluation_page import eval_page
from longspan.report.gantt import axis_ticks, svg_element
from longspan.report.page import (
    PATTERNS,
    chart,
    curve,
    moving_average,
    page,
    page_head,
    read_report_file,
    section,
    thin_curve,
)
from tests.plan.cases import bounded
from tests.report.pages import draw, value_of
from tests.report.runs import FACTS, RECORD, evaluation_row, mixed_plan, train_row, write_run

HOSTILE = "</script><!--<script>\u2028alert(1)\"'&"


def test_texts_stay_in_the_json() -> None:
    html = page(HOSTILE, {"head": page_head(HOSTILE), "sections": [section(HOSTILE, {"note": HOSTILE})]})
    value = value_of(html)
    assert value["sections"][0] == {"title": HOSTILE, "key": HOSTILE, "parts": [{"note": HOSTILE}]}
    assert html.count("<script") == html.count("</script") == 2 and "<!--" not in html


@pytest.mark.parametrize("live", [False, True])
def test_a_page_runs_its_own_script_only_and_loads_nothing(live: bool) -> None:
    html = page("x", {"head": page_head("x"), "sections": []}, live=live)
    policy = html.split('Content-Security-Policy" content="')[1].split('"')[0]
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert ("connect-src 'self'" in policy) == live
    assert not re.search(r"https?:|@import|url\((?!#)|\b(src|href)=", html.replace("http://www.w3.org/2000/svg", ""))
    assert read_report_file("page.js").count("innerHTML") == 1 and "prefers-color-scheme: dark" in html


def test_markup() -> None:
    assert svg_element("a", escape("<&>")) == "<a>&lt;&amp;&gt;</a>"
    assert svg_element("a", class_="x", data_d=3, none=None) == '<a class="x" data-d="3"></a>'
    assert svg_element("svg", x=1.26, quote='"<') == '<svg x="1.3" quote="&quot;&lt;"></svg>'
    assert len(list(ElementTree.fromstring(PATTERNS))) == 2


SHOWN = {"✓ equal", "resumed on 2 ranks", "evaluation, cp 4", "ln V = 7.625, a uniform guess"}


def test_every_part_of_every_page_is_drawn(tmp_path: Path) -> None:
    rows = [train_row(step, mfu=0.4, mtp_loss_1=3.0) for step in range(1, 121)]
    run = write_run(tmp_path / "run", rows=[*rows, *(evaluation_row(120, cp, 4.6) for cp in (4, 1, 2))])
    (run / "run.json").write_text(json.dumps(FACTS | {"sessions": [[0, 4], [60, 2]]}))
    pages = {"report": write_report(run), "eval": tmp_path / "eval.html", "plan": tmp_path / "plan.html"}
    pages["eval"].write_text(eval_page(RECORD))
    pages["plan"].write_text(plan_page(mixed_plan(8)))
    for name, path in pages.items():
        value, drawn = value_of(path.read_text()), draw(path, 360)
        words = {element["words"] for element in drawn["elements"]}
        assert name != "report" or words >= SHOWN
        titles = [element["words"] for element in drawn["elements"] if element["name"] == "h2"]
        assert titles == [section["title"] for section in value["sections"] if section["title"]]
        assert drawn["title"] == value["name"] and drawn["timers"] == 0
        assert sum(element["name"] == "markup" for element in drawn["elements"]) == (name != "eval")
        rings = [element["class"] for element in drawn["elements"] if "ring" in element.get("class", "")]
        assert name != "report" or rings == ["mark ring c2", "mark ring c3"], "around the first of three equal marks"


def test_curves_are_where_their_values_are(tmp_path: Path) -> None:
    values = [3.0, 9.0, 1.0, 2.0, 4.0]
    curves = {"log": (values, {"log": True}), "linear": (values, {}), "zero": (values, {"zero": True})}
    curves["flat"] = [0.9, 0.9 + 1e-15, 0.9 - 1e-15, 0.9, 0.9], {}
    for title, (y, options) in curves.items():
        charts = [chart(title, "nats", curve("a", range(1, 6), y, kind="marks"), references=[(5, "bound")], **options)]
        path = tmp_path / f"{title}.html"
        path.write_text(page("x", {"head": page_head("x"), "sections": [section("Loss", {"charts": charts})]}))
        elements = draw(path, 400)["elements"]
        (drawn,) = (element["d"] for element in elements if element.get("class", "").startswith("curve"))
        points = [tuple(map(float, point.split())) for point in drawn[1:].split("L")]
        marks = [(float(e["cx"]), float(e["cy"])) for e in elements if e.get("class") == "mark c0"]
        heights = [-height for _, height in points]
        assert all(m == pytest.approx(p, abs=0.06) for m, p in zip(marks, points, strict=True))
        assert all(50 < x < 400 and 0 < y < 190 for x, y in points) and points == sorted(points)
        order = sorted(range(5), key=heights.__getitem__) == sorted(range(5), key=y.__getitem__)
        assert max(heights) - min(heights) < 0.2 if title == "flat" else order
        marked = {element["words"] for element in elements if element.get("class") == "tick"}
        assert ("0" in marked) == (title == "zero")


def test_small_numbers_of_an_axis_are_written_alike(tmp_path: Path) -> None:
    rates = chart("Learning rate", "factor of an update", curve("a", range(1, 4), [6e-5, 1.2e-4, 1.8e-4]), zero=True)
    path = tmp_path / "rates.html"
    path.write_text(page("x", {"head": page_head("x"), "sections": [section("Steps", {"charts": [rates]})]}))
    ticks = [element["words"] for element in draw(path, 400)["elements"] if element.get("class") == "tick"]
    assert ticks[:4] == ["0", "5e-5", "1e-4", "1.5e-4"]


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_smooth_is_the_mean_of_the_window(window: int) -> None:
    values = np.random.default_rng(0).normal(size=40)
    values[[3, 4, 20]] = np.nan
    for i, mean in enumerate(moving_average(values, window)):
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
        (axis_ticks(300, 5), [0, 100, 200, 300]),
        (axis_ticks(7.7, 4), [0, 2, 4, 6]),
        (axis_ticks(0, 5), [0]),
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
