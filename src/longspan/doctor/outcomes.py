"""What a proof says of each case, and of the ranks that it ran on."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from longspan.doctor.cases import Case

Status = Literal["exact", "refused", "wrong", "crashed", "not built"]


@dataclass(frozen=True)
class Outcome:
    """Of one case: its relative errors from the stock model, of the loss and of the worst gradient, `parameter`.

    "wrong": an error above `tolerance`; "refused": a LongspanError, its text in `message`; "crashed": another error, a
    rank that died or did not end; "not built": the stock model itself cannot run. Errors are None where nothing was
    compared. `levels` has the ranks of the levels of hierarchical groups, `why` the choice of `auto` and its reasons.
    """

    case: Case
    status: Status
    loss_error: float | None = None
    gradient_error: float | None = None
    parameter: str = ""
    tolerance: float | None = None
    message: str = ""
    seconds: float = 0.0
    levels: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether it is exact, or refused for sizes that the case alone has."""
        return self.status == "exact" or (self.status == "refused" and not self.case.basic)

    def row(self) -> dict[str, Any]:
        """As a JSON object, the fields of its case among the others."""
        fields = asdict(self)
        return {"name": self.case.name, **fields.pop("case"), **fields, "good": self.good}


@dataclass(frozen=True)
class WorldFacts:
    """A world in which cases ran: its ranks and device, and the process groups that were made."""

    ranks: int
    device: str
    backend: str
    groups: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Proof:
    """Outcomes in the order of their cases, and the worlds in which they ran.

    `text_suffices`: the model's class is that of text alone too, so that images which are refused are a remark.
    """

    outcomes: tuple[Outcome, ...]
    worlds: tuple[WorldFacts, ...] = ()
    text_suffices: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, nothing crashed, and the model as such is not refused."""
        return bool(self.outcomes) and all(outcome.good or self._is_remark(outcome) for outcome in self.outcomes)

    def _is_remark(self, outcome: Outcome) -> bool:
        return self.text_suffices and outcome.case.encoder > 0 and outcome.status == "refused"
