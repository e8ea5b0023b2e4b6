"""Many steps of dynamic plans over eight processes: nothing grows."""

import math
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.plan import Plan, plan_dynamic
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts

HOME = Layout(ranks=8)
STEPS, FEWER, WARM = 100, 60, 40
LONGEST, ROWS = 180, 24
GROWTH = 4 * 2**20  # bytes


@cache
def plans(steps: int = STEPS) -> list[Plan]:
    """Long-tailed lengths: a few documents of up to 180 tokens among many short ones, at most 24 rows a slot."""
    draw = np.random.default_rng(0)
    drawn = [draw.lognormal(2.0, 1.5, size=draw.integers(4, 20)).clip(1, LONGEST).astype(int) for _ in range(steps)]
    return [plan_dynamic(lengths.tolist(), HOME, max_tokens_per_slot=ROWS) for lengths in drawn]


class Held(NamedTuple):
    memory: int
    groups: int
    files: int
    threads: int


def _held(world: World) -> Held:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files, threads = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), len(world.process_groups.made), files, threads)


def _steps(rank: int, plans: list[Plan]) -> tuple[list[float], list[Held]]:
    losses, held = list[float](), list[Held]()
    with World(HOME, backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("qwen3", torch.float32, layers=1), world)
        optimizer = build_optimizer(model, "adamw", lr=1e-3)
        for step, plan in enumerate(plans):
            world.prepare(plan)
            losses.append(run_step(model, plan, texts(plan.lengths, step), world, optimizer, step=step).loss)
            if step % 10 == 9:
                held.append(_held(world))
    return losses, held


@pytest.mark.whole
def test_plans_have_any_degree_and_idle_slots() -> None:
    batches = [batch for plan in plans(FEWER) for batch in plan.micro_batches]
    groups = {group.slots for batch in batches for group in batch.groups}
    assert len({len(slots) for slots in groups}) >= 6 and len(groups) >= 20 and len(batches) > 1.2 * FEWER
    assert any(not batch.groups_of(slot) for batch in batches for slot in range(HOME.slots))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("steps", [pytest.param(steps, marks=pytest.mark.whole) for steps in (FEWER, STEPS)])
def test_later_steps_hold_no_more_than_the_first(steps: int) -> None:
    answers = run_ranks(_steps, HOME.slots, plans(steps), timeout=280)
    for losses, held in answers:
        assert losses == answers[0][0] and len(losses) == steps and all(map(math.isfinite, losses))
        first, last = held[WARM // 10 - 1], held[-1]
        assert last[1:] == first[1:], held
        assert last.memory - first.memory < GROWTH, [each.memory // 2**10 for each in held]
