"""The records of a session, written by its first rank: run.json, metrics, plans, groups, rows of loggers, and run.lock.

groups.jsonl has the communicators and groups that contain the first rank: an object for each communicator (kind, axis,
ranks, seconds), for each group of a plan that shares documents (kind "cp"), and for each pair of levels.
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.comm.world import open_worlds
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, RunFolderError
from longspan.files import as_json, name_file_in_errors, read_json, write_atomically
from longspan.plan import Cost, Group, Plan
from longspan.plan.hierarchy import Levels, group_levels, hierarchical_groups
from longspan.plan.plan_rows import plan_row
from longspan.run.facts import LOCK, RunFacts, facts_text
from longspan.run.loggers.metrics_log import MetricsLog, find_evaluations, read_metrics
from longspan.run.loggers.run_loggers import LoggerClass, RunLoggers, RunStart, logger_classes
from longspan.run.result import LAST_STEPS
from longspan.run.run_data import TrainingRun
from longspan.run.run_facts import facts_of
from longspan.train.starts import Starts
from longspan.train.step_figures import waiting_text

HANG = "hang"  # of what torch recorded of collectives, where one failed
_STEP = re.compile(rb'{"step":(\d+),')


class PlanLog:
    """Appends plans to a file, flushed one by one; opened for a resumed run, it keeps those up to a step.

    >>> with PlanLog(Path("runs/first/plans.jsonl"), after_step=100) as log:
    ...     log.write(101, plan)

    `None` for a path writes nothing: on the ranks that do not record.
    """

    def __init__(self, path: Path | None, *, after_step: int) -> None:
        """Open the file and cut rows after `after_step` off; the first row that is written names its cost again."""
        self._file = None
        if path is not None:
            with name_file_in_errors(path):
                self._file = path.open("a+b")
                self._file.truncate(_length_to_keep(path, after_step))
        self._cost: Cost | None = None  # of the last row of this session

    def __enter__(self) -> "PlanLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # a row that could not be written: `write` has raised an error
                self._file.close()

    def write(self, step: int, plan: Plan) -> None:
        """Append the plan of a step, counted from 1. Raises OSError, with the file's name, if the disk refuses it."""
        if self._file is None:
            return
        # a row names its cost only where that of the row before is another
        row, self._cost = plan_row(step, plan, after=self._cost), plan.cost
        with name_file_in_errors(Path(self._file.name)):
            self._file.write(row.encode() + b"\n")
            self._file.flush()


def _length_to_keep(path: Path, after_step: int) -> int:
    length = 0
    with path.open("rb") as lines:
        for line in lines:
            step = _STEP.match(line)
            if step is None or int(step[1]) > after_step or not line.endswith(b"\n"):
                break
            length += len(line)
    return length


# By kind of communicator: the axis of the home along which its ranks lie, or what it is for.
AXES = {
    "control": "control",
    "saves": "control",
    "parent": "plane",
    "everyone": "all",
    "slots": "slots",
    "replicate": "replicate",
    "tp": "tp",
    "pipeline": "pp",
    "ep": "ep",
    "outer": "experts",
    "communicator": "cp",
}
Use = Literal["training", "evaluation"]
Row = dict[str, Any]


