"""The page of `longspan eval --out`: its figures as a table, the loss by length and by position, and differences.

It is made of results.json and of pictures that come with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longspan.errors import plural
from longspan.plain_text import seconds_text
from longspan.report.chart import chart_figure
from longspan.report.evaluation_sections import HELD_OUT, bucket_charts
from longspan.report.markup import page, scrolling_table, section, tag, text

_COLUMNS = ("eval_loss", "eval_perplexity")  # before metrics
_COUNTS = ("eval_documents", "eval_tokens", "eval_targets")


def eval_page(record: Mapping[str, Any]) -> str:
    """Return the page of one call of `longspan eval`, from the record that --json prints.

    >>> Path("report.html").write_text(eval_page(json.loads(Path("results.json").read_text())))
    """
    return page(f"{record['target']} · longspan", list(_eval_sections(record)))


def _eval_sections(record: Mapping[str, Any]) -> Iterator[str]:
    models = [record, *([record["compare"]] if "compare" in record else [])]
    yield _eval_header(record)
    yield section("Evaluations", scrolling_table(*_evaluations_table(models)))
    for difference in record.get("compare", {}).get("differences", ()):
        yield _difference_section(difference, [str(model["target"]) for model in models])
    charts = list(_loss_charts(models))
    if charts:
        yield section("Where the loss is", tag("div", *charts, class_="grid-2"))


def _eval_header(record: Mapping[str, Any]) -> str:
    degrees = [f"{key} {degree}" for key, degree in record["parallel"].items() if degree > 1]
    lines = [" · ".join([_kind_text(record), plural(record["world"], "rank"), *degrees])]
    lines += [
        f"{change['key']} {change['before']} became {change['now']} ({change['why']})" for change in record["changes"]
    ]
    title = tag("p", "longspan", class_="brand") + tag("h1", text(record["target"]))
    return tag("header", title, *(tag("p", text(line), class_="sub") for line in lines))


def _kind_text(model: Mapping[str, Any]) -> str:
    if model["kind"] == "folder":
        return "Hugging Face folder"
    return f"{model['kind']}, step {model['evaluations'][0]['step']}"


def _evaluations_table(models: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns are those of every evaluation, then the metrics of any evaluation, then counts. A metric that is no
    number in some row is left out; where a row lacks it, its cell is "-".
    """
    rows = [(model, row) for model in models for row in model["evaluations"]]
    no_metrics = {"eval_name", "eval_activation_bytes", *_COLUMNS, *_COUNTS}
    others = dict.fromkeys(key for _, row in rows for key in row if key.startswith("eval_") and key not in no_metrics)
    metrics = [key for key in others if all(isinstance(row.get(key, 0.0), int | float | None) for _, row in rows)]
    keys = (*_COLUMNS, *metrics, *_COUNTS)
    names = ["weights", "set", "type", "cp", *(key.removeprefix("eval_").replace("_", " ") for key in keys), "seconds"]
    cells = [
        [
            str(model["target"]),
            _set_label(row),
            ", ".join(row["cp_comm_type"]) or "-",
            str(row["cp"]),
            *(_number_cell(row.get(key)) for key in keys),
            seconds_text(row["seconds"]),
        ]
        for model, row in rows
    ]
    return names, cells


def _difference_section(difference: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the section that compares two models, named by `names`, on one set: a sentence and a table by length."""
    unit, error = difference["unit"].replace("_", " "), difference["standard_error"]
    first_name, other_name = names
    words = (
        f"{unit} of {other_name} minus that of {first_name}: {difference['difference']:+.6f}"
        f"{'' if error is None else f' ± {error:.6f} (standard error over documents)'}; {difference['lower']:,} of "
        f"{plural(difference['documents'], 'document')} have a lower value."
    )
    rows = [("all", difference["first"], difference["other"], difference["documents"])]
    rows += [(f"{start:,} to {last:,}", a, b, documents) for start, last, a, b, documents in difference["by_length"]]
    cells = [
        [name, _number_cell(a), _number_cell(b), f"{b - a:+.6f}", f"{documents:,}"] for name, a, b, documents in rows
    ]
    table = scrolling_table(["tokens of the document", first_name, other_name, "difference", "documents"], cells)
    return section(f"Difference, {difference['name'] or HELD_OUT}", tag("p", text(words), class_="note"), table)


def _loss_charts(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_position, by_length = dict[str, Any](), dict[str, Any]()
    for model in models:
        for row in model["evaluations"]:
            name = _set_label(row) if len(models) == 1 else f"{model['target']}, {_set_label(row)}"
            by_position.setdefault(name, row["by_position"])  # degrees of one set have the same loss
            by_length.setdefault(name, row["by_length"])
    yield from map(chart_figure, bucket_charts(by_position, by_length))


def _set_label(row: Mapping[str, Any]) -> str:
    return row.get("eval_name") or HELD_OUT


def _number_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6f}"
