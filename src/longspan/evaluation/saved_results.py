"""Results of `longspan eval`: evaluations by set and degree, and how two models differ. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.config.sections import RunConfig
from longspan.evaluation.fit_layout import HOME, Change
from longspan.evaluation.request import SavedWeights
from longspan.evaluation.result import Evaluation


@dataclass(frozen=True)
class SetResult:
    """The evaluation of one set at one degree, and where its documents came from."""

    evaluation: Evaluation
    sources: tuple[str, ...]

    @property
    def comm_types(self) -> list[str]:
        """The types by which groups of more than one slot shared documents; a group may have one for each layer."""
        groups = [group for group in self.evaluation.plan.groups if group.degree > 1]
        types = [group.cp_comm_type for group in groups]
        return sorted({name for names in types for name in ((names,) if isinstance(names, str) else names)})


@dataclass(frozen=True)
class SubjectResult:
    """The evaluations of one subject's weights, set by set and within a set degree by degree."""

    weights: SavedWeights
    # The weights were evaluated under this configuration.
    config: RunConfig
    sets: tuple[SetResult, ...]
    changes: tuple[Change, ...]
    # This says what the losses are, "" for the model's own.
    loss: str = ""

    def record(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        return {
            "target": self.weights.title,
            "kind": self.weights.kind,
            **({"loss": self.loss} if self.loss else {}),
            "parallel": {key: getattr(self.config.parallel, key) for key in HOME},
            "changes": [change._asdict() for change in self.changes],
            "evaluations": [result.evaluation.row() | {"cp_comm_type": result.comm_types} for result in self.sets],
        }


def results_record(results: Sequence[SubjectResult], ranks: int) -> dict[str, Any]:
    """Return the JSON of `longspan eval`: all of the first subject, its only evaluation at the top too.

    Under "compare" is the second subject, with differences by set.
    """
    first, *others = results
    record = first.record() | {"world": ranks}
    if len(first.sets) == 1:
        record = first.sets[0].evaluation.row() | record
    for other in others:
        record["compare"] = other.record() | {
            "differences": [asdict(row) for row in differences_by_set(first, other)]
        }
    return record


def document_rows(results: Sequence[SubjectResult]) -> list[dict[str, Any]]:
    """Return one JSON object for each document of each set, degree and subject."""
    return [
        {"target": subject.weights.title, "set": set_result.evaluation.name, "cp": set_result.evaluation.cp, **row}
        for subject in results
        for set_result in subject.sets
        for row in set_result.evaluation.document_rows(set_result.sources)
    ]


@dataclass(frozen=True)
class Difference:
    """The other model's mean of a `figure` minus the first's, over the same documents.

    It is that of the loss over all tokens, or under a loss of preferences that of a figure over all pairs or answers.
    `count` is the number of documents, pairs or answers (`unit`), of which `lower` fell.
    """

    name: str
    figure: str
    unit: str
    first: float
    other: float
    difference: float
    standard_error: float | None
    count: int
    lower: int
    by_length: tuple[tuple[int, int, float, float, int], ...] = ()  # tokens from, to, first, other, documents

    def rows(self) -> list[tuple[str, float, float, int]]:
        """Return (text, both means, number of units) of all documents, and of each range of lengths."""
        lengths = [
            (f"{shortest:,} to {longest:,}", first, other, count)
            for shortest, longest, first, other, count in self.by_length
        ]
        return [("all", self.first, self.other, self.count), *lengths]


def differences_by_set(first: SubjectResult, other: SubjectResult) -> list[Difference]:
    """Return how the other's losses, and figures by pair, differ from the first's, for each set and degree."""
    differences = list[Difference]()
    for one, another in zip(first.sets, other.sets, strict=True):
        units = one.evaluation.units
        other_units = another.evaluation.units
        if units is None or other_units is None:
            differences.append(_difference_by_token(one, another))
            continue
        for figure, values in units.figures.items():
            both = np.array([values, other_units.figures[figure]])
            differences.append(_difference_by_unit(one.evaluation.name, figure, units.kind, both))
    return differences


def _difference_by_unit(name: str, figure: str, unit: str, values: npt.NDArray[np.float64]) -> Difference:
    """The values are (2, n), of n units."""
    first, other = values.mean(1).tolist()
    paired = values[1] - values[0]
    n = len(paired)
    return Difference(
        name=name,
        figure=figure,
        unit=unit,
        first=first,
        other=other,
        difference=other - first,
        standard_error=None if n < 2 else float(paired.std(ddof=1) / math.sqrt(n)),
        count=n,
        lower=int((paired < 0).sum()),
    )


def _difference_by_token(first: SetResult, other: SetResult) -> Difference:
    """The error of the ratio Σ sums / Σ counts follows from the documents' residuals sum − mean · count. Documents
    without targets are left out."""
    evaluation = first.evaluation
    losses = evaluation.document_losses, other.evaluation.document_losses, evaluation.document_lengths
    rows = [
        (first_loss.sum, other_loss.sum, first_loss.count, length)
        for first_loss, other_loss, length in zip(*losses, strict=True)
        if first_loss.count
    ]
    sums, counts, lengths = np.split(np.array(rows).reshape(-1, 4), [2, 3], axis=1)  # (D, 2), (D, 1), (D, 1)
    means = sums.sum(0) / counts.sum()
    n = len(counts)
    residuals = np.diff(sums - means * counts)
    by_length = list[tuple[int, int, float, float, int]]()
    for bucket in evaluation.by_length:
        inside = ((bucket.first <= lengths) & (lengths <= bucket.last))[:, 0]
        if inside.any():
            bucket_means = (sums[inside].sum(0) / counts[inside].sum()).tolist()
            by_length.append((bucket.first, bucket.last, *bucket_means, int(inside.sum())))
    return Difference(
        name=evaluation.name,
        figure="loss",
        unit="document",
        first=float(means[0]),
        other=float(means[1]),
        difference=float(means[1] - means[0]),
        standard_error=None if n < 2 else float(math.sqrt((residuals**2).sum() * n / (n - 1)) / counts.sum()),
        count=n,
        lower=int((sums[:, 1] < sums[:, 0]).sum()),
        by_length=tuple(by_length),
    )
