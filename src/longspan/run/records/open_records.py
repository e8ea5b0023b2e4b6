"""What a session of a run records, on its first rank: run.json, metrics.jsonl, groups.jsonl, rows to its loggers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from longspan.comm.all_ranks import LogLine, is_first_rank, on_every_rank, on_first_rank
from longspan.errors import ConfigError, RunFolderError
from longspan.files import as_json, write_atomically
from longspan.run.loggers.logger import LoggerClass, RunStart
from longspan.run.loggers.run_loggers import RunLoggers
from longspan.run.records.facts import RunFacts, facts_text
from longspan.run.records.group_log import GroupLog
from longspan.run.records.metrics_log import MetricsLog, evaluated_in, read_metrics
from longspan.run.training_run import TrainingRun


class Records(NamedTuple):
    """Where a session writes rows of metrics, and the groups that its plans add."""

    metrics: MetricsLog
    groups: GroupLog


@contextmanager
def open_records(
    run: TrainingRun, facts: RunFacts, classes: Mapping[str, LoggerClass], log: LogLine
) -> Iterator[Records]:
    """Open them all, and close them at the end; entered by all ranks, of which the first alone writes.

    Says the facts, unless no step is left. Raises ConfigError where a logger cannot start, RunFolderError for what the
    disk refuses, on every rank.
    """
    world, first = run.world, is_first_rank(run.world)
    metrics_file, groups_file = (run.dir / name if first else None for name in ("metrics.jsonl", "groups.jsonl"))
    if run.done < run.config.train.steps:
        text = as_json(asdict(facts), indent=1)
        on_first_rank(world, lambda: write_atomically(run.dir / "run.json", text), RunFolderError)
        log(facts_text(facts))
    open_loggers = partial(_open_loggers, run, facts, classes if first else {}, log)
    with on_every_rank(world, open_loggers, ConfigError) as loggers:
        open_metrics = partial(MetricsLog, metrics_file, after_step=run.done, loggers=loggers)
        with on_every_rank(world, open_metrics, RunFolderError) as metrics:
            open_groups = partial(GroupLog, world, groups_file, log)
            yield Records(metrics, on_every_rank(world, open_groups, RunFolderError))


def _open_loggers(run: TrainingRun, facts: RunFacts, classes: Mapping[str, LoggerClass], log: LogLine) -> RunLoggers:
    """The loggers of this rank; none where a finished run is shown again, which has no row left to write."""
    rows = read_metrics(run.dir / "metrics.jsonl") if classes else []
    steps = run.config.train.steps
    if run.done == steps and {(steps, entry.name) for entry in run.sets} <= evaluated_in(rows):
        classes = {}
    start = RunStart(run.dir, run.config.tables(), dict(facts.lines()), run.done, rows)
    return RunLoggers.open(classes, start, log)
