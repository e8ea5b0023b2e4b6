"""The best steps of a run, by `checkpoint.keep_best`, and which of a run's checkpoints its weights are taken from.

A run with `evaluation.patience` hands out its best step, any other its newest one. Training goes on from the newest.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from longspan.checkpoint.files import (
    Check,
    checkpoints_root,
    complete_checkpoints,
    newest_good_checkpoint,
    step_of,
)
from longspan.config.file import load_config
from longspan.config.text_values import BestFigure
from longspan.errors import CheckpointError
from longspan.files import read_json, write_atomically
from longspan.plain_text import LogLine

BEST_FILE = "best.json"


class BestStep(NamedTuple):
    """A step that was the best when it was evaluated, and its figure."""

    step: int
    value: float


def read_best_steps(run_dir: Path, figure: BestFigure, log: LogLine) -> list[BestStep]:
    """Return the best steps in best.json, the best of them last; [] without it, and, which is logged, if it is damaged
    or of another figure.
    """
    file = run_dir / BEST_FILE
    try:
        stored = read_json(file)
        if {key: stored[key] for key in vars(figure)} != vars(figure):
            log(f"{file} is of another figure than checkpoint.keep_best: no best step is known from it")
            return []
        bests = [BestStep(int(entry["step"]), float(entry["value"])) for entry in stored["bests"]]
        if not all(best.step > 0 and math.isfinite(best.value) for best in bests):
            raise ValueError("a best step without a finite figure")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        log(f"{file} is damaged: no best step is known from it")
        return []
    return bests


def write_best_steps(run_dir: Path, figure: BestFigure, bests: Iterable[BestStep]) -> None:
    """Write best.json. Raises OSError for what the disk refuses."""
    values = {**vars(figure), "bests": [best._asdict() for best in bests]}
    write_atomically(run_dir / BEST_FILE, json.dumps(values, indent=1))


class RunCheckpoints(NamedTuple):
    """The checkpoints of a run, in the order in which its weights are taken from the first good one.

    `figure` is what `checkpoint.keep_best` names ("": nothing), `best` the best step by it (None: none is known). With
    `takes_best` its checkpoint is the first of `paths`, else the newest is.
    """

    run_dir: Path
    root: Path
    paths: list[Path]
    figure: str = ""
    best: BestStep | None = None
    takes_best: bool = False

    @classmethod
    def find(cls, run_dir: Path, log: LogLine) -> "RunCheckpoints":
        """Find the checkpoints of a run that were saved to the end; what is unfinished or damaged is logged."""
        config = load_config(run_dir / "config.toml")
        root = checkpoints_root(run_dir, config.checkpoint.dir)
        paths = complete_checkpoints(root, log)
        if not config.checkpoint.keep_best:
            return cls(run_dir, root, paths)
        figure = BestFigure.from_text(config.checkpoint.keep_best)
        bests = read_best_steps(run_dir, figure, log)[::-1]
        takes_best = config.evaluation.patience > 0
        if takes_best:
            best_steps = [best.step for best in bests]
            best_paths = [path for path in paths if step_of(path) in best_steps]
            best_paths.sort(key=lambda path: best_steps.index(step_of(path)))
            paths = best_paths + [path for path in paths if path not in best_paths]
        return cls(run_dir, root, paths, figure.name, bests[0] if bests else None, takes_best)

    def take(self, check: Check, log: LogLine) -> Path:
        """Return the first checkpoint that passes `check`, and log which step it is where one is the best.

        Raises CheckpointError if there is none.
        """
        taken, _ = newest_good_checkpoint(self.paths, check, log)
        if taken is None:
            raise CheckpointError(
                f"{self.run_dir} has no checkpoint in {self.root}; train it first: longspan train "
                f"{self.run_dir}/config.toml"
            )
        if line := self._choice_line(taken):
            log(line)
        return taken

    def _choice_line(self, taken: Path) -> str:
        newest = max(self.paths, key=step_of)
        taken_text = f"step {step_of(taken)}{', the newest, is' if taken == newest else ' is'} taken"
        if self.best is None:
            return (
                f"{self.run_dir}: no best step by {self.figure} is known; {taken_text}" if self.takes_best else ""
            )
        best_text = f"{self.run_dir}: step {self.best.step} is the best by {self.figure} {self.best.value:.6g}"
        best_path = next((path for path in self.paths if step_of(path) == self.best.step), None)
        if taken == best_path:
            rest = "" if taken == newest else f"; the newest is {newest}"
            return f"{best_text} and is taken{rest}" if self.takes_best else ""
        if self.takes_best or best_path is None:
            return f"{best_text}, and has no good checkpoint; {taken_text}"
        return f"{best_text}; {taken_text}, and to take the best give {best_path}"
