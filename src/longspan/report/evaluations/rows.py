"""Evaluations as rows of metrics.jsonl tell them, those of older releases too, which measured the loss alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NO_METRIC = {"eval_loss", "eval_tokens", "eval_targets", "eval_documents", "eval_perplexity", "eval_activation_bytes"}


class BucketRow(NamedTuple):
    """The mean loss of `targets` tokens, at positions or in documents of lengths `first` to `last`."""

    first: int
    last: int
    loss: float
    targets: int
    documents: int


@dataclass(frozen=True)
class EvalRow:
    """One evaluation: of the weights after `step`, of the set `name` ("": held-out documents), at one degree.

    `metrics` are those beside loss and perplexity, by name; `activation_bytes` what it added to a GPU's memory.
    """

    step: int
    cp: int
    loss: float
    tokens: int
    name: str = ""
    planner: str = ""
    documents: int = 0
    activation_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    by_position: tuple[BucketRow, ...] = ()
    by_length: tuple[BucketRow, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "EvalRow | None":
        """The evaluation of a row; None for a row of training, or one that is damaged."""
        loss, cp = number(row.get("eval_loss")), row.get("cp")
        if math.isnan(loss) or not isinstance(cp, int):
            return None
        values = {key.removeprefix("eval_"): number(row[key]) for key in row if key.startswith("eval_")}
        metrics = {name: value for name, value in values.items() if f"eval_{name}" not in _NO_METRIC and value == value}
        return cls(
            step=int(row.get("step", 0)),
            cp=cp,
            loss=loss,
            tokens=_count(row, "eval_tokens"),
            name=str(row.get("eval_name", "")),
            planner=str(row.get("planner", "")),
            documents=_count(row, "eval_documents"),
            activation_bytes=_count(row, "eval_activation_bytes"),
            metrics=tuple(metrics.items()),
            by_position=_buckets(row.get("by_position")),
            by_length=_buckets(row.get("by_length")),
        )

    @property
    def degree(self) -> str:
        """Its degree in words; "dynamic" where a plan chose one for each document, of which `cp` is the largest."""
        return "dynamic" if self.planner == "dynamic" else str(self.cp)

    @property
    def place(self) -> tuple[int, str, bool, int]:
        """What is evaluated where: of the rows of one place, the last counts. Largest degrees of dynamic plans vary."""
        dynamic = self.planner == "dynamic"
        return self.step, self.name, dynamic, 0 if dynamic else self.cp

    @property
    def perplexity(self) -> str:
        """exp(loss) in words."""
        return f"{math.exp(self.loss):,.3f}" if self.loss < 50 else "over 1e21"


def last_rows(rows: Sequence[EvalRow]) -> tuple[EvalRow, ...]:
    """The evaluations after the last step of any."""
    last = max((row.step for row in rows), default=0)
    return tuple(row for row in rows if row.step == last)


def number(value: object) -> float:
    """A number of a record; NaN for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _count(row: Mapping[str, Any], key: str) -> int:
    value = number(row.get(key))
    return 0 if math.isnan(value) else int(value)


def _buckets(rows: object) -> tuple[BucketRow, ...]:
    """The buckets that can be read, of those that have targets."""
    buckets = list[BucketRow]()
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 5 and not any(math.isnan(value) for value in map(number, row)):
            first, last, loss, targets, documents = row
            buckets.append(BucketRow(int(first), int(last), float(loss), int(targets), int(documents)))
    return tuple(buckets)
