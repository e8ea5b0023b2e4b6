"""The result of an evaluation, and a table of several. It needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from longspan.plain_text import text_table
from longspan.plan import Plan

HELD_OUT = "held out"  # how tables name the documents of a run that have no name
# A pair's documents have these names.
SIDES = ("chosen", "rejected")
SAME = 1e-6  # relative difference up to which losses at two degrees are called equal

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Mean
    from longspan.evaluation.row_sums import Bucket
    from longspan.train.terms.document_loss import LossUnits


@dataclass(frozen=True)
class Evaluation:
    """The loss over the documents of an evaluation, the sum over `targets` predicted tokens divided by their number.

    Of a model that makes scores (`scored`) it is that of scores, and has no perplexity; of a loss of sets it is the
    mean over `units` (pairs, say), and scored too.

    Every value is the same on every rank, except `seconds`. `metrics` are sums and counts; `by_position` and
    `by_length` have the loss in buckets cut at powers of two, `kl_by_position` and `kl_by_length` the divergence from a
    teacher; `document_losses` and `document_metrics` the sum and count of each document. What `document_losses` are,
    `document_value` says: of a language model under a loss of units cross entropies. `activation_bytes` is the most
    memory that it added on any GPU; None on CPUs.
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
    kl_by_position: "tuple[Bucket, ...]" = ()
    kl_by_length: "tuple[Bucket, ...]" = ()
    document_losses: "tuple[Mean, ...]" = ()
    document_metrics: "Mapping[str, tuple[Mean, ...]]" = field(default_factory=dict)
    activation_bytes: int | None = None
    units: "LossUnits | None" = None
    document_value: Literal["loss", "cross_entropy"] = "loss"

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
        if self.units is not None:
            row[f"eval_{self.units.kind}s"] = len(self.units.documents)
        row |= {"cp": self.cp, "planner": self.plan.planner, "seconds": round(self.seconds, 6)}
        if self.activation_bytes is not None:
            row["eval_activation_bytes"] = self.activation_bytes
        tables = {"by_position": self.by_position, "by_length": self.by_length}
        if self.kl_by_length:
            tables |= {"kl_by_position": self.kl_by_position, "kl_by_length": self.kl_by_length}
        for name, buckets in tables.items():
            row[name] = [[b.first, b.last, b.loss.value, int(b.loss.count), b.documents] for b in buckets]
        return row

    def document_rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return one JSON object per document: its number, its name if `names` are given, its tokens, targets and mean
        loss. Under a loss of units it has its cross entropy, the number of its unit, and that one's loss and figures; a
        document that is in no unit has no loss.
        """
        rows = [
            {"document": document}
            | ({} if names is None else {"name": names[document]})
            | {"tokens": tokens, "targets": int(loss.count), self.document_value: loss.value}
            for document, (tokens, loss) in enumerate(zip(self.document_lengths, self.document_losses, strict=True))
        ]
        if self.units is None:
            return rows
        kind, documents_of_units, figures = self.units
        for unit, documents in enumerate(documents_of_units):
            for document, side in zip(documents, SIDES if kind == "pair" else [""] * len(documents), strict=True):
                rows[document] |= {kind: unit} | ({"side": side} if side else {})
                rows[document] |= {name: values[unit] for name, values in figures.items()}
        return rows


def largest_difference(losses: Sequence[float]) -> float:
    """Return the largest difference of a loss from the first one, relative to the first; 0 where the first is 0."""
    if losses[0]:
        return max(abs(loss - losses[0]) for loss in losses) / abs(losses[0])
    return 0.0


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """Write evaluations of one set of weights, a line each, with the difference of a loss to its set's first one."""
    metrics = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    kinds = list(dict.fromkeys(e.units.kind for e in evaluations if e.units is not None))
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
        counts = [f"{count:,}" for count in (e.documents, e.tokens, e.targets, len(e.plan.micro_batches))]
        if kinds:
            counts.insert(0, f"{len(e.units.documents):,}" if e.units is not None else "-")
        words = ("-" if value is None else f"{value:.5f}" for value in values)
        rows.append([str(e.cp), *figures, *words, *counts, f"{e.seconds:.2f}", e.plan.planner, e.name or HELD_OUT])
    names = ["cp", "loss", "difference", "perplexity", *(name.replace("_", " ") for name in metrics)]
    names += [f"{' or '.join(kinds)}s"] if kinds else []
    names += ["documents", "tokens", "targets", "micro-batches", "seconds", "plan", "set"]
    return text_table(names, rows, left=0)
