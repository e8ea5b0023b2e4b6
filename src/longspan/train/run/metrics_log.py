"""What a run writes down: one JSON object a line in metrics.jsonl, whole plans of a few steps, and a summary.

Rows of training: step, loss, tokens, targets, grad_norm, lr, seconds, tokens_per_second, memory_bytes, micro_batches,
efficiency, and router_balance_loss and router_z_loss of models with experts. Rows of evaluation: step, eval_loss,
eval_tokens, eval_targets, cp, seconds. One rank writes. A number that is not finite, for which JSON has no word, is
written and read as null.
"""

import json
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from longspan.train.disk import errors_name, write_atomically
from longspan.train.json_record import as_json, json_values


class MetricsLog:
    """Appends rows to a file, flushed one by one; opened for a resumed run, it keeps the rows up to a step.

    >>> with MetricsLog(Path("runs/first/metrics.jsonl"), after_step=100) as log:
    ...     log.write({"step": 101, "loss": 3.2})

    Later rows, which the run is about to make again, and a line that an interrupted write left torn are dropped. `None`
    for a path writes nothing: on the ranks that do not record.
    """

    def __init__(self, path: Path | None, *, after_step: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= after_step] if path else []
        self.evaluated: set[int] = {row["step"] for row in kept if "eval_loss" in row}
        self._file = None
        if path is not None:
            write_atomically(path, "".join(as_json(row) + "\n" for row in kept))
            self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # of a row that could not be written, which `write` has said
                self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises OSError, with the file's name, for what the disk refuses."""
        if "eval_loss" in row:
            self.evaluated.add(row["step"])
        if self._file is not None:
            with errors_name(Path(self._file.name)):
                self._file.write(as_json(row) + "\n")
                self._file.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file that can be read; none where it does not exist."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(json_values(row))
    return rows


def memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
