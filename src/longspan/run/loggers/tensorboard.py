"""Rows of a run as scalars of TensorBoard, in the run's folder: `tensorboard --logdir runs/first`.

Every session writes a file of its own. A resumed one tells TensorBoard to forget the steps that it makes again, so that
no point is there twice.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from longspan.run.loggers.logger import RunStart, scalars

FOLDER = "tensorboard"


class TensorBoardLogger:
    """Writes event files into `tensorboard/` of the run's folder, flushed row by row."""

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._writer: SummaryWriter | None = None  # a session without a row leaves no file

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Write the numbers of a row. Raises OSError for what the disk refuses."""
        if self._writer is None:
            self._writer = self._opened()
        for tag, value in scalars(row).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> SummaryWriter:
        start = self._start
        writer = SummaryWriter(str(start.dir / FOLDER), purge_step=start.done + 1)
        facts = "\n".join(f"| {name} | {value} |" for name, value in start.facts.items())
        writer.add_text("run", f"| fact | value |\n|---|---|\n{facts}", start.done)
        return writer
