"""Passkey retrieval in the report of a run: the newest grid of each set as a picture, and over steps as curves."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from longspan.evaluation.result import PasskeyGrid
from longspan.report.charts.chart import Chart, Series, chart_figure
from longspan.report.evaluations.heat_map import passkey_picture
from longspan.report.markup import tag

COLORS = 6  # of curves


def passkey_grids(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, PasskeyGrid], ...]:
    """The set and the grid of every row of metrics.jsonl that has one, by step; a step that was repeated counts once.

    A row whose grid cannot be read is left out.
    """
    grids = dict[tuple[str, int, int], PasskeyGrid]()
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):
            grid = PasskeyGrid.from_json(row["passkey"])
            grids[str(row.get("eval_name", "")), grid.step, grid.cp] = grid
    return tuple((key[0], grids[key]) for key in sorted(grids))


def passkey_section(grids: Sequence[tuple[str, PasskeyGrid]]) -> str:
    """The section of the page."""
    return tag("section", tag("h2", "Passkey retrieval"), *_of_sets(grids))


def _of_sets(grids: Sequence[tuple[str, PasskeyGrid]]) -> Iterator[str]:
    for name in dict.fromkeys(name for name, _ in grids):
        of_set = [grid for other, grid in grids if other == name]
        newest = of_set[-1]
        yield tag("figure", tag("div", passkey_picture(newest, name=name), class_="scroll"), class_="chart")
        alike = [grid for grid in of_set if (grid.lengths, grid.cp) == (newest.lengths, newest.cp)]
        if len(alike) > 1:
            yield chart_figure(_over_steps(alike, name))


def _over_steps(grids: Sequence[PasskeyGrid], name: str) -> Chart:
    """The share of keys over steps, a curve for each length."""
    steps = np.array([grid.step for grid in grids])
    series = (
        Series(f"{length:,} tokens", steps, np.array([grid.of_length(i) for grid in grids]), i % COLORS, "marks")
        for i, length in enumerate(grids[0].lengths)
    )
    title = f"Keys retrieved ({name})" if name else "Keys retrieved"
    return Chart(title, tuple(series), "of all depths", width=1120, height=260, y_format="percent", zero=True)
