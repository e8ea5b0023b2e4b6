"""`max_tokens_per_slot = "auto"`: the fit, a budget that a step keeps, and what a run goes on with."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from longspan.comm import World
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from longspan.train.memory import row_probe, rows_that_fit
from longspan.train.memory.live_bytes import LiveBytes
from longspan.train.memory.row_probe import (
    TOO_MANY_FILE,
    TooMany,
    measure_step_bytes,
    memory_keys,
    probe_plan,
    read_measurement,
    read_too_many_rows,
)
from longspan.train.memory.rows_that_fit import FILE, RowsThatFit, activation_budget, fit_by_probes, fit_rows
from longspan.train.optim.offload_states import OffloadedStates
from tests.train.small import small_config, train_rank


def world_of_one_process(home: Layout, gather_objects: Callable[..., list[float]]) -> Any:
    """What `fit_by_probes` asks of a world, with what all ranks would answer."""
    control = SimpleNamespace(gather_objects=gather_objects)
    return SimpleNamespace(device=torch.device("cpu"), home=home, control=control)


def nothing_trained() -> tuple[nn.Module, Any]:
    """A model and an optimizer that take no bytes of a budget."""
    return nn.Module(), SimpleNamespace(state={})


def test_the_fit_of_two_probes() -> None:
    fit = fit_rows([(100, 3000), (300, 7000)], 10_000, ranks=2)
    assert fit == RowsThatFit(rows=450, bytes_per_row=20.0, fixed_bytes=1000.0, budget_bytes=10_000, ranks=2)
    assert fit_rows([(100, 3000), (300, 7000)], 1020, ranks=2).rows == 1
    with pytest.raises(ConfigError, match="a row takes 20 bytes beside 1,000 for any number"):
        fit_rows([(100, 3000), (300, 7000)], 1019, ranks=2)


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
def test_a_probe_fills_every_slot(tmp_path: Path, planner: str, degree: int, widest: int) -> None:
    name, _, most = planner.partition(" ")
    changes = {"context__planner": name, "context__context_parallel_size": degree}
    config = small_config(tmp_path, **changes, context__max_dynamic_context_parallel_size=int(most or 0))
    plan = probe_plan(config, Layout(ranks=4), 64)
    assert plan.timeline().rows.tolist() == [[64] * 4] and plan.efficiency == 1
    assert {group.degree for group in plan.micro_batches[0].groups} == {widest}


@pytest.mark.parametrize(("positions", "documents"), [(1000, 1), (256, 1), (255, 2), (100, 3), (64, 4), (20, 16)])
@pytest.mark.parametrize("rows", [64, 61, 1001])
def test_a_probe_has_documents_that_a_model_s_positions_allow(
    tmp_path: Path, positions: int, documents: int, rows: int
) -> None:
    config = small_config(tmp_path, context__planner="dynamic", parallel__pp=2)
    plan = probe_plan(config, Layout(ranks=8, pp=2), rows, positions=positions)
    assert max(plan.lengths) <= positions and len({*plan.lengths}) == 1 and len(plan.micro_batches) == 2
    assert all(rows <= n < rows + 2 * len(plan.lengths) for n in plan.timeline().rows.flatten())
    if rows == 64:
        assert len(plan.micro_batches[0].documents) == documents and plan.efficiency == 1


def test_a_step_is_measured_within_a_table_of_positions(tmp_path: Path) -> None:
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=40, **drops)
    with World(Layout(ranks=1), backend=backend()) as world:
        model = prepare(GPT2LMHeadModel(config), world)
        few, many = (measure_step_bytes(small_config(tmp_path), model, world, rows) for rows in (32, 128))
    assert many > 2 * few


def test_probes_suit_rows_that_are_split_over_tp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third probe is of half the rows that fit, an odd number here; tp 3 does not divide the sizes of the first."""
    for tp in (2, 3):
        config = small_config(
            tmp_path, parallel__tp=tp, parallel__sequence_parallel=True, train__memory_bytes=2_010_000
        )
        home, probed = Layout(ranks=2 * tp, tp=tp), list[int]()

        def bytes_of(config: RunConfig, model: object, world: World, rows: int, probed: list[int] = probed) -> int:
            probe_plan(config, world.home, rows)  # raises where they do not suit
            probed.append(rows)
            return 1000 * rows

        monkeypatch.setattr(rows_that_fit, "measure_step_bytes", bytes_of)
        world = world_of_one_process(home, lambda value, what="": [value])
        assert fit_by_probes(config, *nothing_trained(), world).rows == 2010
        assert len(probed) == 4 and probed[-1] > 1000 and not any(rows % tp for rows in probed)


class Machine(NamedTuple):
    """What the two ranks have, and how many rows a probe may have where nothing says more."""

    budgets: tuple[int, int]
    fixed: int
    row_bytes: int
    below: int | None = None


