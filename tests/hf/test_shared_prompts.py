"""Rows of a batch that share a prompt, in trainers of TRL and transformers: losses, rewards and weights are stock's."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments
from trl import KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from longspan.plan import Cost
from longspan.train import prefix_sharing
from longspan.train.prefix_sharing import share_prefixes_where_faster
from tests.hf.stock import CP2, Run, check_each, ours_each, stock_each, train_with_shared_prompts
from tests.hf.test_grpo import grpo
from tests.hf.test_scores import reward
from tests.hf.test_trl import DYNAMIC, EVALUATED, TWICE, dpo, sft, train
from tests.hf.tiny import WORDS, completions, judged, model_of

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


def large_model() -> Any:
    return model_of(dtype=torch.float32, max_position_embeddings=512)


def train_of_rows(run: Run, data: list[dict[str, list[int]]], model: Any = None, **changes: Any) -> Any:
    """transformers' own Trainer, whose rows are padded on the left."""
    trainer = run.trainer(
        Trainer,
        model=model or large_model(),
        args=TrainingArguments(**run.arguments(**changes)),
        train_dataset=data,
        data_collator=pad_left,
    )
    trainer.train()
    return trainer


def padded_on_the_left(run: Run) -> Any:
    """Rows of two prompts and of none."""
    draw = torch.Generator().manual_seed(0)
    rows = list[dict[str, list[int]]]()
    for number in range(16):
        prompt = [7 + number % 2] * 2 + [5, 6, 9, 9, 8]
        answer = torch.randint(3, 60, (4 + number % 5,), generator=draw).tolist()
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return train_of_rows(run, rows, model_of(), **TWICE)


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
    "dpo and the cross entropy of answers": partial(dpo, reference=True, loss_type=["sigmoid", "sft"]),
    "qwen3-moe": partial(sft, data=few_prompts, family="qwen3-moe"),
}


ONE_PROMPT = 300  # tokens


def rows_of_one_prompt(count: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    answers = [torch.randint(3, 60, (3 + number,), generator=draw).tolist() for number in range(count)]
    prompt = [5 + i % 40 for i in range(ONE_PROMPT)]
    return [{"input_ids": prompt + a, "labels": [-100] * len(prompt) + a} for a in answers]


def plans_of_one_prompt(run: Run, kind: Any, rows: int) -> None:
    """One step of so many rows; keeps whether each plan of it shares the prompt, priced as of a Qwen3-8B, and how often
    a line says so.
    """
    prefix_sharing._LOGGED_SHARED.clear()  # cases share processes
    plans = list[bool]()

    def plan(*arguments: Any, **keywords: Any) -> Any:
        documents, made = share_prefixes_where_faster(*arguments, **keywords)
        plans.append(made.parents is not None and len(documents) == rows + 1)
        return documents, made

    with (
        patch("longspan.hf.steps.share_prefixes_where_faster", plan),
        patch("longspan.hf.resolve_trainer.find_run_cost", return_value=Cost()),
        patch.object(prefix_sharing, "_log") as log,
    ):
        if kind is Trainer:
            train_of_rows(run, rows_of_one_prompt(rows), rows=rows, steps=1).end()
        else:
            texts = {"prompt": " ".join(WORDS[i % 40] for i in range(ONE_PROMPT)) + " ", "completion": "w1 w2 w3"}
            data = Dataset.from_list([texts] * rows)
            train(run, SFTTrainer, SFTConfig, data, model=large_model(), rows=rows, steps=1, max_length=None).end()
    run.kept["shared"] = plans
    run.kept["lines"] = sum("computed once" in call.args[1] for call in log.warning.call_args_list)


def test_a_prompt_is_shared_where_the_plan_is_predicted_to_be_faster() -> None:
    """Over two slots two rows of one prompt are computed whole, a slot each, and of eight rows the prompt once."""
    cases = [partial(plans_of_one_prompt, kind=kind, rows=rows) for kind in (Trainer, SFTTrainer) for rows in (2, 8)]
    keys = {"context_parallel_size": 1, "max_tokens_per_slot": 4096}
    found = [ran.kept for ran in ours_each(cases, keys, 2, exact=False).values()]
    assert [set(kept["shared"]) for kept in found] == [{False}, {True}] * 2
    assert [[kept["lines"], *(other["lines"] for other in kept["others"])] for kept in found] == [[0, 0], [1, 0]] * 2


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
