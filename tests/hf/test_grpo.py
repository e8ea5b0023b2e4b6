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
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.hf.stock import VOCABULARY, WORDS, Run, compare, model_of, tokenizer

CP = {"context_parallel_size": 2}
WEIGHTS = 1e-4  # rotary angles are in float32, and left padding shifts stock's positions
GENERATIONS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 16}
DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": 64}


def prompts(count: int = 12) -> Dataset:
    """Prompts of 2 to 11 words, each with a number that rewards read."""
    draw = np.random.default_rng(0)
    words = [" ".join(draw.choice(WORDS, 7)) for _ in range(count)]
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


def grpo(run: Run, path: str = "", rows: int = 4, steps: int = 2, lora: bool = False, **changes: Any) -> Any:
    """A GRPO run of a few steps; `path` is the model's, from which TRL loads a reference."""
    args = GRPOConfig(**run.arguments(rows=rows, steps=steps), **GENERATIONS | changes)
    return train(run, RuledGRPO, args, path, lora)


def rloo(run: Run, path: str = "", rows: int = 4, steps: int = 2, lora: bool = False, **changes: Any) -> Any:
    """An RLOO run of a few steps."""
    args = RLOOConfig(**run.arguments(rows=rows, steps=steps), **GENERATIONS | changes)
    return train(run, RuledRLOO, args, path, lora)


def train(run: Run, kind: Any, args: Any, path: str, lora: bool) -> Any:
    """A trainer of this class that has trained; with an evaluation where the arguments have one."""
    trainer = run.trainer(
        kind,
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.get_default_dtype()) if path else model_of(),
        reward_funcs=[luck, some],
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(6) if args.eval_strategy != "no" else None,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in a folder, as a reference is loaded from one."""
    folder = str(tmp_path_factory.mktemp("model"))
    model_of().save_pretrained(folder)
    return folder


TWICE = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "steps": 4}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}


def test_grpo_of_answers_and_rewards_that_differ_by_rank() -> None:
    """dapo, answers of random length, rewards by chance, an asynchronous one that is None for odd prompts."""
    compare(partial(grpo, gradient_accumulation_steps=2), CP, weights=WEIGHTS)


def test_grpo_with_a_reference_and_two_iterations_on_four_ranks(saved: str) -> None:
    """grpo, old log-probabilities, clipping, the divergence from a reference, an evaluation; dynamic plans."""
    compare(
        partial(grpo, path=saved, loss_type="grpo", beta=0.1, **TWICE, **EVALUATION), DYNAMIC, ranks=4, weights=WEIGHTS
    )


def test_rloo_with_a_reference(saved: str) -> None:
    """RLOO, with the divergence from a reference in its rewards."""
    compare(partial(rloo, path=saved, beta=0.1, **TWICE), CP, weights=WEIGHTS)


TABLE: dict[str, dict[str, Any]] = {
    **{kind: TWICE | {"loss_type": kind} for kind in ("bnpo", "dr_grpo", "cispo", "sapo", "vespo", "grpo", "dapo")},
    "sequence": TWICE | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo": TWICE | {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "truncated": TWICE | {"mask_truncated_completions": True},
    "all truncated": {"mask_truncated_completions": True, "max_completion_length": 16},
    "entropy": TWICE | {"top_entropy_quantile": 0.5},
    "off policy": TWICE | {"off_policy_mask_threshold": 0.01},
    "two-sided": TWICE | {"delta": 1.5, "epsilon_high": 0.3},
    "lora": TWICE | {"lora": True},
    "lora with beta": TWICE | {"lora": True, "beta": 0.1},
    "generation batch": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "steps": 4},
    "rewards by batch": {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
    "padded": {"pad_to_multiple_of": 8},
}


@pytest.mark.whole
@pytest.mark.parametrize("name", TABLE)
def test_grpo_table(name: str) -> None:
    """Losses and settings of GRPO."""
    compare(partial(grpo, **TABLE[name]), CP, weights=WEIGHTS)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["lora", "lora with beta", "generation batch", "padded"])
def test_rloo_table(saved: str, name: str) -> None:
    """Settings of RLOO."""
    compare(partial(rloo, path=saved, **TABLE[name]), CP, weights=WEIGHTS)