MACHINES = {  # what is probed after the warm-up, and what is found, at 64 and 256 rows at first
    "room": (Machine((10**7, 10**7), 10**5, 1000), [64, 256, 2048], 9900),
    "the least of all ranks": (Machine((10**7, 10**6), 10**5, 1000), [64, 256, 450], 900),
    "the second is what surely fits": (Machine((300_000, 300_000), 10**5, 1000), [64, 117], 200),
    "the first is too large": (Machine((130_000, 130_000), 10**5, 1000), [64, 32], 30),
    "more did not fit before": (Machine((10**7, 10**7), 10**5, 1000, below=256), [64, 128], 128),
    "less than the first did not fit before": (Machine((10**6, 10**6), 10**5, 1000, below=64), [16, 32], 32),
    "more did not fit before, and would not": (Machine((400_000, 400_000), 10**5, 1000, below=1024), [64, 156], 300),
}


@pytest.mark.parametrize("name", MACHINES)
def test_probes_go_no_further_than_those_before_allow(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, sizes, rows = MACHINES[name]
    probed = list[int]()

    def bytes_of(config: RunConfig, model: object, world: World, rows: int) -> int:
        probed.append(rows)
        return machine.fixed + machine.row_bytes * rows

    def gather_objects(value: float, what: str = "") -> list[float]:
        return list(machine.budgets) if not probed else [value] * 2

    monkeypatch.setattr(rows_that_fit, "measure_step_bytes", bytes_of)
    config = small_config(tmp_path, train__memory_bytes=machine.budgets[0])
    world = world_of_one_process(Layout(ranks=2), gather_objects)
    fit = fit_by_probes(config, *nothing_trained(), world, below=machine.below)
    assert (probed, fit.rows) == ([sizes[0], *sizes], rows)
    assert all(machine.fixed + machine.row_bytes * n <= min(machine.budgets) for n in sizes[1:] if n > sizes[0])


@pytest.mark.parametrize(
    ("guess", "below", "sizes", "rows"),
    [
        (4096, None, [64, 64, 4096], 9900),  # a plan of memory that had room for more
        (16384, None, [64, 64, 16384], 9900),  # and one for less
        (4096, 2048, [64, 64, 1024], 1024),  # where a probe of 2048 rows found no memory before
        (64, None, [64, 64, 256, 2048], 9900),  # no more than the first probe has
    ],
)
def test_one_probe_corrects_a_first_guess(
    guess: int, below: int | None, sizes: list[int], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = list[int]()

    def bytes_of(config: RunConfig, model: object, world: World, rows: int) -> int:
        probed.append(rows)
        return 10**5 + 1000 * rows

    monkeypatch.setattr(rows_that_fit, "measure_step_bytes", bytes_of)
    world = world_of_one_process(Layout(ranks=1), lambda value, what="": [value])
    config = small_config(tmp_path, train__memory_bytes=10**7)
    fit = fit_by_probes(config, *nothing_trained(), world, below=below, first_guess=guess)
    assert (probed, fit.rows) == (sizes, rows)


def test_weights_and_moments_are_part_of_what_a_run_may_fill(tmp_path: Path) -> None:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    config, device = small_config(tmp_path, train__memory_bytes=10**6), torch.device("cpu")
    to_come = activation_budget(config, model, optimizer, device)
    assert to_come == pytest.approx(10**6 - 3 * 4000, abs=4)  # the count of steps is a number of its own
    on_host = OffloadedStates(torch.optim.AdamW(model.parameters()), device)
    assert activation_budget(config, model, on_host, device) == 10**6 - 4000
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert activation_budget(config, model, optimizer, device) == 10**6 - 3 * 4000 - 4


def test_too_few_rows_for_probes_are_named(tmp_path: Path) -> None:
    world = world_of_one_process(Layout(ranks=1), lambda value: [value])
    with pytest.raises(ConfigError, match="7 rows of a slot did not fit when this run was started before"):
        fit_by_probes(small_config(tmp_path, train__memory_bytes=1000), *nothing_trained(), world, below=7)


def _measured(rank: int, config: RunConfig) -> tuple[RowsThatFit, float, bool]:
    """What is found, the share of the budget that so many rows take, and whether gradients are left."""
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = load_model(None, "qwen3-tiny", vocab_size=300)
        model = prepare(model, world, activation_checkpointing=config.train.activation_checkpointing)
        fit = fit_by_probes(config, model, build_optimizer(model), world)
        seen = measure_step_bytes(config, model, world, fit.rows)
        left = any(p.grad is not None for p in model.parameters())
    return fit, seen / fit.budget_bytes, left


def test_rows_that_fit_fill_the_budget(tmp_path: Path) -> None:
    rows = {}
    for kind in ("none", "full"):
        config = small_config(tmp_path, train__activation_checkpointing=kind, train__memory_bytes=30_000_000)
        answers = run_ranks(_measured, 2, config)
        assert answers[0][0] == answers[1][0] and not any(left for _, _, left in answers)
        assert all(0.9 < share < 1.05 for _, share, _ in answers), answers
        rows[kind] = answers[0][0].rows
    assert rows["full"] > 1.3 * rows["none"]


def test_a_run_measures_once_and_goes_on_with_it(tmp_path: Path) -> None:
    changes = {"context__max_tokens_per_slot": "auto", "train__memory_bytes": 20_000_000}
    run = tmp_path / "run"
    run_ranks(train_rank, 2, small_config(tmp_path, **changes, train__steps=1), 2)
    fit = json.loads((run / FILE).read_text())
    assert json.loads((run / "plans" / "step-000001.json").read_text())["max_tokens_per_slot"] == fit["rows"]
    assert 'max_tokens_per_slot = "auto"' in (run / "config.toml").read_text()
    (run / FILE).write_text(json.dumps(fit | {"rows": 77}))
    run_ranks(train_rank, 2, small_config(tmp_path, **changes, train__steps=2), 2)
    assert json.loads((run / "plans" / "step-000002.json").read_text())["max_tokens_per_slot"] == 77


def _again(file: Path, ranks: int, config: RunConfig) -> RowsThatFit | None:
    return read_measurement(RowsThatFit, file, ranks, memory_keys(config), "it is measured again")


def test_other_keys_are_measured_again(tmp_path: Path) -> None:
    config = small_config(tmp_path, context__max_tokens_per_slot="auto")
    (file := tmp_path / FILE).write_text(json.dumps(vars(RowsThatFit(3, 1.0, 1.0, 1.0, 2, memory_keys(config)))))
    assert _again(file, 2, config) and not _again(file, 4, config)
    for changes in (
        {"train__memory_fraction": 0.5},
        {"train__activation_checkpointing": "full"},
        {"parallel__tp": 2},
        {"model__preset": "qwen3-deep-tiny"},  # another model, in a folder without a checkpoint yet
        {"model__dtype": "bfloat16"},
        {"data__vocab_size": 4096},
    ):
        changed = small_config(tmp_path, context__max_tokens_per_slot="auto", **changes)
        assert not _again(file, 2, changed), changes


def test_a_document_that_does_not_fit_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path, context__max_tokens_per_slot="auto")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).write_text(json.dumps(vars(RowsThatFit(3, 1.0, 1.0, 1.0, 2, memory_keys(config)))))
    with pytest.raises(ConfigError, match="max_tokens_per_slot 3 do not suit the longest document"):
        run_ranks(train_rank, 2, config, 2)


