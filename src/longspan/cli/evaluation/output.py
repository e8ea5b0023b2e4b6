"""The results of `longspan eval` as tables for a terminal, and as files."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.flags import write_text
from longspan.errors import ConfigError, plural
from longspan.evaluation.request import (
    HOME,
    Difference,
    SubjectResult,
    document_rows,
    set_differences,
)
from longspan.evaluation.result import comparison_table
from longspan.files import as_json, json_values, os_error_text
from longspan.plain_text import text_table
from longspan.report.evaluation_page import eval_page

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Bucket


def check_writable(file: str, out: str) -> None:
    """Make the folders of results and check that they can be written to, before hours of evaluation.

    `file` and `out` are the values of --documents and --out, "" without the flag. Raises ConfigError.
    """
    if file and Path(file).is_dir():
        raise ConfigError(f"--documents {file} is a folder; give a file in it, such as {Path(file, 'documents.jsonl')}")
    if out and Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    folders = {"--documents": Path(file).parent} if file else {}
    if out:
        folders["--out"] = Path(out)
    for flag, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag}: {os_error_text(error)}") from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{flag}: {folder} cannot be written to; give another folder")


def write_documents(results: Sequence[SubjectResult], file: Path) -> None:
    """Write the loss of every document, one JSON object a line."""
    lines = (json.dumps(json_values(row), ensure_ascii=False) + "\n" for row in document_rows(results))
    write_text(file, "".join(lines))


def write_result_folder(results: Sequence[SubjectResult], record: dict[str, Any], folder: Path) -> None:
    """Write the results to a folder: results.json, documents.jsonl and report.html."""
    write_text(folder / "results.json", as_json(record, indent=1) + "\n")
    write_documents(results, folder / "documents.jsonl")
    write_text(folder / "report.html", eval_page(json_values(record)))


HELD_OUT = "held out"  # how tables call the documents of a run


def result_tables(results: Sequence[SubjectResult], ranks: int) -> str:
    """Write everything that was found, tables with a blank line between them.

    First one line for each difference between the first subject and another; then each subject's table; then a
    set's degrees, if there are several, and with one subject the losses by length and by position; last the tables of
    the differences.
    """
    return "\n\n".join(_iterate_tables(results, ranks))


def _iterate_tables(results: Sequence[SubjectResult], ranks: int) -> Iterator[str]:
    first = results[0]
    pairs = [
        (difference, other_result)
        for other_result in results[1:]
        for difference in set_differences(first, other_result)
    ]
    if pairs:
        yield "\n".join(_difference_line(difference, first, other_result) for difference, other_result in pairs)
    for result in results:
        step, parallel = result.sets[0].evaluation.step, result.config.parallel
        words = [result.weights.title] + ([f"step {step}"] if result.weights.run_dir is not None else [])
        words += [f"{key} {degree}" for key in HOME if (degree := getattr(parallel, key)) > 1]
        yield f"{', '.join(words)} on {plural(ranks, 'rank')}\n{_evaluation_table(result)}"
    for name in dict.fromkeys(set_result.evaluation.name for set_result in first.sets):
        at_degrees = [set_result.evaluation for set_result in first.sets if set_result.evaluation.name == name]
        if len(at_degrees) > 1:
            yield f"{name or HELD_OUT}: {comparison_table(at_degrees)}"
        if len(results) == 1:  # losses do not depend on the degree, so one degree's buckets are enough
            yield from _bucket_tables(at_degrees[0].name, at_degrees[0].by_length, at_degrees[0].by_position)
    for difference, other_result in pairs:
        yield _difference_table(difference, first, other_result)


def _evaluation_table(result: SubjectResult) -> str:
    metrics = list(dict.fromkeys(name for set_result in result.sets for name in set_result.evaluation.metrics))
    names = ["set", "type", "cp", "loss", "perplexity", *(name.replace("_", " ") for name in metrics)]
    rows = list[list[str]]()
    for set_result in result.sets:
        of = set_result.evaluation
        values = [of.metrics[name].value if name in of.metrics else None for name in metrics]
        rows.append(
            [
                of.name or HELD_OUT,
                ", ".join(set_result.comm_types) or "-",
                str(of.cp),
                f"{of.loss:.9f}",
                # from a loss of 50 on, e ** loss is above 5e21, whose digits would fill the table
                f"{of.perplexity:,.4f}" if of.loss < 50 else "over 1e21",
                *("-" if value is None else f"{value:.5f}" for value in values),
                *(f"{count:,}" for count in (of.documents, of.tokens, of.targets)),
                f"{of.seconds:.2f}",
            ]
        )
    return text_table([*names, "documents", "tokens", "targets", "seconds"], rows, left=2)


def _bucket_tables(name: str, lengths: "Sequence[Bucket]", positions: "Sequence[Bucket]") -> Iterator[str]:
    for title, unit, buckets in (("document length", "tokens", lengths), ("position", "position", positions)):
        rows = [
            [_range_text(b.first, b.last), f"{b.loss.value:.6f}", f"{b.documents:,}", f"{int(b.loss.count):,}"]
            for b in buckets
            if b.loss.value is not None
        ]
        if len(rows) > 1:
            yield f"{name or HELD_OUT}, loss by {title}\n" + text_table((unit, "loss", "documents", "targets"), rows)


def _range_text(first: int, last: int) -> str:
    return f"{first:,} to {last:,}"


def _difference_line(difference: Difference, first: SubjectResult, other: SubjectResult) -> str:
    return (
        f"{difference.name or HELD_OUT}: {difference.unit.replace('_', ' ')} of {first.weights.title} "
        f"{difference.first:.6f}, of {other.weights.title} {difference.other:.6f}, "
        f"difference {difference.difference:+.6f}{_spread_text(difference.standard_error)}"
    )


def _difference_table(difference: Difference, first: SubjectResult, other: SubjectResult) -> str:
    unit = difference.unit.replace("_", " ")
    lines = [
        f"{difference.name or HELD_OUT}: {unit} of {other.weights.title} beside {first.weights.title}",
        f"difference {difference.difference:+.6f}{_spread_text(difference.standard_error)}; of documents, each counted "
        f"once, {difference.document_difference:+.6f}{_spread_text(difference.document_standard_error)}",
        f"{difference.lower:,} of {plural(difference.documents, 'document')} have a lower value under "
        f"{other.weights.title}",
    ]
    if difference.unit == "bits_per_byte":
        lines.append("the tokenizers differ: losses per token and perplexities cannot be compared, bits per byte can")
    rows = [("all", difference.first, difference.other, difference.documents)]
    if len(difference.by_length) > 1:
        rows += [(_range_text(start, last), a, b, documents) for start, last, a, b, documents in difference.by_length]
    table = text_table(
        ("tokens", first.weights.title, other.weights.title, "difference", "documents"),
        [(name, f"{a:.6f}", f"{b:.6f}", f"{b - a:+.6f}", f"{documents:,}") for name, a, b, documents in rows],
    )
    return "\n".join([*lines, table])


def _spread_text(error: float | None) -> str:
    return "" if error is None else f" ± {error:.6f}"
