"""A run as it is now, from what it has written so far: read again and again, only what was added each time.

Every file may be missing, cut or wrong, for a run that has not begun, is killed, or comes from someone else.
"""

import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from longspan.checkpoint.files import complete_checkpoints, is_unfinished, step_of
from longspan.errors import ConfigError, PlanError, plural
from longspan.plan import Plan
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.plan_rows import has_cost, read_plan_row
from longspan.report.follow.tail import Tail, lock_holder
from longspan.report.run_folder import EvalRow, RunFolder, number, read_config, read_json_object
from longspan.run.facts import RunFacts
from longspan.run.loggers.metrics_log import read_json_row

State = Literal["waiting", "running", "done", "stopped", "broken"]
COLUMNS = ("loss", "tokens", "targets", "seconds", "tokens_per_second", "memory_bytes", "grad_norm", "lr")
LAST_SAVES = 8  # that are shown
AT_MOST_EVERY = 0.5  # seconds between two readings


@dataclass(frozen=True)
class Save:
    """A checkpoint that was published before `step` ended: its bytes, and the seconds that writing it took.

    Training stood still for `shown_seconds`.
    """

    step: int
    bytes: float
    seconds: float
    shown_seconds: float


@dataclass(frozen=True)
class LiveRun:
    """A run now: its records, the plan of its newest step, its saves, and whether it is at work.

    `holder` is the process at work, "" for none; `idle` the seconds since it last wrote metrics, or since it began;
    `unfinished` are checkpoints that are being written, or whose save was interrupted.
    """

    run: RunFolder
    state: State
    holder: str = ""
    idle: float = 0.0
    plan: tuple[int, Plan] | None = None
    saves: tuple[Save, ...] = ()
    checkpoints: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last step that ended; 0 before the first."""
        return int(self.run.step[-1]) if len(self.run.step) else 0

    @property
    def steps(self) -> int:
        """How many steps the run is to take; 0 where that is not known.

        The first positive number in run.json, summary.json and config.toml counts, if it is below 2^53, up to which
        a browser holds whole numbers exactly.
        """
        train = self.run.config.get("train")
        key = train.get("steps") if isinstance(train, dict) else 0
        values = [self.run.facts.steps if self.run.facts else 0, self.run.summary.get("steps"), key]
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 53), 0)

    def state_sentence(self) -> str:
        """Return where the run is, or what came of it, in a sentence without a full stop.

        The signal's name is shown only if it is a short word: a damaged summary.json may hold anything in its place.
        """
        step_text = f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
        match self.state:
            case "running":
                return f"the run is at {step_text}"
            case "waiting":
                return "no run has begun here"
            case "done":
                return f"the run has come to its end at {step_text}"
            case "stopped":
                signal = str(self.run.summary.get("stopped"))
                signal = signal if signal.isalnum() and len(signal) < 16 else "a signal"
                return f"the run was stopped by {signal} after {step_text}; the same command goes on"
            case "broken":
                return f"the run ended after {step_text} with an error or was killed; its own output says more"


class LiveRecords:
    """Reads a run's folder as often as it is asked, from several threads.

    >>> records = LiveRecords(Path("runs/first"))
    >>> records.read().step
    """

    def __init__(self, path: Path) -> None:
        """Begin with nothing read: steps, evaluations and saves are collected here as lines are added to the files."""
        self.path = path
        self._lock, self._read_at = Lock(), -AT_MOST_EVERY  # when it was read last: long enough ago to be read now
        self._metrics, self._plans = Tail(path / "metrics.jsonl"), Tail(path / "plans.jsonl")
        self._step, self._columns = array("q"), {name: array("d") for name in COLUMNS}
        self._evaluations, self._saves = dict[Any, EvalRow](), list[Save]()
        self._cost_line, self._plan_line = b"", b""  # the last lines of plans.jsonl with a cost, and of all
        self._plan: tuple[int, Plan] | None = None  # the newest plan, with its step
        self._notes = dict[str, str]()  # by subject, so that a newer note takes an older one's place
        self._damaged = 0  # lines of metrics.jsonl that could not be read
        self._live: LiveRun | None = None  # as it was read last

    def read(self) -> LiveRun:
        """Return the run as it is now, or was at most half a second ago."""
        with self._lock:
            if self._live is None or time.monotonic() - self._read_at >= AT_MOST_EVERY:
                holder = lock_holder(self.path)  # first: what a run that ends writes is there once its lock is gone
                self._read_metrics()
                self._read_plans()
                self._live, self._read_at = self._compose_run(holder), time.monotonic()
            return self._live

    def _read_metrics(self) -> None:
        """Read new lines of metrics.jsonl, steps and evaluations; if the file began anew, first forget all records."""
        for line in self._metrics.lines():
            if self._metrics.is_first:  # the first line of a new file: a resumed run replaces metrics.jsonl
                self._forget_records()
            if not line.strip():
                continue
            row = read_json_row(line)
            if row is None:
                self._damaged += 1
            elif "loss" in row:
                self._add_step(row)
            else:
                self._add_evaluation(row)
        if self._metrics.is_first:  # the file began anew and has no whole line yet
            self._forget_records()

    def _forget_records(self) -> None:
        self._step, self._columns = array("q"), {name: array("d") for name in COLUMNS}
        self._evaluations.clear()
        self._saves.clear()
        self._damaged = 0
        self._notes.pop("evaluation", None)  # of a row that is there no more

    def _add_step(self, row: Mapping[str, Any]) -> None:
        """Add a step, and its save if it has one; steps from this one on, which a resumed run repeats, go first."""
        step = int(row["step"])
        while self._step and self._step[-1] >= step:
            for column in (self._step, *self._columns.values()):
                column.pop()
        self._step.append(step)
        for name, column in self._columns.items():
            column.append(number(row.get(name)))
        figures = [number(row.get(name)) for name in ("save_bytes", "save_seconds", "save_shown_seconds")]
        if all(figure >= 0 for figure in figures):  # NaN where the step knows of no save
            self._saves = [*(save for save in self._saves if save.step < step), Save(step, *figures)][-LAST_SAVES:]

    def _add_evaluation(self, row: Mapping[str, Any]) -> None:
        try:
            if (evaluation := EvalRow.from_row(row)) is not None:
                self._evaluations[evaluation.record_key] = evaluation
        except ConfigError as error:
            self._notes["evaluation"] = str(error)

    def _read_plans(self) -> None:
        """A line without a cost has that of the last line with one. A plan that cannot be read is noted."""
        line_before = self._plan_line
        for line in self._plans.lines():
            if self._plans.is_first:
                self._cost_line = b""
            self._cost_line = line if has_cost(line) else self._cost_line
            self._plan_line = line
        if self._plan_line == line_before:
            return
        try:
            where = f"{self.path / 'plans.jsonl'}, its last line,"
            cost = read_plan_row(self._cost_line, where=where)[1].cost if self._cost_line else DEFAULT_COST
            self._plan = read_plan_row(self._plan_line, cost, where)
            self._notes.pop("plan", None)
        except (PlanError, RecursionError, MemoryError) as error:
            self._plan, self._notes["plan"] = None, str(error)

    def _compose_run(self, holder: str) -> LiveRun:
        """Make the run as it is now from what was read so far and the small files of its folder."""
        notes = list[str]()
        facts = RunFacts.from_json(read_json_object(self.path / "run.json", notes))
        summary = read_json_object(self.path / "summary.json", notes)
        text, config = read_config(self.path, notes)
        evaluations = self._evaluations.items()
        run = RunFolder(
            path=self.path,
            step=np.array(self._step, np.int64),
            train={name: np.array(column, np.float64) for name, column in self._columns.items()},
            evaluations=tuple(row for _, row in sorted(evaluations, key=lambda item: item[0])),
            config_text=text,
            config=config,
            summary=summary,
            facts=facts,
        )
        checkpoints, unfinished = _find_checkpoints(self.path, config)
        notes += [*self._notes.values(), *_failure_notes(self.path)]
        if self._damaged:
            notes.append(f"{plural(self._damaged, 'line')} of metrics.jsonl could not be read and left out")
        # a plan without a step, and without a process at work, is of a run that never used it
        plan = self._plan if len(self._step) or holder else None
        state = _state_of(run, holder, is_empty=not self._step and not self._evaluations)
        return LiveRun(
            run=run,
            state=state,
            holder=holder,
            idle=_seconds_since_change(self.path),
            plan=plan,
            saves=tuple(self._saves),
            checkpoints=checkpoints,
            unfinished=unfinished,
            notes=tuple(notes),
        )


def _state_of(run: RunFolder, holder: str, *, is_empty: bool) -> State:
    """`is_empty` is whether metrics.jsonl has no step and no evaluation. The summary counts only if it is of the last
    step: a resumed run leaves an older one until it ends. A number that the summary lacks is NaN, which equals nothing,
    so that a run without a summary is "broken".
    """
    if holder:
        return "running"
    if is_empty and not run.summary:
        return "waiting"
    summary_step, steps = number(run.summary.get("step")), number(run.summary.get("steps"))
    last = int(run.step[-1]) if len(run.step) else summary_step
    if summary_step != last:
        return "broken"
    return "stopped" if run.summary.get("stopped") else "done" if summary_step >= steps else "broken"


def _find_checkpoints(path: Path, config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Folders whose names have no step, for which `step_of` gives -1, are left out."""
    section = config.get("run")
    if isinstance(section, dict) and section.get("checkpoints"):
        return (), ()  # checkpoints are elsewhere, perhaps in an object store, which is not asked
    try:
        folder = path / "checkpoints"
        unfinished = {step_of(p) for p in folder.iterdir() if is_unfinished(p)} if folder.is_dir() else set[int]()
        return tuple(sorted(step_of(p) for p in complete_checkpoints(folder))), tuple(sorted(unfinished - {-1}))
    except OSError:
        return (), ()


def _failure_notes(path: Path) -> Iterator[str]:
    if (path / "hang").is_dir():
        yield "a collective failed or timed out; what torch recorded is in the folder hang"
    if (path / "memory").is_dir():
        yield "memory was short; what was recorded is in the folder memory"


def _seconds_since_change(path: Path) -> float:
    """Return seconds since metrics.jsonl or run.json was written; 0 where neither is there."""
    times = list[float]()
    for name in ("metrics.jsonl", "run.json"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times)) if times else 0.0
