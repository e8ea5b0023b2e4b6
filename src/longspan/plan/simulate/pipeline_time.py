"""How long micro-batches take through pipeline stages: 1F1B and interleaved schedules, event by event.

Every slot is a pipeline; in lockstep they all move together, so one pipeline with the slowest slot's times stands for
all. The wire between stages takes no time here (`simulate.py` counts its bytes).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError

Floats = NDArray[np.float64]


class Action(NamedTuple):
    """What a stage does next: the forward or backward pass of one model chunk for one micro-batch."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class PipelineRun:
    """Micro-batches through the stages: the seconds of all, the share of them in which a stage waits, and the order."""

    seconds: float
    bubble: float
    actions: tuple[tuple[Action, ...], ...]  # of each stage


def run_pipeline(
    forward: Sequence[float], backward: Sequence[float] | None, stages: int, chunks: int = 1
) -> PipelineRun:
    """Run micro-batches, whose passes take these seconds in the whole model, through `stages` stages.

    >>> run_pipeline([1.0] * 8, [2.0] * 8, stages=4).bubble  # 3 of 11
    0.2727...

    `chunks` > 1 gives each stage that many model chunks (the interleaved schedule). `backward` None runs forward passes
    alone. Raises PlanError where interleaving finds micro-batches that are no multiple of the stages.
    """
    if stages < 1 or chunks < 1:
        raise PlanError(f"{stages} pipeline stages of {chunks} chunks; both are at least 1")
    if chunks > 1 and (stages == 1 or len(forward) % stages):
        raise PlanError(
            f"{len(forward)} micro-batches do not interleave over {stages} stages of {chunks} chunks; "
            f"use at least 2 stages, and plan with micro_batch_multiple={max(2, stages)}"
        )
    order = _order(len(forward), stages, chunks, backward is not None)
    seconds = {"forward": np.asarray(forward, np.float64), "backward": np.asarray(backward or [], np.float64)}
    total = _play(seconds, order, chunks)
    busy = float(seconds["forward"].sum() + seconds["backward"].sum()) / stages
    return PipelineRun(total, max(0.0, 1 - busy / total) if total else 0.0, order)


def _order(micro_batches: int, stages: int, chunks: int, backward: bool) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(_stage_order(stage, micro_batches, stages, chunks, backward)) for stage in range(stages))


def _stage_order(stage: int, micro_batches: int, stages: int, chunks: int, backward: bool) -> list[Action]:
    """1F1B after a warm-up; with chunks, rounds of `stages` micro-batches, chunk by chunk (Narayanan et al. 2021)."""
    total = micro_batches * chunks
    if not backward:
        return [_action("forward", k, stages, chunks) for k in range(total)]
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    forwards = [_action("forward", k, stages, chunks) for k in range(total)]
    backwards = [_action("backward", k, stages, chunks) for k in range(total)]
    steady = [action for k in range(total - warm_up) for action in (forwards[warm_up + k], backwards[k])]
    return [*forwards[:warm_up], *steady, *backwards[total - warm_up :]]


def _action(kind: Literal["forward", "backward"], k: int, stages: int, chunks: int) -> Action:
    if chunks == 1:
        return Action(kind, 0, k)
    chunk = k // stages % chunks
    micro_batch = k // (stages * chunks) * stages + k % stages
    return Action(kind, chunk if kind == "forward" else chunks - 1 - chunk, micro_batch)


def _play(seconds: dict[str, Floats], order: tuple[tuple[Action, ...], ...], chunks: int) -> float:
    """Start every action when its stage is free and its input is there; the end of the last one."""
    stages, ended = len(order), dict[tuple[Action, int], float]()
    clock, place = [0.0] * stages, [0] * stages
    while any(place[s] < len(order[s]) for s in range(stages)):
        moved = False
        for stage, actions in enumerate(order):
            while place[stage] < len(actions):
                action = actions[place[stage]]
                ready = _ready(action, stage, stages, chunks, ended)
                if ready is None:
                    break
                taken = float(seconds[action.kind][action.micro_batch])
                clock[stage] = max(clock[stage], ready) + taken / (stages * chunks)
                ended[action, stage] = clock[stage]
                place[stage], moved = place[stage] + 1, True
        assert moved, "the schedule waits for itself"
    return float(max(clock))


def _ready(
    action: Action, stage: int, stages: int, chunks: int, ended: dict[tuple[Action, int], float]
) -> float | None:
    """When the input of an action is there: 0.0 for the model's own input, None for not yet."""
    kind, chunk, micro_batch = action
    position = chunk * stages + stage  # among all parts of the model
    if kind == "backward" and position == stages * chunks - 1:
        return ended.get((Action("forward", chunk, micro_batch), stage))
    before = position - 1 if kind == "forward" else position + 1
    if before < 0:
        return 0.0
    return ended.get((Action(kind, before // stages, micro_batch), before % stages))
