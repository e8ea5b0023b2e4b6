"""Batches and steps are made ahead, and a Trainer's host waits for its device where that of `longspan train` does."""

import os
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import longspan
from longspan import Layout, World
from longspan.hf import ahead, steps, with_longspan
from longspan.hf.ahead import AheadBatch, BatchesAhead, ComingStep, OffsetValues, read_step_documents
from longspan.hf.batch_entries import counts_of_writes, document_entries
from longspan.hf.steps import CollectedTokens, documents_digest
from longspan.plan import plan_fixed
from longspan.testing import run_ranks
from longspan.train import LossTokens
from longspan.train.terms.loss_tokens import Distributions
from tests.hf.stock import Run
from tests.hf.tiny import completions, model_of, tokenizer


def counted(until: int, error: bool = False) -> Iterator[str]:
    yield from (f"batch {number}" for number in range(until))
    if error:
        raise OSError("the disk is gone")


def test_what_is_made_ahead_comes_in_its_place_and_an_error_too() -> None:
    batches = BatchesAhead(counted(6))
    assert [next(batches), next(batches)] == ["batch 0", "batch 1"]  # accelerate has one more than the Trainer
    assert batches.make_next_batches(2) == ["batch 1", "batch 2"]
    assert batches.make_next_batches(2) == ["batch 1", "batch 2"]  # once
    assert [next(batches), next(batches)] == ["batch 2", "batch 3"]
    assert batches.make_next_batches(3) == ["batch 3", "batch 4", "batch 5"]
    assert list(batches) == ["batch 4", "batch 5"]
    batches = BatchesAhead(counted(2, error=True))
    assert next(batches) == "batch 0"
    assert batches.make_next_batches(4) == ["batch 0", "batch 1"]
    assert next(batches) == "batch 1"
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert list(batches) == []


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(6).reshape(2, 3)
    return {"input_ids": ids, "labels": ids.clone()}


def coming(batches: list[Any]) -> ComingStep:
    rows, documents, firsts = read_step_documents(batches, 4.0)
    plan = plan_fixed([len(d) for d in documents], Layout(1), cp=1, targets=4)
    versions = [counts_of_writes(document_entries(x)) for x in batches]
    return ComingStep(batches, rows, documents, documents, firsts, documents_digest(documents), plan, versions)


def test_a_step_is_of_its_batches_until_they_are_written_to() -> None:
    batches = [batch(), batch()]
    step = coming(batches)
    assert step.is_read_from(batches) and step.firsts == [0, 2]
    assert not step.is_read_from([batch(), batches[1]]) and not step.is_read_from(batches[:1])
    batches[1]["labels"][0, 1] = -100
    assert not step.is_read_from(batches)


def test_an_answer_is_of_the_same_tensors_or_equal_ones_that_were_not_written_to() -> None:
    called, values = batch(), OffsetValues(None, 0)  # pyright: ignore[reportArgumentType]
    made = AheadBatch(
        document_entries(called), read_step_documents([called], 4.0)[0][0], values, counts_of_writes(called)
    )
    assert made.matches(called) and made.has_same_tensors(called)
    assert made.matches(batch()) and not made.has_same_tensors(batch())
    assert not made.has_same_tensors(called | {"position_ids": torch.arange(3).expand(2, 3)})
    assert not made.matches(batch() | {"labels": None})
    assert not made.matches(batch() | {"position_ids": torch.arange(3).expand(2, 3)}), "other documents"
    called["labels"][1, 2] = -100
    assert not made.matches(called)


def sums(rank: int) -> list[np.ndarray]:
    results = []
    with World(Layout(2), backend="gloo") as world, pytest.MonkeyPatch.context() as patch:
        for on_device in (False, True):
            patch.setattr(steps, "sums_stay_on_device", lambda world, on_device=on_device: on_device)
            collected = CollectedTokens((3, 4), ("entropy",))
            for document, position in ((0, rank), (1, 2 - 2 * rank), (1, 1))[: 3 - rank]:
                value = torch.tensor([1.0 + 10 * document + position])
                row, place, target = (torch.tensor([x]) for x in (document, position, 0))
                at = LossTokens(row, place, target, {"coefficient": torch.ones(1)}, _Entropy(-value))
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


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
HOST = {"compare_digests", "flags_on_any_rank", "__call__", "get_batch_samples"}  # tensors that never were on a device
OURS = f"{Path(longspan.__file__).parent}/"  # not the folder of a clone, which may be called longspan too
COUNTED = 3  # the step, from 1


