"""Evaluations on pages: each degree, each set, loss by position and by length; and `longspan eval`'s page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longspan.errors import plural
from longspan.evaluation.result import HELD_OUT, SAME
from longspan.evaluation.saved_results import Difference
from longspan.plain_text import bytes_text, number_text, seconds_text
from longspan.report.page import COLORS, Part, chart, curve, page, page_head, section, table
from longspan.report.run_folder import EvalRow, RunFolder
from longspan.run.facts import time_and_command
from longspan.run.metrics import COMPLETIONS, read_metrics

_STEPS = 3  # the last ones whose completions a page shows
# A page shows at most this many completions.
_ROWS = 400
# A page shows at most this many characters of a prompt or completion.
_CHARACTERS = 4000
NATS = "nats per predicted token"
SCORED = "mean of what is scored"
_LABELS = {"token_accuracy": "accuracy", "bits_per_byte": "bits per byte"}


def degree_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the table of the last evaluations of the held-out documents, a row for each degree. Losses are equal if
    they are of as many tokens and differ by SAME at most, relative to the first.
    """
    if not (rows := run.newest_by_degree):
        return
    base = rows[0]
    has_memory_column = any(row.activation_bytes for row in rows)
    cells = list[list[object]]()
    for row in rows:
        relative = (row.loss - base.loss) / abs(base.loss) if base.loss else 0.0
        difference = f"{relative:+.1e}"
        if row is base:
            difference = ""
            verdict = ["reference", ""]
        elif abs(relative) <= SAME and row.tokens == base.tokens:
            verdict = ["✓ equal", "good"]
        else:
            verdict = ["✗ differs", "bad"]
        cells.append([row.degree, f"{row.loss:.9f}", verdict, difference, row.perplexity, f"{row.tokens:,}"])
        if has_memory_column:
            cells[-1].append(bytes_text(row.activation_bytes))
    names = ["cp", "loss", "", "relative difference", "perplexity", "tokens"]
    if has_memory_column:
        names.append("added memory of a GPU")
    note = f"The weights after step {base.step:,}, the same documents. "
    note += f"Equal means within {SAME:g} of the first row, relative."
    yield section("Evaluation at each degree", {"note": note}, table(names, cells))


def completion_sections(run: RunFolder) -> Iterator[Part]:
    """Yield what the model wrote behind each prompt after the first and the last evaluations."""
    rows = read_metrics(run.path / COMPLETIONS)
    steps = sorted({row["step"] for row in rows})
    shown = {*steps[:1], *steps[-_STEPS:]}
    cells = [
        [f"{row['step']:,}", *(str(row.get(name, ""))[:_CHARACTERS] for name in ("prompt", "completion"))]
        for row in sorted(rows, key=lambda row: (str(row.get("prompt")), row["step"]))
        if row["step"] in shown
    ][:_ROWS]
    if cells:
        note = f"After {plural(len(shown), 'evaluation')} of {len(steps)}; {COMPLETIONS} has all."
        yield section("Completions", {"note": note}, table(("step", "prompt", "completion"), cells))


def loss_unit(run: RunFolder) -> str:
    """Say of what losses of a run are means: of predicted tokens, of preferences, or of what a model scores."""
    if run.configured_value("train", "loss"):
        return "mean of pairs or answers"
    return SCORED if run.configured_value("model", "num_labels") else NATS


def sections_of_sets(run: RunFolder) -> Iterator[Part]:
    """Yield the curves and the last row of every set, if any has a name, and losses by position and by length. With a
    single set its first evaluation is shown too, so that the change over the run is seen.
    """
    sets = evaluations_by_set(run)
    last_rows = {name or HELD_OUT: rows[-1] for name, rows in sets.items()}
    if any(sets):  # held-out documents, without a name, are in the table of degrees already
        curves = (_loss_marks(name or HELD_OUT, rows, color) for color, (name, rows) in enumerate(sets.items()))
        losses = chart("Loss of each set", loss_unit(run), *curves, format="loss", tall=True)
        rows_and_cells = [(row, {"set": name, "step": f"{row.step:,}"}) for name, row in last_rows.items()]
        yield section("Evaluation sets", {"charts": [losses]}, evaluations_part(rows_and_cells))
    charted = last_rows
    if len(sets) == 1 and (rows := next(iter(sets.values())))[0].step < rows[-1].step:
        charted = {f"after step {row.step:,}": row for row in (rows[-1], rows[0])}
    if charts := [*bucket_charts(charted, loss_unit(run))]:
        by_position = (
            "of the tokens predicted at these positions, and "
            if any(r.by_position for r in charted.values())
            else ""
        )
        note = (
            f"Mean loss {by_position}of whole documents of these lengths, from each mark to the next. A model that "
            "fails on long documents shows a loss that rises to the right."
        )
        yield section("Loss by position and by length", {"note": note}, {"charts": charts})


def _loss_marks(name: str, rows: Sequence[EvalRow], color: int) -> Part:
    return curve(name, [row.step for row in rows], [row.loss for row in rows], color, "marks")


def evaluations_by_set(run: RunFolder) -> dict[str, list[EvalRow]]:
    """Return the evaluations of every set by its name, one for each step. Of several after one step it is the last in
    the order of `record_key`: the one under a plan of several degrees, else the one at the largest degree. The held-out
    documents, "", come first.
    """
    sets = dict[str, dict[int, EvalRow]]()
    for row in sorted(run.evaluations, key=lambda row: (bool(row.name), row.step)):
        sets.setdefault(row.name, {})[row.step] = row
    return {name: list(rows.values()) for name, rows in sets.items()}


