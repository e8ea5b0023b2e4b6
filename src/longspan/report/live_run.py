"""A run as it is now, from what it has written so far, and whether a process is at work in its folder.

Every file may be missing, cut or wrong, for a run that has not begun, is killed, or comes from someone else.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.report.run_folder import RunFolder, number
from longspan.run.facts import LOCK

State = Literal["waiting", "running", "done", "stopped", "broken"]


@dataclass(frozen=True)
class LiveRun:
    """A run now: its records, the process at work, "" for none, and the seconds since it wrote metrics, or began."""

    run: RunFolder
    state: State
    holder: str = ""
    idle: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "LiveRun":
        """Read the run in a folder, which need not be there yet.

        >>> LiveRun.read(Path("runs/first")).step
        """
        holder = lock_holder(path)  # first: what a run that ends writes is there once its lock is gone
        run = RunFolder.read(path, live=True)
        files = (path / name for name in ("metrics.jsonl", "run.json"))
        idle = min((time.time() - file.stat().st_mtime for file in files if file.is_file()), default=0.0)
        return cls(run, _state_of(run, holder), holder, idle)

    @property
    def step(self) -> int:
        """The last step that ended; 0 before the first."""
        return int(self.run.step[-1]) if len(self.run.step) else 0

    @property
    def steps(self) -> int:
        """How many steps the run is to take, by run.json, summary.json or config.toml; 0 where none of them says."""
        facts, summary = self.run.facts, self.run.summary
        values = facts.steps if facts else 0, summary.get("steps"), self.run.key("train", "steps")
        # up to 2^53 a browser holds whole numbers exactly
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 53), 0)

    def state_sentence(self) -> str:
        """Return where the run is, or what came of it, in a sentence without a full stop."""
        step_text = f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
        signal = str(self.run.summary.get("stopped"))
        signal = signal if signal.isalnum() and len(signal) < 16 else "a signal"  # a damaged file may hold anything
        sentences: dict[State, str] = {
            "running": f"the run is at {step_text}",
            "waiting": "no run has begun here",
            "done": f"the run has come to its end at {step_text}",
            "stopped": f"the run was stopped by {signal} after {step_text}; the same command goes on",
            "broken": f"the run ended after {step_text} with an error or was killed; its own output says more",
        }
        return sentences[self.state]


def lock_holder(folder: Path) -> str:
    """Return which process is at work in a run's folder, as its lock names it; "" where none is.

    The lock is only asked for and never taken, so that a run which begins meanwhile is not refused. Where the system
    has no locks of files, the lock counts as held if the file names a process.
    """
    path = folder / LOCK
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            holder = file.read(4096).decode("utf-8", "replace").strip()
            file.seek(0)
            try:
                os.lockf(file.fileno(), os.F_TEST, 0)
            except (PermissionError, BlockingIOError):
                return holder or "another process"
            except OSError:
                return holder
            return ""
    except OSError:
        return ""


def _state_of(run: RunFolder, holder: str) -> State:
    """The summary counts only if it is of the last step: a resumed run leaves an older one until it ends. A number that
    the summary lacks is NaN, which equals nothing, so that a run without a summary is "broken".
    """
    if holder:
        return "running"
    if not run.summary and not len(run.step) and not run.evaluations:
        return "waiting"
    summary_step, steps = number(run.summary.get("step")), number(run.summary.get("steps"))
    if summary_step != (int(run.step[-1]) if len(run.step) else summary_step):
        return "broken"
    return "stopped" if run.summary.get("stopped") else "done" if summary_step >= steps else "broken"
