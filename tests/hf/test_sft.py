"""SFTTrainer on ranks that share documents logs what stock does in one process, and ends with the same weights."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from tests.hf.stock import Run, compare, compare_each, stock
from tests.hf.tiny import completions, conversations, model_of, texts, tokenizer

CP2 = {"context_parallel_size": 2}
DYNAMIC = {"planner": "dynamic", "max_tokens_per_slot": "64"}


def train(
    run: Run, dataset: Any, family: str = "qwen3", peft_config: Any = None, dtype: Any = torch.float64, **changes: Any
) -> Any:
    """A trained SFTTrainer of a tiny model."""
    args = SFTConfig(**run.arguments(**changes))
    trainer = run.trainer(
        SFTTrainer,
        model=model_of(family, dtype=dtype),
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(6)) if "eval_strategy" in changes else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def chats(run: Run) -> Any:
    """Chats whose assistant's words count, with accumulation, clipping and evaluation."""
    more = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2}
    return train(run, conversations(16), assistant_only_loss=True, **more)


def packed(run: Run) -> Any:
    """Documents packed best fit first, cut at no document."""
    return train(run, texts(24), packing=True, max_length=64, rows=2, learning_rate=1e-3)


def wrapped(run: Run) -> Any:
    """Rows of one long text."""
    return train(run, texts(24), packing=True, packing_strategy="wrapped", max_length=48, rows=2)


def padding_free(run: Run) -> Any:
    """A batch as one row."""
    return train(run, texts(12), padding_free=True, max_length=None)


def prompts(run: Run) -> Any:
    """Completions only."""
    return train(run, completions(12), completion_only_loss=True)


def dft(run: Run) -> Any:
    """The loss of dynamic fine-tuning, whose weights have no gradient."""
    return train(run, completions(12), loss_type="dft", gradient_accumulation_steps=2)


def adapters(run: Run) -> Any:
    """LoRA."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return train(run, conversations(12), peft_config=lora, assistant_only_loss=True)


def moe(run: Run) -> Any:
    """Experts, without their balance loss."""
    return train(run, completions(12), "qwen3-moe")


def gemma3(run: Run) -> Any:
    """Windows of five tokens, in packed rows."""
    return train(run, texts(12), "gemma3", packing=True, max_length=64, rows=2, adam_epsilon=1e-2)


def gpt_oss(run: Run) -> Any:
    """Sinks, windows and experts."""
    return train(run, completions(12), "gpt-oss")


def qwen3_next(run: Run) -> Any:
    """Stock's linear attention is in float32: no update may hang on the sign of a gradient near 0."""
    return train(run, completions(12), "qwen3-next", adam_epsilon=1e-2)


def qwen3_next_packed(run: Run) -> Any:
    """Packed rows, against stock's padded ones: without causal_conv1d stock packs no linear attention."""
    more = {"padding_free": True, "max_length": None} if run.longspan else {}
    return train(run, completions(12), "qwen3-next", adam_epsilon=1e-2, **more)


def streamed(run: Run) -> Any:
    """A dataset that is read as it comes."""
    return train(run, texts(16).to_iterable_dataset())


def in_float32(run: Run) -> Any:
    """TRL's own head and sums."""
    return train(run, completions(12), dtype=torch.float32)


def test_chats_on_two_ranks_and_dynamic_on_four() -> None:
    expected = stock(chats)
    compare(chats, CP2 | {"eval_context_parallel_size": "1"}, reference=expected)
    compare(chats, DYNAMIC, ranks=4, reference=expected)


def test_equals_stock() -> None:
    compare_each((packed, adapters, gpt_oss), CP2)


def test_equals_stock_where_stock_computes_in_float32() -> None:
    compare_each((qwen3_next,), CP2, weights=1e-5)


@pytest.mark.whole
def test_more_that_equals_stock() -> None:
    compare_each((wrapped, padding_free, prompts, streamed, dft, moe), CP2)
    compare_each((qwen3_next_packed, gemma3), CP2, weights=1e-5)
    compare_each((padding_free, dft, moe), DYNAMIC, ranks=4)


@pytest.mark.whole
def test_equals_trls_own_head_in_float32() -> None:
    compare(in_float32, CP2, exact=False, weights=None)
