"""What a run or an evaluation came to, as values that print well. No torch: a launcher reads them too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import counted
from longspan.plan import Plan
from longspan.train.finite import finite
from longspan.train.versions import versions

LAST_STEPS = 10  # whose mean loss sums up a run


@dataclass(frozen=True)
class Evaluation:
    """The loss over the held-out documents: the sum over `targets` predicted tokens, divided by their number."""

    step: int
    cp: int
    loss: float
    documents: int
    tokens: int
    targets: int
    seconds: float
    plan: Plan

    def row(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl."""
        return {
            "step": self.step,
            "eval_loss": self.loss,
            "eval_tokens": self.tokens,
            "eval_targets": self.targets,
            "cp": self.cp,
            "seconds": round(self.seconds, 6),
        }


@dataclass(frozen=True)
class Outcome:
    """What a run on `world` ranks came to: its steps, why it stopped early, its last losses, its final evaluations."""

    dir: Path
    done: int
    steps: int
    stopped: str
    last_loss: float
    vocab_size: int
    final: tuple[Evaluation, ...]
    world: int = 1

    def summary(self) -> dict[str, Any]:
        """As it stands in summary.json."""
        values = {
            "step": self.done,
            "steps": self.steps,
            "stopped": self.stopped,
            "vocab_size": self.vocab_size,
            "loss_of_last_steps": self.last_loss,
            "share_of_ln_vocabulary": self.last_loss / math.log(self.vocab_size),
            "eval_at_degrees": [evaluation.row() for evaluation in self.final],
            "world": self.world,
            "versions": versions(),
        }
        return finite(values)

    def text(self) -> str:
        """The run's last lines: its mean loss, and the table of degrees where it came to its end."""
        uniform = math.log(self.vocab_size)
        share = 100 * self.last_loss / uniform
        steps = min(LAST_STEPS, self.done)
        mean = f"mean loss of the last {counted(steps, 'step') if steps > 1 else 'step'}: {self.last_loss:.4f}"
        lines = (
            [f"{mean} ({share:.1f} % of ln {self.vocab_size:,} = {uniform:.3f}, the loss of a uniform guess)"]
            if self.done
            else []
        )
        if self.stopped:
            lines.append(f"stopped by {self.stopped} after step {self.done} of {self.steps}; the same command goes on")
        return "\n".join(lines + ([comparison_table(self.final)] if self.final else []))


def comparison_table(evaluations: Sequence[Evaluation]) -> str:
    """The losses of one set of weights at several degrees, with their relative difference to the first, as text."""
    first = evaluations[0]
    lines = [
        f"evaluation loss of the weights after step {first.step}: {counted(first.documents, 'document')}, "
        f"{counted(first.tokens, 'token')}",
        f"{'cp':>4}  {'loss':>14}  {'relative difference':>20}  {'micro-batches':>13}  {'seconds':>8}",
    ]
    for found in evaluations:
        difference = abs(found.loss - first.loss) / abs(first.loss) if first.loss else 0.0
        lines.append(
            f"{found.cp:>4}  {found.loss:>14.9f}  {difference:>20.1e}  {len(found.plan.micro_batches):>13}  "
            f"{found.seconds:>8.2f}"
        )
    return "\n".join(lines)
