"""`max_tokens_per_slot = "auto"`: what a plan of memory chooses, what a run goes on with, and halves of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.training.live_bytes import LiveBytes
from transformers import GPT2Config

from longspan.cli.train import train_rank as train_by_command
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.run import warm_up
from longspan.testing import run_ranks
from longspan.train.run_memory import FILE, SlotRows, full_plan, memory_keys
from longspan.train.starts import Starts
from tests.train.small import small_config, train_rank

AUTO: dict[str, object] = {"context__max_tokens_per_slot": "auto"}


def test_bytes_that_are_alive() -> None:
    with LiveBytes() as counted:
        x = torch.ones(1000)
        y = x + 1
        del x
        z = y.view(10, 100) * 2
        del y, z
    assert counted.peak == 8000 and counted.now == 0


@pytest.mark.parametrize(
    ("planner", "degree", "widest"), [("fixed", 2, 2), ("padded", 1, 1), ("dynamic", 1, 4), ("dynamic 3", 1, 2)]
)
def test_a_full_plan_fills_every_slot(tmp_path: Path, planner: str, degree: int, widest: int) -> None:
    name, _, most = planner.partition(" ")
    changes = {"context__planner": name, "context__context_parallel_size": degree}
    config = small_config(tmp_path, **changes, context__max_dynamic_context_parallel_size=int(most or 0))
    plan = full_plan(config, Layout(ranks=4), 64)
    assert plan.timeline().rows.tolist() == [[64] * 4] and plan.efficiency == 1
    assert {group.degree for group in plan.micro_batches[0].groups} == {widest}


def _kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def _rows_of_plan(run: Path, step: int) -> int:
    return json.loads((run / "plans" / f"step-{step:06}.json").read_text())["max_tokens_per_slot"]


def test_a_run_chooses_once_and_goes_on_with_it(tmp_path: Path) -> None:
    """Within the bytes that it may fill, or of the host's memory where no key says them."""
    run = tmp_path / "run"
    run_ranks(train_rank, 2, small_config(tmp_path, **AUTO, train__steps=1), 2)
    kept = _kept(run)
    assert _rows_of_plan(run, 1) == kept["rows"] == kept["planned"] >= 64
    assert 'max_tokens_per_slot = "auto"' in (run / "config.toml").read_text()
    (run / FILE).write_text(json.dumps(kept | {"rows": 77}))
    run_ranks(train_rank, 2, small_config(tmp_path, **AUTO, train__steps=2), 2)
    assert _rows_of_plan(run, 2) == 77 and _kept(run)["rows"] == 77


def test_less_memory_means_fewer_rows(tmp_path: Path) -> None:
    def config_within(size: int) -> RunConfig:
        changes = AUTO | {"train__memory_bytes": size, "train__steps": 1, "train__tokens_per_step": 1024}
        folder = str(tmp_path / str(size))
        return small_config(tmp_path, run__dir=folder, **changes, train__activation_checkpointing="none")

    with pytest.raises(ConfigError, match="the run does not fit") as refusal:
        run_ranks(train_rank, 2, config_within(1 << 20), 2)
    found = re.search(r"needs at least [^(]*\(([\d,]+) bytes\)", str(refusal.value))
    assert found is not None
    least, rows = int(found[1].replace(",", "")), list[int]()
    for size in (1 << 33, least):
        run_ranks(train_rank, 2, config_within(size), 2)
        rows.append(_kept(tmp_path / str(size))["rows"])
    assert rows[1] < rows[0]


def test_positions_of_a_model_bound_no_rows(tmp_path: Path) -> None:
    """A model with a table of 80 positions: a slot may hold several documents of so many tokens."""
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    table = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=80, **drops)
    table.architectures = ["GPT2LMHeadModel"]
    table.save_pretrained(tmp_path / "gpt2")
    changes = AUTO | {"model__config": str(tmp_path / "gpt2"), "train__steps": 1, "train__tokens_per_step": 512}
    run_ranks(train_rank, 2, small_config(tmp_path, **changes), 2)
    assert _kept(tmp_path / "run")["rows"] > 80


