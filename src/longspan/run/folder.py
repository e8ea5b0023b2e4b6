"""A run and its folder: one run at a time in it, and when checkpoints are written.

The lock is the system's, on the open file `run.lock` (POSIX, also over NFS), so that a killed process leaves none
behind; the file names its holder. Checkpoints are written every so many steps or minutes, at the end, and before an
error that every rank raises; how they are written, and that training goes on meanwhile, is in `checkpoint/`. An error
of one rank, such as the loss of another rank, saves nothing: no rank can tell whether the others would join, and the
last checkpoint stands.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from longspan.checkpoint.files import complete_checkpoints, remove_old_checkpoints, step_of
from longspan.checkpoint.saver import CheckpointSaver
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.data.stream import ORDER
from longspan.errors import (
    CheckpointError,
    LongspanError,
    NonFiniteError,
    RankLostError,
    RunFolderError,
    plural,
)
from longspan.files import name_file_in_errors
from longspan.run.best import BestCheckpoint
from longspan.run.facts import LOCK
from longspan.run.refining import STATE
from longspan.run.run_data import TrainingRun


@contextmanager
def run_lock(directory: Path, world: World, log: LogLine) -> Iterator[None]:
    """Hold the lock of a run's folder, creating the folder if needed; entered by all ranks.

    Raises RunFolderError on every rank if another process holds it: which one, on which host.
    """
    file = run_on_every_rank(
        world, lambda: _lock_file(directory, log) if is_first_rank(world) else None, RunFolderError
    )
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                file.truncate(0)
                file.close()


def _lock_file(directory: Path, log: LogLine) -> TextIO:
    """Open the lock file and lock it. Raises RunFolderError if another process holds the lock."""
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
    """Return the message that another run is at work in the folder, which its lock file names; closes the file."""
    with file:
        file.seek(0)
        holder = file.read().strip() or "another process"
    return (
        f"another run is at work in {directory}: {holder}; wait until it has ended, stop it, or set run.dir to "
        "another folder"
    )


class Saves:
    """The checkpoints of a run; `done` counts the steps that its weights have taken.

    >>> saves = Saves(run, display.log)
    >>> with saves.save_before_errors():
    ...     saves.done += 1
    ...     saves.save()
    ...     saves.wait()

    They are written while training goes on, unless `train.save_async` is off (`checkpoint/saver.py`).
    """

    def __init__(self, run: TrainingRun, log: LogLine) -> None:
        """Prepare the saves of a run; a run that keeps its best checkpoint finds it among those that are there."""
        self.done: int = run.done
        self._run, self._saved, self._saved_at = run, run.done, time.monotonic()
        self.saver: CheckpointSaver = CheckpointSaver(
            run.checkpoints,
            run.world,
            keep=run.config.run.keep_checkpoints,
            background=run.config.train.save_async == "auto",
            timeout=run.config.run.save_timeout_seconds,
            log=log,
        )
        self._best: BestCheckpoint | None = None
        if figure_name := run.config.train.keep_best:
            self._best = BestCheckpoint(figure_name, run.dir, run.world, log)
            self._best.figure.check_sets({entry.name for entry in run.sets})
            saved_steps = run_on_first_rank(
                run.world, lambda: [*map(step_of, complete_checkpoints(run.checkpoints))], CheckpointError
            )
            self._best.take_up(run.done, saved_steps)
            self.saver.best = self._best.step

    def minutes_are_over(self) -> bool:
        """Whether the first rank's clock makes the next checkpoint due; False on other ranks, which follow it."""
        minutes = self._run.config.train.save_minutes
        return is_first_rank(self._run.world) and 0 < minutes <= (time.monotonic() - self._saved_at) / 60

    def is_save_due(self, *, minutes_over: bool) -> bool:
        """Whether a checkpoint is due after this step; the ranks have agreed on `minutes_over`."""
        settings = self._run.config.train
        return minutes_over or is_due(self.done, settings.save_every) or self.done == settings.steps

    def reserve_memory(self) -> None:
        """After a session's first step, begin to take the memory into which saves copy weights.

        The call does nothing after other steps, nor where a checkpoint of the first step has just begun, which takes
        the memory itself.
        """
        if self.done == self._run.done + 1 and self.done > self._saved:
            self.saver.prepare(self._run.model, self._run.optimizer)

    def save(self, *, keep_all: bool = False) -> None:
        """Begin a checkpoint of the weights as they are; all ranks call it. With `keep_all` no old one is removed."""
        run = self._run
        state = {"config": run.config.tables(), "ranks": len(run.world.home.ranks), "order": ORDER}
        state |= {STATE: run.refinement.to_json()} if run.refinement else {}
        self.saver.keep = 0 if keep_all else run.config.run.keep_checkpoints
        self.saver.save(run.model, run.optimizer, step=self.done, state=state)
        self._saved, self._saved_at = self.done, time.monotonic()

    def save_if_unsaved(self) -> None:
        """Begin a checkpoint unless the last one has these weights."""
        if self.done > self._saved:
            self.save()

    def keep_if_best(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep this step's checkpoint if its evaluations have the best figure so far; it is written if it is not yet.

        `rows` are the metrics of this step's evaluations, empty where none was due.
        """
        if self._best is None or not rows or not self._best.is_new(rows, self.done):
            return
        self.save_if_unsaved()
        self.saver.best = self.done

    def remove_old_saves(self) -> None:
        """Remove checkpoints that are not kept any more, after the last evaluation; all ranks call it together.

        Without train.keep_best each save has removed them already.
        """
        keep = self._run.config.run.keep_checkpoints
        if self._best is not None:
            self.wait()
            remove = partial(remove_old_checkpoints, self._run.checkpoints, keep, best=self.saver.best)
            run_on_first_rank(self._run.world, remove, CheckpointError)

    def wait(self) -> None:
        """Return when the last checkpoint is published; all ranks call it together."""
        self.saver.wait()

    def columns(self) -> dict[str, Any]:
        """Return the columns of metrics with the time and bytes of the last save; {} unless they are known and new."""
        figures = self.saver.take_figures()
        if figures is None:
            return {}
        return {
            "save_shown_seconds": round(figures.shown_seconds, 6),
            "save_seconds": round(figures.seconds, 6),
            "save_bytes": figures.bytes,
        }

    @contextmanager
    def save_before_errors(self) -> Iterator[None]:
        """Write what was trained since the last checkpoint before an error that all ranks raise leaves the context.

        Nothing new is written after an error of this rank alone, as other ranks would not join, nor where saving itself
        failed or weights are not finite: the ranks then only wait for the save under way. A rank that fails alone waits
        for at most a quarter of `world.timeout`, because the other ranks wait for this rank no longer than the whole.
        After the loss of a rank no rank waits.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, LongspanError):  # an error of this rank alone, as far as anyone knows
                self.saver.wait_here(self._run.world.timeout / 4)
                raise
            refused = isinstance(error, CheckpointError)
            broken = isinstance(error, NonFiniteError) and not error.weights_are_finite
            if isinstance(error, RankLostError):
                self.saver.give_up()
            elif not error.on_all_ranks:
                self.saver.wait_here(self._run.world.timeout / 4)
            elif self.done > self._saved and not refused and not broken:
                error.add_note(self._try_to_save())
            else:
                self._try_to_wait(error)
            raise

    def _try_to_save(self) -> str:
        """Save after an error; return in a sentence what is saved, or what is lost and why."""
        saved_step = self._saved  # before `save` changes it
        try:
            self.save(keep_all=True)
            self.wait()
        except LongspanError as error:  # a disk that is full, or a rank that died meanwhile
            return f"What was trained since step {saved_step} is lost: {error}"
        return f"The weights after {plural(self.done, 'step')} are saved in {self._run.checkpoints}"

    def _try_to_wait(self, error: LongspanError) -> None:
        """Wait for a save that is under way; add its failure as a note to the error that ends the run."""
        try:
            self.wait()
        except LongspanError as failure:
            error.add_note(str(failure))


def is_due(done: int, every: int) -> bool:
    """Whether an action of every `every` steps (0: never) is due after `done` steps."""
    return every > 0 and done > 0 and done % every == 0