def evaluations_part(rows: Sequence[tuple[EvalRow, Mapping[str, str]]]) -> Part:
    """Return a table of evaluations, each with cells of its own by the names of their columns, which come first."""
    metrics = list(dict.fromkeys(name for row, _ in rows for name, _ in row.metrics))
    first_names = [name for _, first_cells in rows[:1] for name in first_cells]
    names = [*first_names, "loss", "perplexity", *(_LABELS.get(name, name) for name in metrics)]
    cells = list[list[str]]()
    for row, first_cells in rows:
        words = [_metric_text(name, dict(row.metrics).get(name)) for name in metrics]
        counts = [f"{row.documents:,}" if row.documents else "–", f"{row.tokens:,}", row.degree]
        cells.append([*first_cells.values(), f"{row.loss:.6f}", row.perplexity, *words, *counts])
    return table([*names, "documents", "tokens", "cp"], cells)


def _metric_text(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f}%" if name in ("token_accuracy", "accuracy") else number_text(value, 5)


def bucket_charts(rows: Mapping[str, EvalRow], unit: str) -> Iterator[Part]:
    """Yield the chart by position and that by length, with a curve for each of the first COLORS names; one bucket makes
    no chart.
    """
    for key, kind, x_label in (
        ("by_position", "position", "position in the document, from"),
        ("by_length", "document length", "tokens of the document, from"),
    ):
        by_name = {name: getattr(row, key) for name, row in rows.items()}
        firsts = sorted({bucket[0] for buckets in by_name.values() for bucket in buckets})
        if len(firsts) > 1:
            curves = list[Part]()
            for color, (name, buckets) in enumerate([*by_name.items()][:COLORS]):
                # Field 0 of a bucket is its beginning, 2 its loss.
                losses = {firsts.index(bucket[0]): bucket[2] for bucket in buckets}
                curves.append(curve(name, losses, losses.values(), color, "marks"))
            starts = [_position_text(first) for first in firsts]
            yield chart(f"Loss by {kind}", unit, *curves, format="loss", x_label=x_label, x_names=starts)


def _position_text(first: int) -> str:
    """4096 → '4K', 1000 → '1,000'"""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if first >= size and first % size == 0:
            return f"{first // size}{unit}"
    return f"{first:,}"


def degree_curves(run: RunFolder) -> Iterator[Part]:
    """Yield the losses of the held-out documents, a curve for each degree, the degree of most evaluations first."""
    by_degree = dict[str, list[EvalRow]]()
    for row in run.held_out:
        by_degree.setdefault(row.degree, []).append(row)
    for color, (degree, rows) in enumerate(sorted(by_degree.items(), key=lambda item: -len(item[1])), 1):
        words = f"cp {degree}" if degree.isdecimal() else f"{degree} plans"
        yield _loss_marks(f"evaluation, {words}", rows, color)


def eval_page(record: Mapping[str, Any]) -> str:
    """Return the page of one call of `longspan eval`, from the record that --json prints."""
    models = [record, *([record["compare"]] if "compare" in record else [])]
    names = [str(model["target"]) for model in models]
    folder = record["kind"] == "folder"
    step = record["evaluations"][0]["step"]
    kind = "Hugging Face folder" if folder else f"{record['kind']}, step {step}"
    degrees = [f"{key} {degree}" for key, degree in record["parallel"].items() if degree > 1]
    changes = [f"{row['key']} {row['before']} became {row['now']}" for row in record["changes"]]
    loss = [f"loss: {record['loss']}"] if "loss" in record else []
    layout = " · ".join([kind, plural(record["world"], "rank"), *degrees, *loss])
    charted = dict[str, EvalRow]()
    rows = list[tuple[EvalRow, dict[str, str]]]()
    for model in models:
        for values in model["evaluations"]:
            # An evaluation without targets has no row.
            if (row := EvalRow.from_row(values)) is None:
                continue
            set_name = row.name or HELD_OUT
            name = set_name if len(models) == 1 else f"{model['target']}, {set_name}"
            charted.setdefault(name, row)  # degrees of one set have the same loss
            cells = {
                "weights": str(model["target"]),
                "set": set_name,
                "type": ", ".join(values["cp_comm_type"]) or "-",
            }
            cells |= {"seconds": seconds_text(values["seconds"]), "targets": f"{values['eval_targets']:,}"}
            rows.append((row, cells))
    sections = [section("Evaluations", evaluations_part(rows))]
    differences = record.get("compare", {}).get("differences", ())
    sections += [_difference_section(Difference(**difference), names) for difference in differences]
    unit = SCORED if any(row.scored for row, _ in rows) else NATS
    if charts := [*bucket_charts(charted, unit)]:
        sections.append(section("Where the loss is", {"charts": charts}))
    title = page_head(names[0], " · ".join(time_and_command()), layout, *changes)
    return page(f"{names[0]} · longspan", {"head": title, "sections": sections})


def _difference_section(difference: Difference, names: Sequence[str]) -> Part:
    error = difference.standard_error
    unit = difference.unit
    words = (
        f"{difference.figure} of {names[1]} minus that of {names[0]}: "
        f"{difference.difference:+.6f}{'' if error is None else f' ± {error:.6f} (standard error over {unit}s)'}; "
        f"{difference.lower:,} of {plural(difference.count, unit)} have a lower value."
    )
    rows = difference.rows()
    cells = (
        [name, f"{first:,.6f}", f"{other:,.6f}", f"{other - first:+.6f}", f"{count:,}"]
        for name, first, other, count in rows
    )
    rows_by_length = table(["tokens of the document", *names, "difference", f"{unit}s"], cells)
    title = f"Difference of the {difference.figure}, {difference.name or HELD_OUT}"
    return section(title, {"note": words}, rows_by_length)
