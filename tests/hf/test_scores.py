"""RewardTrainer and a Trainer with classifiers on ranks that share documents: losses, rewards, weights are stock's."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from trl import RewardConfig, RewardTrainer

from tests.hf.stock import CP2, Run, check_each, compare_each, ours_each, stock_each
from tests.hf.tiny import FAMILIES, SIZES, preferences, tokenizer


def scored(labels: int, *, tokens: bool = False) -> Any:
    kind, values = FAMILIES["qwen3"]
    config = kind(**SIZES | values, num_labels=labels, classifier_dropout=0.0)
    torch.manual_seed(0)
    make = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    model: Any = make.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.double()


def reward(run: Run, **changes: Any) -> Any:
    peft_config = changes.pop("peft_config", None)
    settings = {"center_rewards_coefficient": 0.05, "disable_dropout": True, "max_length": 64}
    trainer = run.trainer(
        RewardTrainer,
        model=scored(1),
        args=RewardConfig(**run.arguments(**settings | changes)),
        train_dataset=preferences(16),
        eval_dataset=preferences(6, seed=1) if "eval_strategy" in changes else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(f"{run.folder}/saved")
    if peft_config is None:  # the stock class reads what ours wrote
        again: Any = AutoModelForSequenceClassification.from_pretrained(f"{run.folder}/saved", dtype=torch.float64)
        run.kept["weights"] = float(sum(p.double().square().sum() for p in again.parameters()))
    return trainer


def rewards_evaluated(run: Run) -> Any:
    return reward(run, eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=2)


def reward_adapter(run: Run) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    return reward(run, peft_config=config)


def rows_of(*, tokens: bool, count: int = 16) -> Dataset:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 40, (count,), generator=random).tolist()
    ids = [torch.randint(3, 60, (n,), generator=random).tolist() for n in lengths]
    classes = torch.randint(0, 3, (count,), generator=random).tolist()
    words = [torch.randint(0, 3, (n,), generator=random).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": words if tokens else classes})


def classify(run: Run, accumulation: int, *, tokens: bool = False, **changes: Any) -> Any:
    collator = DataCollatorForTokenClassification if tokens else DataCollatorWithPadding
    data = rows_of(tokens=tokens)
    settings = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 1e9, "data_seed": 3}
    trainer = run.trainer(
        Trainer,
        model=scored(3, tokens=tokens),
        args=TrainingArguments(**run.arguments(rows=4 // accumulation) | settings | changes),
        train_dataset=data,
        eval_dataset=data.select(range(6)),
        data_collator=collator(tokenizer()),
        compute_metrics=lambda p: {"sum": float(p.predictions[p.label_ids > -100].sum())},
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def words(run: Run) -> Any:
    return classify(run, 1, tokens=True)


def in_one(run: Run) -> Any:
    return classify(run, 1)


def in_two(run: Run) -> Any:
    """Of two batches transformers' own has twice the loss and the gradient, ours those of one."""
    return classify(run, 1 if run.longspan is None else 2)


def test_equals_stock() -> None:
    cases = [rewards_evaluated, in_two]
    stock, ours = stock_each(cases), ours_each(cases, CP2, 2)
    check_each(stock, ours)
    assert abs(stock["rewards_evaluated"].kept["weights"] - ours["rewards_evaluated"].kept["weights"]) < 1e-8


@pytest.mark.whole
def test_more_equals_stock() -> None:
    compare_each([reward, reward_adapter, in_one, words], {"max_tokens_per_slot": "64", "planner": "dynamic"})
