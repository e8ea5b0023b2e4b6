"""The parts of a run's report about its evaluations: each degree, each set, and loss by position and by length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from longspan.evaluation.result import SAME, largest_difference
from longspan.plain_text import bytes_text, number_text
from longspan.report.chart import COLORS, Chart, Series, chart_figure
from longspan.report.markup import scrolling_table, section, tag, text
from longspan.report.run_folder import EvalRow, RunFolder, last_evaluations

WIDTH, HEIGHT = 560, 260
Buckets = Sequence[Sequence[Any]]  # (first, last, mean loss, targets, documents) of each; a loss may be None
_CHARTS = (
    ("Loss by position", "position in the document, from"),
    ("Loss by document length", "tokens of the document, from"),
)


def bucket_charts(by_position: Mapping[str, Buckets], by_length: Mapping[str, Buckets]) -> Iterator[Chart]:
    """Yield the chart by position and that by length, with a curve for each of the first COLORS names.

    A chart is left out if its curves have one bucket only.
    """
    for (title, x_label), curves in zip(_CHARTS, (by_position, by_length), strict=True):
        firsts = sorted({bucket[0] for buckets in curves.values() for bucket in buckets})
        if len(firsts) > 1:
            first_curves = enumerate(list(curves.items())[:COLORS])
            series = tuple(_bucket_series(name, buckets, firsts, color) for color, (name, buckets) in first_curves)
            names = tuple(map(_start_text, firsts))
            yield Chart(
                title, series, "nats per predicted token", x_label, WIDTH, HEIGHT, x_names=names, y_format="loss"
            )


def _bucket_series(name: str, buckets: Buckets, firsts: Sequence[int], color: int) -> Series:
    # of a bucket 0 is its beginning, 2 its loss: None if it has no targets
    losses = {bucket[0]: bucket[2] for bucket in buckets if bucket[2] is not None}
    x = np.array([firsts.index(first) for first in losses], float)
    return Series(name, x, np.array(list(losses.values()), float), color, "marks")


def _start_text(first: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if first >= size and first % size == 0:
            return f"{first // size}{unit}"
    return f"{first:,}"


WIDTHS = {"wide": 1120, "narrow": 480}  # of a chart; the page shows the one that suits its own width
HELD_OUT = "held out"  # the name of a run's held-out documents in tables
_LABELS = {"token_accuracy": "accuracy", "bits_per_byte": "bits per byte"}


def evaluation_sections(run: RunFolder) -> Iterator[str]:
    """Yield the sections in order: degrees, sets, loss by position and by length; none without evaluations."""
    degrees = run.final or last_evaluations(run.held_out)
    if degrees:
        yield degrees_table(degrees)
    sets = evaluations_by_set(run)
    if any(sets):  # any with a name: the held-out documents have none, and were shown above
        yield section(
            "Evaluation sets", *chart_at_both_widths(lambda width: _sets_chart(sets, width)), _sets_table(sets)
        )
    charts = list(_latest_bucket_charts(sets))
    if charts:
        note = (
            "Mean loss of the tokens predicted at these positions, and of whole documents of these lengths, from each "
            "mark to the next. A model that fails on long documents shows a loss that rises to the right."
        )
        figures = tag("div", *map(chart_figure, charts), class_="grid-2")
        yield section("Loss by position and by length", tag("p", note, class_="note"), figures)


def evaluations_by_set(run: RunFolder) -> dict[str, list[EvalRow]]:
    """Return the evaluations of every set by its name, one for each step.

    Of a step's evaluations the last in the order of `record_key` is taken: that under a plan of several degrees, else
    that at the largest degree. The held-out documents, whose name is "", come first.
    """
    sets = dict[str, dict[int, EvalRow]]()
    for row in sorted(run.evaluations, key=lambda row: (bool(row.name), row.step)):
        sets.setdefault(row.name, {})[row.step] = row
    return {name: list(rows.values()) for name, rows in sets.items()}


def chart_at_both_widths(chart: Callable[[int], Chart]) -> Iterator[str]:
    """Return the figures of a chart for wide and for narrow pages."""
    return (chart_figure(chart(width), css_class=name) for name, width in WIDTHS.items())


def _sets_chart(sets: dict[str, list[EvalRow]], width: int) -> Chart:
    series = [
        Series(
            name or HELD_OUT, np.array([r.step for r in rows]), np.array([r.loss for r in rows]), i % COLORS, "marks"
        )
        for i, (name, rows) in enumerate(sets.items())
    ]
    return Chart(
        "Loss of each set", tuple(series), "nats per predicted token", width=width, height=300, y_format="loss"
    )


def _sets_table(sets: dict[str, list[EvalRow]]) -> str:
    rows = [of_set[-1] for of_set in sets.values()]
    metrics = list(dict.fromkeys(name for row in rows for name, _ in row.metrics))
    names = ["set", "step", "loss", "perplexity", *(_LABELS.get(name, name) for name in metrics)]
    names += ["documents", "tokens", "cp"]
    table_rows = list[list[str]]()
    for row in rows:
        values = dict(row.metrics)
        cells = [row.name or HELD_OUT, f"{row.step:,}", f"{row.loss:.6f}", row.perplexity]
        cells += [_metric_text(name, values[name]) if name in values else "–" for name in metrics]
        cells += [f"{row.documents:,}" if row.documents else "–", f"{row.tokens:,}", row.degree]
        table_rows.append(cells)
    return scrolling_table(names, table_rows)


def _metric_text(name: str, value: float) -> str:
    return f"{100 * value:.2f}%" if name == "token_accuracy" else number_text(value, 5)


def _latest_bucket_charts(sets: dict[str, list[EvalRow]]) -> Iterator[Chart]:
    """With a single set its first evaluation is shown too, so that the change over the run is seen."""
    rows = {name or HELD_OUT: of_set[-1] for name, of_set in sets.items()}
    if len(sets) == 1 and (of_set := next(iter(sets.values())))[0].step < of_set[-1].step:
        rows = {f"after step {row.step:,}": row for row in (of_set[-1], of_set[0])}
    by_position, by_length = (
        {name: getattr(row, buckets) for name, row in rows.items()} for buckets in ("by_position", "by_length")
    )
    yield from bucket_charts(by_position, by_length)


def degrees_table(rows: Sequence[EvalRow]) -> str:
    """Return the section with a table of evaluations of the same weights on the same documents, one row a degree.

    Added memory has a column if any evaluation recorded it, as on GPUs.
    """
    base, memory = rows[0], any(row.activation_bytes for row in rows)
    names = ("cp", "loss", "perplexity", "tokens", *(["added memory of a GPU"] * memory), "relative difference", "")
    head = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    table = tag("table", head, tag("tbody", *(_degree_row(row, base, memory=memory) for row in rows)))
    note = (
        f"The weights after step {base.step:,}, the same documents. "
        f"Equal means within {SAME:g} of the first row, relative."
    )
    return section("Evaluation at each degree", tag("p", note, class_="note"), tag("div", table, class_="scroll"))


def _degree_row(row: EvalRow, base: EvalRow, *, memory: bool) -> str:
    """Losses are equal if they are of as many tokens and differ by SAME at most, relative to the first. With `memory`
    the row has a cell for the bytes that the evaluation added to a GPU.
    """
    relative = (row.loss - base.loss) / abs(base.loss) if base.loss else 0.0
    good = abs(relative) <= SAME and row.tokens == base.tokens
    verdict = ("reference", None) if row is base else ("✓ equal", "good") if good else ("✗ differs", "bad")
    difference = "" if row is base else f"{relative:+.1e}"
    added = [bytes_text(row.activation_bytes)] * memory
    cells = (row.degree, f"{row.loss:.9f}", row.perplexity, f"{row.tokens:,}", *added, difference)
    return tag("tr", *(tag("td", text(cell)) for cell in cells), tag("td", verdict[0], class_=verdict[1]))


def samples_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of samples with images: for each set a table of what was shown, expected and predicted."""
    names = dict.fromkeys(str(row["name"]) for row in rows)
    tables = (_samples_table(name, [row for row in rows if row["name"] == name]) for name in names)
    note = "Each token of an answer is predicted with the true ones before it."
    return section("Samples", tag("p", text(note), class_="note"), *tables)


