"""When a run saves: every so many steps or minutes, at its end, and before an error that every rank raises.

How a checkpoint is written is in `checkpoint/`. What a rank meets alone, such as the loss of another rank, saves
nothing, as no rank could tell whether the others would come; the last checkpoint before it stands.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from longspan.checkpoint.checkpoint import save_checkpoint
from longspan.comm.all_ranks import is_first_rank
from longspan.errors import CheckpointError, LongspanError, NonFiniteError, counted
from longspan.run.training_run import TrainingRun


class Saves:
    """The checkpoints of a run; `done` counts the steps that its weights have taken.

    >>> saves = Saves(run)
    >>> with saves.before_errors():
    ...     saves.done += 1
    ...     saves.save()
    """

    def __init__(self, run: TrainingRun) -> None:
        self.done = run.done
        self._run, self._saved, self._since = run, run.done, time.monotonic()

    def minutes_are_over(self) -> bool:
        """Whether it is time for the next checkpoint by the first rank's clock; the other ranks learn it from that."""
        minutes = self._run.config.train.save_minutes
        return is_first_rank(self._run.world) and 0 < minutes <= (time.monotonic() - self._since) / 60

    def due(self, *, minutes_over: bool) -> bool:
        """Whether a checkpoint is due after this step; `minutes_over` is what the ranks agreed on."""
        settings = self._run.config.train
        return minutes_over or is_due(self.done, settings.save_every) or self.done == settings.steps

    def save(self, *, keep_all: bool = False) -> None:
        """Write a checkpoint of the weights as they are; all ranks call it together."""
        run = self._run
        state = {"config": run.config.tables(), "ranks": len(run.world.home.ranks), "order": run.order.version}
        keep = 0 if keep_all else run.config.run.keep_checkpoints
        save_checkpoint(run.checkpoints, run.model, run.optimizer, run.world, step=self.done, state=state, keep=keep)
        self._saved, self._since = self.done, time.monotonic()

    def save_rest(self) -> None:
        """The same, unless the last checkpoint has these weights."""
        if self.done > self._saved:
            self.save()

    @contextmanager
    def before_errors(self) -> Iterator[None]:
        """Where every rank leaves with the same error, write what was trained since the last checkpoint before that.

        Weights that are not finite are not written, nor anything after a checkpoint that could not be.
        """
        try:
            yield
        except LongspanError as error:
            refused = isinstance(error, CheckpointError)
            broken = isinstance(error, NonFiniteError) and not error.weights_are_finite
            if error.on_all_ranks and self.done > self._saved and not refused and not broken:
                error.add_note(self._saved_or_not())
            raise

    def _saved_or_not(self) -> str:
        try:
            self.save(keep_all=True)
        except LongspanError as error:  # a disk that is full, or a rank that died meanwhile
            return f"What was trained since step {self._saved} is lost: {error}"
        return f"The weights after {counted(self.done, 'step')} are saved in {self._run.checkpoints}"


def is_due(done: int, every: int) -> bool:
    """Whether something that is done every so many steps (0: never) is due after so many."""
    return every > 0 and done > 0 and done % every == 0
