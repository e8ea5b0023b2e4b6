"""The records of a session, written by its first rank: run.json, metrics.jsonl, plans.jsonl, groups.jsonl, and rows for
its loggers; and single plans, in plans/.

Rows of metrics are described in `loggers/metrics_log.py`, and those of groups in `loggers/group_log.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.errors import ConfigError, RunFolderError
from longspan.files import as_json, read_json, write_atomically
from longspan.plan import Plan
from longspan.run.facts import RunFacts, facts_text
from longspan.run.loggers.group_log import GroupLog
from longspan.run.loggers.metrics_log import MetricsLog, find_evaluations, read_metrics
from longspan.run.loggers.plan_log import PlanLog
from longspan.run.loggers.run_loggers import LoggerClass, RunLoggers, RunStart
from longspan.run.run_data import TrainingRun


class Records(NamedTuple):
    """The logs of a session: rows of metrics, the plans of its steps, and the groups that they add."""

    metrics: MetricsLog
    plans: PlanLog
    groups: GroupLog


@contextmanager
def open_records(
    run: TrainingRun, facts: RunFacts, classes: Mapping[str, LoggerClass], log: LogLine
) -> Iterator[Records]:
    """Open all records, and close them at the end; entered by all ranks, only the first writes.

    Logs the facts, unless no step is left. Raises on every rank: ConfigError if a logger cannot start, RunFolderError
    if the disk refuses a write.
    """
    world, first = run.world, is_first_rank(run.world)
    names = ("metrics.jsonl", "plans.jsonl", "groups.jsonl")
    metrics_file, plans_file, groups_file = (run.dir / name if first else None for name in names)
    if run.done < run.config.train.steps:
        run_on_first_rank(world, partial(_write_facts, run.dir, facts), RunFolderError)
        log(facts_text(facts))
    open_loggers = partial(_open_loggers, run, facts, classes if first else {}, log)
    with run_on_every_rank(world, open_loggers, ConfigError) as loggers:
        open_metrics = partial(MetricsLog, metrics_file, after_step=run.done, loggers=loggers)
        open_plans = partial(PlanLog, plans_file, after_step=run.done)
        with (
            run_on_every_rank(world, open_metrics, RunFolderError) as metrics,
            run_on_every_rank(world, open_plans, RunFolderError) as plans,
        ):
            open_groups = partial(GroupLog, world, groups_file, log)
            yield Records(metrics, plans, run_on_every_rank(world, open_groups, RunFolderError))


def _write_facts(directory: Path, facts: RunFacts) -> None:
    """Write run.json, and remove the summary of an earlier end, which a report would take for that of this run."""
    write_atomically(directory / "run.json", as_json(asdict(facts), indent=1))
    (directory / "summary.json").unlink(missing_ok=True)


def note_facts(directory: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to run.json that are known only after the run began."""
    file = directory / "run.json"
    write_atomically(file, as_json(read_json(file) | dict(facts), indent=1))


def save_plan(run: TrainingRun, plan: Plan, name: str) -> None:
    """Save a plan as plans/NAME.json, for the report; all ranks call it together."""
    file = run.dir / "plans" / f"{name}.json"

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, plan.to_json())

    run_on_first_rank(run.world, write, RunFolderError)


def _open_loggers(run: TrainingRun, facts: RunFacts, classes: Mapping[str, LoggerClass], log: LogLine) -> RunLoggers:
    """Return the open loggers of this rank.

    There are none where a finished run is shown again: each set is recorded at the last step, so no row is written.
    """
    rows = read_metrics(run.dir / "metrics.jsonl") if classes else []
    steps = run.config.train.steps
    if run.done == steps and {(steps, entry.name) for entry in run.sets} <= find_evaluations(rows):
        classes = {}
    start = RunStart(run.dir, run.config.tables(), dict(facts.lines()), run.done, rows)
    return RunLoggers.open(classes, start, log)
