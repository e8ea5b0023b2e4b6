"""Rows of a run in Weights & Biases, online or offline, as wandb's own variables and settings say.

The id of the run is kept as wandb.json in the run's folder, so that a resumed session goes on with it. What is logged
there cannot be taken back: rows that a resumed session makes again are not sent again.
"""

import json
from collections.abc import Mapping
from typing import Any

import wandb

from longspan.files import write_atomically
from longspan.run.loggers.logger import RunStart, scalars

PROJECT = "longspan"  # where WANDB_PROJECT names no other
FILE = "wandb.json"


class WandbLogger:
    """A run of wandb, named after the run's folder; its files are in `wandb/` of that folder."""

    def __init__(self, start: RunStart) -> None:
        path = start.dir / FILE
        before = json.loads(path.read_text(encoding="utf-8")) if start.done and path.is_file() else {}
        self._done = start.done
        self._sent = max([before.get("sent", 0), *(row["step"] for row in start.rows)]) if before else 0
        evaluated = [_evaluation(row) for row in start.rows if "eval_loss" in row]
        before_this = [(*entry, "")[:3] for entry in before.get("evaluated", ())]  # older runs had no names
        self._evaluated = {entry for entry in (*before_this, *evaluated) if entry[0] == self._sent}
        self._run = wandb.init(
            project=wandb.setup().settings.project or PROJECT,
            name=start.dir.resolve().name,
            id=before.get("id"),
            resume="allow" if before else None,
            dir=str(start.dir),
            config={**start.config, "facts": dict(start.facts)},
            settings=wandb.Settings(console="off", silent=True),
        )
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        # wandb's own count of rows, beyond those of earlier sessions, which an offline session cannot ask for.
        self._next = max(self._run.step, before.get("next", 0) + len(start.rows)) if before else 0
        sent = {"sent": self._sent, "evaluated": sorted(self._evaluated), "next": self._next}
        write_atomically(path, json.dumps({"id": self._run.id, **sent}))

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a row, unless an earlier session has."""
        if self._was_sent(row, step):
            return
        kind = "eval" if "eval_loss" in row else "train"
        self._run.log({**scalars(row), f"{kind}/step": step}, step=self._next, commit=True)
        self._next += 1

    def close(self) -> None:
        """End the session."""
        self._run.finish()

    def _was_sent(self, row: Mapping[str, Any], step: int) -> bool:
        if not self._done < step <= self._sent:
            return False
        return "eval_loss" not in row or step < self._sent or _evaluation(row) in self._evaluated


def _evaluation(row: Mapping[str, Any]) -> tuple[int, int, str]:
    """What tells an evaluation from others: its step, its degree, and the name of its set."""
    return row["step"], row["cp"], row.get("eval_name", "")
