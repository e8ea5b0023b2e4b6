"""The result of a training run, as a value that prints well; without torch, because the launcher reads it too."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import plural
from longspan.evaluation.result import SAME, Evaluation, comparison_table, largest_difference, sets_table
from longspan.files import json_values
from longspan.versions import versions

LAST_STEPS = 10  # whose mean loss sums up a run


@dataclass(frozen=True)
class TrainResult:
    """The result of a run on `world` ranks: its steps, why it stopped early, its last losses.

    `final` are the last evaluations of the held-out documents, at every degree, `named` those of the named sets.
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

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        values = {
            "step": self.done,
            "steps": self.steps,
            "stopped": self.stopped,
            "vocab_size": self.vocab_size,
            "loss_of_last_steps": self.last_loss,
            "share_of_ln_vocabulary": self.last_loss / math.log(self.vocab_size),
            "eval_at_degrees": [evaluation.row() for evaluation in self.final],
            "eval_sets": [evaluation.row() for evaluation in self.named],
            "world": self.world,
            "versions": versions(),
        }
        return json_values(values)

    def degrees_text(self) -> str:
        """Return how far the losses of the last evaluation differ by degree, in a sentence; "" of one degree."""
        if len(self.final) < 2:
            return ""
        difference = largest_difference([evaluation.loss for evaluation in self.final])
        if difference > SAME:
            return f"losses at these degrees differ by up to {difference:.1e}. "
        return f"equal to {difference:.1e}: the same loss at every degree. "

    def text(self) -> str:
        """Return the lines that sum up a run: its mean loss and, after the last step, the table of degrees."""
        uniform = math.log(self.vocab_size)
        share = 100 * self.last_loss / uniform
        steps = min(LAST_STEPS, self.done)
        mean = f"mean loss of the last {plural(steps, 'step') if steps > 1 else 'step'}: {self.last_loss:.4f}"
        lines = (
            [f"{mean} ({share:.1f} % of ln {self.vocab_size:,} = {uniform:.3f}, the loss of a uniform guess)"]
            if self.done
            else []
        )
        if self.stopped:
            lines.append(f"stopped by {self.stopped} after step {self.done} of {self.steps}; the same command goes on")
        lines += [comparison_table(self.final)] if self.final else []
        return "\n".join(lines + ([sets_table(self.named)] if self.named else []))
