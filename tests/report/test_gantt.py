"""Pictures of a plan: well-formed, complete, of bounded size at 8 and at 1024 slots."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic
from longspan.report import gantt_svg, plan_document, write_png
from longspan.report.gantt import FILLS, plan_bars, plan_part
from longspan.report.page import room_text
from tests.report.runs import mixed_plan


@pytest.mark.parametrize("wide", [1120, 400])
@pytest.mark.parametrize("unit", ["seconds", "rows"])
@pytest.mark.parametrize("slots", [0, 1, 8, 64, 1024])
def test_svg_is_well_formed_and_bounded(slots: int, unit: str, wide: int) -> None:
    plan = mixed_plan(slots) if slots else Plan(4, (), (MicroBatch(), MicroBatch()), 0)  # without documents
    svg = gantt_svg(plan, unit=unit, width=wide)  # pyright: ignore[reportArgumentType]
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
    part = plan_part(plan, "step 1", None, None, measured=True)
    words = {name: value for name, value in part["documents"][1] if name != "group: time as priced"}
    assert words == {
        "tokens": "500",
        "micro-batch": "0",
        "slots": "1–3",
        "degree": "3, p2p/all_gather",
        "group of 2 documents, each padded to 500: rows on a slot": "334",
    }
    assert part["documents"].keys() == {0, 1} and dict(part["facts"])["groups"].startswith("1 of degree 3 ")


def test_a_document_has_one_colour_in_both_units() -> None:
    colors = set[tuple[str, str]]()
    for svg in (gantt_svg(mixed_plan(16)), gantt_svg(mixed_plan(16), unit="rows")):
        rects = ElementTree.fromstring(svg).iter("rect")
        colors |= {(r.attrib["data-d"], r.attrib["class"]) for r in rects if "data-d" in r.attrib}
    assert len(dict(colors)) == len(colors) and len({css for _, css in colors}) == len(FILLS)
    sheet = room_text("page.css")
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
                assert picture.color_of[a.document] != picture.color_of[b.document], (a, b)


def test_a_plan_is_an_svg_document_of_its_own() -> None:
    document = plan_document(mixed_plan(16), title="a<b>")
    root = ElementTree.fromstring(document)
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    assert root.attrib["xmlns"] if "xmlns" in root.attrib else root.tag.startswith("{http://www.w3.org/2000/svg}")
    sizes = [svg.attrib for svg in root.iter("{http://www.w3.org/2000/svg}svg") if svg is not root]
    assert all({"width", "height"} <= size.keys() for size in sizes)  # a style does not size what is inside
    assert (width, height) > (1100, 300) and "a&lt;b&gt;" in document and "in another colour" in document


@pytest.mark.parametrize("slots", [4, 1024])
def test_png_draws_documents_on_their_slots_and_names_them(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib.figure")  # builds rectangles of its own when it is imported
    axes, patches = pytest.importorskip("matplotlib.axes").Axes, pytest.importorskip("matplotlib.patches")
    drawn, names, lines = set[tuple[float, ...]](), list[str](), list[float]()

    class NotedRectangle(patches.Rectangle):
        def __init__(self, corner: tuple[float, float], width: float, height: float, **options: object) -> None:
            drawn.add((*corner, width, height))
            super().__init__(corner, width, height, **options)

    monkeypatch.setattr(patches, "Rectangle", NotedRectangle)
    text, axhline = axes.text, axes.axhline
    monkeypatch.setattr(
        axes, "text", lambda self, x, y, name, **look: names.append(name) or text(self, x, y, name, **look)
    )
    monkeypatch.setattr(axes, "axhline", lambda self, y, **look: lines.append(y) or axhline(self, y, **look))
    lengths = [60000, 42000, 20000, *range(500, 6000, 300)]
    plan = plan_dynamic(lengths, Layout(4), max_tokens_per_slot=16384, node_size=2) if slots == 4 else mixed_plan(slots)
    head = write_png(plan, tmp_path / "plan.png").read_bytes()[:24]
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and 2000 <= width <= 2200 and 300 <= height <= 1400
    if slots == 4:
        assert {(b.start, b.slot, b.stop - b.start, b.slots) for b in plan_bars(plan).bars} <= drawn and lines == [2]
        assert {"0 · 60,000", "1 · 42,000", "2 · 20,000"} <= set(names) and len(names) > len(lengths) // 2


def test_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'longspan\[viz\]'"):
        write_png(mixed_plan(2), tmp_path / "plan.png")