def train_short_of_memory(rank: int, config: RunConfig, least: int) -> int:
    """Train, and have no memory on rank 1 for the second layer of a probe of `least` rows or more."""
    run_step = row_probe.run_step

    def run_step_of_probe(model: Any, plan: Any, *others: Any, **more: Any) -> Any:
        def forward(module: object, inputs: object) -> None:
            if rank == 1 and plan.timeline().rows.max() >= least:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 1 has 1 GiB free")

        hook = model.model.layers[1].register_forward_pre_hook(forward)
        try:
            return run_step(model, plan, *others, **more)
        finally:
            hook.remove()

    row_probe.run_step = run_step_of_probe
    return train_rank(rank, config, 2).done


def test_a_rank_without_memory_for_a_probe_ends_the_run_and_the_next_start_probes_less(tmp_path: Path) -> None:
    changes = {"context__max_tokens_per_slot": "auto", "train__memory_bytes": 100_000_000, "train__steps": 1}
    config, before = small_config(tmp_path, **changes), time.monotonic()
    with pytest.raises(ConfigError, match="rank 1 ran out of memory in a probe of 256 rows of a slot") as raised:
        run_ranks(train_short_of_memory, 2, config, 200)
    assert "(CUDA out of memory)" in str(raised.value) and time.monotonic() - before < config.run.timeout_seconds
    (note,) = raised.value.__notes__
    assert re.search(r"rank 0: CommError: .* rank 1 left with ConfigError: context.max_tokens_per_slot is", note)
    too_many = TooMany(**json.loads((tmp_path / "run" / TOO_MANY_FILE).read_text()))
    assert too_many == TooMany(256, 2, memory_keys(config)) and not (tmp_path / "run" / FILE).exists()
    assert run_ranks(train_short_of_memory, 2, config, 200) == [1, 1]
    assert json.loads((tmp_path / "run" / FILE).read_text())["rows"] == 128


def test_what_did_not_fit_counts_under_the_same_keys_alone(tmp_path: Path) -> None:
    now, file = memory_keys(small_config(tmp_path)), tmp_path / TOO_MANY_FILE
    assert read_too_many_rows(tmp_path, 2, now) is None
    file.write_text(json.dumps(vars(TooMany(256, 2, now))))
    other = memory_keys(small_config(tmp_path, train__activation_checkpointing="full"))
    assert [
        read_too_many_rows(tmp_path, 2, now),
        read_too_many_rows(tmp_path, 4, now),
        read_too_many_rows(tmp_path, 2, other),
    ] == [
        256,
        None,
        None,
    ]
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"is damaged: .*; remove it and rows are probed from the start"):
        read_too_many_rows(tmp_path, 2, now)
