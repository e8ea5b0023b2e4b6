"""The results of `longspan eval` as tables for a terminal."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from longspan.errors import counted
from longspan.evaluation.result import comparison_table
from longspan.evaluation.saved.comparison import HOME, Difference, comm_types, differences, retrieval_grids
from longspan.evaluation.saved.request import SetResult, SubjectResult
from longspan.report.text_table import text_table

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Bucket

HELD_OUT = "held out"  # how tables call the documents of a run


def tables_of(results: Sequence[SubjectResult], ranks: int) -> str:
    """Everything that was found, tables with a blank line between them."""
    return "\n\n".join(_tables(results, ranks))


def _tables(results: Sequence[SubjectResult], ranks: int) -> Iterator[str]:
    first = results[0]
    pairs = [(difference, other) for other in results[1:] for difference in differences(first, other)]
    if pairs:
        yield "\n".join(_difference_line(difference, first, other) for difference, other in pairs)
    for result in results:
        yield f"{_title(result)} on {counted(ranks, 'rank')}\n{_evaluations(result)}"
        yield from (f"passkey at cp {grid.cp}, {grid.table()}" for _, grid in retrieval_grids([result]))
    for name in dict.fromkeys(of_set.evaluation.name for of_set in first.sets):
        at_degrees = [of_set.evaluation for of_set in first.sets if of_set.evaluation.name == name]
        if len(at_degrees) > 1:
            yield f"{name or HELD_OUT}: {comparison_table(at_degrees)}"
        if len(results) == 1:
            yield from _bucket_tables(at_degrees[0].name, at_degrees[0].by_length, at_degrees[0].by_position)
    for difference, other in pairs:
        yield from _difference(difference, first, other)


def _title(result: SubjectResult) -> str:
    step, parallel = result.sets[0].evaluation.step, result.config.parallel
    words = [result.weights.title] + ([f"step {step}"] if result.weights.run_dir is not None else [])
    words += [f"{key} {degree}" for key in HOME if (degree := getattr(parallel, key)) > 1]
    return ", ".join(words)


def _evaluations(result: SubjectResult) -> str:
    """A row for each set and degree, and a column for each metric."""
    metrics = list(dict.fromkeys(name for of_set in result.sets for name in of_set.evaluation.metrics))
    names = ["set", "type", "cp", "loss", "perplexity", *(name.replace("_", " ") for name in metrics)]
    return text_table(
        [*names, "documents", "tokens", "targets", "seconds"],
        [_row(of_set, metrics) for of_set in result.sets],
        left=2,
    )


def _row(result: SetResult, metrics: Sequence[str]) -> list[str]:
    evaluation = result.evaluation
    values = [evaluation.metrics[name].value if name in evaluation.metrics else None for name in metrics]
    return [
        evaluation.name or HELD_OUT,
        ", ".join(comm_types(result)) or "-",
        str(evaluation.cp),
        f"{evaluation.loss:.9f}",
        f"{evaluation.perplexity:,.4f}" if evaluation.loss < 50 else "over 1e21",
        *("-" if value is None else f"{value:.5f}" for value in values),
        f"{evaluation.documents:,}",
        f"{evaluation.tokens:,}",
        f"{evaluation.targets:,}",
        f"{evaluation.seconds:.2f}",
    ]


def _bucket_tables(name: str, lengths: "Sequence[Bucket]", positions: "Sequence[Bucket]") -> Iterator[str]:
    """The loss by length and by position, where there are several of them."""
    for title, buckets in (("document length", lengths), ("position", positions)):
        if len(buckets) > 1:
            rows = [
                [_range(b.first, b.last), f"{b.loss.value or 0:.6f}", f"{b.documents:,}", f"{int(b.loss.count):,}"]
                for b in buckets
            ]
            yield f"{name or HELD_OUT}, loss by {title}\n" + text_table(
                ("tokens" if title != "position" else "position", "loss", "documents", "targets"), rows
            )


def _range(first: int, last: int) -> str:
    return f"{first:,} to {last:,}"


def _difference_line(difference: Difference, first: SubjectResult, other: SubjectResult) -> str:
    """What most want to know of two models."""
    return (
        f"{difference.name or HELD_OUT}: {difference.unit.replace('_', ' ')} of {first.weights.title} "
        f"{difference.first:.6f}, of {other.weights.title} {difference.other:.6f}, "
        f"difference {difference.difference:+.6f}{_error(difference.standard_error)}"
    )


def _difference(difference: Difference, first: SubjectResult, other: SubjectResult) -> Iterator[str]:
    unit = difference.unit.replace("_", " ")
    lines = [
        f"{difference.name or HELD_OUT}: {unit} of {other.weights.title} beside {first.weights.title}",
        f"difference {difference.difference:+.6f}{_error(difference.standard_error)}; of documents, each counted once, "
        f"{difference.document_difference:+.6f}{_error(difference.document_standard_error)}",
        f"{difference.lower:,} of {counted(difference.documents, 'document')} have a lower value",
    ]
    if difference.unit == "bits_per_byte":
        lines.append("the tokenizers differ: losses per token and perplexities cannot be compared, bits per byte can")
    rows = [("all", difference.first, difference.other, difference.documents)]
    if len(difference.by_length) > 1:
        rows += [(_range(start, last), a, b, documents) for start, last, a, b, documents in difference.by_length]
    table = text_table(
        ("tokens", first.weights.title, other.weights.title, "difference", "documents"),
        [(name, f"{a:.6f}", f"{b:.6f}", f"{b - a:+.6f}", f"{documents:,}") for name, a, b, documents in rows],
    )
    yield "\n".join([*lines, table])


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.6f}"