class Reads(TrainerCallback):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ours, self.others, self.phase = Counter[tuple[str, str]](), Counter[str](), ""
        for name in READS:
            patch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))
        patch.setattr(torch, "equal", self._counting(torch.equal))
        name = "_prepare_next_step_and_wait"
        patch.setattr(steps.StepsPart, name, self._in_meanwhile(getattr(steps.StepsPart, name)))

    def _counting(self, read: Any) -> Any:
        def counted(*args: Any, **keywords: Any) -> Any:
            phase, self.phase = self.phase, ""  # not what a call makes itself
            if phase in ("before", "after"):
                self._count(phase)
            try:
                return read(*args, **keywords)
            finally:
                self.phase = phase

        return counted

    def _count(self, phase: str) -> None:
        frames = [f for f in reversed(traceback.extract_stack()) if "tests/hf" not in f.filename]
        around = next(f for f in frames if any(room in f.filename for room in (OURS, "/trl/", "/transformers/")))
        if OURS not in around.filename:
            self.others[around.name] += 1
        elif around.name not in HOST:
            self.ours[phase, around.name] += 1

    def _in_meanwhile(self, work: Any) -> Any:
        def work_meanwhile(trainer: Any) -> None:
            counted, self.phase = self.phase, ""
            work(trainer)
            self.phase = "after" if counted else ""

        return work_meanwhile

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.phase = "before" if state.global_step == COUNTED - 1 else ""


def make(kind: Any, folder: str, accumulate: int = 1, **more: Any) -> Any:
    os.environ["CI"] = "1"
    run = Run(folder, longspan={})
    args = SFTConfig(**run.arguments(steps=3, logging_steps=100, gradient_accumulation_steps=accumulate))
    parts = {"model": model_of(num_hidden_layers=1), "train_dataset": completions(24), "processing_class": tokenizer()}
    return run.trainer(kind, args=args, **parts, **more)


def sft(folder: str, accumulate: int) -> tuple[Counter[Any], Counter[Any], dict[str, list[bool]]]:
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        work: dict[str, list[bool]] = {"rows": [], "plans": [], "collated": []}

        def note(owner: Any, name: str, key: str) -> None:
            original = getattr(owner, name)

            def noted(*args: Any, **keywords: Any) -> Any:
                frames = {f.name for f in traceback.extract_stack()}
                if reads.phase or "_prepare_next_step" in frames:
                    work[key].append("_prepare_next_step" in frames)
                return original(*args, **keywords)

            patch.setattr(owner, name, noted)

        note(ahead, "read_documents_of_batch", "rows")
        note(steps.StepsPart, "_plan_documents", "plans")
        trainer = make(SFTTrainer, folder, accumulate, callbacks=[reads])
        note(trainer, "data_collator", "collated")
        trainer.train()
        trainer.end()
    return reads.ours, reads.others, work


def below(folder: str) -> tuple[int, bool]:
    seen = []

    class Below(with_longspan(SFTTrainer)):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.append(inputs["input_ids"].shape)
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = make(Below, folder)
    trainer.train()
    trainer.end()
    return len(seen), trainer._batches_ahead is not None


def each(rank: int, folder: str) -> Any:
    return {accumulate: sft(folder, accumulate) for accumulate in (1, 2)}, below(folder)


def test_a_step_reads_its_device_once_and_prepares_the_next_before(tmp_path: Path) -> None:
    ((found, (steps_seen, made)),) = run_ranks(each, 1, str(tmp_path))
    assert steps_seen and not made, "a class below gets its batches where the Trainer puts them"
    for accumulate, (ours, others, work) in found.items():
        assert not [place for place in ours if place[0] == "before"], ours
        # As `longspan train`: loss, norm and targets. Besides, tokens' values and, a batch, what the loss left of them.
        assert ours["after", "sum_over_ranks"] <= 3
        for place, at_most in (("is_finite", 1), ("host_array", 2), ("training_step", 1)):
            assert ours.pop(("after", place)) <= at_most * accumulate
        assert {name for _, name in ours} <= {"finish_step", "<listcomp>", "sum_over_ranks", "sum_array_over_ranks"}
        assert set(others) <= {"compute_loss", "_run_epoch"} and sum(others.values()) <= 7 * accumulate, others
        assert all(len(done) > 1 and all(done) for done in work.values()), work
