"""GRPO and RLOO through `with_longspan`, against TRL in one process: answers come from a rule, and rewards from functions.

The rule and the rewards give something else on every rank, and draw random numbers: so ranks stay together only where
answers, rewards, logs and the random state of the first rank reach all.
"""

import os
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.hf.stock import VOCABULARY, WORDS, Run, compare, model_of, tokenizer

CP = {"context_parallel_size": 2}
DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "128"}


def prompts(count: int = 12) -> Dataset:
    """Prompts of 2 to 11 words, each with a number that rewards read."""
    draw = np.random.default_rng(0)
    words = [" ".join(draw.choice(WORDS, draw.integers(2, 12))) for _ in range(count)]
    return Dataset.from_list([{"prompt": text, "number": i} for i, text in enumerate(words)])


def answers_to(prompt_ids: list[list[int]]) -> list[list[int]]:
    """An answer to each prompt, of another kind on each rank; some end with the end of the text."""
    draw = np.random.default_rng([int(os.environ.get("RANK", "0")), *prompt_ids[0]])
    answers = [draw.integers(5, VOCABULARY, draw.integers(3, 12)).tolist() for _ in prompt_ids]
    return [answer + [1] * (i % 3 != 0) for i, answer in enumerate(answers)]


class RuledGRPO(GRPOTrainer):
    """GRPO whose answers come from a rule."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return answers_to(prompt_ids), None


class RuledRLOO(RLOOTrainer):
    """RLOO whose answers come from a rule."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return answers_to(prompt_ids)


def luck(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """Rewards by chance, as a judge's are."""
    log_metric("luck_of_five", random.random())
    log_extra("words", [len(c.split()) for c in completions])
    return [float(torch.rand(())) + np.random.random() + len(c.split()) / 10 for c in completions]


async def some(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
    """Rewards of even prompts only."""
    return [len(set(ids)) / 10 if n % 2 == 0 else None for ids, n in zip(completion_ids, number, strict=True)]


def grpo(run: Run, changes: dict[str, Any], **more: Any) -> Any:
    """A GRPO run of a few steps, whose reference for `beta` is a model of its own in the trainer."""
    values = {"num_generations": 2, "max_completion_length": 16, "steps": 2, "rows": 4} | changes
    args = GRPOConfig(**run.arguments(**values))
    keywords = {"model": model_of(), "reward_funcs": [luck, some], "processing_class": tokenizer()} | more
    trainer = run.trainer(RuledGRPO, args=args, train_dataset=prompts(), **keywords)
    if args.beta and "peft_config" not in more:
        trainer.ref_model = None
    trainer.train()
    return trainer


def case(**changes: Any) -> Any:
    """A GRPO run with these settings."""
    return partial(grpo, changes=changes)


def test_grpo_first() -> None:
    """x"""
    print(compare(case(), CP))
