"""How fast a slot works, over the others: what is timed, and what its step returns."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.data.document import NO_TARGET
from longspan.train import step
from longspan.train.passes import Passes
from longspan.train.step import SlotPaceTerm


def pace(tp: int = 0, vocabulary: int = step.LEAST_LOGITS // 4) -> SlotPaceTerm:
    """A term after the loss of a micro-batch of four targets, which took 20 ms."""

    def measure(batch: Any, hidden: Tensor, head: Any, *deeper: Tensor) -> Tensor:
        time.sleep(0.02)
        return hidden.sum() + len(deeper)

    world: Any = SimpleNamespace(coordinates=SimpleNamespace(tp=tp))
    model: Any = None
    term = SlotPaceTerm(world)
    passes = term.extend_passes(Passes(model=model, plan=model, world=world, backward=True, measure=measure))
    batch: Any = SimpleNamespace(labels=np.array([1, 2, NO_TARGET, 3, 4]))
    assert passes.measure(batch, torch.ones(3), SimpleNamespace(vocabulary=vocabulary), torch.ones(1)).item() == 4.0
    return term


def test_seconds_of_as_many_rows() -> None:
    term = pace()
    seconds, rows = term.sums()
    assert rows == 4.0 and 0.02 <= seconds < 2.0
    ratio = term.results([seconds + 2 * seconds, rows + 10])["slot_ratio"]
    assert ratio == pytest.approx(seconds / 4 / (2 * seconds / 10))


def test_what_is_not_timed_has_no_ratio() -> None:
    small = pace(vocabulary=step.LEAST_LOGITS // 4 - 1)
    assert small.sums() == [0.0, 0.0] and small.results([1.0, 8.0]) == {"slot_ratio": None}
    single = pace()
    assert single.results(single.sums()) == {"slot_ratio": None}, "there is no other slot"
    second = pace(tp=1)
    second.sums()
    assert second.results([1.0, 8.0]) == {"slot_ratio": None}