def test_other_keys_are_chosen_for_again(tmp_path: Path) -> None:
    keys = memory_keys(small_config(tmp_path, **AUTO))
    for changes in (
        {"train__memory_bytes": 10**9},
        {"train__activation_checkpointing": "full"},
        {"parallel__tp": 2},
        {"model__preset": "qwen3-deep-tiny"},  # another model, in a folder without a checkpoint yet
        {"model__dtype": "bfloat16"},
        {"data__vocab_size": 4096},
    ):
        assert memory_keys(small_config(tmp_path, **AUTO, **changes)) != keys, changes
    config, run = small_config(tmp_path, **AUTO, train__steps=1), tmp_path / "run"
    run.mkdir()
    for rows in (SlotRows(3, 3, 4, keys), SlotRows(3, 3, 2, keys | {"train.memory_bytes": 10**9})):
        (run / FILE).write_text(json.dumps(vars(rows)))
    run_ranks(train_rank, 2, config, 2)
    assert _kept(run)["rows"] >= 64
    (run / FILE).write_text("{}")
    with pytest.raises(ConfigError, match=r"is damaged: .*; remove it and rows are chosen again"):
        run_ranks(train_rank, 2, small_config(tmp_path, **AUTO, train__steps=2), 2)


def _train_short_of_memory(rank: int, config: RunConfig, most: int) -> tuple[int, list[int]]:
    """Train with a warm-up in which rank 1 has memory for `most` rows; steps done, and the rows of each attempt."""
    attempts, step, needed = list[int](), warm_up.run_step, warm_up.needs_warm_up

    def run_step(model: Any, plan: Any, *others: Any, **more: Any) -> Any:
        rows = int(plan.timeline().rows.max())
        attempts.append(rows)

        def forward(module: object, inputs: object) -> None:
            if rank == 1 and rows > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 1 has 1 GiB free")

        hook = model.model.layers[1].register_forward_pre_hook(forward)
        try:
            return step(model, plan, *others, **more)
        finally:
            hook.remove()

    warm_up.run_step, warm_up.needs_warm_up = run_step, lambda world: True  # type: ignore[assignment]
    try:
        return train_by_command(rank, config, 2, "gloo", True, Starts()).done, attempts
    finally:
        warm_up.run_step, warm_up.needs_warm_up = step, needed


def test_a_rank_without_memory_halves_the_rows_on_all_ranks(tmp_path: Path) -> None:
    """Before the first update; in the middle of a step, in which the other rank waits for it."""
    changes = AUTO | {"train__steps": 1, "train__eval_every": 0, "train__tokens_per_step": 1024}
    config = small_config(tmp_path, **changes, context__eval_max_tokens_per_slot="auto")
    (done, attempts), (_, others) = run_ranks(_train_short_of_memory, 2, config, 200)
    kept = _kept(tmp_path / "run")
    assert done == 1 and kept["rows"] == kept["planned"] // 4 <= 200 < kept["planned"] // 2
    assert attempts[0] == others[0] > 400 and attempts[-1] <= 200 and _rows_of_plan(tmp_path / "run", 1) == kept["rows"]


def test_a_document_that_fits_no_degree_ends_the_run_with_both_numbers(tmp_path: Path) -> None:
    config = small_config(tmp_path, **AUTO, train__steps=1)
    with pytest.raises(ConfigError, match=r"max_tokens_per_slot 17 do not suit the longest document \(64 tokens"):
        run_ranks(_train_short_of_memory, 2, config, 1)


def test_rows_by_hand_are_not_halved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 ran out of memory before step 1, .* rows of a slot"):
        run_ranks(_train_short_of_memory, 2, small_config(tmp_path, train__steps=1), 1)
