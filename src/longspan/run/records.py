"""The records of a session, written by its first rank: run.json, metrics, plans and rows of loggers."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.errors import ConfigError, RunFolderError
from longspan.files import as_json, read_json, write_atomically
from longspan.plan import Cost, Plan
from longspan.plan.plan_rows import plan_row
from longspan.run.collect_facts import collect_facts, gather_attention_groups
from longspan.run.facts import LAST_STEPS, LOCK, RunFacts
from longspan.run.loggers import LoggerClass, RunLoggers, RunStart
from longspan.run.metrics import (
    COMPLETIONS,
    CompletionsLog,
    MetricsLog,
    StepLog,
    read_metrics,
    recorded_evaluations,
)
from longspan.run.run_data import TrainingRun
from longspan.train.start.start_times import Starts

_STEP = re.compile(rb'{"step": ?(\d{1,16}),')


class PlanLog(StepLog):
    """The plans of steps, in plans.jsonl."""

    # The cost is that of the last row of this session.
    _cost: Cost | None = None

    def write(self, step: int, plan: Plan) -> None:
        """Append the plan of a step, counted from 1. Raises OSError, with the file's name, if the disk refuses it."""
        # a row names its cost only where that of the row before is another
        self.write_line(plan_row(step, plan, after=self._cost))
        self._cost = plan.cost

    def _step_of_line(self, line: bytes) -> int | None:
        """Rows of large plans take long to parse, so the step is read from the first bytes."""
        step = _STEP.match(line)
        return int(step[1]) if step and line.endswith(b"\n") else super()._step_of_line(line)


class Records(NamedTuple):
    """The logs of a session: rows of metrics, the plans of its steps, and completions; other ranks write nothing."""

    run: TrainingRun
    metrics: MetricsLog
    plans: PlanLog
    completions: CompletionsLog

    def write_step(self, row: dict[str, Any], plan: Plan) -> None:
        """Write a step's metrics and plan. Raises OSError, or RunFolderError where the run's folder was removed."""
        if is_first_rank(self.run.world) and not (self.run.dir / LOCK).exists():
            raise RunFolderError(
                f"{self.run.dir} was removed or renamed while the run was at work in it: it has no {LOCK}; put it back "
                "if it is elsewhere, and start the command again"
            )
        self.plans.write(row["step"], plan)
        self.metrics.write(row)

    def last_loss(self, done: int) -> float:
        """Return the mean loss of the last LAST_STEPS of `done` steps; NaN without any, and on ranks but the first."""
        rows = read_metrics(self.run.dir / "metrics.jsonl") if is_first_rank(self.run.world) else []
        last_rows = [row for row in rows if done - LAST_STEPS < row["step"] <= done]
        losses = [row["loss"] for row in last_rows if isinstance(row.get("loss"), float)]
        return math.fsum(losses) / len(losses) if losses else math.nan


@contextmanager
def open_records(run: TrainingRun, classes: Mapping[str, LoggerClass], log: LogLine) -> Iterator[Records]:
    """Open all records, and close them at the end; entered by all ranks, of which the first alone has files.

    A run that has steps left also removes its summary.json, writes run.json and logs its facts.
    """
    world = run.world
    first = is_first_rank(run.world)
    facts = collect_facts(run)
    if run.done < run.config.train.steps:
        # a report would take the summary of an earlier end for this run's
        run_on_first_rank(world, partial((run.dir / "summary.json").unlink, missing_ok=True), RunFolderError)
        write_facts(run, "run.json", asdict(facts))
        log(facts.text())
    loggers = None
    if run.config.run.loggers:
        open_loggers = partial(_open_loggers, run, facts, classes if first else {}, log)
        loggers = run_on_every_rank(world, open_loggers, ConfigError)
    metrics_file, plans_file = (run.dir / name if first else None for name in ("metrics.jsonl", "plans.jsonl"))
    completions_file = run.dir / COMPLETIONS if first and run.config.evaluation.prompts else None
    with loggers or nullcontext():
        metrics, plans, completions = run_on_every_rank(
            world,
            lambda: (
                MetricsLog(metrics_file, after_step=run.done, log=log, loggers=loggers),
                PlanLog(plans_file, after_step=run.done, log=log),
                CompletionsLog(completions_file, after_step=run.done, log=log, loggers=loggers),
            ),
            RunFolderError,
        )
        with metrics, plans, completions:
            yield Records(run, metrics, plans, completions)


def write_facts(run: TrainingRun, name: str, values: Mapping[str, Any]) -> None:
    """Write the first rank's values as a file, called `name`, in the run's folder; all ranks call it together. Raises
    RunFolderError, on every rank, for what the disk refuses.
    """
    write = partial(write_atomically, run.dir / name, as_json(values, indent=1))
    run_on_first_rank(run.world, write, RunFolderError)


def record_start_seconds(run: TrainingRun, starts: Starts, log: LogLine) -> None:
    """Log the seconds of a start by part and the groups of attention in its step, and add both to run.json; all ranks
    call it together.
    """
    file = run.dir / "run.json"
    groups = gather_attention_groups(run.world)

    def add_starts() -> None:
        values = {"starts": starts.to_json(), "attention_groups": groups}
        write_atomically(file, as_json(read_json(file) | values, indent=1))

    run_on_first_rank(run.world, add_starts, RunFolderError)
    log("\n".join([str(starts), *(f"attention groups: {group}" for group in groups)]))


def save_plan(run: TrainingRun, plan: Plan, name: str) -> None:
    """Save a plan as plans/NAME.json, for the report; all ranks call it together."""
    file = run.dir / "plans" / f"{name}.json"

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, plan.to_json())

    run_on_first_rank(run.world, write, RunFolderError)


def _open_loggers(
    run: TrainingRun, facts: RunFacts, classes: Mapping[str, LoggerClass], log: LogLine
) -> RunLoggers:
    """A run that has come to its end with all evaluations has no loggers, nor has a rank without `classes`."""
    rows = read_metrics(run.dir / "metrics.jsonl") if classes else []
    steps = run.config.train.steps
    if run.done == steps and {(steps, entry.name) for entry in run.sets} <= recorded_evaluations(rows):
        classes = {}
    start = RunStart(run.dir, run.config.tables(), dict(facts.lines), run.done, rows)
    return RunLoggers(classes, start, log)
