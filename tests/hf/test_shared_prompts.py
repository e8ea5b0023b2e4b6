"""Rows of a batch that share a prompt, in trainers of TRL and transformers: losses, rewards and weights are stock's."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments
from trl import KTOConfig, KTOTrainer

from tests.hf.stock import CP2, Run, check_each, ours_each, stock_each, train_with_shared_prompts
from tests.hf.test_grpo import grpo
from tests.hf.test_scores import reward
from tests.hf.test_trl import DYNAMIC, EVALUATED, TWICE, dpo, sft, train
from tests.hf.tiny import completions, judged, model_of

BOUNDS = {"loss": 1e-9, "metric": 1e-9, "weights": 1e-8}
PROMPTS = ("w1 w2 w3 w4 w5 w6 ", "w1 w2 w3 w7 w8 w9 w10 w11 ")


def few_prompts(count: int, make: Any = completions) -> Any:
    return make(count).map(lambda _, number: {"prompt": PROMPTS[number % 2]}, with_indices=True)


def kto(run: Run, **changes: Any) -> Any:
    return train(run, KTOTrainer, KTOConfig, few_prompts(16, judged), **{"beta": 0.5} | changes)


def pad_left(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(name: str, fill: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[name]) for row in rows], True, fill, padding_side="left")

    mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], True, 0, "left")
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def padded_on_the_left(run: Run) -> Any:
    """transformers' own Trainer; rows of two prompts and of none."""
    draw = torch.Generator().manual_seed(0)
    rows = list[dict[str, list[int]]]()
    for number in range(16):
        prompt = [7 + number % 2] * 2 + [5, 6, 9, 9, 8]
        answer = torch.randint(3, 60, (4 + number % 5,), generator=draw).tolist()
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    trainer = run.trainer(
        Trainer,
        model=model_of(),
        args=TrainingArguments(**run.arguments(**TWICE)),
        train_dataset=rows,
        data_collator=pad_left,
    )
    trainer.train()
    return trainer


CASES: dict[str, Any] = {
    "sft": partial(sft, data=few_prompts, completion_only_loss=True, **EVALUATED),
    "dpo": partial(dpo, reference=True, **EVALUATED),
    "kto": partial(kto, reference=True, **TWICE),
    "reward": reward,
    "left": padded_on_the_left,
}
MORE: dict[str, Any] = {
    "grpo, uneven prompts": partial(grpo, even=False, **TWICE),
    "dpo, two steps": partial(dpo, reference=True, **TWICE, **EVALUATED),
    "dpo of pairs without a reference": partial(dpo, loss_type=["sigmoid", "sft"]),
    "qwen3-moe": partial(sft, data=few_prompts, family="qwen3-moe"),
    "kto": partial(kto, **TWICE),
}


def compare_shared(cases: dict[str, Any], keys: dict[str, Any]) -> None:
    shared = [partial(train_with_shared_prompts, train=train) for train in cases.values()]
    found = ours_each(shared, CP2 | keys, 2)
    assert all(ran.kept["prefixes"] for ran in found.values()), [ran.kept["prefixes"] for ran in found.values()]
    check_each(stock_each(shared), found, **BOUNDS)


@pytest.mark.whole  # daily: GRPO's, in test_grpo.py
def test_rows_of_one_prompt_share_it() -> None:
    compare_shared(CASES, {})


@pytest.mark.whole
@pytest.mark.parametrize("keys", [{}, DYNAMIC])
def test_more_rows_of_one_prompt_share_it(keys: dict[str, Any]) -> None:
    compare_shared(CASES | MORE if keys else MORE, keys)
