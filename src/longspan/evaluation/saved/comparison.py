"""Two models on the same documents: their difference, and how sure it is. Needs no torch.

Documents are drawn, not tokens: tokens of one document are alike, so that the standard error of a difference is that of
a ratio of sums over documents.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from longspan.errors import ConfigError
from longspan.evaluation.saved.request import SetResult, SubjectResult

Unit = Literal["loss", "bits_per_byte"]


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

    def row(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)


def set_differences(first: SubjectResult, other: SubjectResult) -> list[Difference]:
    """Return the difference on every set: of losses where both read the same tokens, otherwise of bits per byte.

    Raises ConfigError where a tokenizer does not give the bytes of its tokens.
    """
    unit: Unit = "loss" if first.tokenizer == other.tokenizer else "bits_per_byte"
    pairs = zip(first.sets, other.sets, strict=True)
    return [_set_difference(*pair, unit) for pair in pairs]


def _set_difference(first: SetResult, other: SetResult, unit: Unit) -> Difference:
    """Return the difference of two results, of all tokens and of documents, with standard errors by document.

    The difference of all tokens is that of two ratios Σ sums / Σ counts, whose error follows from the documents'
    residuals sum − mean · count; documents that a model did not count are left out.
    """
    first_sums, first_counts = _document_sums(first, unit)
    other_sums, other_counts = _document_sums(other, unit)
    sums, counts = np.array([first_sums, other_sums]).T, np.array([first_counts, other_counts]).T  # (D, 2) each
    has_counts = (counts > 0).all(axis=1)
    sums, counts, lengths = sums[has_counts], counts[has_counts], np.array(first.evaluation.plan.lengths)[has_counts]
    means, document_means = sums.sum(0) / counts.sum(0), sums / counts
    residuals = (sums - means * counts) / counts.sum(0)
    differences = document_means[:, 1] - document_means[:, 0]
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
        by_length=tuple(_means_by_length(first, lengths, sums, counts)),
    )


def _document_sums(result: SetResult, unit: Unit) -> tuple[list[float], list[float]]:
    """Return sums and counts, whose ratio is each document's loss per token, or bits per byte of its text."""
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


def _means_by_length(
    result: SetResult, lengths: np.ndarray, sums: np.ndarray, counts: np.ndarray
) -> Iterator[tuple[int, int, float, float, int]]:
    """Yield, for each bucket of lengths that has documents: first and last length, both models' means, documents."""
    for bucket in result.evaluation.by_length:
        inside = (bucket.first <= lengths) & (lengths <= bucket.last)
        if inside.any():
            means = sums[inside].sum(0) / counts[inside].sum(0)
            yield bucket.first, bucket.last, float(means[0]), float(means[1]), int(inside.sum())


HOME = ("tp", "pp", "ep", "dp_replicate")  # the keys of [parallel] that are recorded


def results_record(results: Sequence[SubjectResult], ranks: int) -> dict[str, Any]:
    """Return everything about the first subject, and under "compare" about the second and their differences.

    The values of a single evaluation stand at the top too.
    """
    first, *others = results
    record = subject_record(first) | {"world": ranks}
    if len(first.sets) == 1:
        record = first.sets[0].evaluation.row() | record
    for other in others:
        rows = [difference.row() for difference in set_differences(first, other)]
        record["compare"] = subject_record(other) | {"differences": rows}
    return record


def subject_record(result: SubjectResult) -> dict[str, Any]:
    """Return what was evaluated, in which layout, and the row of every evaluation."""
    parallel = asdict(result.config.parallel)
    return {
        "target": result.weights.title,
        "kind": result.weights.kind,
        "parallel": {key: parallel[key] for key in HOME},
        "changes": [asdict(change) for change in result.changes],
        "evaluations": [evaluation_record(set_result) for set_result in result.sets],
    }


def evaluation_record(result: SetResult) -> dict[str, Any]:
    """Return the row of an evaluation, with the communication types of its groups."""
    return result.evaluation.row() | {"cp_comm_type": comm_types(result)}


def comm_types(result: SetResult) -> list[str]:
    """Return the types by which groups of more than one slot shared documents; a group may have one for each layer."""
    groups = [group for batch in result.evaluation.plan.micro_batches for group in batch.groups if group.degree > 1]
    types = [group.cp_comm_type for group in groups]
    return sorted({name for names in types for name in ((names,) if isinstance(names, str) else names)})


def document_rows(results: Sequence[SubjectResult]) -> list[dict[str, Any]]:
    """Return one object for every document of every model, to be written as JSON.

    Keys are `target` (the title of the weights), set, cp, document, source, tokens, `targets` (tokens with a label),
    and loss.
    """
    return [
        {"target": result.weights.title, "set": set_result.evaluation.name, "cp": set_result.evaluation.cp, **row}
        for result in results
        for set_result in result.sets
        for row in set_result.evaluation.document_rows(set_result.sources)
    ]
