"""The host of a Trainer waits for its device where that of `longspan train` does, and prepares the next step before.

On a CPU nothing is waited for; counted are the calls that would: those that turn a tensor into numbers.
"""

import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import longspan
from longspan.hf import LongspanArguments, steps, with_longspan
from longspan.testing import run_ranks
from longspan.train.step_end import StepEnd
from tests.hf.stock import Run
from tests.hf.tiny import completions, model_of, tokenizer

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
HOST = {"_compare_digests", "any_ranks", "_is_first_copy", "get_batch_samples"}  # tensors that never were on a device
OURS = f"{Path(longspan.__file__).parent}/"  # not the folder of a clone, which may be called longspan too
COUNTED = 3  # the step, from 1


class Reads(TrainerCallback):
    """Counts calls in one step by where they were made: "before" the host waits for the device, and "after"."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ours, self.others, self.phase = Counter[tuple[str, str]](), Counter[str](), ""
        for name in READS:
            patch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))
        patch.setattr(torch, "equal", self._counting(torch.equal))
        patch.setattr(StepEnd, "_work_meanwhile", self._in_meanwhile(StepEnd._work_meanwhile))

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
        def work_meanwhile(end: StepEnd) -> None:
            counted, self.phase = self.phase, ""
            work(end)
            self.phase = "after" if counted else ""

        return work_meanwhile

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step after the one before it."""
        self.phase = "before" if state.global_step == COUNTED - 1 else ""


def sft(rank: int, folder: str, accumulate: int) -> tuple[Counter[Any], Counter[Any], dict[str, list[bool]]]:
    """What a step of an SFTTrainer reads, and whether its host's work was done in the step before."""
    os.environ["CI"] = "1"
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

        note(steps, "read_batch", "rows")
        note(steps.StepsPart, "_make_plan", "plans")
        args = SFTConfig(
            **Run(folder, 1, None, rank).arguments(logging_steps=100, gradient_accumulation_steps=accumulate)
        )
        trainer = with_longspan(SFTTrainer)(
            model=model_of(),
            args=args,
            train_dataset=completions(64),
            processing_class=tokenizer(),
            callbacks=[reads],
            longspan=LongspanArguments(),
        )
        note(trainer, "data_collator", "collated")
        trainer.train()
        trainer.end()
    return reads.ours, reads.others, work


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_reads_its_device_once_and_prepares_the_next_before(tmp_path: Path, accumulate: int) -> None:
    ours, others, work = run_ranks(sft, 1, str(tmp_path), accumulate)[0]
    assert not [place for place in ours if place[0] == "before"], ours
    # As `longspan train`: loss, norm and targets. Besides, tokens' values and, a batch, what the loss left of them.
    assert ours["after", "sum_over_ranks"] <= 3
    for place, at_most in (("is_finite", accumulate), ("host_array", 2 * accumulate), ("_loss_on_host", accumulate)):
        assert ours.pop(("after", place)) <= at_most
    assert {name for _, name in ours} <= {"sum_over_ranks", "_read_pieces", "<listcomp>", "sum_of_arrays"}, ours
    assert set(others) <= {"compute_loss", "_run_epoch"} and sum(others.values()) <= 7 * accumulate, others
    assert all(len(done) > 1 and all(done) for done in work.values()), work


def below(rank: int, folder: str) -> tuple[int, list[Any]]:
    """Steps that a class of one's own has read, and the batches that were made ahead of it."""
    os.environ["CI"] = "1"
    seen = []

    class Below(with_longspan(SFTTrainer)):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.append(inputs["input_ids"].shape)
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = Below(
        model=model_of(),
        args=SFTConfig(**Run(folder, 1, None, rank).arguments(logging_steps=100)),
        train_dataset=completions(64),
        processing_class=tokenizer(),
        longspan=LongspanArguments(),
    )
    trainer.train()
    trainer.end()
    return len(seen), trainer._host_batches.make_batches(1)


def test_a_step_of_a_class_below_gets_its_batches_where_the_trainer_puts_them(tmp_path: Path) -> None:
    steps_seen, made = run_ranks(below, 1, str(tmp_path))[0]
    assert steps_seen and not made