def _samples_table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    right_answers = sum(row["answer"] == row["predicted"] for row in rows)
    caption = tag(
        "p", text(f"{name or 'held-out documents'}: {right_answers} of {len(rows)} answers are right"), class_="note"
    )
    head = tag("tr", *(tag("th", text(word)) for word in ("images", "text", "answer", "predicted")))
    return caption + tag("div", tag("table", head, *map(_sample_row, rows), class_="samples"), class_="scroll")


def _sample_row(row: Mapping[str, Any]) -> str:
    right = row["answer"] == row["predicted"]
    cells = [tag("td", *_image_tags(row["images"])), tag("td", text(row["text"])), tag("td", text(row["answer"]))]
    return tag("tr", *cells, tag("td", text(row["predicted"]), class_="good" if right else "bad"))


def _image_tags(pictures: Sequence[str]) -> Iterator[str]:
    for i, picture in enumerate(pictures, 1):
        if isinstance(picture, str) and picture.replace("+", "").replace("/", "").rstrip("=").isalnum():  # else markup
            yield f'<img src="data:image/png;base64,{picture}" alt="image {i}" class="sample">'


def evaluations_by_degree(run: RunFolder) -> Iterator[tuple[str, list[EvalRow]]]:
    """Yield names of curves and their evaluations of the held-out documents: a curve for each degree.

    The degree that was evaluated most often comes first. A degree whose every loss equals the first degree's at the
    same step gets no curve, which would lie on the first one. The first curve's name lists the degrees without a curve,
    with the last two of their steps.
    """
    by_degree = dict[str, list[EvalRow]]()
    for row in run.held_out:
        by_degree.setdefault(row.degree, []).append(row)
    if not by_degree:
        return
    main = max(by_degree, key=lambda degree: len(by_degree[degree]))
    losses = {row.step: row.loss for row in by_degree[main]}
    equal = {
        degree: rows
        for degree, rows in by_degree.items()
        # at a step without the main degree the difference from infinity is NaN, which is not <= SAME
        if degree != main and all(largest_difference([losses.get(r.step, np.inf), r.loss]) <= SAME for r in rows)
    }
    steps = sorted({row.step for rows in equal.values() for row in rows})
    note = f"; equal at {', '.join(equal)} after step {', '.join(f'{step:,}' for step in steps[-2:])}" if equal else ""
    yield f"evaluation, {_degree_name(main)}{note}", by_degree[main]
    for degree, rows in by_degree.items():
        if degree != main and degree not in equal:
            yield f"evaluation, {_degree_name(degree)}", rows


def _degree_name(degree: str) -> str:
    return f"cp {degree}" if degree.isdecimal() else f"{degree} plans"
