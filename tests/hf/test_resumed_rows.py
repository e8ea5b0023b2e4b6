"""A resumed run reads the rows that the unbroken one reads, whatever draws the order of an epoch."""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl.trainer.utils import RepeatSampler

from longspan.hf import LongspanArguments, with_longspan
from longspan.hf.files import FilesPart
from longspan.hf.steps import StepsPart
from longspan.hf.trainer import LongspanMixin
from longspan.testing import run_ranks
from tests.hf.stock import Run
from tests.hf.tiny import model_of, pad

ROWS, BATCH, SAVED, STEPS = 20, 4, 7, 11  # five steps an epoch: saved in the second, at its end, and in the third


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(())]


class Saver(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in (5, SAVED)
        draw()


class OwnOrder(Sampler[int]):
    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())

    def __len__(self) -> int:
        return ROWS


class RowByRow(OwnOrder):
    def __init__(self) -> None:
        self.generator = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return (self.generator.randrange(ROWS) for _ in range(ROWS))


class Shuffled(IterableDataset[Any]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        return (row(number) for number in self.generator.permutation(ROWS).tolist())


class GloballyShuffled(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (row(number) for number in random.sample(range(ROWS), ROWS))


def row(number: int) -> dict[str, list[int]]:
    return {"input_ids": [number + 3] * (4 + number % 7)}


def weighted() -> Sampler[int]:
    seeded = torch.Generator().manual_seed(3)
    return WeightedRandomSampler([1.0 + number for number in range(ROWS)], ROWS, generator=seeded)


def own_loader(trainer: Any) -> Any:
    return DataLoader(trainer.train_dataset, BATCH, shuffle=True, collate_fn=trainer.data_collator)


# name: arguments of the Trainer, and what makes its sampler, its data, or its loader
CASES: dict[str, tuple[dict[str, Any], dict[str, Callable[..., Any]]]] = {
    "default": ({}, {}),
    "not seedable": ({"accelerator_config": {"use_seedable_sampler": False}}, {}),
    "a worker": ({"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1}, {}),
    "weighted, with a generator": ({}, {"sampler": weighted}),
    "by torch": ({}, {"sampler": lambda: OwnOrder(lambda: torch.randperm(ROWS).tolist())}),
    "by numpy": ({}, {"sampler": lambda: OwnOrder(lambda: np.random.permutation(ROWS).tolist())}),
    "row by row": ({}, {"sampler": RowByRow}),
    "of GRPO": ({}, {"sampler": lambda: RepeatSampler(range(ROWS), 1, BATCH, seed=3)}),
    "stream": ({}, {"data": Shuffled}),
    "stream by python": ({}, {"data": GloballyShuffled}),
    "own loader": ({}, {"loader": own_loader}),
}


class Rows(Trainer):
    made: dict[str, Callable[..., Any]]
    batches: list[list[int]]

    def get_train_dataloader(self) -> Any:
        return self.made["loader"](self) if "loader" in self.made else super().get_train_dataloader()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.made["sampler"]() if "sampler" in self.made else super()._get_train_sampler(train_dataset)


def read_only(trainer: Any, inputs: Any) -> Tensor:
    trainer.batches.append((inputs["input_ids"][:, 0] - 3).tolist())
    trainer._moved = [(inputs, inputs)]
    trainer._prepare_next_step()
    return torch.zeros(())


def nothing(*_: Any, **__: Any) -> None:
    pass


UNUSED = {
    LongspanMixin: ("_prepare_once",),
    StepsPart: ("_clip_grad_norm", "_get_grad_norm"),
    FilesPart: ("_save", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_check_resumable"),
}


def runs(rank: int, root: str, names: Sequence[str]) -> dict[str, list[list[list[int]]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepsPart, "_runs_ahead", False)
        patch.setattr(StepsPart, "training_step", lambda trainer, model, inputs, *_: read_only(trainer, inputs))
        for part, methods in UNUSED.items():
            for method in methods:
                patch.setattr(part, method, nothing)
        first = make(Path(root), "default")  # whose world all others share
        found = {name: batches(Path(root) / name, name) for name in names}
        first.end()
        return found


def make(folder: Path, name: str) -> Any:
    args = TrainingArguments(
        **Run(str(folder)).arguments(rows=BATCH, steps=STEPS, logging_strategy="no") | CASES[name][0]
    )
    parts = {"data_collator": pad, "train_dataset": data_of(name), "callbacks": [Saver()]}
    return with_longspan(Rows)(model=model_of(), args=args, **parts, longspan=LongspanArguments())


def data_of(name: str) -> Any:
    return CASES[name][1].get("data", lambda: [row(number) for number in range(ROWS)])()


def batches(folder: Path, name: str) -> list[list[list[int]]]:
    trainer, runs = make(folder, name), list[Any]()
    trainer.made = CASES[name][1]
    for step in (0, SAVED, 5):
        trainer.train_dataset, trainer.batches = data_of(name), []
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}") if step else None)
        runs.append(trainer.batches)
    trainer.end()
    return runs


@cache
def found(names: Sequence[str]) -> dict[str, list[list[list[int]]]]:
    with tempfile.TemporaryDirectory() as root:
        return run_ranks(runs, 1, root, names, timeout=240)[0]


DAILY = ("default", "not seedable", "a worker", "weighted, with a generator", "by numpy", "stream", "own loader")


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.whole) for n in CASES])
def test_a_resumed_run_reads_the_rows_of_the_unbroken_one(name: str) -> None:
    unbroken, inside, between = found(DAILY if name in DAILY else tuple(CASES.keys() - DAILY))[name]
    assert len(unbroken) == STEPS and unbroken[:5] != unbroken[5:10]
    assert inside == unbroken[SAVED:]
    assert between == unbroken[5:]
