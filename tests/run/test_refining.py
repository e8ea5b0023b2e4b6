"""Runs that refine their prices: a break changes no plan, timing changes none where it is off, slow slots are named."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from longspan import World
from longspan.comm.time_limits import longest_wait
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError
from longspan.plan import Cost, Plan
from longspan.plan.cost.correction import PARTS, Correction
from longspan.run import refining
from longspan.run.checks.config_check import check_config
from longspan.run.loggers.metrics_log import read_metrics
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.run.result import TrainResult
from longspan.run.run_data import TrainingRun
from longspan.run.slow_slots import STEPS, SlowSlots
from longspan.testing import backend, run_ranks
from longspan.train.plans import read_cost
from longspan.train.terms import slot_pace
from tests.train.small import small_config, without_times

STEPS_OF_RUN, BREAK = 30, 15
COST = Cost(linear_seconds=1e-3, attention_seconds=1e-7, ring_bytes=2e5, inside_bytes_per_second=1e9)
TRUE = Correction(linear=1.0, attention=1.0, inside=2.9, across=1.0)


def train_noting_plans(rank: int, config: RunConfig) -> TrainResult:
    """Train on this rank, on a machine of which messages take longer than priced; `digests` has the plans."""
    digests = Path(config.run.dir).parent / f"{Path(config.run.dir).name}-digests"
    note, take = refining.note_step, TrainingRun.take_step

    def note_made(run: TrainingRun, plan: Plan, step: int, seconds: float) -> None:
        note(run, plan, step, plan.timeline(TRUE.correct_cost(COST)).step_seconds)

    def take_noting(run: TrainingRun, plan: Plan, documents: Any, step: int, *meanwhile: Any) -> Any:
        if rank == 0:
            with digests.open("a") as file:
                file.write(f"{step} {plan.digest()}\n")
        return take(run, plan, documents, step, *meanwhile)

    home = check_config(config, 2)
    with (
        mock.patch("longspan.run.loop.note_step", note_made),
        mock.patch.object(TrainingRun, "take_step", take_noting),
        World(home, backend=backend(), timeout=longest_wait(config.run.timeout_seconds)) as world,
        ProgressDisplay(config.train.steps, None) as display,
    ):
        return train(config, world, display)


def config_in(folder: Path, **changes: object) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cost.json").write_text(json.dumps(COST.to_json()))
    keys = {
        "context__planner": "dynamic",
        "run__machine": str(folder / "cost.json"),
        "run__refine": "on",
        "train__steps": STEPS_OF_RUN,
        "train__tokens_per_step": 256,
        "train__save_every": BREAK,
        "train__eval_every": 0,
    }
    return small_config(folder, **(keys | changes))


def run(config: RunConfig) -> TrainResult:
    return run_ranks(train_noting_plans, 2, config, timeout=120)[0]


def rows_of(config: RunConfig) -> list[dict[str, object]]:
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "loss" in row]


def digests_of(config: RunConfig) -> dict[int, str]:
    lines = (Path(config.run.dir).parent / f"{Path(config.run.dir).name}-digests").read_text().splitlines()
    return {int(step): digest for step, digest in map(str.split, lines)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, TrainResult]:
    config = config_in(tmp_path_factory.mktemp("straight"))
    return config, run(config)


def cut_at_the_break(config: RunConfig, folder: Path) -> RunConfig:
    shutil.copytree(config.run.dir, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS_OF_RUN:06d}")
    (folder / "run" / "summary.json").unlink()
    return replace(config, run=replace(config.run, dir=str(folder / "run")))


def test_a_break_changes_no_plan_and_no_loss(straight: tuple[RunConfig, TrainResult], tmp_path: Path) -> None:
    config, outcome = straight
    broken = cut_at_the_break(config, tmp_path)
    resumed = run(broken)
    wanted = digests_of(config)
    assert digests_of(broken) == {step: wanted[step] for step in range(BREAK, STEPS_OF_RUN)}
    strip = ("tokens_per_second", "bound_share", "mfu")
    for row, other in zip(rows_of(broken), rows_of(config), strict=True):
        assert {k: v for k, v in row.items() if k not in strip} == {k: v for k, v in other.items() if k not in strip}
    assert resumed.last_loss == outcome.last_loss
    corrections = [[row[f"correction_{part}"] for part in PARTS] for row in rows_of(config)]
    assert corrections[:20] == [[1.0] * 4] * 20 and corrections[20:] == [corrections[20]] * 10
    assert corrections[20][2] == pytest.approx(TRUE.inside, rel=0.02)


@pytest.mark.whole
@pytest.mark.parametrize("refine", ["off", "auto"])  # auto: not on CPUs
def test_off_plans_are_those_of_the_prices_as_they_are(
    straight: tuple[RunConfig, TrainResult], refine: str, tmp_path: Path
) -> None:
    config, outcome = straight
    assert outcome.ratios["inside"] == pytest.approx(TRUE.inside, rel=0.02)
    assert "measured over predicted seconds of the last steps: whole 1, " in outcome.text()
    assert outcome.summary()["measured_over_predicted"] == outcome.ratios
    off = config_in(tmp_path / refine, run__refine=refine)
    result = run(off)
    assert result.ratios == {} and "measured over predicted" not in result.text()
    assert not any(key.startswith("correction_") for row in rows_of(off) for key in row)
    plain, refined = digests_of(off), digests_of(config)
    assert all(plain[step] == refined[step] for step in range(20))
    assert any(plain[step] != refined[step] for step in range(20, STEPS_OF_RUN)), "a correction changes plans"


def test_a_correction_of_other_prices_is_left_out(straight: tuple[RunConfig, TrainResult]) -> None:
    config, said = straight[0], list[str]()
    cost = read_cost(config)
    state = json.loads((Path(config.run.dir) / "checkpoints" / f"step-{BREAK:06d}" / "state.json").read_text())
    world: Any = mock.Mock()
    same = refining.refinement_of_run(config, cost, state, world, said.append)
    assert same is not None and not said and len(same.to_json()["steps"]) == BREAK - 1
    other = refining.refinement_of_run(config, replace(cost, linear_seconds=1.0), state, world, said.append)
    assert other is not None and other.to_json()["steps"] == [] and "another cost than before" in said[0]
    state[refining.STATE] = {}
    with pytest.raises(CheckpointError, match=r"set run\.refine to 'off'"):
        refining.refinement_of_run(config, cost, state, world, said.append)


def train_with_a_slow_slot(rank: int, config: RunConfig) -> str:
    """Train on this rank, where the second slot's losses take longer; returns what was logged."""
    slow = 1.25 if rank == 1 else 1.0
    stream = io.StringIO()
    home = check_config(config, 2)
    with (
        mock.patch.object(slot_pace, "LEAST_LOGITS", 1),
        mock.patch.object(slot_pace.SlotPaceTerm, "sums", lambda term: _made_sums(term, slow)),
        World(home, backend=backend(), timeout=longest_wait(config.run.timeout_seconds)) as world,
        ProgressDisplay(config.train.steps, stream if rank == 0 else None) as display,
    ):
        train(config, world, display)
    return stream.getvalue()


def _made_sums(term: slot_pace.SlotPaceTerm, slow: float) -> list[float]:
    term._seconds = 1e-3 * term._rows * slow
    return [term._seconds, float(term._rows)]


def test_a_slow_slot_is_named_once_with_its_host(tmp_path: Path) -> None:
    config = config_in(tmp_path, train__save_every=0)
    log = run_ranks(train_with_a_slow_slot, 2, config, timeout=120)[0]
    assert log.count("slower than its plan") == 1
    assert "slot 1 (rank 1, host " in log and "has been 25 % slower than its plan for 20 steps" in log


def test_a_slot_is_slow_by_the_median_of_its_steps() -> None:
    slots = SlowSlots()
    for _ in range(STEPS - 1):
        slots.note_ratio(1.11)
        slots.note_ratio(None)
    assert not slots.is_slow
    slots.note_ratio(5.0)
    assert slots.is_slow
    for _ in range(STEPS):
        slots.note_ratio(1.09)
    assert not slots.is_slow
