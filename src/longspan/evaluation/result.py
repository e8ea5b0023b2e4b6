"""The result of an evaluation, and a table that compares several. It needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longspan.errors import plural
from longspan.plan import Plan

SAME = 1e-6  # relative difference up to which losses at two degrees are called equal

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Bucket, Mean


@dataclass(frozen=True)
class Evaluation:
    """The loss over the documents of an evaluation, the sum over `targets` predicted tokens divided by their number.

    Every value is the same on every rank, except `seconds`. `metrics` are sums and counts; `by_position` and
    `by_length` have the loss in buckets cut at powers of two; `document_losses` and `document_metrics` the sum and
    count of each document. `activation_bytes` is the most memory that it added on any GPU; None on CPUs.
    """

    step: int
    cp: int
    loss: float
    documents: int
    tokens: int
    targets: int
    seconds: float
    plan: Plan
    name: str = ""
    metrics: "Mapping[str, Mean]" = field(default_factory=dict)
    by_position: "tuple[Bucket, ...]" = ()
    by_length: "tuple[Bucket, ...]" = ()
    document_losses: "tuple[Mean, ...]" = ()
    document_metrics: "Mapping[str, tuple[Mean, ...]]" = field(default_factory=dict)
    activation_bytes: int | None = None

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def row(self) -> dict[str, Any]:
        """Return a row of metrics.jsonl; buckets have first and last, mean loss, targets and documents."""
        row: dict[str, Any] = {"step": self.step} | ({"eval_name": self.name} if self.name else {})
        row |= {"eval_loss": self.loss, "eval_perplexity": self.perplexity}
        row |= {f"eval_{name}": mean.value for name, mean in self.metrics.items()}
        row |= {"eval_tokens": self.tokens, "eval_targets": self.targets, "eval_documents": self.documents}
        row |= {"cp": self.cp, "planner": self.plan.planner, "seconds": round(self.seconds, 6)}
        if self.activation_bytes is not None:
            row["eval_activation_bytes"] = self.activation_bytes
        for name, buckets in (("by_position", self.by_position), ("by_length", self.by_length)):
            row[name] = [[b.first, b.last, b.loss.value, int(b.loss.count), b.documents] for b in buckets]
        return row

    def document_rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return one JSON object a document: its number, name where there is one, tokens, targets and mean loss."""
        return [
            {"document": document}
            | ({} if names is None else {"name": names[document]})
            | {"tokens": tokens, "targets": int(loss.count), "loss": loss.value}
            for document, (tokens, loss) in enumerate(zip(self.plan.lengths, self.document_losses, strict=True))
        ]


def largest_difference(losses: Sequence[float]) -> float:
    """Return how far a loss is from the first one at most, relative to the first; 0 where that is 0."""
    return max(abs(loss - losses[0]) for loss in losses) / abs(losses[0]) if losses[0] else 0.0


def comparison_table(evaluations: Sequence[Evaluation]) -> str:
    """Write the losses of one set of weights at several degrees, and their relative difference to the first."""
    first = evaluations[0]
    lines = [
        f"evaluation loss of the weights after step {first.step}: {plural(first.documents, 'document')}, "
        f"{plural(first.tokens, 'token')}",
        f"{'cp':>4}  {'loss':>14}  {'relative difference':>20}  {'micro-batches':>13}  {'seconds':>8}  plan",
    ]
    for evaluation in evaluations:
        difference = largest_difference([first.loss, evaluation.loss])
        lines.append(
            f"{evaluation.cp:>4}  {evaluation.loss:>14.9f}  {difference:>20.1e}  "
            f"{len(evaluation.plan.micro_batches):>13}  {evaluation.seconds:>8.2f}  {evaluation.plan.planner}"
        )
    return "\n".join(lines)


def sets_table(evaluations: Sequence[Evaluation]) -> str:
    """Write loss and built-in metrics of named sets next to each other, as text; a dash where nothing was counted."""
    width = max(len("evaluation set"), *(len(evaluation.name) for evaluation in evaluations))
    names = f"{'loss':>12}  {'perplexity':>12}  {'accuracy':>8}  {'bits/byte':>9}  {'documents':>9}  {'cp':>4}"
    lines = [f"{'evaluation set':<{width}}  {names}"]
    for e in evaluations:
        accuracy, bits = (e.metrics.get(name) for name in ("token_accuracy", "bits_per_byte"))
        share = f"{100 * accuracy.value:.1f} %" if accuracy and accuracy.value is not None else "-"
        per_byte = f"{bits.value:.4f}" if bits and bits.value is not None else "-"
        numbers = f"{e.loss:>12.6f}  {e.perplexity:>12.4g}  {share:>8}  {per_byte:>9}  {e.documents:>9,}  {e.cp:>4}"
        lines.append(f"{e.name:<{width}}  {numbers}")
    return "\n".join(lines)
