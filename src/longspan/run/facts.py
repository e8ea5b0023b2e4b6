"""The facts of a run (run.json) and its result (summary.json), as values without torch: the report reads them too."""

import math
import shlex
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from longspan.checkpoint.best import BestStep
from longspan.errors import plural
from longspan.evaluation.result import SAME, Evaluation, evaluation_table, largest_difference
from longspan.files import json_safe_values
from longspan.versions import versions

# The lock is in a run's folder; the run that is at work there has it.
LOCK = "run.lock"


def time_and_command() -> tuple[str, str]:
    """Return the time now, to the minute, and the command of this process."""
    name = Path(sys.argv[0]).name.replace("__main__.py", "longspan")
    return datetime.now().astimezone().isoformat(" ", "minutes"), shlex.join([name, *sys.argv[1:]])


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run at the start of a session: `lines` (name, text) for the console and the report, and what others read of it.

    Sizes are of the rank that holds most; `trained` counts the parameters that are trained; `sessions` are the steps
    that were done when each began, and its ranks, this one last; `memory` is a MemoryPlan as JSON.
    """

    lines: tuple[tuple[str, str], ...]
    parameters: int
    parameters_of_rank: int
    trained: int
    device: str
    ranks: int
    node_size: int
    hosts: int
    priced_for: str
    steps: int
    done: int
    date: str
    command: str
    sessions: tuple[tuple[int, int], ...]
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    starts: dict[str, float] = field(default_factory=dict[str, float])  # seconds, once the first step is done
    # Groups are by kind and level, as in the first step.
    attention_groups: list[str] = field(default_factory=list[str])

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunFacts | None":
        """Return the facts in a run.json; None if another release wrote it with other keys."""
        try:
            lines = tuple((str(name), str(text)) for name, text in values["lines"])
            sessions = tuple((int(step), int(ranks)) for step, ranks in values["sessions"])
            return cls(**{**values, "lines": lines, "sessions": sessions})
        except (KeyError, TypeError, ValueError):
            return None

    def text(self) -> str:
        """Return the facts as the console shows them, without "data", which earlier lines of the console have."""
        lines = [line for line in self.lines if line[0] != "data"]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def best_step_text(figure: str, best: BestStep, model_step: int) -> str:
    """Say which step is the best, and whose weights RUN/model has (0: it is not saved).

    >>> best_step_text("eval_loss", BestStep(12, 5.690361), 16)
    'step 12 is the best by eval_loss 5.69036; model/ has the weights of step 16, the last'
    """
    text = f"step {best.step:,} is the best by {figure} {best.value:.6g}"
    if not model_step:
        return f"{text} so far"
    weights = "its weights" if model_step == best.step else f"the weights of step {model_step:,}, the last"
    return f"{text}; model/ has {weights}"


# The mean loss of these steps sums up a run.
LAST_STEPS = 10


@dataclass(frozen=True)
class TrainResult:
    """The result of a run on `world` ranks, of which `done` of `steps` are done.

    `stopped` is the signal that stopped it, `end_reason` why it ended before its last step ("" for neither).
    `model_step` is the step whose weights RUN/model has (0: it was not saved), `best` the name of the figure of
    `checkpoint.keep_best` and the best step by it. `final` are the last evaluations of held-out documents, at every
    degree, `named` those of named sets. `vocab_size` is 0 where the loss is not that of predicted tokens.
    """

    dir: Path
    done: int
    steps: int
    stopped: str
    last_loss: float
    vocab_size: int
    final: tuple[Evaluation, ...]
    named: tuple[Evaluation, ...] = ()
    world: int = 1
    end_reason: str = ""
    model_step: int = 0
    best: tuple[str, BestStep] | None = None

    def summary(self) -> dict[str, Any]:
        """Return the values of summary.json; numbers that are not finite are None."""
        values = {
            "step": self.done,
            "steps": self.steps,
            "stopped": self.stopped,
            "end_reason": self.end_reason,
            "model_step": self.model_step,
            "best": {"figure": self.best[0], **self.best[1]._asdict()} if self.best else None,
            "vocab_size": self.vocab_size,
            "loss_of_last_steps": self.last_loss,
            "share_of_ln_vocabulary": self.last_loss / math.log(self.vocab_size) if self.vocab_size else None,
            "eval_at_degrees": [evaluation.row() for evaluation in self.final],
            "eval_sets": [evaluation.row() for evaluation in self.named],
            "world": self.world,
            "versions": versions(),
        }
        return json_safe_values(values)

    def degrees_text(self) -> str:
        """Say how far the last losses at several degrees agree; "" for fewer than two."""
        if len(self.final) < 2:
            return ""
        difference = largest_difference([evaluation.loss for evaluation in self.final])
        if difference > SAME:
            return f"losses at these degrees differ by up to {difference:.1e}. "
        return f"equal to {difference:.1e}: the same loss at every degree. "

    def text(self) -> str:
        """Return the result as the console shows it: the mean loss, what stopped or ended the run, evaluations."""
        steps = min(LAST_STEPS, self.done)
        mean = f"mean loss of the last {plural(steps, 'step') if steps > 1 else 'step'}: {self.last_loss:.4f}"
        if self.vocab_size:
            uniform = math.log(self.vocab_size)
            share = f"{100 * self.last_loss / uniform:.1f} % of ln {self.vocab_size:,} = {uniform:.3f}"
            mean += f" ({share}, the loss of a uniform guess)"
        lines = [mean] if self.done else []
        if self.stopped:
            rest = (
                "goes on" if self.done < self.steps else "saves the model and makes the evaluations that are left"
            )
            lines.append(
                f"stopped by {self.stopped} after step {self.done} of {self.steps}; the same command {rest}"
            )
        elif self.end_reason:
            lines.append(f"ended after step {self.done} of {self.steps}: {self.end_reason}")
        if self.best:
            lines.append(best_step_text(*self.best, self.model_step))
        evaluations = (*self.final, *self.named)
        return "\n".join([*lines, *([evaluation_table(evaluations)] if evaluations else [])])
