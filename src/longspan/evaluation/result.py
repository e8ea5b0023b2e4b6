"""The result of an evaluation, and a table that compares several. It needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from longspan.errors import plural
from longspan.plan import Plan

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Bucket, Mean


@dataclass(frozen=True)
class PasskeyGrid:
    """Of the `samples` documents of each length and depth, how many were `retrieved`: every token of the answer right.

    `retrieved[l][d]` and `losses[l][d]`, the mean loss of the answers' tokens, are those of `lengths[l]` and
    `depths[d]`.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    retrieved: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[float, ...], ...]
    step: int = 0
    cp: int = 0

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.lengths) * len(self.depths) * self.samples

    @property
    def share(self) -> float:
        """The share of all keys that were retrieved."""
        return sum(map(sum, self.retrieved)) / self.documents

    def share_of_length(self, index: int) -> float:
        """Return the share of keys that were retrieved from documents of `lengths[index]`."""
        return sum(self.retrieved[index]) / (len(self.depths) * self.samples)

    def table(self) -> str:
        """Write the shares as text: a line for each depth, a column for each length.

        >>> print(PasskeyGrid((512, 1024), (0.0, 1.0), 4, ((4, 4), (1, 3)), ((0.1, 0.1), (2.0, 0.7))).table())
        keys retrieved: 12 of 16, 4 for each length and depth (1: the key stands at the end)
        depth   512  1,024
        0      100%    25%
        1      100%    75%
        """
        rows = [
            (f"{depth:g}", *(f"{100 * row[d] / self.samples:.0f}%" for row in self.retrieved))
            for d, depth in enumerate(self.depths)
        ]
        rows.insert(0, ("depth", *(f"{length:,}" for length in self.lengths)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip() for cells in rows
        ]
        title = (
            f"keys retrieved: {sum(map(sum, self.retrieved))} of {self.documents}, {self.samples} for each length and"
        )
        return "\n".join([f"{title} depth (1: the key stands at the end)", *lines])

    def to_json(self) -> dict[str, Any]:
        """Return the grid as a JSON object; `from_json` gives an equal one back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "PasskeyGrid":
        """Read a grid from a JSON object, in which a loss that is not finite is null.

        Raises KeyError, TypeError or ValueError for an object that is no grid.
        """
        rows: Sequence[Sequence[int]] = value["retrieved"]
        grid = cls(
            lengths=tuple(map(int, value["lengths"])),
            depths=tuple(map(float, value["depths"])),
            samples=int(value["samples"]),
            retrieved=tuple(tuple(map(int, row)) for row in rows),
            losses=tuple(tuple(float("nan") if x is None else float(x) for x in row) for row in value["losses"]),
            step=int(value["step"]),
            cp=int(value["cp"]),
        )
        if [len(row) for row in grid.retrieved] != [len(grid.depths)] * len(grid.lengths) or grid.samples < 1:
            raise ValueError(f"{len(grid.lengths)} x {len(grid.depths)} cells were expected")
        return grid


@dataclass(frozen=True)
class Evaluation:
    """The loss over the documents of an evaluation, the sum over `targets` predicted tokens divided by their number.

    Every value is the same on every rank, except `seconds`. `metrics` has token_accuracy, bits_per_byte (with
    `token_bytes`) and the caller's metrics, each a sum and a count. `by_position` and `by_length` have the loss by the
    position of the predicting token and by the length of its document, in buckets cut at powers of two.
    `document_losses` has the sum and the targets of every document, `document_metrics` the sum and count of every
    document for each metric of documents. `passkey` has the retrieved keys of documents by `passkey_documents`.
    `activation_bytes` is the most memory that the evaluation added on any GPU; None on CPUs.
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
    passkey: PasskeyGrid | None = None
    activation_bytes: int | None = None

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where that is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def row(self) -> dict[str, Any]:
        """Return the evaluation as a row of metrics.jsonl.

        `by_position` and `by_length` list, for each bucket: first and last position or length, mean loss, targets, and
        documents.
        """
        row: dict[str, Any] = {"step": self.step} | ({"eval_name": self.name} if self.name else {})
        row |= {"eval_loss": self.loss, "eval_perplexity": self.perplexity}
        row |= {f"eval_{name}": mean.value for name, mean in self.metrics.items()}
        if self.passkey is not None:
            row |= {"eval_passkey_retrieved": self.passkey.share, "passkey": self.passkey.to_json()}
        row |= {"eval_tokens": self.tokens, "eval_targets": self.targets, "eval_documents": self.documents}
        row |= {"cp": self.cp, "planner": self.plan.planner, "seconds": round(self.seconds, 6)}
        if self.activation_bytes is not None:
            row["eval_activation_bytes"] = self.activation_bytes
        for name, buckets in (("by_position", self.by_position), ("by_length", self.by_length)):
            row[name] = [[b.first, b.last, b.loss.value, int(b.loss.count), b.documents] for b in buckets]
        return row

    def document_rows(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return one JSON object for each document: its number, its tokens, its targets and its mean loss.

        Where names are passed, the object has that of the document too.
        """
        return [
            {"document": document}
            | ({} if names is None else {"name": names[document]})
            | {"tokens": tokens, "targets": int(loss.count), "loss": loss.value}
            for document, (tokens, loss) in enumerate(zip(self.plan.lengths, self.document_losses, strict=True))
        ]


def comparison_table(evaluations: Sequence[Evaluation]) -> str:
    """Write the losses of one set of weights at several degrees, and their relative difference to the first."""
    first = evaluations[0]
    lines = [
        f"evaluation loss of the weights after step {first.step}: {plural(first.documents, 'document')}, "
        f"{plural(first.tokens, 'token')}",
        f"{'cp':>4}  {'loss':>14}  {'relative difference':>20}  {'micro-batches':>13}  {'seconds':>8}  plan",
    ]
    for evaluation in evaluations:
        difference = abs(evaluation.loss - first.loss) / abs(first.loss) if first.loss else 0.0
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
