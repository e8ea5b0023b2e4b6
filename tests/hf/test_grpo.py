"""GRPO and RLOO through `with_longspan`, against TRL in one process: answers by a rule, rewards by functions.

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
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from longspan.train import PlanChoice
from tests.hf.stock import SIZES, VOCABULARY, WORDS, Run, compare, model_of, ours, tokenizer

CP = {"context_parallel_size": 2}
EXACT: dict[str, Any] = {"loss": 1e-9, "metric": 1e-9}
# Stock pads prompts on the left, which shifts their positions, and rotary angles are in float32.
PADDED: dict[str, Any] = {"loss": 1e-5, "metric": 1e-5, "weights": 1e-4}
GENERATIONS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 16}
DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": 64}


def prompts(count: int = 12, *, even: bool = True, chat: bool = False) -> Dataset:
    """Prompts of 7 words, or of 2 to 11, each with a number that rewards read."""
    draw = np.random.default_rng(0)
    words = [" ".join(draw.choice(WORDS, 7 if even else draw.integers(2, 12))) for _ in range(count)]
    rows = [[{"role": "user", "content": text}] if chat else text for text in words]
    return Dataset.from_list([{"prompt": row, "number": i} for i, row in enumerate(rows)])


def answers_to(prompt_ids: list[list[int]], rank: int | None = None) -> list[list[int]]:
    """An answer to each prompt, of another kind on each rank; some end with the end of the text."""
    draw = np.random.default_rng([int(os.environ.get("RANK", "0")) if rank is None else rank, *prompt_ids[0]])
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


def luck(completions: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """Rewards by chance, as a judge's are."""
    log_metric("luck_of_five", random.random())
    log_extra("words", [len(c) for c in completions])
    rank = int(os.environ.get("RANK", "0"))
    return [rank + float(torch.rand(())) + np.random.random() + len(c) / 10 for c in completions]


async def some(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
    """Rewards of even prompts only."""
    return [len(set(ids)) / 10 if n % 2 == 0 else None for ids, n in zip(completion_ids, number, strict=True)]


MORE = ("kind", "reward_funcs", "rollout_func", "environment_factory", "processing_class")


def grpo(run: Run, rows: int = 4, steps: int = 2, config: Any = GRPOConfig, **settings: Any) -> Any:
    """A run of a few steps of RuledGRPO; settings of `train` or of its arguments."""
    mine = {name: settings.pop(name) for name in (*train.__kwdefaults__, *MORE) if name in settings}
    args = config(**run.arguments(rows=rows, steps=steps), **GENERATIONS | settings)
    return train(run, mine.pop("kind", RuledGRPO), args, **mine)


def rloo(run: Run, **settings: Any) -> Any:
    """A run of a few steps of RuledRLOO."""
    return grpo(run, **{"config": RLOOConfig, "kind": RuledRLOO} | settings)


def train(
    run: Run,
    kind: Any,
    args: Any,
    *,
    path: str = "",
    lora: bool = False,
    judge: bool = False,
    even: bool = True,
    chat: bool = False,
    questions: int = 6,
    **more: Any,
) -> Any:
    """A trainer that has trained; of the model in the folder `path`, from which TRL loads a reference as well."""
    keywords: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(path, dtype=torch.get_default_dtype()) if path else model_of(),
        "reward_funcs": [luck, some],
        "train_dataset": prompts(even=even, chat=chat),
        "eval_dataset": prompts(questions) if args.eval_strategy != "no" else None,
        "processing_class": tokenizer(),
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
    }
    if judge:
        keywords |= {"reward_funcs": [luck, judging_model()], "reward_processing_classes": [None, tokenizer()]}
    trainer = run.trainer(kind, args=args, **keywords | more)
    trainer.train()
    return trainer


def judging_model() -> Qwen3ForSequenceClassification:
    """A reward model."""
    torch.manual_seed(3)
    return Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1)).to(torch.get_default_dtype())


TWICE = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "steps": 4}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}


def test_grpo_of_answers_and_rewards_that_differ_by_rank() -> None:
    """dapo, answers of random length, rewards by chance, an asynchronous one that is None for odd prompts."""
    compare(partial(grpo, gradient_accumulation_steps=2), CP, **EXACT)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_grpo_with_a_reference_and_two_iterations(saved: str, ranks: int) -> None:
    """grpo, old log-probabilities, clipping, the divergence from a reference, an evaluation; dynamic plans."""
    case = partial(grpo, path=saved, loss_type="grpo", beta=0.1, **TWICE, **EVALUATION)
    compare(case, DYNAMIC, ranks=ranks, **EXACT)


def counted_plans(run: Run) -> Any:
    """Two updates, and how many plans were made for them."""
    made, plain = list[int](), PlanChoice.plan

    def plan(choice: PlanChoice, *values: Any, **keywords: Any) -> Any:
        made.append(len(values[0]))
        return plain(choice, *values, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanChoice, "plan", plan)
        trainer = grpo(run)
    run.kept["plans"] = made.count(4)  # answers of an update
    return trainer


def test_the_two_passes_of_an_update_have_one_plan() -> None:
    """A dynamic plan may take a good part of a second on the host."""
    assert ours(counted_plans, DYNAMIC, ranks=2).kept["plans"] == 2


@pytest.mark.whole
def test_rloo_with_a_reference(saved: str) -> None:
    """RLOO, with the divergence from a reference in its rewards."""
    compare(partial(rloo, path=saved, beta=0.1, **TWICE), CP, **EXACT)


TABLE: dict[str, dict[str, Any]] = {
    **{kind: TWICE | {"loss_type": kind} for kind in ("bnpo", "dr_grpo", "cispo", "sapo", "vespo", "grpo", "dapo")},
    "sequence": TWICE | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo": TWICE | {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "truncated": TWICE | {"mask_truncated_completions": True},
    "all truncated": {"mask_truncated_completions": True, "max_completion_length": 16},
    "entropy": TWICE | {"top_entropy_quantile": 0.5},
    "off policy": TWICE | {"off_policy_mask_threshold": 0.01},
    "temperature": TWICE | {"temperature": 0.7, "top_entropy_quantile": 0.6},
    "two-sided": TWICE | {"delta": 1.5, "epsilon_high": 0.3},
    "lora": TWICE | {"lora": True},
    "lora with beta": TWICE | {"lora": True, "beta": 0.1},
    "generation batch": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "steps": 4},
    "rewards by batch": {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
    "reference follows": TWICE | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "judge": {"judge": True},
    "chat": {"chat": True},
    "uneven": TWICE | {"even": False},
    "padded": {"even": False, "pad_to_multiple_of": 8},
}
LEFT_PADDED = ("uneven", "padded")


@pytest.mark.whole
@pytest.mark.parametrize("name", TABLE)
def test_grpo_table(saved: str, name: str) -> None:
    """Losses and settings of GRPO."""
    compare(partial(grpo, path=saved, **TABLE[name]), CP, **PADDED if name in LEFT_PADDED else EXACT)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["lora", "generation batch", "judge", "chat", "uneven"])
def test_rloo_table(saved: str, name: str) -> None:
    """Settings of RLOO."""
    compare(partial(rloo, path=saved, **TABLE[name]), CP, **PADDED if name in LEFT_PADDED else EXACT)
