"""The results of `longspan eval` as one JSON object, and the loss of every document as rows. Needs no torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from longspan.evaluation.passkey.grid import PasskeyGrid
from longspan.evaluation.saved.comparison import differences
from longspan.evaluation.saved.request import SetResult, SubjectResult

HOME = ("tp", "pp", "ep", "dp_replicate")


def record_of(results: Sequence[SubjectResult], ranks: int) -> dict[str, Any]:
    """Everything about the first subject, and under "compare" about the second and their differences.

    The values of a single evaluation stand at the top too.
    """
    first, *others = results
    record = subject_record(first) | {"world": ranks}
    if len(first.sets) == 1:
        record = first.sets[0].evaluation.row() | record
    for other in others:
        rows = [difference.row() for difference in differences(first, other)]
        record["compare"] = subject_record(other) | {"differences": rows}
    return record


def subject_record(result: SubjectResult) -> dict[str, Any]:
    """What was evaluated, in which layout, and the row of every evaluation."""
    parallel = asdict(result.config.parallel)
    return {
        "target": result.weights.title,
        "kind": result.weights.kind,
        "parallel": {key: parallel[key] for key in HOME},
        "changes": [asdict(change) for change in result.changes],
        "evaluations": [evaluation_record(of_set) for of_set in result.sets],
    }


def evaluation_record(result: SetResult) -> dict[str, Any]:
    """The row of an evaluation, with the communication types of its groups."""
    return result.evaluation.row() | {"cp_comm_type": comm_types(result)}


def comm_types(result: SetResult) -> list[str]:
    """The types by which groups of more than one slot shared documents."""
    groups = [group for batch in result.evaluation.plan.micro_batches for group in batch.groups if group.degree > 1]
    types = [kind if isinstance(kind := group.cp_comm_type, str) else tuple(kind) for group in groups]
    return sorted({one for kind in types for one in ((kind,) if isinstance(kind, str) else kind)})


def grids_of(results: Sequence[SubjectResult]) -> list[tuple[str, PasskeyGrid]]:
    """Every evaluation of passkey retrieval; with the weights' path, where there are several."""
    return [
        (result.weights.title if len(results) > 1 else "", grid)
        for result in results
        for of_set in result.sets
        if (grid := of_set.evaluation.passkey) is not None
    ]


def document_rows(results: Sequence[SubjectResult]) -> list[dict[str, Any]]:
    """One object for every document of every evaluation: target, set, cp, document, source, tokens, targets, loss."""
    return [
        {"target": result.weights.title, "set": of_set.evaluation.name, "cp": of_set.evaluation.cp, **row}
        for result in results
        for of_set in result.sets
        for row in of_set.evaluation.document_rows(of_set.sources)
    ]
