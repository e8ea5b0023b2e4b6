"""Passkey retrieval as an SVG: a cell for each length and depth, with its share of keys as a colour and a number.

The drawing is for a file or a page, light or dark. Cells go from red at 0% over yellow to blue at 100%, which
are told apart with any colour vision (ColorBrewer's RdYlBu).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from longspan.config.data_sections import PASSKEY
from longspan.errors import plural
from longspan.evaluation.result import PasskeyGrid
from longspan.report.chart import COLORS, Chart, Series, chart_figure
from longspan.report.markup import label, tag, text

RAMP = ((165, 0, 38), (244, 109, 67), (254, 224, 144), (116, 173, 209), (49, 54, 149))  # at 0, 1/4, 1/2, 3/4 and 1
EVEN = 0.18  # luminance of colours on which black and white are equally clear
CELL, ROW = 68.0, 34.0  # pixels: width and height of a cell
LEFT, TOP, BOTTOM, LEAST_WIDTH = 62.0, 74.0, 52.0, 600.0  # pixels around the cells, and of the whole
GOOD = "Keys whose every token is right: 100% in every cell is best."
AXES = "tokens of the document; depth 0: the key stands at its beginning, 1: at its end"
STYLE = """
.heat { max-width: 100%; height: auto; }
.heat .sheet { fill: #ffffff; } .heat text { font: 12px system-ui, sans-serif; fill: #1d2126; }
.heat .heading { font-size: 15px; font-weight: 600; } .heat .soft { fill: #5d6670; }
.heat .on-dark { fill: #ffffff; } .heat .on-light { fill: #000000; }
@media (prefers-color-scheme: dark) {
  .heat .sheet { fill: #1b1f25; } .heat text { fill: #e8eaed; } .heat .soft { fill: #9aa4af; }
  .heat .on-dark { fill: #ffffff; } .heat .on-light { fill: #000000; }
}
"""


def passkey_picture(grid: PasskeyGrid, *, name: str = "") -> str:
    """Return the picture of a grid, of the evaluation set or weights `name`; lengths go to the right, depths down.

    >>> Path("passkey.svg").write_text(passkey_picture(evaluate(model, documents, choice, world).passkey))
    """
    return passkey_pictures([(name, grid)])


def passkey_pictures(grids: Sequence[tuple[str, PasskeyGrid]]) -> str:
    """Return one picture of several grids, one below the other, each with the name of its set or weights."""
    heights = [TOP + ROW * len(grid.depths) + BOTTOM for _, grid in grids]
    width = max([LEAST_WIDTH, *(LEFT + CELL * len(grid.lengths) + 20 for _, grid in grids)])
    starts = itertools.accumulate(heights, initial=0.0)  # of each drawing, and the end of the last
    drawings = (
        tag("g", *_grid_drawing(grid, name), transform=f"translate(0 {y:g})")
        for (name, grid), y in zip(grids, starts, strict=False)
    )
    return tag(
        "svg",
        tag("style", STYLE),
        tag("rect", class_="sheet", width=width, height=sum(heights)),
        *drawings,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {sum(heights):g}",
        width=f"{width:g}",
        class_="heat",
        role="img",
        aria_label=". ".join(f"{_heading(grid, name)}. {grid.table()}" for name, grid in grids),
    )


def _grid_drawing(grid: PasskeyGrid, name: str) -> Iterator[str]:
    """Yield the titles, cells and axes of a grid."""
    bottom = TOP + ROW * len(grid.depths)
    yield label(_heading(grid, name), 16, 26, "start", "heading")
    yield label(f"After step {grid.step:,}, at cp {grid.cp}. {GOOD}", 16, 46, "start", "soft")
    yield label("depth", LEFT - 10, TOP - 8, "end", "soft")
    for j, depth in enumerate(grid.depths):
        yield label(f"{depth:g}", LEFT - 10, TOP + ROW * (j + 0.5) + 4, "end")
    for i, length in enumerate(grid.lengths):
        yield label(f"{length:,}", LEFT + CELL * (i + 0.5), bottom + 18, "middle")
        yield from (_draw_cell(grid, i, j) for j in range(len(grid.depths)))
    yield label(AXES, LEFT, bottom + 38, "start", "soft")


def _heading(grid: PasskeyGrid, name: str) -> str:
    """Write how many keys were retrieved, and of which set or weights; the name of the usual set is left out."""
    of_set = f" ({name})" if name not in ("", PASSKEY) else ""
    keys = f"{sum(map(sum, grid.retrieved)):,} of {plural(grid.documents, 'key')} retrieved"
    return f"Passkey retrieval{of_set}: {keys}"


def _draw_cell(grid: PasskeyGrid, i: int, j: int) -> str:
    """Return the cell of length number `i` and depth number `j`; a pointer over it shows its numbers."""
    share = grid.retrieved[i][j] / grid.samples
    color, dark = _share_color(share)
    x, y = LEFT + CELL * i, TOP + ROW * j
    tip = (
        f"{grid.lengths[i]:,} tokens, depth {grid.depths[j]:g}: {grid.retrieved[i][j]} of "
        f"{plural(grid.samples, 'key')}, loss of an answer's token {grid.losses[i][j]:.4f}"
    )
    box = tag("rect", x=x + 1, y=y + 1, width=CELL - 2, height=ROW - 2, rx=4, fill=color)
    number = label(f"{100 * share:.0f}%", x + CELL / 2, y + ROW / 2 + 4, "middle", "on-dark" if dark else "on-light")
    return tag("g", tag("title", text(tip)), box, number)


def _share_color(share: float) -> tuple[str, bool]:
    """Return the colour of a share, between those of RAMP, and whether it is dark enough for white digits.

    Luminance is the relative one of sRGB, with a gamma of 2.2.
    """
    red, green, blue = (
        round(np.interp(share, np.linspace(0, 1, len(RAMP)), primary)) for primary in zip(*RAMP, strict=True)
    )
    luminance = sum(
        w * (primary / 255) ** 2.2 for w, primary in zip((0.2126, 0.7152, 0.0722), (red, green, blue), strict=True)
    )
    return f"#{red:02x}{green:02x}{blue:02x}", luminance < EVEN


def passkey_grids(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, PasskeyGrid], ...]:
    """Return the set and the grid of every row of metrics.jsonl that has one, sorted by set, then by step.

    Of a step that a resumed run repeated the last grid counts.
    """
    grids = dict[tuple[str, int, int], PasskeyGrid]()
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):
            grid = PasskeyGrid.from_json(row["passkey"])
            grids[str(row.get("eval_name", "")), grid.step, grid.cp] = grid
    return tuple((key[0], grids[key]) for key in sorted(grids))


def passkey_section(grids: Sequence[tuple[str, PasskeyGrid]]) -> str:
    """Return the section of a run's page with the grids of its sets."""
    return tag("section", tag("h2", "Passkey retrieval"), *_figures_of_sets(grids))


def _figures_of_sets(grids: Sequence[tuple[str, PasskeyGrid]]) -> Iterator[str]:
    """Yield for each set the picture of its newest grid, and a chart over steps if older grids compare with it.

    Grids compare if they have the same lengths and degree.
    """
    for name in dict.fromkeys(name for name, _ in grids):
        grids_of_set = [grid for grid_name, grid in grids if grid_name == name]
        newest = grids_of_set[-1]
        yield tag("figure", tag("div", passkey_picture(newest, name=name), class_="scroll"), class_="chart")
        comparable = [grid for grid in grids_of_set if (grid.lengths, grid.cp) == (newest.lengths, newest.cp)]
        if len(comparable) > 1:
            yield chart_figure(_chart_over_steps(comparable, name))


def _chart_over_steps(grids: Sequence[PasskeyGrid], name: str) -> Chart:
    """Return the chart of the share of keys over steps, with a curve for each length; `name` is the set's."""
    steps = np.array([grid.step for grid in grids])
    series = (
        Series(f"{length:,} tokens", steps, np.array([grid.share_of_length(i) for grid in grids]), i % COLORS, "marks")
        for i, length in enumerate(grids[0].lengths)
    )
    title = f"Keys retrieved ({name})" if name else "Keys retrieved"
    return Chart(title, tuple(series), "of all depths", width=1120, height=260, y_format="percent", zero=True)
