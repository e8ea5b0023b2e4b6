"""One evaluation of a run as a value, read from its row of metrics.jsonl; rows that lack keys are refused by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from longspan.errors import ConfigError

EVALUATION_KEYS = ("step", "cp", "planner", "eval_tokens", "eval_documents", "by_position", "by_length")
MOST = 1e30  # a larger number of a record is taken for none
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

    `metrics` are all except loss and perplexity, by name; `activation_bytes` is what it added to a GPU's memory.
    """

    step: int
    cp: int
    loss: float
    tokens: int
    documents: int
    planner: str
    name: str = ""
    activation_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    by_position: tuple[BucketRow, ...] = ()
    by_length: tuple[BucketRow, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "EvalRow | None":
        """Return the evaluation of a row of metrics.jsonl; None for a row of training, or a loss that is not finite.

        Numbers whose keys begin with "eval_" are metrics, except the fixed columns (_NO_METRIC).

        Raises ConfigError for a row that lacks keys or has no number in their place.
        """
        loss = number(row.get("eval_loss"))
        if math.isnan(loss):
            return None
        lack = [key for key in EVALUATION_KEYS if key not in row]
        counts = [number(row.get(key)) for key in ("step", "cp", "eval_tokens", "eval_documents")]
        if lack or any(map(math.isnan, counts)):
            reason = (
                f"it has no {', '.join(lack)}: it is of a version before 0.1" if lack else "its counts are no numbers"
            )
            raise ConfigError(f"an evaluation of metrics.jsonl is left out: {reason}")
        step, cp, tokens, documents = map(int, counts)
        values = {key.removeprefix("eval_"): number(row[key]) for key in row if key.startswith("eval_")}
        # value == value: not NaN, which `number` gives for what is no number
        metrics = {name: value for name, value in values.items() if f"eval_{name}" not in _NO_METRIC and value == value}
        return cls(
            step=step,
            cp=cp,
            loss=loss,
            tokens=tokens,
            documents=documents,
            planner=str(row["planner"]),
            name=str(row.get("eval_name", "")),
            activation_bytes=int(np.nan_to_num(number(row.get("eval_activation_bytes", 0)))),
            metrics=tuple(metrics.items()),
            by_position=_read_buckets(row["by_position"]),
            by_length=_read_buckets(row["by_length"]),
        )

    @property
    def degree(self) -> str:
        """The degree as text; of a plan with several degrees, of which `cp` is the largest, the planner's name."""
        return self.planner if self._has_several_degrees else str(self.cp)

    @property
    def record_key(self) -> tuple[int, str, bool, int]:
        """The key of an evaluation: its step, its set, whether its plan may have several degrees, and its degree.

        Of rows with one key the last counts. A plan of several degrees has 0 for its degree, since the largest varies.
        """
        several = self._has_several_degrees
        return self.step, self.name, several, 0 if several else self.cp

    @property
    def _has_several_degrees(self) -> bool:
        """Whether its plan may have several degrees, as dynamic plans and those of other planners do."""
        return self.planner == "dynamic" or "." in self.planner  # a dotted name is a planner of the user's own

    @property
    def perplexity(self) -> str:
        """The perplexity exp(loss) as text; from a loss of 50 on "over 1e21", as all digits would fill the table."""
        return f"{math.exp(self.loss):,.3f}" if self.loss < 50 else "over 1e21"


def last_evaluations(rows: Sequence[EvalRow]) -> tuple[EvalRow, ...]:
    """Return the evaluations of the newest weights: those after the last step that has an evaluation."""
    last = max((row.step for row in rows), default=0)
    return tuple(row for row in rows if row.step == last)


def number(value: object) -> float:
    """Return a number of a record as a float; NaN for what is no number, or too large to be drawn (MOST or more)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST:
        return float(value)
    return math.nan


def _read_buckets(rows: object) -> tuple[BucketRow, ...]:
    """Return the buckets that can be read; one without targets has no loss, which is no number, and is left out."""
    buckets = list[BucketRow]()
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 5 and not any(math.isnan(value) for value in map(number, row)):
            first, last, loss, targets, documents = row
            buckets.append(BucketRow(int(first), int(last), float(loss), int(targets), int(documents)))
    return tuple(buckets)
