"""The outcomes of a proof, case by case, with the worlds that it ran in: as values, text and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from longspan.doctor.cases import Case
from longspan.errors import LongspanError, plural
from longspan.plain_text import text_table

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
        """Whether the case is exact, or refused for what only this case asks for (`Case.is_basic`)."""
        return self.status == "exact" or (self.status == "refused" and not self.case.is_basic)

    def row(self) -> dict[str, Any]:
        """Return the outcome as a JSON object: its fields and those of its case in one, with `name` and `good`."""
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

    `text_suffices`: the model's class is also that of text, so that refused images are only a remark.
    """

    outcomes: tuple[Outcome, ...]
    worlds: tuple[WorldFacts, ...] = ()
    text_suffices: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, nothing crashed, and the model as such is not refused."""
        return bool(self.outcomes) and all(outcome.good or self._is_remark(outcome) for outcome in self.outcomes)

    def _is_remark(self, outcome: Outcome) -> bool:
        """Return whether an outcome only refuses images, for a model that needs none."""
        return self.text_suffices and outcome.case.encoder > 0 and outcome.status == "refused"


def proof_text(proof: Proof, heading: Sequence[str], seconds: float) -> str:
    """Write the heading, a line for each case, and a verdict."""
    rows = [
        (_status_mark(outcome), outcome.case.name, outcome.status, outcome_text(outcome)) for outcome in proof.outcomes
    ]
    table = text_table(("", "case", "result", "found"), rows, left=4)
    return "\n".join([*heading, "", table, "", verdict(proof, seconds)])


def verdict(proof: Proof, seconds: float) -> str:
    """Write how many cases are exact and what the others are, in a line."""
    numbers = {
        status: sum(o.status == status for o in proof.outcomes)
        for status in ("exact", "refused", "wrong", "crashed", "not built")
    }
    parts = [f"{number} {status}" for status, number in numbers.items() if number]
    word = "proven" if proof.good else "NOT proven"
    return f"{word} on this machine: of {plural(len(proof.outcomes), 'case')} {', '.join(parts)} ({seconds:.0f} s)"


def outcome_text(outcome: Outcome) -> str:
    """Write the errors of a case and the tolerance, or the reason why there are none."""
    if outcome.loss_error is None:
        return " ".join(outcome.message.split())
    text = f"loss {outcome.loss_error:.1e}"
    if outcome.gradient_error is not None:
        worst_parameter = f" ({outcome.parameter})" if outcome.status == "wrong" else ""
        text += f", gradients {outcome.gradient_error:.1e}{worst_parameter}"
    return f"{text} from the stock model, allowed {outcome.tolerance:.1e}"


def proof_json(proof: Proof, model: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the proof as a JSON object: the model, `good`, a row for each case, and the worlds."""
    worlds = [{"ranks": w.ranks, "device": w.device, "backend": w.backend} for w in proof.worlds]
    rows = [outcome.row() for outcome in proof.outcomes]
    return {"good": proof.good, "seconds": seconds, "model": model, "cases": rows, "worlds": worlds}


def _status_mark(outcome: Outcome) -> str:
    """Return the mark of a case in a table; a dot is for a refusal that says nothing against the model."""
    return "✓" if outcome.status == "exact" else "·" if outcome.good else "✗"


def error_text(error: BaseException) -> str:
    """Write the message of an error, with its type unless it is this package's."""
    return str(error) if isinstance(error, LongspanError) else f"{type(error).__name__}: {error}"
