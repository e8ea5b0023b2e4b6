"""Every plan of a run's training steps: one JSON object a line in plans.jsonl, which `longspan.plan.read_plans` reads.

The first rank writes. A resumed run goes on after its step; what the run is about to do again is cut off.
"""

import re
from contextlib import suppress
from pathlib import Path

from longspan.files import name_file_in_errors
from longspan.plan import Cost, Plan
from longspan.plan.plan_rows import plan_row

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
    """Return the length of the file up to its first line that is torn, or of a later step."""
    length = 0
    with path.open("rb") as lines:
        for line in lines:
            step = _STEP.match(line)
            if step is None or int(step[1]) > after_step or not line.endswith(b"\n"):
                break
            length += len(line)
    return length
