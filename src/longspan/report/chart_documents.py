"""A chart as an SVG document of its own, for pages that are not ours: title, legend, curves and colours in one file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longspan.report.chart import Chart, Series, chart_svg, mark
from longspan.report.markup import label, tag, text
from longspan.report.pictures.bars import FILLS

HEAD = 42  # above the drawing, with the lines of the title: unit and legend
LINE = 17  # pixels from one line of a title to the next
# The colours of page.css, for light and for dark pages.
STYLE = """
svg{--card:#fff;--ink:#1d2126;--soft:#5d6670;--grid:#ecece8;--axis:#9aa4af;
--c0:#2f6fb3;--c1:#d1495b;--c2:#228833;--c3:#aa3377}
@media (prefers-color-scheme: dark){svg{--card:#1b1f25;--ink:#e8eaed;--soft:#9aa4af;--grid:#2c323a;--axis:#77808a;
--c0:#6aaeff;--c1:#ff8090;--c2:#5fcf73;--c3:#e083bd}}
text{font:12px system-ui,sans-serif;fill:var(--soft)}.title,.strong{font-weight:600;fill:var(--ink)}
.tick{font-size:11px}.paper{fill:var(--card)}
.grid{stroke:var(--grid);fill:none}.grid.short,.axis{stroke:var(--axis);fill:none}
.reference{stroke:var(--soft);stroke-dasharray:4 3;fill:none}
.halo{paint-order:stroke;stroke:var(--card);stroke-width:4px}.mark{stroke:var(--card);stroke-width:1.2}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve.faint{opacity:.38}
.curve.c0{stroke:var(--c0)}.curve.c1{stroke:var(--c1)}.curve.c2{stroke:var(--c2)}.curve.c3{stroke:var(--c3)}
.mark.c0{fill:var(--c0)}.mark.c1{fill:var(--c1)}.mark.c2{fill:var(--c2)}.mark.c3{fill:var(--c3)}
"""


def chart_document(chart: Chart) -> str:
    """Return the chart as the text of an .svg file, under its title and a legend; colours are 0 to 3, those of STYLE.

    >>> Path("degrees.svg").write_text(chart_document(chart))

    Entries of the legend stand side by side, each as wide as its name.
    """
    titles = chart.title.splitlines()
    head = HEAD + LINE * len(titles)
    width, height, x, legend = chart.width, chart.height + head, 52.0, list[str]()
    for series in chart.series:
        legend.append(_legend_mark(series, x, head - 14.0) + label(series.name, x + 14, head - 10.0, "start"))
        x += 34 + 6.6 * len(series.name)
    return (
        tag(
            "svg",
            tag("title", text(f"{'; '.join(titles)}: {chart.y_label} over {chart.x_label}")),
            tag("style", STYLE),
            tag("rect", class_="paper", width=width, height=height),
            *(label(line, 12, 18 + LINE * i, "start", "" if i else "title") for i, line in enumerate(titles)),
            *legend,
            label(chart.y_label, width - 14.0, head - 10.0, "end"),
            tag("svg", chart_svg(chart), y=head, width=width, height=chart.height),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            role="img",
        )
        + "\n"
    )


def _legend_mark(series: Series, x: float, y: float) -> str:
    """Return the line or mark of a curve, which stands before its name in the legend."""
    if series.kind == "marks":
        return mark(series.color, x + 4, y, 4.0)
    return tag("path", class_=f"curve {series.kind} c{series.color}", d=f"M{x - 4:.1f} {y:.1f}h14")


# Pixels: the whole width, from bar to bar, a bar's height, and the room for names before and words behind the bars.
WIDTH, ROW, BAR, LEFT, RIGHT = 820, 30.0, 18.0, 130.0, 330.0
CUT = 2.5  # of the median: longer bars are cut


@dataclass(frozen=True)
class NamedBar:
    """A bar: its name, its value, the words behind it, and the number of its colour in the style."""

    name: str
    value: float
    words: str
    color: int = 0


def bar_document(title: str, bars: Sequence[NamedBar], unit: str, reference: tuple[float, str] | None = None) -> str:
    """Return bars from 0 as the text of an .svg file; the reference is a line at a value, with its words.

    >>> Path("planners.svg").write_text(bar_document("Planners", [NamedBar("dynamic", 7.0, "7.0 s")], "seconds"))

    A bar that is longer than CUT times the median is cut, so that other bars stay readable: the longest of those that
    are not cut sets the scale.
    """
    titles = title.splitlines()
    top = 34.0 + LINE * len(titles)
    bottom = top + ROW * len(bars)
    values = sorted(bar.value for bar in bars)
    cut = CUT * values[(len(values) - 1) // 2]
    scale = (WIDTH - LEFT - RIGHT) / (max(value for value in values if value <= cut) or 1.0)
    return tag(
        "svg",
        tag("title", text("; ".join(titles))),
        tag("style", STYLE),
        tag("rect", class_="paper", width=WIDTH, height=round(bottom + 34)),
        *(label(line, 12, 20 + LINE * i, "start", "" if i else "title") for i, line in enumerate(titles)),
        *(element for i, bar in enumerate(bars) for element in _bar_row(bar, top + ROW * i, scale, cut)),
        *_reference_elements(reference, scale, top, bottom),
        label(unit, LEFT, bottom + 20, "start"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {bottom + 34:.0f}",
        role="img",
    )


def _bar_row(bar: NamedBar, y: float, scale: float, cut: float) -> Iterator[str]:
    """Yield a bar with its name and words.

    A bar ends at most 30 pixels behind the longest whole one; a value above `cut` gets a white stroke through its bar.
    """
    width = min(bar.value * scale, WIDTH - LEFT - RIGHT + 30.0)
    yield label(bar.name, LEFT - 8, y + BAR / 2 + 4, "end", "strong")
    yield tag("rect", class_=f"mark c{bar.color}", x=LEFT, y=y, width=width, height=BAR)
    if bar.value > cut:
        yield tag("path", d=f"M{LEFT + width - 20:.1f} {y + BAR + 2:.1f}l8 {-BAR - 4}h6l-8 {BAR + 4}z", fill="#fff")
    yield label(bar.words, LEFT + width + 8, y + BAR / 2 + 4, "start")


def _reference_elements(reference: tuple[float, str] | None, scale: float, top: float, bottom: float) -> Iterator[str]:
    """Yield the reference's line at its value, with its words below; nothing without a reference."""
    if reference:
        x = LEFT + reference[0] * scale
        yield tag("path", class_="reference", d=f"M{x:.1f} {top - 6}V{bottom}")
        yield label(reference[1], x, bottom + 20, "middle", "halo")


@dataclass(frozen=True)
class StackedBar:
    """A bar of several parts, one after another from 0: its name, the value of each part, and the words behind it."""

    name: str
    parts: Mapping[str, float]
    words: str


def stack_document(
    title: str, bars: Sequence[StackedBar], unit: str, reference: tuple[float, str] | None = None
) -> str:
    """Return bars of parts as the text of an .svg file, with a legend.

    Bars begin at 0 and share one scale, on which the longest bar and the reference fit. All have the same parts, whose
    colours are those of FILLS: at most 16 parts may be over 0 in any bar, and others are not in the legend. The
    reference is a line at a value, with its words.

    >>> Path("memory.svg").write_text(stack_document("Memory", [StackedBar("none", {"kept": 3.0}, "3 GiB")], "GiB"))
    """
    titles = title.splitlines()
    all_names = dict.fromkeys(name for bar in bars for name in bar.parts)
    names = [name for name in all_names if any(bar.parts.get(name) for bar in bars)]
    top = 34.0 + LINE * (len(titles) + 1)
    bottom = top + ROW * len(bars)
    largest_value = max([sum(bar.parts.values()) for bar in bars] + [reference[0] if reference else 0.0]) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / largest_value
    return tag(
        "svg",
        tag("title", text("; ".join(titles))),
        tag("style", STYLE),
        tag("rect", class_="paper", width=WIDTH, height=round(bottom + 34)),
        *(label(line, 12, 20 + LINE * i, "start", "" if i else "title") for i, line in enumerate(titles)),
        *_stack_legend(names, top - 20),
        *_reference_elements(reference, scale, top, bottom),
        *(element for i, bar in enumerate(bars) for element in _stack_row(bar, names, top + ROW * i, scale)),
        label(unit, 12, bottom + 20, "start"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {bottom + 34:.0f}",
        role="img",
    )


def _stack_legend(names: Sequence[str], y: float) -> Iterator[str]:
    """Yield a coloured square and a name for each part, in one row."""
    x = 12.0
    for index, name in enumerate(names):
        yield tag("rect", x=x, y=y - 9, width=10, height=10, fill=FILLS[index])
        yield label(name, x + 14, y, "start")
        x += 30 + 6.6 * len(name)


def _stack_row(bar: StackedBar, names: Sequence[str], y: float, scale: float) -> Iterator[str]:
    """Yield the parts of a bar end to end, with its name before and its words behind."""
    yield label(bar.name, LEFT - 8, y + BAR / 2 + 4, "end", "strong")
    x = LEFT
    for index, name in enumerate(names):
        width = bar.parts.get(name, 0.0) * scale
        yield tag("rect", x=x, y=y, width=width, height=BAR, fill=FILLS[index])
        x += width
    yield label(bar.words, x + 8, y + BAR / 2 + 4, "start", "halo")
