"""Values as horizontal bars with names before and words behind them, as an SVG document for pages that are not ours.

A bar that is much longer than the others ends at the edge with a gap in it, so that the others can be told apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longspan.report.charts.document import STYLE
from longspan.report.markup import label, tag, text

WIDTH, ROW, BAR, LEFT, RIGHT = 820, 30.0, 18.0, 130.0, 330.0
LINE = 17.0
CUT = 2.5  # of the median: longer bars are cut


@dataclass(frozen=True)
class NamedBar:
    """A bar: its name, its value, the words behind it, and the place of its colour."""

    name: str
    value: float
    words: str
    color: int = 0


def bar_document(title: str, bars: Sequence[NamedBar], unit: str, reference: tuple[float, str] | None = None) -> str:
    """Bars from 0 as the text of an .svg file; the reference is a line at a value, with its words.

    >>> Path("planners.svg").write_text(bar_document("Planners", [NamedBar("dynamic", 7.0, "7.0 s")], "seconds"))
    """
    titles = title.splitlines()
    top = 34.0 + LINE * len(titles)
    bottom = top + ROW * len(bars)
    values = sorted(bar.value for bar in bars)
    cut = CUT * values[(len(values) - 1) // 2]
    scale = (WIDTH - LEFT - RIGHT) / max(value for value in values if value <= cut)
    return tag(
        "svg",
        tag("title", text("; ".join(titles))),
        tag("style", STYLE),
        tag("rect", width=WIDTH, height=round(bottom + 34), fill="#fff"),
        *(label(line, 12, 20 + LINE * i, "start", "" if i else "title") for i, line in enumerate(titles)),
        *(part for i, bar in enumerate(bars) for part in _row(bar, top + ROW * i, scale, cut)),
        *_reference(reference, scale, top, bottom),
        label(unit, LEFT, bottom + 20, "start"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {bottom + 34:.0f}",
        role="img",
    )


def _row(bar: NamedBar, y: float, scale: float, cut: float) -> Iterator[str]:
    width = min(bar.value * scale, WIDTH - LEFT - RIGHT + 30.0)
    yield label(bar.name, LEFT - 8, y + BAR / 2 + 4, "end", "strong")
    yield tag("rect", class_=f"mark c{bar.color}", x=LEFT, y=y, width=width, height=BAR)
    if bar.value > cut:
        yield tag("path", d=f"M{LEFT + width - 20:.1f} {y + BAR + 2:.1f}l8 {-BAR - 4}h6l-8 {BAR + 4}z", fill="#fff")
    yield label(bar.words, LEFT + width + 8, y + BAR / 2 + 4, "start")


def _reference(reference: tuple[float, str] | None, scale: float, top: float, bottom: float) -> Iterator[str]:
    if reference:
        x = LEFT + reference[0] * scale
        yield tag("path", class_="reference", d=f"M{x:.1f} {top - 6}V{bottom}")
        yield label(reference[1], x, bottom + 20, "middle", "halo")
