"""The result of an evaluation, and a table that compares several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspan.errors import counted
from longspan.plan import Plan


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
        """The evaluation as a row of metrics.jsonl."""
        return {
            "step": self.step,
            "eval_loss": self.loss,
            "eval_tokens": self.tokens,
            "eval_targets": self.targets,
            "cp": self.cp,
            "seconds": round(self.seconds, 6),
        }


def comparison_table(evaluations: Sequence[Evaluation]) -> str:
    """The losses of one set of weights at several degrees, with their relative difference to the first, as text."""
    first = evaluations[0]
    lines = [
        f"evaluation loss of the weights after step {first.step}: {counted(first.documents, 'document')}, "
        f"{counted(first.tokens, 'token')}",
        f"{'cp':>4}  {'loss':>14}  {'relative difference':>20}  {'micro-batches':>13}  {'seconds':>8}",
    ]
    for evaluation in evaluations:
        difference = abs(evaluation.loss - first.loss) / abs(first.loss) if first.loss else 0.0
        lines.append(
            f"{evaluation.cp:>4}  {evaluation.loss:>14.9f}  {difference:>20.1e}  "
            f"{len(evaluation.plan.micro_batches):>13}  {evaluation.seconds:>8.2f}"
        )
    return "\n".join(lines)
