"""Loss by position and by length of documents as charts: where does a model fail on long documents."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from longspan.report.charts.chart import Chart, Series

COLORS = 6  # of page.css, and curves of a chart at most
WIDTH, HEIGHT = 560, 260
Buckets = Sequence[Sequence[Any]]  # (first, last, mean loss, targets, documents) of each; a loss may be None
_CHARTS = (
    ("Loss by position", "position in the document, from"),
    ("Loss by document length", "tokens of the document, from"),
)


def bucket_charts(by_position: Mapping[str, Buckets], by_length: Mapping[str, Buckets]) -> Iterator[Chart]:
    """A chart of each, with a curve for every name; none where all documents are in one bucket."""
    for (title, x_label), curves in zip(_CHARTS, (by_position, by_length), strict=True):
        firsts = sorted({bucket[0] for buckets in curves.values() for bucket in buckets})
        if len(firsts) > 1:
            chosen = enumerate(list(curves.items())[:COLORS])
            series = tuple(_series(name, buckets, firsts, color) for color, (name, buckets) in chosen)
            names = tuple(map(_start_text, firsts))
            yield Chart(
                title, series, "nats per predicted token", x_label, WIDTH, HEIGHT, x_names=names, y_format="loss"
            )


def _series(name: str, buckets: Buckets, firsts: Sequence[int], color: int) -> Series:
    losses = {bucket[0]: bucket[2] for bucket in buckets if bucket[2] is not None}
    x = np.array([firsts.index(first) for first in losses], float)
    return Series(name, x, np.array(list(losses.values()), float), color, "marks")


def _start_text(first: int) -> str:
    """Where a bucket begins: powers of two in thousands of 1,024."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if first >= size and first % size == 0:
            return f"{first // size}{unit}"
    return f"{first:,}"
