"""A page is one file that draws itself: its JSON is safe, its script runs, and no chart or plan is drawn wrong."""

import base64
import json
import re
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import pytest

from longspan.report import plan_page, write_report
from longspan.report.evaluation_page import eval_page
from longspan.report.page import PATTERNS, chart, curve, head, page, room_text, section, tag, text
from tests.report.pages import draw, value_of
from tests.report.runs import FACTS, RECORD, mixed_plan, train_row, write_run

HOSTILE = "</script><!--<script>\u2028alert(1)\"'&"


def test_texts_stay_in_the_json() -> None:
    html = page(HOSTILE, {"head": head(HOSTILE), "sections": [section(HOSTILE, {"note": HOSTILE})]})
    value = value_of(html)
    assert value["sections"][0] == {"title": HOSTILE, "key": HOSTILE, "parts": [{"note": HOSTILE}]}
    assert html.count("<script") == html.count("</script") == 2 and "<!--" not in html


@pytest.mark.parametrize("live", [False, True])
def test_a_page_runs_its_own_script_only_and_loads_nothing(live: bool) -> None:
    html = page("x", {"head": head("x"), "sections": []}, live=live)
    policy = html.split('Content-Security-Policy" content="')[1].split('"')[0]
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert ("connect-src 'self'" in policy) == live
    assert not re.search(r"https?:|@import|url\((?!#)|\b(src|href)=", html.replace("http://www.w3.org/2000/svg", ""))
    assert room_text("page.js").count("innerHTML") == 1 and "prefers-color-scheme: dark" in html


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        (tag("a", text("<&>")), "<a>&lt;&amp;&gt;</a>"),
        (tag("a", class_="x", data_d=3, none=None), '<a class="x" data-d="3"></a>'),
        (tag("svg", viewBox="0 0 1 1", x=1.26, quote='"'), '<svg viewBox="0 0 1 1" x="1.3" quote="&quot;"></svg>'),
    ],
)
def test_markup(element: str, expected: str) -> None:
    assert element == expected and len(list(ElementTree.fromstring(PATTERNS))) == 2


@pytest.mark.parametrize("width", [360, 1200])
def test_every_part_of_every_page_is_drawn(width: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[train_row(step, mfu=0.4, mtp_loss_1=3.0) for step in range(1, 121)])
    (run / "run.json").write_text(json.dumps(FACTS | {"sessions": [[0, 4], [60, 2]]}))
    sample = {"step": 4, "name": "", "text": "<b>", "answer": "3", "predicted": "4", "images": ["aGk="]}
    (run / "samples.jsonl").write_text(json.dumps(sample))
    pages = {"report": write_report(run), "eval": tmp_path / "eval.html", "plan": tmp_path / "plan.html"}
    pages["eval"].write_text(eval_page(RECORD))
    pages["plan"].write_text(plan_page(mixed_plan(8)))
    for name, path in pages.items():
        value, drawn = value_of(path.read_text()), draw(path, width)
        titles = [element["words"] for element in drawn["elements"] if element["name"] == "h2"]
        assert titles == [section["title"] for section in value["sections"] if section["title"]]
        assert drawn["title"] == value["name"] and drawn["timers"] == 0
        assert sum(element["name"] == "markup" for element in drawn["elements"]) == (name != "eval")
    words = {element["words"] for element in draw(pages["report"], width)["elements"]}
    assert {"✓ equal", "<b>", "resumed on 2 ranks", "evaluation, cp 4", "ln V = 7.625, a uniform guess"} <= words


def test_curves_are_where_their_values_are(tmp_path: Path) -> None:
    """Greater values are higher, rounding is flat, marks lie on their points, and amounts begin at zero."""
    values = [3.0, 9.0, 1.0, 2.0, 4.0]
    curves = {"log": (values, {"log": True}), "linear": (values, {}), "zero": (values, {"zero": True})}
    curves["flat"] = [0.9, 0.9 + 1e-15, 0.9 - 1e-15, 0.9, 0.9], {}
    for title, (y, options) in curves.items():
        charts = [chart(title, "nats", curve("a", range(1, 6), y, kind="marks"), references=[(5, "bound")], **options)]
        path = tmp_path / f"{title}.html"
        path.write_text(page("x", {"head": head("x"), "sections": [section("Loss", {"charts": charts})]}))
        elements = draw(path, 400)["elements"]
        (points,) = (
            [tuple(map(float, point.split())) for point in element["d"][1:].split("L")]
            for element in elements
            if element.get("class", "").startswith("curve")
        )
        marks = [(float(e["cx"]), float(e["cy"])) for e in elements if e.get("class") == "mark c0"]
        heights = [-height for _, height in points]
        assert all(m == pytest.approx(p, abs=0.06) for m, p in zip(marks, points, strict=True))
        assert all(50 < x < 400 and 0 < y < 190 for x, y in points) and points == sorted(points)
        if title == "flat":
            assert max(heights) - min(heights) < 0.2
        else:
            assert sorted(range(5), key=heights.__getitem__) == sorted(range(5), key=y.__getitem__)
        ticks = {element["words"] for element in elements if element.get("class") == "tick"}
        assert ("0" in ticks) == (title == "zero")
