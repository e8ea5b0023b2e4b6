"""When the checkpoints of a run are written, and which one is its best.

Checkpoints are written every so many steps or minutes, at the end, and before an error that every rank raises; how they
are written, and that training goes on meanwhile, is in `checkpoint/`. An error of one rank, such as the loss of another
rank, saves nothing: no rank can tell whether the others would join, and the last checkpoint stands.

The best checkpoint is that of `checkpoint.keep_best`, by a figure of the run's evaluations. `best.json` in the run's
folder has the last two steps that were the best when they were evaluated, with their figures: a run that ends while it
writes the newer one's checkpoint goes on with the older. With `evaluation.patience` the run hands out its best step.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from longspan.checkpoint.best import BestStep, read_best_steps, write_best_steps
from longspan.checkpoint.checkpoint import load_checkpoint
from longspan.checkpoint.files import checkpoint_path, complete_checkpoints, remove_old_checkpoints, step_of
from longspan.checkpoint.saver import CheckpointSaver
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, on_all_ranks, run_on_every_rank, run_on_first_rank
from longspan.config.text_values import BestFigure
from longspan.data.stream import ORDER, ORDER_OF_SOURCES
from longspan.errors import (
    CheckpointError,
    ConfigError,
    LongspanError,
    ModelError,
    NonFiniteError,
    RankLostError,
    RunFolderError,
    plural,
)
from longspan.model import save_model
from longspan.model.weights.hf_folder import read_configuration
from longspan.model.weights.tokenizer_files import RunFolderFiles
from longspan.run.run_data import TrainingRun


class Saves:
    """The checkpoints of a run, written while training goes on; `done` counts the steps that its weights have taken."""

    def __init__(self, run: TrainingRun, log: LogLine) -> None:
        self.done: int = run.done
        # A run that ends before its last step has a reason.
        self.end_reason: str = ""
        self._run = run
        self._log = log
        self._saved = run.done  # the step of the last checkpoint
        self._saved_at = time.monotonic()
        self.saver: CheckpointSaver = CheckpointSaver(
            run.checkpoints,
            run.world,
            keep=run.config.checkpoint.save_total_limit,
            background=run.config.checkpoint.async_mode == "auto",
            log=log,
        )
        self._best: BestCheckpoint | None = None
        if figure_name := run.config.checkpoint.keep_best:
            self._best = BestCheckpoint(figure_name, run.dir, run.world, log)
            self._best.figure.check_sets({entry.name for entry in run.sets})
            saved_steps = run_on_first_rank(
                run.world, lambda: [*map(step_of, complete_checkpoints(run.checkpoints))], CheckpointError
            )
            self._best.restore_best_steps(run.done, saved_steps)
            self.saver.best = self._best.step

    def minutes_are_over(self) -> bool:
        """Whether the first rank's clock makes the next checkpoint due; False on other ranks, which follow it."""
        minutes = self._run.config.checkpoint.minutes
        return is_first_rank(self._run.world) and 0 < minutes <= (time.monotonic() - self._saved_at) / 60

    def is_checkpoint_due(self, *, minutes_over: bool) -> bool:
        """Whether a checkpoint is due after this step; the ranks have agreed on `minutes_over`."""
        config = self._run.config
        return minutes_over or is_due(self.done, config.checkpoint.every) or self.done == config.train.steps

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
        order = ORDER_OF_SOURCES if run.config.data.sources else ORDER
        state = {"config": run.config.tables(), "ranks": len(run.world.home.ranks), "order": order}
        state["begin"] = run.order.begin_of_step(self.done)
        self.saver.keep = 0 if keep_all else run.config.checkpoint.save_total_limit
        self.saver.save(run.model, run.optimizer, step=self.done, state=state)
        self._saved = self.done
        self._saved_at = time.monotonic()

    def save_if_unsaved(self) -> None:
        """Begin a checkpoint unless the last one has these weights."""
        if self.done > self._saved:
            self.save()

    def save_if_best(self, row: Mapping[str, Any]) -> None:
        """If the `row` of an evaluation of this step has the best figure so far, note the step as the best, and save
        its weights unless the last checkpoint has them; all ranks call it with the same row. Raises ConfigError where
        the row does not name the figure.
        """
        if self._best is None or not self._best.record_if_best(row, self.done):
            return
        self.save_if_unsaved()
        self.saver.best = self.done

    def wait_for_best(self) -> None:
        """If this step is the best, wait until its checkpoint is complete; all ranks call it together."""
        if self._best is not None and self._best.step == self.done:
            self.wait()

    def loses_patience(self, evaluated: Collection[tuple[int, str]]) -> bool:
        """Return whether as many evaluations as `evaluation.patience` came after the best step; if so, log it and set
        `end_reason`. All ranks call it and get the same; what counts is `evaluated` of the first rank, the step and set
        of every recorded evaluation.
        """
        patience = self._run.config.evaluation.patience
        best = self._best
        # Without a best step the next evaluation gives one.
        if best is None or not patience or not best.step:
            return False
        later = {step for step, name in evaluated if name == best.figure.set and step > best.step}
        if not self._run.world.control.broadcast_object(len(later) >= patience):
            return False
        self.end_reason = f"no {best.figure.column} better than {best} in {plural(patience, 'evaluation')}"
        self._log(f"the run ends after step {self.done}: {self.end_reason} (evaluation.patience)")
        return True

    def take_best(self) -> int:
        """With `evaluation.patience` load the weights of the best step into the model; returns the step whose weights
        it has. All ranks call it together.
        """
        run = self._run
        best = self._best
        if best is None or not run.config.evaluation.patience or best.step == self.done:
            return self.done
        if not best.step:
            self._log(
                f"no step has a finite {best.figure.name}: model/ gets the weights of step {self.done}, the last"
            )
            return self.done
        run.finish_update()
        load_checkpoint(checkpoint_path(run.checkpoints, best.step), run.model, None, run.world)
        return best.step

    @property
    def best_figure(self) -> tuple[str, BestStep] | None:
        """The name of the figure of `checkpoint.keep_best` and the best step by it; None without one."""
        best = self._best
        return None if best is None or not best.steps else (best.figure.name, best.steps[-1])

    def remove_old_saves(self) -> None:
        """Remove checkpoints that are not kept any more, after the last evaluation; all ranks call it together."""
        keep = self._run.config.checkpoint.save_total_limit
        if self._best is not None:
            self.wait()
            remove = partial(remove_old_checkpoints, self._run.checkpoints, keep, best=self.saver.best)
            run_on_first_rank(self._run.world, remove, CheckpointError)

    def wait(self) -> None:
        """Wait until the save under way is complete; all ranks call it together. Raises CheckpointError."""
        self.saver.wait()

    def take_save_columns(self) -> dict[str, Any]:
        """Log the time and bytes of the last save, and return them as columns of metrics; {} unless they are new."""
        figures = self.saver.take_figures()
        if figures is None:
            return {}
        self._log(str(figures))
        return {
            "save_shown_seconds": round(figures.shown_seconds, 6),
            "save_seconds": round(figures.seconds, 6),
            "save_bytes": figures.bytes,
        }

    @contextmanager
    def save_before_errors(self) -> Iterator[None]:
        """Before an error that all ranks raise leaves the context, save what was trained since the last checkpoint.

        Otherwise nothing is saved. After the loss of a rank, this rank waits for nothing. With an error of its own it
        waits for the save under way, at most a quarter of `world.timeout`. After an error of all ranks that is of
        saving, that left weights that are not finite, or that came with nothing new to save, all ranks wait until that
        save is complete.
        """
        try:
            yield
        except Exception as error:
            save_failed = isinstance(error, CheckpointError)
            weights_are_bad = isinstance(error, NonFiniteError) and not error.weights_are_finite
            if isinstance(error, RankLostError):
                self.saver.give_up()
            elif not isinstance(error, LongspanError) or not error.on_all_ranks:
                # Other ranks may not have the error.
                self.saver.give_up(self._run.world.timeout / 4)
            elif self.done > self._saved and not save_failed and not weights_are_bad:
                error.add_note(self._try_to_save())
            else:
                try:
                    self.wait()
                except LongspanError as failure:
                    error.add_note(str(failure))
            raise

    def _try_to_save(self) -> str:
        # `save` changes the number below.
        saved_step = self._saved
        try:
            self.save(keep_all=True)
            self.wait()
        except LongspanError as error:  # a disk that is full, or a rank that died meanwhile
            return f"What was trained since step {saved_step} is lost: {error}"
        return f"The weights after {plural(self.done, 'step')} are saved in {self._run.checkpoints}"


