"""A plan as bars and pictures: every document once, where it belongs, and pictures of bounded size."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image, ImageColor

from longspan.errors import ConfigError
from longspan.plan import Group, MicroBatch, Plan
from longspan.report import gantt_svg, plan_document, write_png
from longspan.report.bars import FILLS, plan_bars
from longspan.report.gantt import HEAD, LEGEND, plan_part
from longspan.report.page import read_report_file
from tests.plan.cases import bounded, plans
from tests.report.runs import mixed_plan


def _covered(plan: Plan) -> dict[tuple[int, int], float]:
    places: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in plan_bars(plan).bars:
        for slot in range(bar.slot, bar.slot + bar.slots):
            places.setdefault((bar.micro_batch, slot), []).append((bar.start, bar.stop))
    total = {}
    for key, spans in places.items():
        spans.sort()
        assert all(b[0] >= a[1] - 1e-9 * (1 + a[1]) for a, b in pairwise(spans))
        total[key] = sum(stop - start for start, stop in spans)
    return total


@bounded
@given(st.one_of(plans("lockstep"), plans("free")))
def test_bars_in_time_add_up_to_each_slot_s_work(plan: Plan) -> None:
    times, seconds = plan.timeline(), _covered(plan)
    work = times.busy - plan.cost.micro_batch_seconds * (times.busy > 0)
    assert all(length == pytest.approx(work[place], rel=1e-9) for place, length in seconds.items())
    assert {(m, s) for m, s in np.argwhere(work > 1e-12).tolist()} <= seconds.keys()
    assert plan_bars(plan).end == pytest.approx(times.step_seconds)


@bounded
@given(plans())
def test_every_document_is_on_its_group_s_slots_once(plan: Plan) -> None:
    slots: dict[int, list[int]] = {}
    for bar in plan_bars(plan).bars:
        slots.setdefault(bar.document, []).extend(range(bar.slot, bar.slot + bar.slots))
    groups = [group for batch in plan.micro_batches for group in batch.groups]
    assert {d: sorted(s) for d, s in slots.items()} == {d: sorted(g.slots) for g in groups for d in g.documents}


def test_a_long_document_is_one_bar_over_its_slots() -> None:
    wide, short = Group((0, 1, 2, 3), (0,), (9000,)), Group((2,), (1,), (50,))
    plan = Plan(4, (9000, 50), (MicroBatch((short, wide)),), 9048)  # the short one comes first in the plan
    bars = {bar.document: bar for bar in plan_bars(plan).bars}
    assert (bars[0].slot, bars[0].slots) == (0, 4)
    assert bars[1].start == bars[0].stop


def test_thinning_keeps_large_bars_and_counts_the_others() -> None:
    plan = mixed_plan(256)
    picture = plan_bars(plan)
    bars, summaries = picture.select_bars(1000 / picture.end, 600 / 256, limit=300)
    assert 0 < len(bars) <= 300 and all(bar.slots >= 2 for bar in bars)
    drawn = {bar.document for bar in bars}
    left = [d for d in range(len(plan.lengths)) if d not in drawn]
    assert sum(part.documents for part in summaries) == len(left)
    assert sum(part.tokens for part in summaries) == sum(plan.lengths[d] for d in left)
    everything, none = picture.select_bars(1e6, 100, limit=10**6)
    assert len(everything) == len(picture.bars) and not none


@pytest.mark.parametrize(("slots", "wide"), [(0, 400), (1, 400), (8, 1120), (1024, 1120), (1024, 400)])
def test_svg_is_well_formed_and_bounded(slots: int, wide: int) -> None:
    plan = mixed_plan(slots) if slots else Plan(4, (), (MicroBatch(), MicroBatch()), 0)  # without documents
    svg = gantt_svg(plan, width=wide)
    tree = ElementTree.fromstring(svg)
    width, height = (float(x) for x in tree.attrib["viewBox"].split()[2:])
    for rect in tree.iter("rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.2 and 0 <= y <= y + h <= height + 0.2
    assert len(svg) < 500_000 and height < 800 and width == wide
    assert all(0 <= float(words.attrib["x"]) <= width for words in tree.iter("text"))
    drawn = [rect for rect in tree.iter("rect") if {"data-d", "data-info"} & rect.attrib.keys()]
    assert len(drawn) <= 4800 and bool(drawn) == bool(slots) and "nan" not in svg


def test_hover_says_where_a_document_is() -> None:
    group = Group((3, 1, 2), (1, 0), (500, 40), cp_comm_type=("p2p", "all_gather", "p2p"), pad_to=500)
    plan = Plan(4, (40, 500), (MicroBatch((group,)),), 538)
    part = plan_part(plan, "step 1", None, measured=True)
    words = {name: value for name, value in part["documents"][1] if name != "group: time as priced"}
    rows = "group of 2 documents, each padded to 500: rows on a slot"
    expected = {"tokens": "500", "micro-batch": "0", "slots": "1–3", "degree": "3, p2p/all_gather", rows: "334"}
    assert words == expected
    assert part["documents"].keys() == {0, 1} and dict(part["facts"])["groups"] == (
        "1 group of 3 slots, by p2p/all_gather"
    )
    assert [words for _, words in part["legend"]] == [LEGEND[i][1] for i in (0, 2, 3)]  # no short ones
    full = Plan(2, (500, 40), (MicroBatch((Group((0, 1), (0, 1), (500, 40)),)),), 538)
    assert [kind for kind, _ in plan_part(full, "", None, measured=True)["legend"]] == ["b k0", "launch"]


def test_shares_of_a_step_are_quarters() -> None:
    plan = mixed_plan(4)
    svg = gantt_svg(plan, replace(plan.cost, source=""))
    assert re.findall(r">(\d+)%<", svg) == ["0", "25", "50", "75", "100"] and "share of the step, as priced" in svg


def test_all_colours_are_used_and_are_those_of_the_page() -> None:
    rects = ElementTree.fromstring(gantt_svg(mixed_plan(16))).iter("rect")
    assert len({r.attrib["class"] for r in rects if "data-d" in r.attrib}) == len(FILLS)
    sheet = read_report_file("page.css")
    assert all(f".k{place} {{ fill: {fill}; }}" in sheet for place, fill in enumerate(FILLS))


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_neighbours_have_other_colours(slots: int) -> None:
    picture = plan_bars(mixed_plan(slots))
    bars = [b for b in picture.bars if b.slots > 1 or slots <= 16]
    for a in bars:
        for b in bars:
            together = a.start < b.stop and b.start < a.stop and b.slot == a.slot + a.slots
            after = a.stop == b.start and a.slot < b.slot + b.slots and b.slot < a.slot + a.slots
            if a.document != b.document and (together or after):
                assert picture.color_by_document[a.document] != picture.color_by_document[b.document], (a, b)


def test_a_plan_is_an_svg_document_of_its_own() -> None:
    document, name = plan_document(mixed_plan(16), title="a<b>"), "{http://www.w3.org/2000/svg}svg"
    root = ElementTree.fromstring(document)
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    sizes = [svg.attrib for svg in root.iter(name) if svg is not root]
    assert root.tag == name and all(
        {"width", "height"} <= size.keys() for size in sizes
    )  # no style sizes what is inside
    assert (width, height) > (1100, 300) and "a&lt;b&gt;" in document and "in another colour" in document


@pytest.mark.parametrize("slots", [4, 256])
def test_a_png_is_the_svg_document(slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes, words = pytest.importorskip("matplotlib.axes").Axes, list[str]()
    text = axes.text
    monkeypatch.setattr(axes, "text", lambda self, x, y, word, **k: words.append(word) or text(self, x, y, word, **k))
    plan = mixed_plan(slots)
    image = Image.open(write_png(plan, tmp_path / "plan.png", title="$a$")).convert("RGB")
    document = ElementTree.fromstring(plan_document(plan, title="$a$"))
    assert sorted(words) == sorted(element.text or "" for element in document.iterfind(".//{*}text"))
    assert image.size == tuple(int(1.92 * int(size)) for size in document.attrib["viewBox"].split()[2:])
    rects = [rect for rect in document.iterfind(".//{*}rect") if "data-d" in rect.attrib]
    sizes = [[float(rect.attrib[name]) for name in ("x", "y", "width", "height")] for rect in rects]
    places = [(1.92 * (x + 3), 1.92 * (HEAD + y + 3)) if min(wide, high) > 6 else () for x, y, wide, high in sizes]
    corners = {
        (rect.attrib["class"], image.getpixel(place)) for rect, place in zip(rects, places, strict=True) if place
    }
    assert len(corners) > 3 and corners <= {(f"b k{i}", ImageColor.getrgb(fill)) for i, fill in enumerate(FILLS)}


def test_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'longspan\[viz\]'"):
        write_png(mixed_plan(2), tmp_path / "plan.png")
