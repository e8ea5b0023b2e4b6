"""Pictures of a plan: well-formed, complete, of bounded size at 8 and at 1024 slots."""

import json
import math
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest

from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic
from longspan.report import gantt_svg, plan_document, write_png
from longspan.report.markup import style_sheet
from longspan.report.pictures.bars import FILLS, Panel, PlanBars, plan_bars
from longspan.report.pictures.png import _name_panels
from tests.report.runs import mixed_plan

EMPTY = Plan(4, (), (MicroBatch(), MicroBatch()), 0)


@pytest.mark.parametrize("wide", [1120, 400])
@pytest.mark.parametrize("unit", ["seconds", "rows"])
@pytest.mark.parametrize("slots", [1, 8, 64, 1024])
def test_svg_is_well_formed_and_bounded(slots: int, unit: str, wide: int) -> None:
    plan = mixed_plan(slots)
    svg = gantt_svg(plan, unit=unit, width=wide)  # pyright: ignore[reportArgumentType]
    tree = ElementTree.fromstring(svg)
    width, height = (float(x) for x in tree.attrib["viewBox"].split()[2:])
    for rect in tree.iter("rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.2 and 0 <= y <= y + h <= height + 0.2
    assert len(svg) < 500_000 and height < 800 and width == wide
    assert all(0 <= float(words.attrib["x"]) <= width for words in tree.iter("text"))
    data = json.loads(tree.attrib["data-plan"])
    drawn = {rect.attrib["data-d"] for rect in tree.iter("rect") if "data-d" in rect.attrib}
    assert drawn == data["documents"].keys()
    assert all(data["documents"][d][0] == plan.lengths[int(d)] for d in drawn)


def test_hover_says_where_a_document_is() -> None:
    group = Group((3, 1, 2), (1, 0), (500, 40), cp_comm_type=("p2p", "all_gather", "p2p"), pad_to=500)
    plan = Plan(4, (40, 500), (MicroBatch((group,)),), 538)
    data = json.loads(ElementTree.fromstring(gantt_svg(plan)).attrib["data-plan"])
    assert data["documents"] == {"1": [500, 0], "0": [40, 0]}
    batch, slots, degree, comm, count, rows, _, padded = data["groups"][0]
    assert (batch, slots, degree, comm, count, rows) == (0, "1–3", 3, "p2p/all_gather", 2, 334)
    assert padded == ", each padded to 500"


def test_colours_repeat_for_one_document_and_differ_between_the_longest() -> None:
    tree = ElementTree.fromstring(gantt_svg(mixed_plan(16)))
    bars = [(r.attrib["data-d"], r.attrib["class"]) for r in tree.iter("rect") if "data-d" in r.attrib]
    assert all(len({css for d, css in bars if d == document}) == 1 for document, _ in bars)
    plan = mixed_plan(16)
    areas = {bar.document: (bar.stop - bar.start) * bar.slots for bar in plan_bars(plan).bars}
    largest = sorted(areas, key=lambda d: -areas[d])[:8]
    assert len({dict(bars)[str(d)] for d in largest}) == 8
    rows = ElementTree.fromstring(gantt_svg(plan, unit="rows")).iter("rect")
    assert all(
        dict(bars).get(r.attrib["data-d"], r.attrib["class"]) == r.attrib["class"] for r in rows if "data-d" in r.attrib
    )


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_neighbours_have_other_colours(slots: int) -> None:
    picture = plan_bars(mixed_plan(slots))
    bars = [b for b in picture.bars if b.slots > 1 or slots <= 16]
    for a in bars:
        for b in bars:
            together = a.start < b.stop and b.start < a.stop and b.slot == a.slot + a.slots
            after = a.stop == b.start and a.slot < b.slot + b.slots and b.slot < a.slot + a.slots
            if a.document != b.document and (together or after):
                assert picture.color_of[a.document] != picture.color_of[b.document], (a, b)


def test_fills_are_those_of_the_page() -> None:
    sheet = style_sheet()
    assert all(f".k{place} {{ fill: {fill}; }}" in sheet for place, fill in enumerate(FILLS))


def test_a_plan_is_an_svg_document_of_its_own() -> None:
    document = plan_document(mixed_plan(16), title="a<b>")
    root = ElementTree.fromstring(document)
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    assert root.attrib["xmlns"] if "xmlns" in root.attrib else root.tag.startswith("{http://www.w3.org/2000/svg}")
    sizes = [svg.attrib for svg in root.iter("{http://www.w3.org/2000/svg}svg") if svg is not root]
    assert all({"width", "height"} <= size.keys() for size in sizes)  # a style does not size what is inside
    assert (width, height) > (1100, 300) and "a&lt;b&gt;" in document and "in another colour" in document


def test_a_summary_of_several_slots_says_when_they_are_busy() -> None:
    tree = ElementTree.fromstring(gantt_svg(mixed_plan(1024), limit=300))
    parts = [rect.attrib["data-info"] for rect in tree.iter("rect") if "data-info" in rect.attrib]
    several = [part for part in parts if "–" in part.split("slots ")[1].split("|")[0]]
    assert several and len(several) < len(parts)
    assert all(("busy until" in part) == (part in several) for part in parts)


@pytest.mark.parametrize("unit", ["seconds", "rows"])
def test_a_plan_without_documents_is_drawn(unit: str) -> None:
    tree = ElementTree.fromstring(gantt_svg(EMPTY, unit=unit))  # pyright: ignore[reportArgumentType]
    numbers = [float(number) for number in tree.attrib["viewBox"].split()]
    assert all(map(math.isfinite, numbers)) and min(numbers[2:]) > 0
    assert not [rect for rect in tree.iter("rect") if "data-info" in rect.attrib]  # no document, no summary
    assert "nan" not in ElementTree.tostring(tree, "unicode").lower()


def test_bars_have_every_slot_s_work() -> None:
    plan = mixed_plan(8)
    busy = dict.fromkeys(range(8), 0.0)
    for bar in plan_bars(plan).bars:
        for slot in range(bar.slot, bar.slot + bar.slots):
            busy[slot] += bar.stop - bar.start
    times = plan.timeline()
    wanted = times.busy.sum(axis=0) - plan.cost.micro_batch_seconds * len(plan.micro_batches)
    np.testing.assert_allclose([busy[slot] for slot in range(8)], wanted, atol=1e-7)
    assert {plan.lengths[bar.document] for bar in plan_bars(plan).bars} == set(plan.lengths)


@pytest.mark.parametrize("slots", [8, 1024])
def test_png(slots: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write_png(mixed_plan(slots), tmp_path / "plan.png")
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    assert 2000 <= width <= 2200 and 300 <= height <= 1400


def test_png_draws_a_document_on_its_slots_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib.figure")  # builds rectangles of its own when it is imported
    patches = pytest.importorskip("matplotlib.patches")
    drawn: list[tuple[float, float, float, float]] = []

    class NotedRectangle(patches.Rectangle):
        def __init__(self, corner: tuple[float, float], width: float, height: float, **options: object) -> None:
            drawn.append((*corner, width, height))
            super().__init__(corner, width, height, **options)

    monkeypatch.setattr(patches, "Rectangle", NotedRectangle)
    plan = mixed_plan(2, micro_batches=2)
    write_png(plan, tmp_path / "plan.png")
    bars = plan_bars(plan).bars
    assert {(bar.start, bar.slot, bar.stop - bar.start, bar.slots) for bar in bars} <= set(drawn)


def test_png_of_few_slots_names_documents_and_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    names, lines = list[str](), list[float]()
    text, axhline = axes.Axes.text, axes.Axes.axhline
    monkeypatch.setattr(
        axes.Axes, "text", lambda self, x, y, name, **look: (names.append(name), text(self, x, y, name, **look))[1]
    )
    monkeypatch.setattr(axes.Axes, "axhline", lambda self, y, **look: (lines.append(y), axhline(self, y, **look))[1])
    lengths = [60000, 42000, 20000, *range(500, 6000, 300)]
    plan = plan_dynamic(lengths, Layout(4), max_tokens_per_slot=16384, node_size=2)
    path = write_png(plan, tmp_path / "plan.png")
    assert int.from_bytes(path.read_bytes()[20:24], "big") > 600 and lines == [2]
    assert {"0 · 60,000", "1 · 42,000", "2 · 20,000"} <= set(names) and len(names) > len(lengths) // 2


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_png_names_the_same_panels_at_every_scale(scale: float) -> None:
    panels = tuple(Panel(i * scale, i * scale, (i + 1) * scale) for i in range(100))
    axes = Mock()
    _name_panels(axes, PlanBars(EMPTY, "rows", panels, ()))
    assert [call.args[0] for call in axes.annotate.call_args_list][:3] == ["0", "2", "4"]


def test_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'longspan\[viz\]'"):
        write_png(mixed_plan(2), tmp_path / "plan.png")
