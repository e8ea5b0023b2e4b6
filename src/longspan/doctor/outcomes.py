"""What came of a case of a proof, and how it is written; no torch."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from longspan.doctor.cases import Case
from longspan.errors import LongspanError

Status = Literal["exact", "refused", "wrong", "crashed", "not built", "not judged"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case: relative errors from the stock model, of the loss and of the worst gradient
    (`parameter`).

    "wrong": an error above `tolerance`; "refused": a LongspanError, its text in `message`; "crashed": another error, a
    rank that died or did not end; "not built": the stock model itself cannot run; "not judged": an error above
    `tolerance` where rounding changes the keys that the stock model itself chooses. Errors are None where nothing was
    compared.
    """

    case: Case
    status: Status
    loss_error: float | None = None
    gradient_error: float | None = None
    parameter: str = ""
    tolerance: float | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the case is exact, cannot be judged, or is refused for what it alone asks for (`Case.is_basic`)."""
        return self.status in ("exact", "not judged") or (self.status == "refused" and not self.case.is_basic)

    def row(self) -> dict[str, Any]:
        """Return the outcome as a row of the record: the case's fields beside its own."""
        fields = asdict(self)
        return {"name": self.case.name, **fields.pop("case"), **fields, "good": self.good}


def outcome_text(outcome: Outcome) -> str:
    """Say how far a case is from the stock model, or on one line why nothing was compared."""
    if outcome.loss_error is None:
        return " ".join(outcome.message.split())
    text = f"loss {outcome.loss_error:.1e}"
    if outcome.gradient_error is not None:
        worst_parameter = f" ({outcome.parameter})" if outcome.status == "wrong" else ""
        text += f", gradients {outcome.gradient_error:.1e}{worst_parameter}"
    text = f"{text} from the stock model, allowed {outcome.tolerance:.1e}"
    if outcome.status == "not judged":
        return f"{text}; its own choice of keys changes by rounding"
    return text


def exception_text(error: BaseException) -> str:
    """Write an error of the model's own code with its class, one of longspan's without."""
    if isinstance(error, LongspanError):
        return str(error)
    return f"{type(error).__name__}: {error}"
