"""Results of `longspan eval`: of every set, as records, and the difference of two models. Needs no torch.

The standard error of a difference is that of a ratio of sums over documents: tokens of one document are alike, so that
documents are drawn, not tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.evaluation.result import Evaluation
from longspan.evaluation.saved.request import Change, SavedWeights

Unit = Literal["loss", "bits_per_byte"]
HOME = ("tp", "pp", "ep", "dp_replicate")  # the keys of [parallel] that are recorded


@dataclass(frozen=True)
class SetResult:
    """The evaluation of one set at one degree, and where its documents came from.

    `text_bytes` are the UTF-8 bytes of each document's predicted tokens.
    """

    evaluation: Evaluation
    sources: tuple[str, ...]
    text_bytes: tuple[int, ...]

    @property
    def comm_types(self) -> list[str]:
        """The types by which groups of more than one slot shared documents; a group may have one for each layer."""
        groups = [group for batch in self.evaluation.plan.micro_batches for group in batch.groups if group.degree > 1]
        types = [group.cp_comm_type for group in groups]
        return sorted({name for names in types for name in ((names,) if isinstance(names, str) else names)})


@dataclass(frozen=True)
class SubjectResult:
    """The evaluations of one subject's weights, set by set and within a set degree by degree."""

    weights: SavedWeights
    config: RunConfig  # under which they were evaluated
    tokenizer: str  # digest of it, and of what it puts around texts
    sets: tuple[SetResult, ...]
    changes: tuple[Change, ...]

    def record(self) -> dict[str, Any]:
        """Return what was evaluated, in which layout, and the row of every evaluation."""
        return {
            "target": self.weights.title,
            "kind": self.weights.kind,
            "parallel": {key: getattr(self.config.parallel, key) for key in HOME},
            "changes": [asdict(change) for change in self.changes],
            "evaluations": [entry.evaluation.row() | {"cp_comm_type": entry.comm_types} for entry in self.sets],
        }


def results_record(results: Sequence[SubjectResult], ranks: int) -> dict[str, Any]:
    """Return everything about the first subject, and under "compare" about the second and their differences.

    The values of a single evaluation stand at the top too.
    """
    first, *others = results
    record = first.record() | {"world": ranks}
    if len(first.sets) == 1:
        record = first.sets[0].evaluation.row() | record
    for other in others:
        record["compare"] = other.record() | {"differences": [asdict(row) for row in set_differences(first, other)]}
    return record


def document_rows(results: Sequence[SubjectResult]) -> list[dict[str, Any]]:
    """Return one object for every document of every model, to be written as JSON.

    Keys are `target` (the title of the weights), set, cp, document, source, tokens, `targets` (tokens with a label),
    and loss.
    """
    return [
        {"target": result.weights.title, "set": entry.evaluation.name, "cp": entry.evaluation.cp, **row}
        for result in results
        for entry in result.sets
        for row in entry.evaluation.document_rows(entry.sources)
    ]


@dataclass(frozen=True)
class Difference:
    """The other model's mean minus the first's, over the same documents; errors are None for fewer than two.

    `difference` is of the means over all tokens (bytes), `document_difference` the mean over documents of each one's
    own difference; `lower` documents have a lower value under the other model.
    """

    name: str
    unit: Unit
    first: float
    other: float
    difference: float
    standard_error: float | None
    document_difference: float
    document_standard_error: float | None
    documents: int
    lower: int
    by_length: tuple[tuple[int, int, float, float, int], ...] = ()  # tokens from, to, first, other, documents


def set_differences(first: SubjectResult, other: SubjectResult) -> list[Difference]:
    """Return the difference on every set: of losses where both read the same tokens, otherwise of bits per byte.

    The difference of all tokens is that of two ratios Σ sums / Σ counts, whose error follows from the documents'
    residuals sum − mean · count; documents that a model did not count are left out. Raises ConfigError where a
    tokenizer does not give the bytes of its tokens.
    """
    unit: Unit = "loss" if first.tokenizer == other.tokenizer else "bits_per_byte"
    return [_set_difference(*pair, unit) for pair in zip(first.sets, other.sets, strict=True)]


def _set_difference(first: SetResult, other: SetResult, unit: Unit) -> Difference:
    first_sums, first_counts = _document_sums(first, unit)
    other_sums, other_counts = _document_sums(other, unit)
    sums, counts = np.array([first_sums, other_sums]).T, np.array([first_counts, other_counts]).T  # (D, 2) each
    has_counts = (counts > 0).all(axis=1)
    sums, counts, lengths = sums[has_counts], counts[has_counts], np.array(first.evaluation.plan.lengths)[has_counts]
    means, document_means = sums.sum(0) / counts.sum(0), sums / counts
    residuals = (sums - means * counts) / counts.sum(0)
    differences = document_means[:, 1] - document_means[:, 0]
    by_length = list[tuple[int, int, float, float, int]]()
    for bucket in first.evaluation.by_length:
        inside = (bucket.first <= lengths) & (lengths <= bucket.last)
        if inside.any():
            in_bucket = sums[inside].sum(0) / counts[inside].sum(0)
            by_length.append((bucket.first, bucket.last, float(in_bucket[0]), float(in_bucket[1]), int(inside.sum())))
    return Difference(
        name=first.evaluation.name,
        unit=unit,
        first=float(means[0]),
        other=float(means[1]),
        difference=float(means[1] - means[0]),
        standard_error=_standard_error(residuals[:, 1] - residuals[:, 0], scale=len(lengths)),
        document_difference=float(differences.mean()),
        document_standard_error=_standard_error(differences - differences.mean(), scale=1),
        documents=len(lengths),
        lower=int((differences < 0).sum()),
        by_length=tuple(by_length),
    )


def _document_sums(result: SetResult, unit: Unit) -> tuple[list[float], list[float]]:
    """Return sums and counts, whose ratio is a document's loss per token, or bits per byte of its text."""
    losses = result.evaluation.document_losses
    if unit == "loss":
        return [loss.sum for loss in losses], [loss.count for loss in losses]
    if not result.text_bytes:
        raise ConfigError(
            "the two tokenizers differ, so that losses per token cannot be compared, and a tokenizer does not say how "
            "many bytes of text its tokens stand for, so that bits per byte cannot be either"
        )
    return [loss.sum / math.log(2) for loss in losses], list(result.text_bytes)


def _standard_error(residuals: np.ndarray, *, scale: float) -> float | None:
    """Return the standard error of a mean (scale 1) or sum (scale n) of n values with these residuals."""
    n = len(residuals)
    return None if n < 2 else float(scale * math.sqrt((residuals**2).sum() / (n - 1) / n))
