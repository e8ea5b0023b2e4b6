"""The metrics of a run: one JSON object a line in metrics.jsonl.

Rows of training: step, loss, tokens, targets, grad_norm, lr, seconds, tokens_per_second, memory_bytes, micro_batches,
efficiency; groups, [{degree, cp_comm_type, count, tokens}] of the plan; if they are known tflops, mfu,
predicted_seconds and bound_share, and of a model with images encoder_share, encoder_balance and both as predicted
(`step_figures.py`); on GPUs allocator_retries, how often the first rank's allocator had to wait, give memory back and
ask again; source_tokens, those of each of several sources;
save_shown_seconds, save_seconds and save_bytes of a checkpoint, in the row of the first step that ended after it was
published: the seconds that training paused for it, those until it was published, and all ranks' bytes (of the last
checkpoint a line of the log says them);
router_balance_loss and router_z_loss of models with experts; and mtp_loss_1, mtp_loss_2 and so on of depths of
multi-token prediction. docs/figures.md explains them.

Rows of evaluation: step, eval_name (of a named set), eval_loss, eval_perplexity, eval_token_accuracy,
eval_bits_per_byte (where the tokenizer's tokens stand for bytes), eval_NAME of a metric of the user's (null where it
counted nothing), eval_tokens, eval_targets, eval_documents, cp (the widest degree of a dynamic plan), planner, seconds,
on GPUs eval_activation_bytes (most memory that it added on any rank), by_position and by_length: [first, last, mean
loss, targets, documents] of each bucket of positions, or of documents' lengths. One rank writes. A number that is not
finite, for which JSON has no word, is written and read as null.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspan.files import as_json, json_values, name_file_in_errors, parse_json, read_lines, write_atomically
from longspan.run.loggers.run_loggers import RunLoggers

_MOST_BYTES = 64 << 20  # of a line; samples with images take some megabytes
_MOST_STEPS = 1 << 53  # from here on a JSON reader may round a number, and no run takes so many


class MetricsLog:
    """Appends rows to a file, flushed one by one; opened for a resumed run, it keeps the rows up to a step.

    >>> with MetricsLog(Path("runs/first/metrics.jsonl"), after_step=100) as log:
    ...     log.write({"step": 101, "loss": 3.2})

    Later rows, which the run is about to make again, and a line that an interrupted write left torn are dropped. `None`
    for a path writes nothing: on the ranks that do not record. A row that is written goes to `loggers` too.
    """

    def __init__(self, path: Path | None, *, after_step: int, loggers: RunLoggers | None = None) -> None:
        """Rewrite the file with the rows that stay; `evaluated` are the steps and sets that have an evaluation."""
        self._loggers = loggers
        rows = [row for row in read_metrics(path) if row["step"] <= after_step] if path else []
        self.evaluated = find_evaluations(rows)
        self._file = None
        if path is not None:
            write_atomically(path, "".join(as_json(row) + "\n" for row in rows))
            self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # a row that could not be written: `write` has raised an error
                self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises OSError, with the file's name, for what the disk refuses."""
        self.evaluated |= find_evaluations([row])
        if self._file is not None:
            with name_file_in_errors(Path(self._file.name)):
                self._file.write(as_json(row) + "\n")
                self._file.flush()
        if self._loggers is not None:
            self._loggers.log(row)


def find_evaluations(rows: Iterable[Mapping[str, Any]]) -> set[tuple[int, str]]:
    """The step and the name of the set ("" of the held-out documents) of every evaluation in rows of metrics."""
    return {(row["step"], row.get("eval_name", "")) for row in rows if "eval_loss" in row}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file that can be read; none where it does not exist."""
    return read_json_rows(path)[0] if path.exists() else []


def read_json_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file like metrics.jsonl, and how many of its lines are no rows.

    A row is an object with a step (`read_json_row`); a line that is too long is none.
    """
    # None is a line of more than _MOST_BYTES; empty lines are not counted
    lines = [line for line in read_lines(path, _MOST_BYTES) if line is None or line.strip()]
    rows = [row for line in lines if line is not None and (row := read_json_row(line)) is not None]
    return rows, len(lines) - len(rows)


def read_json_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line of a file like metrics.jsonl; None for a line that is no object with a step."""
    try:
        row = parse_json(line.decode("utf-8", "replace"))
        step = row.get("step") if isinstance(row, dict) else None
        is_row = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MOST_STEPS
        return json_values(row) if is_row else None
    except (ValueError, RecursionError):  # no JSON, or nested too deeply for the parser
        return None
