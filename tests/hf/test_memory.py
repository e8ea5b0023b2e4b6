"""What layers keep is chosen by a plan of memory, or as the arguments have it; losses do not depend on it.

What bfloat16 computes is as near to float32 as what stock computes under autocast.
"""

import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from longspan.hf import LongspanArguments
from longspan.hf.trainer import prepare_options
from tests.hf.stock import RECOMPUTES, Ran, Run, log_errors, model_of, ours, stock, stock_each
from tests.hf.test_trainer import EXACT, make


def checkpointed(run: Run) -> Any:
    """The arguments ask for recomputation."""
    trainer = make(run, max_steps=2, eval_strategy="no", **{RECOMPUTES: True})
    trainer.train()
    run.kept["measures"] = _measures(trainer, run)
    return trainer


def plain(run: Run) -> Any:
    """The arguments leave it."""
    trainer = make(run, max_steps=2, eval_strategy="no")
    trainer.train()
    run.kept["measures"] = _measures(trainer, run)
    return trainer


def _measures(trainer: Any, run: Run) -> Any:
    if run.longspan is None:
        return None
    return None if trainer.memory_plan is None else trainer.memory_plan.measures


@pytest.mark.parametrize(
    ("case", "keys", "measures"),
    [
        (checkpointed, {}, None),
        pytest.param(plain, {"memory_bytes": 1 << 30}, ("none", "none"), marks=pytest.mark.whole),
        (plain, {"memory_bytes": 3_000_000, "max_tokens_per_slot": "0"}, ("selective", "selective")),
    ],
)
def test_layers_keep_what_was_chosen(case: Any, keys: dict[str, Any], measures: Any) -> None:
    found = ours(case, {"context_parallel_size": 2, **keys}, 2)
    assert found.kept["measures"] == measures
    expected = _expected()
    for one, other in zip(expected.logs, found.logs, strict=True):
        assert all(abs(other[name] - value) <= EXACT["metric"] * max(1, abs(value)) for name, value in one.items())


@cache
def _expected() -> Ran:
    return stock(plain)


def in_float32(run: Run) -> Any:
    """A model in float32."""
    trainer = make(run, more={"model": model_of(dtype=torch.float32)}, max_steps=4, learning_rate=1e-3, eval_steps=2)
    trainer.train()
    return trainer


def in_bfloat16(run: Run) -> Any:
    """The same in bfloat16: by its argument in stock, and by the launcher's configuration in ours."""
    if run.longspan is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    more = {"model": model_of(dtype=torch.float32)}
    trainer = make(run, more=more, max_steps=4, learning_rate=1e-3, eval_steps=2, bf16=run.longspan is None)
    assert run.longspan is None or trainer.args.mixed_precision == "bf16"
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    return trainer


def test_bfloat16_is_as_near_to_float32_as_autocast_is() -> None:
    exact, autocast = stock_each([in_float32, in_bfloat16], exact=False)
    found = ours(in_bfloat16, {"context_parallel_size": 2}, 2, exact=False)
    for reference, least in ((exact, 1e-6), (autocast, 0.0)):
        errors = log_errors(reference.logs, found.logs)
        assert least < errors["loss"] < 1e-3 and errors["eval_loss"] < 1e-3 and errors["grad_norm"] < 1e-2, errors


def test_layers_are_compiled_as_in_a_run() -> None:
    trainer = SimpleNamespace(_stock_arguments=TrainingArguments(use_cpu=True), longspan=LongspanArguments())
    options = [prepare_options(trainer, model_of(), None, training=training) for training in (True, False)]
    assert [option.compiled for option in options] == ["auto", "none"], "a reference is not"


def test_keys_of_memory_hold_without_a_plan() -> None:
    config = LongspanArguments().config()
    config = replace(config, train=replace(config.train, offload_activations=True, mlp_tile_rows=64))
    arguments = TrainingArguments(use_cpu=True, **{RECOMPUTES: True})
    trainer = SimpleNamespace(_stock_arguments=arguments, longspan=SimpleNamespace(config=lambda: config))
    options = prepare_options(trainer, model_of(), None, training=True)
    assert (options.activation_checkpointing, options.offload_activations, options.mlp_tile_rows) == ("full", True, 64)
