"""The loggers that longspan has: TensorBoard and Weights & Biases. Each package is imported when its logger starts.

TensorBoard: scalars in the run's folder, shown by `tensorboard --logdir runs/first`. Every session writes a file of its
own. A resumed session tells TensorBoard to forget the steps that it repeats, so that no point appears twice.

Weights & Biases: online or offline, by wandb's own variables and settings. The id of the run is kept as wandb.json in
the run's folder, so that a resumed session continues the same wandb run. Rows that are
logged there cannot be taken back: those that a resumed session repeats are not sent again.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longspan.files import write_atomically
from longspan.run.loggers.run_loggers import RunStart, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PROJECT = "longspan"  # where WANDB_PROJECT names no other
FILE = "wandb.json"


class WandbLogger:
    """A run of wandb, named after the run's folder; its files are in `wandb/` of that folder."""

    def __init__(self, start: RunStart) -> None:
        """Open the run of Weights & Biases, or the one that an earlier start of this run wrote to.

        Each start writes a file with the id of the service's run and with what was sent before: the last step, the
        evaluations of that step, and wandb's next row number. With the rows of metrics.jsonl it tells a resumed run
        which rows not to send again. A run that begins anew (no step done) gets a new run of the service.
        """
        import wandb

        path = start.dir / FILE
        saved = json.loads(path.read_text(encoding="utf-8")) if start.done and path.is_file() else {}
        self._done = start.done
        self._last_sent_step = max([saved.get("sent", 0), *(row["step"] for row in start.rows)]) if saved else 0
        evaluated = [_evaluation_key(row) for row in start.rows if "eval_loss" in row]
        sent_before = [tuple(entry) for entry in saved.get("evaluated", ())]
        self._evaluated = {entry for entry in (*sent_before, *evaluated) if entry[0] == self._last_sent_step}
        self._run = wandb.init(
            project=wandb.setup().settings.project or PROJECT,
            name=start.dir.resolve().name,
            id=saved.get("id"),
            resume="allow" if saved else None,
            dir=str(start.dir),
            config={**start.config, "facts": dict(start.facts)},
            settings=wandb.Settings(console="off", silent=True),
        )
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        # wandb's number of the next row must be above all earlier ones. An offline session cannot ask wandb for it, so
        # the rows of metrics.jsonl are counted: more may be counted than were sent, but not fewer.
        self._next = max(self._run.step, saved.get("next", 0) + len(start.rows)) if saved else 0
        sent = {"sent": self._last_sent_step, "evaluated": sorted(self._evaluated), "next": self._next}
        write_atomically(path, json.dumps({"id": self._run.id, **sent}))

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a row, unless an earlier session has sent them."""
        if self._was_sent(row, step):
            return
        kind = "eval" if "eval_loss" in row else "train"
        self._run.log({**scalars(row), f"{kind}/step": step}, step=self._next, commit=True)
        self._next += 1

    def close(self) -> None:
        """End the session."""
        self._run.finish()

    def _was_sent(self, row: Mapping[str, Any], step: int) -> bool:
        """Return whether an earlier session sent this row.

        Rows of steps up to `_done` come only if metrics.jsonl lacks them, and then they were not sent. Of the steps
        after that, up to the last one that was sent, every row was sent; of this last step an evaluation counts as sent
        only if it is noted, as the session may have ended between two evaluations.
        """
        if not self._done < step <= self._last_sent_step:
            return False
        return "eval_loss" not in row or step < self._last_sent_step or _evaluation_key(row) in self._evaluated


def _evaluation_key(row: Mapping[str, Any]) -> tuple[int, int, str]:
    return row["step"], row["cp"], row.get("eval_name", "")


FOLDER = "tensorboard"


class TensorBoardLogger:
    """Writes event files into `tensorboard/` of the run's folder, flushed row by row."""

    def __init__(self, start: RunStart) -> None:
        """Keep the start of the session; `log` opens the file at the first row."""
        self._start = start
        self._writer: SummaryWriter | None = None  # a session without a row leaves no file

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Write the numbers of a row. Raises OSError for what the disk refuses."""
        if self._writer is None:
            self._writer = self._open_writer()
        for tag, value in scalars(row).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open_writer(self) -> "SummaryWriter":
        """Open the writer of TensorBoard's files, and write the run's facts.

        TensorBoard is told to drop what earlier sessions wrote of later steps (`purge_step`): they are repeated.
        """
        from torch.utils.tensorboard import SummaryWriter

        start = self._start
        writer = SummaryWriter(str(start.dir / FOLDER), purge_step=start.done + 1)
        facts = "\n".join(f"| {name} | {value} |" for name, value in start.facts.items())
        writer.add_text("run", f"| fact | value |\n|---|---|\n{facts}", start.done)
        return writer