class GroupLog:
    """Records the groups that each plan adds; writes nothing if `path` is None.

    >>> log = GroupLog(world, Path("runs/first/groups.jsonl"))
    >>> log.note_groups(plan)
    """

    def __init__(self, world: World, path: Path | None) -> None:
        """Begin an empty file; a session notes its groups anew, for it makes them anew."""
        self._world, self._path = world, path
        self._plan_count = self._recorded_communicators = 0
        self._recorded_levels: set[Levels] = set()
        self._recorded_groups: set[tuple[object, ...]] = set()
        if path is not None:
            path.write_text("", encoding="utf-8")

    def note_groups(self, plan: Plan, use: Use = "training") -> None:
        """Write the groups that this plan adds.

        They are communicators that were made since the last call, context-parallel groups of this rank that no plan had
        before, and levels of hierarchical groups. The file gets a row for each. Only the rank that keeps the records
        has a file.
        """
        if self._path is None:
            return
        self._plan_count += 1
        communicators = self._world.process_groups.made[self._recorded_communicators :]
        self._recorded_communicators += len(communicators)
        level_pairs = dict.fromkeys(group_levels(group) for group in hierarchical_groups(plan))
        levels = [pair for pair in level_pairs if pair not in self._recorded_levels]
        self._recorded_levels.update(levels)
        rows: list[Row] = [
            {"kind": r.kind, "axis": AXES[r.kind], "ranks": r.ranks, "seconds": round(r.seconds, 6)}
            for r in communicators
        ]
        groups = self._new_cp_groups(plan, use)
        self._recorded_groups.update(groups)
        for group in groups.values():
            rows += self._cp_rows(group, use)
        rows += [{"kind": "levels", "use": use, "a2a": pair.a2a, "p2p": pair.p2p} for pair in levels]
        if rows:
            with name_file_in_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row | {"plan": self._plan_count}) + "\n" for row in rows)

    def _new_cp_groups(self, plan: Plan, use: Use) -> dict[tuple[object, ...], Group]:
        groups = (group for batch in plan.micro_batches for group in batch.groups if group.degree > 1)
        keyed = {
            (use, group.slots, group.cp_comm_type, group.hierarchical_context_parallel_sizes): group
            for group in groups
            if self._world.slot in group.slots
        }
        return {key: group for key, group in keyed.items() if key not in self._recorded_groups}

    def _cp_rows(self, group: Group, use: Use) -> Iterator[Row]:
        # "over" is what carries a level's messages: a communicator of the level alone, or that of all slots, the plane.
        for level, slots in self._levels_of_rank(group):
            ranks = tuple(self._world.plane[slot] for slot in slots)
            carrier = "plane" if self._world.process_groups.communicator(ranks) is None else "communicator"
            yield {"kind": "cp", "use": use, "degree": group.degree, "level": level, "ranks": ranks, "over": carrier}

    def _levels_of_rank(self, group: Group) -> Iterator[tuple[str, tuple[int, ...]]]:
        comm_types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
        for comm_type in dict.fromkeys(comm_types):
            if comm_type != "a2a+p2p":
                yield comm_type, group.slots
                continue
            levels = group_levels(group)
            for level, slot_sets in (("a2a", levels.a2a), ("p2p", levels.p2p)):
                yield level, next(slots for slots in slot_sets if self._world.slot in slots)


@contextmanager
def run_lock(directory: Path, world: World, log: LogLine) -> Iterator[None]:
    """Hold the lock of a run's folder, creating the folder if needed; entered by all ranks.

    A folder that it created is removed where an error ends the run before its run.json is written. Raises
    RunFolderError on every rank if another process holds the lock: which one, on which host.
    """
    to_remove = is_first_rank(world) and not directory.exists()
    file = run_on_every_rank(
        world, lambda: _lock_file(directory, log) if is_first_rank(world) else None, RunFolderError
    )
    try:
        yield
        to_remove = False
    finally:
        if file is not None:
            with suppress(OSError):
                file.truncate(0)
                file.close()
        if to_remove and not (directory / "run.json").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _lock_file(directory: Path, log: LogLine) -> TextIO:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    file = path.open("a+", encoding="utf-8")
    try:
        with name_file_in_errors(path):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunFolderError(_lock_holder_text(directory, file)) from error
        log(f"{path} cannot be locked ({error.strerror}): a second run in this folder would not be noticed")
    with suppress(OSError):  # a full disk: what counts is the lock
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def _lock_holder_text(directory: Path, file: TextIO) -> str:
    with file:
        file.seek(0)
        holder = file.read().strip() or "another process"
    return (
        f"another run is at work in {directory}: {holder}; wait until it has ended, stop it, or set run.dir to "
        "another folder"
    )


class Records(NamedTuple):
    """The logs of a session: rows of metrics, the plans of its steps, and the groups that they add."""

    run: TrainingRun
    metrics: MetricsLog
    plans: PlanLog
    groups: GroupLog

    def write_step(self, row: dict[str, Any], plan: Plan) -> None:
        """Write a step's metrics, its plan and the groups that it added. Raises OSError for what the disk refuses.

        Raises RunFolderError where the run's folder was removed, as files that are open are written even then.
        """
        if is_first_rank(self.run.world) and not (self.run.dir / LOCK).exists():
            raise RunFolderError(
                f"{self.run.dir} was removed or renamed while the run was at work in it: it has no {LOCK}; put it back "
                "if it is elsewhere, and start the command again"
            )
        self.groups.note_groups(plan)
        self.plans.write(row["step"], plan)
        self.metrics.write(row)

    def last_loss(self, done: int) -> float:
        """Return the mean loss of the last LAST_STEPS of `done` steps; NaN without any, and on other ranks."""
        rows = read_metrics(self.run.dir / "metrics.jsonl") if is_first_rank(self.run.world) else []
        rows = [row for row in rows if done - LAST_STEPS < row["step"] <= done]
        losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
        return math.fsum(losses) / len(losses) if losses else math.nan


