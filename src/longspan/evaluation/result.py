"""The result of an evaluation, and a table of several. It needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longspan.plain_text import text_table
from longspan.plan import Plan

HELD_OUT = "held out"  # how tables name the documents of a run that have no name
SAME = 1e-6  # relative difference up to which losses at two degrees are called equal

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Mean
    from longspan.evaluation.row_sums import Bucket


@dataclass(frozen=True)
class Evaluation:
    """The loss over the documents of an evaluation, the sum over `targets` predicted tokens divided by their number.

    Of a model that makes scores (`scored`) it is that of scores, and has no perplexity.

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
    scored: bool = False
    metrics: "Mapping[str, Mean]" = field(default_factory=dict)
    by_position: "tuple[Bucket, ...]" = ()
    by_length: "tuple[Bucket, ...]" = ()
    document_losses: "tuple[Mean, ...]" = ()
    document_metrics: "Mapping[str, tuple[Mean, ...]]" = field(default_factory=dict)
    activation_bytes: int | None = None

    @property
    def document_lengths(self) -> list[int]:
        """The tokens of each document, those of a prefix that it shares among them."""
        return [self.plan.path_lengths[document] for document in self.plan.whole_documents]

    @property
    def perplexity(self) -> float:
        """e to the loss; infinity where that is too large."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def row(self) -> dict[str, Any]:
        """Return a row of metrics.jsonl; buckets have first and last, mean loss, targets and documents."""
        row: dict[str, Any] = {"step": self.step} | ({"eval_name": self.name} if self.name else {})
        row |= {"eval_loss": self.loss} | ({} if self.scored else {"eval_perplexity": self.perplexity})
        row |= {f"eval_{name}": mean.value for name, mean in self.metrics.items()}
        row |= {"eval_tokens": self.tokens, "eval_targets": self.targets, "eval_documents": self.documents}
        row |= {"cp": self.cp, "planner": self.plan.planner, "seconds": round(self.seconds, 6)}
        if self.activation_bytes is not None:
            row["eval_activation_bytes"] = self.activation_bytes
        for name, buckets in (("by_position", self.by_position), ("by_length", self.by_length)):
            row[name] = [[b.first, b.last, b.loss.value, int(b.loss.count), b.documents] for b in buckets]
        return row

    def document_rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return one JSON object per document: its number, its name if `names` are given, its tokens, targets and mean
        loss.
        """
        return [
            {"document": document}
            | ({} if names is None else {"name": names[document]})
            | {"tokens": tokens, "targets": int(loss.count), "loss": loss.value}
            for document, (tokens, loss) in enumerate(zip(self.document_lengths, self.document_losses, strict=True))
        ]


def largest_difference(losses: Sequence[float]) -> float:
    """Return the largest difference of a loss from the first one, relative to the first; 0 where the first is 0."""
    if losses[0]:
        return max(abs(loss - losses[0]) for loss in losses) / abs(losses[0])
    return 0.0


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """Write evaluations of one set of weights, a line each, with the difference of a loss to its set's first one."""
    metrics = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    firsts = dict[str, Evaluation]()
    rows = list[list[str]]()
    for e in evaluations:
        difference = largest_difference([firsts.setdefault(e.name, e).loss, e.loss])
        values = [e.metrics[name].value if name in e.metrics else None for name in metrics]
        if e.scored:
            perplexity = "-"
        elif e.loss < 50:
            perplexity = f"{e.perplexity:,.4f}"
        else:
            perplexity = "over 1e21"  # e ** 50 is above 5e21, whose digits would fill the table
        figures = (f"{e.loss:.9f}", f"{difference:.1e}", perplexity)
        counts = (f"{count:,}" for count in (e.documents, e.tokens, e.targets, len(e.plan.micro_batches)))
        words = ("-" if value is None else f"{value:.5f}" for value in values)
        rows.append([str(e.cp), *figures, *words, *counts, f"{e.seconds:.2f}", e.plan.planner, e.name or HELD_OUT])
    names = ["cp", "loss", "difference", "perplexity", *(name.replace("_", " ") for name in metrics)]
    names += ["documents", "tokens", "targets", "micro-batches", "seconds", "plan", "set"]
    return text_table(names, rows, left=0)
