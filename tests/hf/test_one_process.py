"""Accelerate says one process while trainers of ours are open, and what it said before afterwards."""

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import Trainer, TrainingArguments

from longspan.config.file import load_config
from longspan.errors import ConfigError
from longspan.hf import LongspanArguments, LongspanTrainer
from longspan.hf.one_process import OneProcess
from longspan.hf.trainer import layout_line
from longspan.testing import run_ranks
from tests.hf.stock import Run, model_of
from tests.hf.test_trainer import Texts, pad

CP2 = LongspanArguments(context_parallel_size=2)


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments(**Run("unused", 2).arguments() | {"output_dir": "unused-folder"} | changes)


def trainer(args: TrainingArguments | None = None, longspan: LongspanArguments = CP2, kind: Any = None) -> Any:
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


def life(rank: int, folder: str) -> dict[str, Any]:
    """What is seen before, between and after trainers."""
    import os

    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    seen: dict[str, Any] = {}
    before = arguments()
    seen["before"], first_state = before.world_size, state()
    seen["refused at construction"] = refused(lambda: trainer(arguments(), LongspanArguments(pp=2)))
    seen["after a refusal"] = state() == first_state
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        LongspanTrainer(
            model_of(), arguments(max_steps=-1), train_dataset=iter([]), longspan=CP2
        )  # raised by stock's constructor
    seen["after a constructor that raised"] = state() == first_state and OneProcess.now is None
    one = trainer(before)
    seen["inside"] = (one.accelerator.num_processes, one.args.world_size, one.args.train_batch_size)
    seen["main processes"] = (one.accelerator.is_main_process, one.args.should_save)
    between = arguments()
    seen["between"] = (before.world_size, between.world_size, one.args.world_size, one.accelerator.num_processes)
    seen["stock while open"] = refused(lambda: trainer(kind=Trainer))
    seen["another layout"] = refused(lambda: trainer(between, LongspanArguments(tp=2)))
    two = trainer(between)
    seen["shared"] = two.world is one.world
    one.train()
    one.end()
    one.end()
    seen["one is left"] = OneProcess.now is not None
    two.train()
    seen["steps"] = (one.state.global_step, two.state.global_step)
    two.end()
    seen["put back"] = state() == first_state
    seen["after"] = (arguments().world_size, before.world_size, between.world_size)
    stock = trainer(arguments(), kind=Trainer)
    seen["stock after"] = (stock.accelerator.num_processes, AcceleratorState().num_processes)
    again = trainer(arguments())
    again.train()
    again.end()
    seen["again"] = again.state.global_step
    return seen


def test_accelerates_state(tmp_path: Any) -> None:
    first, second = run_ranks(life, 2, str(tmp_path))
    assert first | {"main processes": None} == second | {"main processes": None}
    assert first["main processes"] == (True, True) and second["main processes"] == (False, False)
    assert first["before"] == 2 and first["after"] == (2, 2, 2)
    assert first["inside"] == (1, 1, 4) and first["between"] == (2, 2, 1, 1)
    assert all(first[name] is True for name in ("after a refusal", "after a constructor that raised", "shared"))
    assert first["put back"] is True and first["one is left"] is True
    assert first["steps"] == (3, 3) and first["again"] == 3 and first["stock after"] == (2, 2)
    assert (
        "Trainer is made while a longspan trainer is open, and would train on 2 ranks without"
        in (first["stock while open"])
    )
    assert "call end() of the first" in first["another layout"] and "pp is 2" in first["refused at construction"]


def other_rows(rank: int) -> str:
    """Rows of equal lengths, but not the same on the ranks."""
    torch.set_default_dtype(torch.float64)
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


def test_ranks_with_other_rows_are_refused() -> None:
    for found in run_ranks(other_rows, 2):
        assert found.startswith("CommError") and "batches of a Trainer" in found and "the same rows" in found, found


def waits(rank: int) -> list[str]:
    """The first rank goes first, and the others wait for it."""
    import time

    one = trainer()
    order = list[str]()
    with one.args.main_process_first(), PartialState().main_process_first():
        if rank == 0:
            time.sleep(0.5)
        order.append(f"{time.monotonic():.6f}")
    one.end()
    return order


def test_others_wait_for_the_main_process(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = run_ranks(waits, 2)
    assert float(first[0]) <= float(second[0])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("longspan: ")]
    fixed = "training fixed at cp 2, evaluation fixed at cp 2"
    assert lines == [f"longspan: 2 ranks, 2 slots; {fixed}; weights sharded over 2 ranks"]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "8 slots; training fixed at cp 1, evaluation fixed at cp 1; weights sharded over 8 ranks"),
        (
            {"planner": "dynamic", "eval_context_parallel_size": "auto"},
            "training dynamic, evaluation fixed at cp auto",
        ),
        ({"tp": 2, "dp_replicate": 2}, "4 slots, tp 2, dp_replicate 2; training fixed"),
        (
            {"dp_replicate": 2, "context_parallel_size": 4},
            "evaluation fixed at cp 4; weights sharded over 4 ranks",
        ),
    ],
)
def test_a_line_says_how_ranks_share_documents(keys: dict[str, Any], text: str) -> None:
    arguments = LongspanArguments(**keys)
    assert text in layout_line(arguments.config(), arguments.home(8))


def test_defaults_are_those_of_a_run_on_a_folder() -> None:
    keys = {"model.config": "the Trainer's model", "context.cp_comm_type": "auto"}
    assert LongspanArguments().config() == load_config(None, keys)
