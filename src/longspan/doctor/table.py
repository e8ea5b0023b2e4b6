"""A proof as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from longspan.doctor.outcomes import Outcome, Proof
from longspan.errors import counted
from longspan.report.plain_text import text_table


def proof_text(proof: Proof, heading: Sequence[str], seconds: float) -> str:
    """The heading, a line for each case, and a verdict."""
    rows = [(_mark(outcome), outcome.case.name, outcome.status, found(outcome)) for outcome in proof.outcomes]
    table = text_table(("", "case", "result", "found"), rows, left=4)
    return "\n".join([*heading, "", table, "", verdict(proof, seconds)])


def verdict(proof: Proof, seconds: float) -> str:
    """How many cases are exact and what the others are, in a line."""
    numbers = {
        status: sum(o.status == status for o in proof.outcomes)
        for status in ("exact", "refused", "wrong", "crashed", "not built")
    }
    parts = [f"{number} {status}" for status, number in numbers.items() if number]
    word = "proven" if proof.good else "NOT proven"
    return f"{word} on this machine: of {counted(len(proof.outcomes), 'case')} {', '.join(parts)} ({seconds:.0f} s)"


def found(outcome: Outcome) -> str:
    """The errors of a case beside what is allowed, or why there are none."""
    if outcome.loss_error is None:
        return " ".join(outcome.message.split())
    text = f"loss {outcome.loss_error:.1e}"
    if outcome.gradient_error is not None:
        worst = f" ({outcome.parameter})" if outcome.status == "wrong" else ""
        text += f", gradients {outcome.gradient_error:.1e}{worst}"
    return f"{text} from the stock model, allowed {outcome.tolerance:.1e}"


def proof_json(proof: Proof, model: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The proof as a JSON object: the model, `good`, a row for each case, and the worlds."""
    worlds = [{"ranks": w.ranks, "device": w.device, "backend": w.backend} for w in proof.worlds]
    rows = [outcome.row() for outcome in proof.outcomes]
    return {"good": proof.good, "seconds": seconds, "model": model, "cases": rows, "worlds": worlds}


def _mark(outcome: Outcome) -> str:
    return "✓" if outcome.status == "exact" else "·" if outcome.good else "✗"