def import_loggers(config: RunConfig, world: World) -> Mapping[str, LoggerClass]:
    """Import the classes of a run's loggers on its first rank. Raises ConfigError, on every rank, where that fails."""
    names = config.run.loggers if is_first_rank(world) else ()
    return run_on_every_rank(world, partial(logger_classes, names), ConfigError)


@contextmanager
def open_records(run: TrainingRun, classes: Mapping[str, LoggerClass], log: LogLine) -> Iterator[Records]:
    """Open all records, and close them at the end; entered by all ranks, only the first writes.

    Logs the facts, unless no step is left. Raises on every rank: ConfigError if a logger cannot start, RunFolderError
    if the disk refuses a write.
    """
    world, first, facts = run.world, is_first_rank(run.world), facts_of(run)
    for open_world in open_worlds():  # each writes what torch recorded of a failed collective
        open_world.watch.folder = run.dir / HANG
    names = ("metrics.jsonl", "plans.jsonl", "groups.jsonl")
    metrics_file, plans_file, groups_file = (run.dir / name if first else None for name in names)
    if run.done < run.config.train.steps:
        # a report would take the summary of an earlier end for this run's
        run_on_first_rank(world, partial((run.dir / "summary.json").unlink, missing_ok=True), RunFolderError)
        write_facts(run, "run.json", asdict(facts))
        log(facts_text(facts))
    open_loggers = partial(_open_loggers, run, facts, classes if first else {}, log)
    with run_on_every_rank(world, open_loggers, ConfigError) as loggers:
        open_metrics = partial(MetricsLog, metrics_file, after_step=run.done, loggers=loggers)
        open_plans = partial(PlanLog, plans_file, after_step=run.done)
        with (
            run_on_every_rank(world, open_metrics, RunFolderError) as metrics,
            run_on_every_rank(world, open_plans, RunFolderError) as plans,
        ):
            open_groups = partial(GroupLog, world, groups_file)
            yield Records(run, metrics, plans, run_on_every_rank(world, open_groups, RunFolderError))


def write_facts(run: TrainingRun, name: str, values: Mapping[str, Any]) -> None:
    """Write a file of facts in the run's folder; all ranks call it together."""
    write = partial(write_atomically, run.dir / name, as_json(values, indent=1))
    run_on_first_rank(run.world, write, RunFolderError)


def note_start(run: TrainingRun, starts: Starts, plan: Plan, log: LogLine) -> None:
    """Log the seconds of a start, by part until the first step's end, and add them to run.json; all ranks enter.

    Also log what this step, of this plan, waited for, if its prices are of these devices.
    """
    file = run.dir / "run.json"

    def add_starts() -> None:
        write_atomically(file, as_json(read_json(file) | {"starts": starts.to_json()}, indent=1))

    run_on_first_rank(run.world, add_starts, RunFolderError)
    log(str(starts))
    if run.figures.priced_here and (text := waiting_text(plan)):
        log(text)


def save_plan(run: TrainingRun, plan: Plan, name: str) -> None:
    """Save a plan as plans/NAME.json, for the report; all ranks call it together."""
    file = run.dir / "plans" / f"{name}.json"

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, plan.to_json())

    run_on_first_rank(run.world, write, RunFolderError)


def _open_loggers(run: TrainingRun, facts: RunFacts, classes: Mapping[str, LoggerClass], log: LogLine) -> RunLoggers:
    rows = read_metrics(run.dir / "metrics.jsonl") if classes else []
    steps = run.config.train.steps
    if run.done == steps and {(steps, entry.name) for entry in run.sets} <= find_evaluations(rows):
        classes = {}
    start = RunStart(run.dir, run.config.tables(), dict(facts.lines()), run.done, rows)
    return RunLoggers.open(classes, start, log)
