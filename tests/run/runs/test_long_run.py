"""Many steps of dynamic plans over eight processes: nothing grows, and a rank that is killed is named by all."""

import math
import os
import re
import signal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from longspan.comm import World
from longspan.errors import CommError
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
    """What this process holds: bytes of memory, communicators, open files, threads."""

    memory: int
    groups: int
    files: int
    threads: int


def _held(world: World) -> Held:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files, threads = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), len(world.process_groups.made), files, threads)


def _steps(rank: int, plans: list[Plan]) -> tuple[list[float], list[Held]]:
    """Losses, and what is held after every ten steps."""
    with World(HOME, backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("qwen3", torch.float32, layers=1), world)
        return _run(model, world, plans)


def _run(model: nn.Module, world: World, plans: list[Plan]) -> tuple[list[float], list[Held]]:
    losses, held = list[float](), list[Held]()
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


KILLED, AT = 5, 7


def _dies(rank: int, plans: list[Plan], folder: Path) -> None:
    """Steps until one rank is killed in a forward pass; what each of the others then says is left in the folder."""

    def die(*_: Any) -> None:
        if rank == KILLED and world.step == AT:
            (folder / str(rank)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with World(HOME, backend=backend(), timeout=60) as world:
            model = prepare_untried(deep("qwen3", torch.float32, layers=2), world)
            model.model.layers[1].register_forward_hook(die)
            _run(model, world, plans)
    except CommError as error:
        (folder / str(rank)).write_text(str(error), encoding="utf-8")
        raise


@pytest.mark.skipif(backend() != "gloo", reason="NCCL ends a stuck process instead of raising in it")
def test_the_others_stop_and_say_who_was_killed(tmp_path: Path) -> None:
    with pytest.raises(CommError, match=f"rank {KILLED} of 8 was killed by signal 9"):
        run_ranks(_dies, HOME.slots, plans(AT + 2), tmp_path, timeout=100)
    left = {rank: tmp_path / str(rank) for rank in range(HOME.slots)}
    for rank in set(left) - {KILLED}:
        assert re.search(f"of step {AT} .*rank {KILLED} does not answer: it was killed", left[rank].read_text("utf-8"))
        assert left[rank].stat().st_mtime - left[KILLED].stat().st_mtime < 30
