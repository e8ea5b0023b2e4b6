"""Slots that are slower than the others are named once, with their host."""

import io
from pathlib import Path
from unittest import mock

from longspan import World
from longspan.config.sections import RunConfig
from longspan.run.checks import check_config
from longspan.run.loop import STEPS, SlowSlots, train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from longspan.train import step
from longspan.train.training import Training
from tests.train.small import small_config


def train_with_a_slow_slot(rank: int, config: RunConfig) -> str:
    """Train on this rank, where the second slot's losses take longer; returns what was logged."""
    slow = 1.25 if rank == 1 else 1.0
    stream = io.StringIO()
    home = check_config(config, 2)
    with (
        mock.patch.object(Training, "times_slots", True),
        mock.patch.object(step, "LEAST_LOGITS", 1),
        mock.patch.object(step.SlotPaceTerm, "sums", lambda term: _made_sums(term, slow)),
        World(home, backend=backend(), timeout=config.run.timeout_seconds) as world,
        ProgressDisplay(config.train.steps, stream if rank == 0 else None) as display,
    ):
        train(config, world, display)
    return stream.getvalue()


def _made_sums(term: step.SlotPaceTerm, slow: float) -> list[float]:
    term._seconds = 1e-3 * term._rows * slow
    return [term._seconds, float(term._rows)]


def test_a_slow_slot_is_named_once_with_its_host(tmp_path: Path) -> None:
    keys = {"context__planner": "dynamic", "train__steps": 24, "train__tokens_per_step": 256, "train__eval_every": 0}
    config = small_config(tmp_path, **keys, train__save_every=0)
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
