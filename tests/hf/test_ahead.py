"""Batches made before they are asked for, steps that are read ahead, and sums of tokens' values by either way."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from longspan import Layout, World
from longspan.hf import steps
from longspan.hf.facade import AheadBatch, Offset, document_entries, versions_of
from longspan.hf.steps import BatchesAhead, CollectedTokens, ComingStep, documents_digest, read_step
from longspan.plan import plan_fixed
from longspan.testing import run_ranks
from longspan.train import LossRows
from longspan.train.terms.token_loss import Distributions


def counted(until: int, error: bool = False) -> Iterator[str]:
    """Batches by name; an error or the end comes after them."""
    yield from (f"batch {number}" for number in range(until))
    if error:
        raise OSError("the disk is gone")


def test_what_is_made_ahead_comes_in_its_place() -> None:
    batches = BatchesAhead(counted(6))
    assert [next(batches), next(batches)] == ["batch 0", "batch 1"]  # accelerate has one more than the Trainer
    assert batches.make_batches(2) == ["batch 1", "batch 2"]
    assert batches.make_batches(2) == ["batch 1", "batch 2"]  # once
    assert [next(batches), next(batches)] == ["batch 2", "batch 3"]
    assert batches.make_batches(3) == ["batch 3", "batch 4", "batch 5"]
    assert list(batches) == ["batch 4", "batch 5"]


def test_an_error_comes_where_its_batch_is_asked_for() -> None:
    batches = BatchesAhead(counted(2, error=True))
    assert next(batches) == "batch 0"
    assert batches.make_batches(4) == ["batch 0", "batch 1"]
    assert next(batches) == "batch 1"
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert list(batches) == []


def batch() -> dict[str, torch.Tensor]:
    """Two rows of three tokens."""
    ids = torch.arange(6).reshape(2, 3)
    return {"input_ids": ids, "labels": ids.clone()}


def coming(batches: list[Any]) -> ComingStep:
    """A step over batches."""
    rows, documents, firsts = read_step(batches, 4.0)
    plan = plan_fixed([len(d) for d in documents], Layout(1), cp=1, targets=4)
    versions = [versions_of(document_entries(x)) for x in batches]
    return ComingStep(batches, rows, documents, firsts, documents_digest(documents), plan, versions)


def test_a_step_is_of_its_batches_until_they_are_written_to() -> None:
    batches = [batch(), batch()]
    step = coming(batches)
    assert step.has_batches(batches) and step.firsts == [0, 2]
    assert not step.has_batches([batch(), batches[1]]) and not step.has_batches(batches[:1])
    batches[1]["labels"][0, 1] = -100
    assert not step.has_batches(batches)


def test_an_answer_is_of_the_same_tensors_or_equal_ones_that_were_not_written_to() -> None:
    called, values = batch(), Offset(None, 0)  # pyright: ignore[reportArgumentType]
    made = AheadBatch(document_entries(called), read_step([called], 4.0)[0][0], values, versions_of(called))
    assert made.matches(called) and made.has_same_tensors(called)
    assert made.matches(batch()) and not made.has_same_tensors(batch())
    assert not made.has_same_tensors(called | {"position_ids": torch.arange(3).expand(2, 3)})
    assert not made.matches(batch() | {"labels": None})
    assert not made.matches(batch() | {"position_ids": torch.arange(3).expand(2, 3)}), "other documents"
    if "attention_mask" in called:
        assert not made.matches(batch() | {"attention_mask": torch.zeros_like(called["attention_mask"])})
    called["labels"][1, 2] = -100
    assert not made.matches(called)


def sums(rank: int) -> list[np.ndarray]:
    """Values of two documents, of which each rank has some tokens, summed on the host and as on a GPU."""
    results = []
    with World(Layout(2), backend="gloo") as world, pytest.MonkeyPatch.context() as patch:
        for on_device in (False, True):
            patch.setattr(steps, "sums_on_device", lambda world, on_device=on_device: on_device)
            collected = CollectedTokens((3, 4), ("entropy",))
            for document, position in ((0, rank), (1, 2 - 2 * rank), (1, 1))[: 3 - rank]:
                value = torch.tensor([1.0 + 10 * document + position])
                row, place, target = (torch.tensor([x]) for x in (document, position, 0))
                at = LossRows(row, place, target, {"coefficient": torch.ones(1)}, _Entropy(-value))
                collected(value, at)
            values = collected.sum_over_ranks(world)
            results.append(np.stack([values.values, values.also["entropy"]]))
    return results


class _Entropy(Distributions):
    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def value(self, name: str) -> torch.Tensor:
        return self._value


def test_values_are_summed_alike_on_the_host_and_on_the_device() -> None:
    expected = np.array([0, 1, 2, 0, 11, 12, 13.0])  # of the token after each row
    for results in run_ranks(sums, 2):
        for values in results:
            assert np.array_equal(values[0], expected) and np.array_equal(values[1], -expected)
