"""What layers keep is chosen by a plan of memory, or as the arguments have it; losses do not depend on it."""

from functools import cache
from typing import Any

import pytest

from tests.hf.stock import RECOMPUTES, Ran, Run, ours, stock
from tests.hf.test_trainer import EXACT, make


def checkpointed(run: Run) -> Any:
    """The arguments ask for recomputation."""
    trainer = make(run, max_steps=2, eval_strategy="no", **{RECOMPUTES: True})
    trainer.train()
    run.kept["measures"] = _measures(trainer, run)
    return trainer


def plain(run: Run) -> Any:
    """The arguments leave it."""
    trainer = make(run, max_steps=2, eval_strategy="no")
    trainer.train()
    run.kept["measures"] = _measures(trainer, run)
    return trainer


def _measures(trainer: Any, run: Run) -> Any:
    if run.longspan is None:
        return None
    return None if trainer.memory_plan is None else trainer.memory_plan.measures


@pytest.mark.parametrize(
    ("case", "keys", "measures"),
    [
        (checkpointed, {}, None),
        (plain, {"memory_bytes": 1 << 30}, ("none", "none")),
        (plain, {"memory_bytes": 3_000_000, "max_tokens_per_slot": "0"}, ("selective", "selective")),
    ],
)
def test_layers_keep_what_was_chosen(case: Any, keys: dict[str, Any], measures: Any) -> None:
    found = ours(case, {"context_parallel_size": 2, **keys}, 2)
    assert found.kept["measures"] == measures
    expected = _expected()
    for one, other in zip(expected.logs, found.logs, strict=True):
        assert all(abs(other[name] - value) <= EXACT["metric"] * max(1, abs(value)) for name, value in one.items())


@cache
def _expected() -> Ran:
    return stock(plain)
