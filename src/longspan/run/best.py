"""The best checkpoint of a run, by a figure of its evaluations: `train.keep_best`.

`best.json` in the run's folder has the last two steps that were the best when they were evaluated, with their figures:
a run that ends while it writes the newer one's checkpoint goes on with the older.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, on_all_ranks, run_on_first_rank
from longspan.config.best_figure import BestFigure
from longspan.errors import ConfigError, RunFolderError
from longspan.files import write_atomically

FILE = "best.json"


class BestCheckpoint:
    """The best step so far; made and used by all ranks together.

    >>> best = BestCheckpoint("eval_loss", Path("runs/mine"), world, display.log)
    >>> best.take_up(done=100, saved=[100, 50])
    >>> if best.is_new(rows, step=150):                                   # after an evaluation
    ...     saver.best = 150
    """

    def __init__(self, figure: str, folder: Path, world: World, log: LogLine) -> None:
        """Begin without a best step; `figure` is train.keep_best, and `folder` the run's."""
        self.figure, self._file, self._world, self._log = BestFigure.of(figure), folder / FILE, world, log
        self._bests: Sequence[tuple[int, float]] = ()  # step and value, the newest last

    @property
    def step(self) -> int:
        """The best step, which is the last one noted; 0 before an evaluation."""
        return self._bests[-1][0] if self._bests else 0

    def take_up(self, done: int, saved: Collection[int]) -> None:
        """Take over the best steps of an earlier session: those up to `done` whose checkpoints are in `saved`."""
        stored = run_on_first_rank(self._world, self._read_figures, RunFolderError)
        self._bests = [(step, value) for step, value in stored if step <= done and step in saved]

    def is_new(self, rows: Iterable[Mapping[str, Any]], step: int) -> bool:
        """Return whether evaluations after a step have a better figure than all before; if so, note the step."""
        try:
            value = self._world.control.broadcast_object(self.figure.value_in(rows))
        except ConfigError as error:  # every rank has the same rows, and raises it
            raise on_all_ranks(error) from None
        if value is None or not self._is_better(value):
            return False
        best_before = f" (before: {self._bests[-1][1]:.6g} at step {self.step})" if self._bests else ""
        self._log(
            f"step {step} has the best {self.figure.column} so far, {value:.6g}{best_before}; its checkpoint is kept"
        )
        self._bests = [*self._bests[-1:], (step, value)]
        run_on_first_rank(self._world, self._write_figures, RunFolderError)
        return True

    def _is_better(self, value: float) -> bool:
        """Return whether a value is better than the best so far; the first value always is."""
        if not self._bests:
            return True
        best_value = self._bests[-1][1]
        return value > best_value if self.figure.higher else value < best_value

    def _read_figures(self) -> list[tuple[int, float]]:
        """Return what the file has; nothing where it is of another figure or damaged."""
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if [stored["set"], stored["column"], stored["higher"]] != list(vars(self.figure).values()):
                self._log(f"{self._file} is of another figure than train.keep_best: the best is looked for anew")
                return []
            return [(int(entry["step"]), float(entry["value"])) for entry in stored["bests"]]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, AttributeError):
            self._log(f"{self._file} is damaged: the best checkpoint is looked for anew")
            return []

    def _write_figures(self) -> None:
        """Write the best steps and their values, and which figure they are of."""
        bests = [{"step": step, "value": value} for step, value in self._bests]
        write_atomically(self._file, json.dumps({**vars(self.figure), "bests": bests}, indent=1))