class BestCheckpoint:
    """The best step so far by `checkpoint.keep_best`; made and used by all ranks together."""

    def __init__(self, figure: str, folder: Path, world: World, log: LogLine) -> None:
        self.figure: BestFigure = BestFigure.from_text(figure)
        # Each of these steps was the best when it was evaluated; the last one is the best.
        self.steps: Sequence[BestStep] = ()
        self._folder = folder
        self._world = world
        self._log = log

    def __str__(self) -> str:
        return f"{self.steps[-1].value:.6g} of step {self.step}" if self.steps else "none"

    @property
    def step(self) -> int:
        """The best step; 0 for none."""
        return self.steps[-1].step if self.steps else 0

    def restore_best_steps(self, done: int, saved: Collection[int]) -> None:
        """Take from best.json the steps up to `done` whose checkpoints are among the `saved` ones, and leave the others
        out of it: later steps are made again.
        """
        read = partial(read_best_steps, self._folder, self.figure, self._log)
        stored = run_on_first_rank(self._world, read, RunFolderError)
        self.steps = [best for best in stored if best.step <= done and best.step in saved]
        if self.steps != stored:
            self._write_steps()

    def record_if_best(self, row: Mapping[str, Any], step: int) -> bool:
        """Note a step as the best, here and in best.json, if the row of its evaluation has a better figure than all
        before. A figure that is not finite is none, which is logged.

        The first rank's row counts. Returns whether it is the best; the caller keeps its checkpoint. Raises ConfigError
        where the row does not name the figure.
        """
        try:
            value = self._world.control.broadcast_object(self.figure.figure_in_row(row))
        except ConfigError as error:  # every rank has the same row, and raises it
            raise on_all_ranks(error) from None
        if value is None:  # the row is of another set, or has nothing that was counted
            return False
        if not math.isfinite(value):
            self._log(f"{self.figure.name} of step {step} is {value}: no figure by which it could be the best")
            return False
        best_before = ""
        if self.steps:
            best_value = self.steps[-1].value
            is_better = value > best_value if self.figure.higher else value < best_value
            if not is_better:
                return False
            best_before = f" (before: {best_value:.6g} at step {self.step})"
        self._log(
            f"step {step} has the best {self.figure.column} so far, {value:.6g}{best_before}; its checkpoint is kept"
        )
        self.steps = [*self.steps[-1:], BestStep(step, value)]
        self._write_steps()
        return True

    def _write_steps(self) -> None:
        write = partial(write_best_steps, self._folder, self.figure, self.steps)
        run_on_first_rank(self._world, write, RunFolderError)


def save_final_model(run: TrainingRun) -> None:
    """Save the model's weights as RUN/model in the dtype that config.json names, an adapter in its own; all ranks call
    it together.
    """
    dtype = run_on_every_rank(run.world, lambda: read_configuration(run.dir).dtype, ModelError)
    saved_dtype = None if run.config.lora.rank else dtype
    run.finish_update()
    save_model(run.model, run.dir / "model", run.world, RunFolderFiles(run.dir), dtype=saved_dtype)


def is_due(done: int, every: int) -> bool:
    """Return whether something that happens `every` steps (0: never) is due after `done` of them."""
    return every > 0 and done > 0 and done % every == 0
