"""Files of a row a step: metrics.jsonl, whose rows loggers get too, and how they are read."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from longspan.errors import plural
from longspan.files import as_json, json_safe_values, name_file_in_errors, own_file, parse_json, read_lines
from longspan.plain_text import LogLine
from longspan.run.loggers import RunLoggers

COMPLETIONS = "completions.jsonl"
# The limit is that of a line; samples with images take some megabytes.
_MOST_BYTES = 64 << 20


# From here on a JSON reader may round a number, and no run takes so many.
_MOST_STEPS = 1 << 53


class StepLog(AbstractContextManager["StepLog"]):
    """Appends lines of steps to a file, each flushed at once; without a path, as on other ranks, it writes nothing.

    From a file that is there the rows of steps later than `after_step` are removed, which is logged.
    """

    def __init__(self, path: Path | None, *, after_step: int, log: LogLine = lambda _: None) -> None:
        self._file = None
        if path is not None:
            with name_file_in_errors(path):
                if own_file(path).exists():
                    self._remove_later_rows(path, after_step, log)
                self._file = path.open("ab")

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # a line that could not be written: `write_line` has raised an error
                self._file.close()

    def write_line(self, line: str) -> None:
        """Append a line. Raises OSError, with the file's name, for what the disk refuses."""
        if self._file is not None:
            with name_file_in_errors(Path(self._file.name)):
                self._file.write(line.encode() + b"\n")
                self._file.flush()

    def _remove_later_rows(self, path: Path, after_step: int, log: LogLine) -> None:
        """Lines that are no rows stay, damaged ones and those of other tools."""
        later = torn = unreadable = 0
        size = path.stat().st_size
        # The end of what stays is in bytes.
        end = 0
        last = b"\n"  # line that stays
        with path.open("r+b") as file:
            while line := file.readline(_MOST_BYTES):
                position = file.tell()
                step = self._step_of_line(line)
                if step is not None and step > after_step:
                    later += 1
                    continue
                if step is None and position == size and not line.endswith(b"\n"):
                    torn = 1
                    continue
                unreadable += step is None and bool(line.strip())
                # The row stands behind a row that goes.
                if position - len(line) > end:
                    file.seek(end)
                    file.write(line)
                    file.seek(position)
                end += len(line)
                last = line
            file.truncate(end)
            if not last.endswith(b"\n"):
                file.seek(end)
                file.write(b"\n")
        counts = [
            (later, f"removed {plural(later, 'row')} of steps after {after_step}"),
            (torn, "removed a torn last line"),
            (unreadable, f"left in place {plural(unreadable, 'line')} that cannot be read"),
        ]
        if texts := [text for count, text in counts if count]:
            log(f"{path}: {', '.join(texts)}")

    def _step_of_line(self, line: bytes) -> int | None:
        row = read_json_row(line)
        return None if row is None else row["step"]


class MetricsLog(StepLog):
    """The rows of metrics.jsonl, which go to `loggers` too."""

    def __init__(
        self,
        path: Path | None,
        *,
        after_step: int,
        log: LogLine = lambda _: None,
        loggers: RunLoggers | None = None,
    ) -> None:
        super().__init__(path, after_step=after_step, log=log)
        self._loggers = loggers
        # (step, set) of every recorded evaluation; on ranks without a file those of this session
        self.evaluated: set[tuple[int, str]] = (
            recorded_evaluations(read_metrics(path)) if path and after_step else set[tuple[int, str]]()
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row, and hand it to the loggers. Raises OSError for what the disk refuses."""
        self.evaluated |= recorded_evaluations([row])
        self.write_line(as_json(row))
        if self._loggers is not None:
            self._loggers.log(row)


class CompletionsLog(StepLog):
    """The rows of completions.jsonl, of which loggers get those of a step together."""

    def __init__(
        self,
        path: Path | None,
        *,
        after_step: int,
        log: LogLine = lambda _: None,
        loggers: RunLoggers | None = None,
    ) -> None:
        super().__init__(path, after_step=after_step, log=log)
        self._loggers = loggers
        self.steps: set[int] = {row["step"] for row in read_metrics(path)} if path and after_step else set[int]()

    def write_rows(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the completions of a step, and hand them to the loggers together."""
        self.steps.add(step)
        for row in rows:
            self.write_line(as_json({"step": step, **row}))
        if self._loggers is not None:
            self._loggers.log_completions(rows, step)


def recorded_evaluations(rows: Iterable[Mapping[str, Any]]) -> set[tuple[int, str]]:
    """Return (step, set) of each evaluation among rows of metrics; the set is "" for held-out documents."""
    return {(row["step"], str(row.get("eval_name", ""))) for row in rows if "eval_loss" in row}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file like metrics.jsonl, without damaged lines; [] where it is not there."""
    return read_json_rows(path)[0] if path.exists() else []


def read_json_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file like metrics.jsonl, and how many lines, too long ones too, are no rows."""
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
        return json_safe_values(row) if is_row else None
    except (ValueError, RecursionError):  # no JSON, or nested too deeply for the parser
        return None
