"""The figure of an evaluation by which `train.keep_best` keeps a checkpoint."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longspan.errors import ConfigError

_ORDERS = "higher", "lower"


@dataclass(frozen=True)
class BestFigure:
    """Which figure of which evaluation set is compared, and whether the highest or the lowest is the best.

    >>> BestFigure.of("code/eval_token_accuracy:higher")
    BestFigure(set='code', column='eval_token_accuracy', higher=True)
    """

    set: str
    column: str
    higher: bool

    @classmethod
    def of(cls, text: str) -> "BestFigure":
        """Read the figure that `train.keep_best` names. Raises ConfigError for a text that names none."""
        figure, _, order = text.partition(":")
        name, _, column = figure.rpartition("/")
        if not column.startswith("eval_") or (order and order not in _ORDERS):
            raise ConfigError(
                f"train.keep_best is {text!r}; give a figure of an evaluation as metrics.jsonl has it, such as "
                "eval_loss, with the name of its set before it (code/eval_loss) and :higher after it where more is "
                "better"
            )
        return cls(name, column, order == "higher")

    def check_sets(self, names: Collection[str]) -> None:
        """Raise ConfigError for a set that is not evaluated; `names` are the run's sets, "" the held-out documents."""
        if self.set in names:
            return
        names_text = ", ".join(sorted(filter(None, names))) or "none"
        absent = f"the set {self.set!r}" if self.set else "documents that are held out (data.eval_documents)"
        raise ConfigError(
            f"train.keep_best names {self.column} of {absent}, which the run has not; its sets: {names_text}"
        )

    def value_in(self, rows: Iterable[Mapping[str, Any]]) -> float | None:
        """Return the figure in rows of evaluations, one a set; None if its set has no row, or None for the figure.

        Raises ConfigError where the set has no such figure.
        """
        for row in rows:
            if row.get("eval_name", "") != self.set:
                continue
            if self.column not in row:
                columns = ", ".join(name for name in row if name.startswith("eval_") and name != "eval_name")
                raise ConfigError(f"train.keep_best names {self.column}, and the evaluation has {columns}")
            return row[self.column]
        return None
