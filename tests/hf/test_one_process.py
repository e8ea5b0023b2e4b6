"""Accelerate says one process while trainers of ours are open; what a trainer is given, by name and by keys."""

import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import HfArgumentParser, Trainer, TrainingArguments

from longspan.config.file import load_config
from longspan.errors import ConfigError
from longspan.hf import LongspanArguments, LongspanTrainer
from longspan.hf.one_process import OneProcess
from longspan.hf.resolve_trainer import options_of_prepare
from longspan.hf.trainer import layout_line
from longspan.testing import run_ranks
from tests.hf.stock import CP2, RECOMPUTES, Run
from tests.hf.test_trainer import Texts
from tests.hf.tiny import model_of, pad

TWO = LongspanArguments(**CP2)


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments(**Run("unused", 2).arguments(steps=1) | {"output_dir": "unused-folder"} | changes)


def trainer(args: TrainingArguments | None = None, longspan: LongspanArguments = TWO, kind: Any = None) -> Any:
    keywords: dict[str, Any] = {} if kind is Trainer else {"longspan": longspan}
    return (kind or LongspanTrainer)(
        model=model_of(), args=args or arguments(), data_collator=pad, train_dataset=Texts(8), **keywords
    )


def refused(make: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


def state() -> dict[str, Any]:
    return {name: str(value) for name, value in PartialState._shared_state.items()}


def wait_for_the_first(rank: int) -> float:
    one = trainer()
    with one.args.main_process_first(), PartialState().main_process_first():
        if rank == 0:
            time.sleep(0.2)
        passed = time.monotonic()
    one.end()
    return passed


def other_rows(rank: int) -> str:
    one = trainer(arguments(seed=1 + rank, data_seed=1))
    one.train_dataset = Texts(8)
    ids = one.train_dataset[0]["input_ids"]
    one.data_collator = lambda rows: pad([{"input_ids": [i - rank for i in ids], "labels": ids} for _ in rows])
    try:
        one.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        one.end()
    return ""


def life(rank: int, folder: str) -> tuple[float, str]:
    os.chdir(folder)
    waited = wait_for_the_first(rank)
    torch.set_default_dtype(torch.float64)
    before, first_state = arguments(), state()
    assert before.world_size == 2
    assert "pp is 2" in refused(lambda: trainer(arguments(), LongspanArguments(pp=2)))
    assert state() == first_state
    with pytest.raises(ValueError, match="max_steps has to be specified"):  # raised by stock's constructor
        LongspanTrainer(model_of(), arguments(max_steps=-1), train_dataset=iter([]), longspan=TWO)
    assert state() == first_state and OneProcess.now is None
    one = trainer(before)
    assert (one.accelerator.num_processes, one.args.world_size, one.args.train_batch_size) == (1, 1, 4)
    assert one.accelerator.is_main_process == one.args.should_save == (rank == 0)
    between = arguments()
    assert (before.world_size, between.world_size, one.args.world_size, one.accelerator.num_processes) == (2, 2, 1, 1)
    error = refused(lambda: trainer(kind=Trainer))
    assert "Trainer is made while a longspan trainer is open, and would train on 2 ranks without" in error
    assert "call end() of the first" in refused(lambda: trainer(between, LongspanArguments(tp=2)))
    two = trainer(between)
    assert two.world is one.world
    one.train()
    one.end()
    one.end()
    assert OneProcess.now is not None, "one is left"
    two.train()
    assert one.state.global_step == two.state.global_step == 1
    two.end()
    assert state() == first_state, "put back"
    assert arguments().world_size == before.world_size == between.world_size == 2
    stock = trainer(arguments(), kind=Trainer)
    assert stock.accelerator.num_processes == AcceleratorState().num_processes == 2
    again = trainer(arguments())
    again.train()
    again.end()
    assert again.state.global_step == 1
    return waited, other_rows(rank)


def test_accelerates_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (first, first_error), (second, second_error) = run_ranks(life, 2, str(tmp_path))
    assert first <= second, "the second rank waits for the first"
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("longspan: ")]
    fixed = "training fixed at cp 2, evaluation fixed at cp 2"
    assert lines == [f"longspan: 2 ranks, 2 slots; {fixed}; weights sharded over 2 ranks"] * 5, "one of each trainer"
    for error in (first_error, second_error):
        assert error.startswith("CommError") and "batches of a Trainer" in error and "the same rows" in error, error


def test_keys_are_read_from_a_command_line() -> None:
    words = ["--hierarchical_context_parallel_sizes", "2", "2", "--context_parallel_size", "4"]
    words += ["--cp_comm_type", "a2a+p2p", "--max_tokens_per_slot", "512"]
    words += ["--eval_context_parallel_size", "auto", "--reshard_after_forward", "false"]
    (keys,) = HfArgumentParser(LongspanArguments).parse_args_into_dataclasses(words)  # pyright: ignore[reportArgumentType]
    assert keys.home(4).slots == 4
    assert keys.config().context.hierarchical_context_parallel_sizes == (2, 2)
    assert LongspanArguments(max_tokens_per_slot=512).config().context.max_tokens_per_slot == 512  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"max_tokens_per_slot is '²'"):
        LongspanArguments(max_tokens_per_slot="²")  # pyright: ignore[reportArgumentType]
    assert pickle.loads(pickle.dumps(keys)) == keys


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "8 slots; training dynamic, evaluation dynamic; weights sharded over 8 ranks"),
        ({"planner": "dynamic", "eval_context_parallel_size": "auto"}, "training dynamic, evaluation fixed at cp auto"),
        ({"tp": 2, "dp_replicate": 2, "planner": "fixed"}, "4 slots, tp 2, dp_replicate 2; training fixed"),
        ({"dp_replicate": 2, "context_parallel_size": 4}, "evaluation fixed at cp 4; weights sharded over 4 ranks"),
    ],
)
def test_a_line_says_how_ranks_share_documents(keys: dict[str, Any], text: str) -> None:
    arguments = LongspanArguments(**keys)
    assert text in layout_line(arguments.config(), arguments.home(8))


def test_defaults_are_those_of_a_run_on_a_folder() -> None:
    keys = {"model.config": "the Trainer's model", "context.cp_comm_type": "auto"}
    assert LongspanArguments().config() == load_config(None, keys)


def test_layers_are_compiled_as_in_a_run_and_keys_of_memory_hold_without_a_plan() -> None:
    trainer = SimpleNamespace(_stock_arguments=TrainingArguments(use_cpu=True), longspan=LongspanArguments())
    options = [options_of_prepare(trainer, model_of(), None, training=training) for training in (True, False)]
    assert [option.compiled for option in options] == ["auto", "none"], "a reference is not"
    config = LongspanArguments().config()
    config = replace(config, train=replace(config.train, mlp_tile_tokens=64))
    arguments = TrainingArguments(use_cpu=True, **{RECOMPUTES: True})
    trainer = SimpleNamespace(_stock_arguments=arguments, longspan=SimpleNamespace(config=lambda: config))
    chosen = options_of_prepare(trainer, model_of(), None, training=True)
    assert (chosen.checkpoint_policies, chosen.mlp_tile_tokens) == ("full", 64)
