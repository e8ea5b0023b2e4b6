"""`max_tokens_per_slot = "auto"`: the fit, a budget that a step keeps, and what a run goes on with."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.comm import World
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, rows_that_fit
from longspan.train.config import RunConfig
from longspan.train.live_bytes import LiveBytes
from longspan.train.rows_that_fit import FILE, RowsThatFit, _most_bytes, _read, conditions, fitted, measure, probe_plan
from tests.train.small import small_config, train_rank


def test_the_fit_of_two_probes() -> None:
    found = fitted([(100, 3000), (300, 7000)], 10_000, ranks=2)
    assert found == RowsThatFit(rows=450, bytes_per_row=20.0, fixed_bytes=1000.0, budget_bytes=10_000, ranks=2)
    assert fitted([(100, 3000), (300, 7000)], 1020, ranks=2).rows == 1
    with pytest.raises(ConfigError, match="a row takes 20 bytes beside 1,000 for any number"):
        fitted([(100, 3000), (300, 7000)], 1019, ranks=2)


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


def test_probes_suit_rows_that_are_split_over_tp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third probe is of half the rows that fit, an odd number here; tp 3 does not divide the sizes of the first."""
    for tp in (2, 3):
        config = small_config(
            tmp_path, parallel__tp=tp, parallel__sequence_parallel=True, train__memory_bytes=2_010_000
        )
        home, probed = Layout(ranks=2 * tp, tp=tp), list[int]()

        def most_bytes(config: RunConfig, model: object, world: World, rows: int, probed: list[int] = probed) -> int:
            probe_plan(config, world.home, rows)  # raises where they do not suit
            probed.append(rows)
            return 1000 * rows

        monkeypatch.setattr(rows_that_fit, "_most_bytes", most_bytes)
        world: Any = SimpleNamespace(device=torch.device("cpu"), home=home, gather_objects=lambda told: [told])
        unused: Any = None
        assert measure(config, unused, unused, world).rows == 2010
        assert len(probed) == 4 and probed[-1] > 1000 and not any(rows % tp for rows in probed)


def _measured(rank: int, config: RunConfig) -> tuple[RowsThatFit, float, bool]:
    """What is found, the share of the budget that so many rows take, and whether gradients are left."""
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = load_model(None, "qwen3-tiny", vocab_size=300)
        model = prepare(model, world, activation_checkpointing=config.train.activation_checkpointing)
        found = measure(config, model, build_optimizer(model), world)
        seen = _most_bytes(config, model, world, found.rows)
        left = any(p.grad is not None for p in model.parameters())
    return found, seen / found.budget_bytes, left


def test_rows_that_fit_fill_the_budget(tmp_path: Path) -> None:
    each = {}
    for kind in ("none", "full"):
        config = small_config(tmp_path, train__activation_checkpointing=kind, train__memory_bytes=30_000_000)
        answers = run_ranks(_measured, 2, config)
        assert answers[0][0] == answers[1][0] and not any(left for _, _, left in answers)
        assert all(0.9 < share < 1.05 for _, share, _ in answers), answers
        each[kind] = answers[0][0].rows
    assert each["full"] > 1.3 * each["none"]


def test_a_run_measures_once_and_goes_on_with_it(tmp_path: Path) -> None:
    changes = {"context__max_tokens_per_slot": "auto", "train__memory_bytes": 20_000_000}
    run = tmp_path / "run"
    run_ranks(train_rank, 2, small_config(tmp_path, **changes, train__steps=1), 2)
    found = json.loads((run / FILE).read_text())
    assert json.loads((run / "plans" / "step-000001.json").read_text())["max_tokens_per_slot"] == found["rows"]
    assert 'max_tokens_per_slot = "auto"' in (run / "config.toml").read_text()
    (run / FILE).write_text(json.dumps(found | {"rows": 77}))
    run_ranks(train_rank, 2, small_config(tmp_path, **changes, train__steps=2), 2)
    assert json.loads((run / "plans" / "step-000002.json").read_text())["max_tokens_per_slot"] == 77


def test_other_keys_are_measured_again(tmp_path: Path) -> None:
    config = small_config(tmp_path, context__max_tokens_per_slot="auto")
    (file := tmp_path / FILE).write_text(json.dumps(vars(RowsThatFit(3, 1.0, 1.0, 1.0, 2, conditions(config)))))
    assert _read(file, 2, conditions(config)) and not _read(file, 4, conditions(config))
    for changes in ({"train__memory_fraction": 0.5}, {"train__activation_checkpointing": "full"}, {"parallel__tp": 2}):
        changed = small_config(tmp_path, context__max_tokens_per_slot="auto", **changes)
        assert not _read(file, 2, conditions(changed)), changes


def test_a_document_that_does_not_fit_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path, context__max_tokens_per_slot="auto")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).write_text(json.dumps(vars(RowsThatFit(3, 1.0, 1.0, 1.0, 2, conditions(config)))))
    with pytest.raises(ConfigError, match="max_tokens_per_slot 3 do not suit the longest document"):
        run_ranks(train_rank, 2, config, 2)
