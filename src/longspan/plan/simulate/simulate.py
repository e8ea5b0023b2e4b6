"""What a plan would do on a machine: time through pipeline stages, bubbles, memory of each slot, bytes on the links.

It follows the cost model and the plan to the letter; what neither holds (the wire between stages, optimizer steps, the
memory of weights) is not in the numbers.

Micro-batches go through pipeline stages event by event, in 1F1B and interleaved schedules. Every slot is a pipeline; in
lockstep they all move together, so one pipeline with the slowest slot's times stands for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.plan.cost.bound import lower_bound_seconds
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.type_price import bytes_by_level
from longspan.plan.plan import Plan
from longspan.plan.simulate.row_bytes import RowBytes

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

    `chunks` > 1 gives each stage that many model chunks (the interleaved schedule). `backward` None runs only forward
    passes. Raises PlanError where interleaving finds micro-batches that are no multiple of the stages.
    """
    if stages < 1 or chunks < 1:
        raise PlanError(f"{stages} pipeline stages of {chunks} chunks; both are at least 1")
    if chunks > 1 and (stages == 1 or len(forward) % stages):
        raise PlanError(
            f"{len(forward)} micro-batches do not interleave over {stages} stages of {chunks} chunks; "
            f"use at least 2 stages, and plan with micro_batch_multiple={max(2, stages)}"
        )
    order = _pipeline_order(len(forward), stages, chunks, backward is not None)
    seconds = {"forward": np.asarray(forward, np.float64), "backward": np.asarray(backward or [], np.float64)}
    total = _play_schedule(seconds, order, chunks)
    busy = float(seconds["forward"].sum() + seconds["backward"].sum()) / stages
    return PipelineRun(total, max(0.0, 1 - busy / total) if total else 0.0, order)


def _pipeline_order(micro_batches: int, stages: int, chunks: int, backward: bool) -> tuple[tuple[Action, ...], ...]:
    """List the actions of every stage, in order; without `backward` forward passes only."""
    return tuple(tuple(_stage_order(stage, micro_batches, stages, chunks, backward)) for stage in range(stages))


def _stage_order(stage: int, micro_batches: int, stages: int, chunks: int, backward: bool) -> list[Action]:
    """List the actions of a stage: forward passes to warm up, then one forward and one backward in turn, then the rest.

    The warm-up has as many forward passes as there are stages after this one: no more are needed to keep the stage busy
    until its first backward pass. With chunks actions come in rounds of `stages` micro-batches, chunk by chunk
    (interleaved 1F1B, Narayanan et al. 2021); the warm-up is then twice as long, as each stage is passed again, and has
    a round for each chunk but the last.
    """
    total = micro_batches * chunks
    if not backward:
        return [_schedule_action("forward", k, stages, chunks) for k in range(total)]
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    forwards = [_schedule_action("forward", k, stages, chunks) for k in range(total)]
    backwards = [_schedule_action("backward", k, stages, chunks) for k in range(total)]
    steady = [action for k in range(total - warm_up) for action in (forwards[warm_up + k], backwards[k])]
    return [*forwards[:warm_up], *steady, *backwards[total - warm_up :]]


def _schedule_action(kind: Literal["forward", "backward"], k: int, stages: int, chunks: int) -> Action:
    """Return the k-th forward or backward pass of a stage: which chunk it runs, and which micro-batch.

    Rounds of `stages` micro-batches go through chunk after chunk, backward from the last chunk to the first.
    """
    if chunks == 1:
        return Action(kind, 0, k)
    chunk = k // stages % chunks
    micro_batch = k // (stages * chunks) * stages + k % stages
    return Action(kind, chunk if kind == "forward" else chunks - 1 - chunk, micro_batch)


def _play_schedule(seconds: dict[str, Floats], order: tuple[tuple[Action, ...], ...], chunks: int) -> float:
    """Run all stages, each action when its stage is free and its input is there; return when the last one ends.

    A stage goes on until an input is missing; then others run, as long as any makes progress. `clock` is when each
    stage is free, `done` how many of its actions are. A micro-batch's seconds are those of all layers, which the chunks
    of all stages share evenly.
    """
    stages, end_times = len(order), dict[tuple[Action, int], float]()
    clock, done = [0.0] * stages, [0] * stages
    while any(done[s] < len(order[s]) for s in range(stages)):
        has_progress = False
        for stage, actions in enumerate(order):
            while done[stage] < len(actions):
                action = actions[done[stage]]
                ready = _input_time(action, stage, stages, chunks, end_times)
                if ready is None:
                    break
                action_seconds = float(seconds[action.kind][action.micro_batch])
                clock[stage] = max(clock[stage], ready) + action_seconds / (stages * chunks)
                end_times[action, stage] = clock[stage]
                done[stage], has_progress = done[stage] + 1, True
        assert has_progress, "the schedule waits for itself"
    return float(max(clock))


def _input_time(
    action: Action, stage: int, stages: int, chunks: int, end_times: dict[tuple[Action, int], float]
) -> float | None:
    """Return when the input of an action is there: 0.0 for the model's own input, None for not yet.

    A forward pass waits for the part of the model before this one, a backward pass for the part after it; the last
    part's backward pass waits for its own forward pass.
    """
    kind, chunk, micro_batch = action
    position = chunk * stages + stage  # among all parts of the model
    if kind == "backward" and position == stages * chunks - 1:
        return end_times.get((Action("forward", chunk, micro_batch), stage))
    position_before = position - 1 if kind == "forward" else position + 1
    if position_before < 0:
        return 0.0
    return end_times.get((Action(kind, position_before // stages, micro_batch), position_before % stages))


@dataclass(frozen=True, eq=False)
class Simulation:
    """A plan on pipeline stages. Seconds of the step; bytes of the whole step on all slots together.

    `lower_bound_seconds` is what no plan on these stages can beat: the work spread over all slots and stages, or the
    longest document's way through them. `bubble` is the share of a stage's time that the schedule leaves empty, `idle`
    the share of slot time that is spent waiting for slower slots. `peak_rows` counts the most rows whose activations
    a slot's first stage holds at once, as rows of the whole model: 1000 rows of a quarter of the layers are 250.
    `closing_seconds`, part of `seconds`, gather sharded parameters for a free step and sum gradients after it (in an
    evaluation they gather parameters).
    """

    plan: Plan
    cost: Cost
    seconds: float
    lower_bound_seconds: float
    bubble: float
    idle: float
    peak_rows: NDArray[np.float64]  # (slots,)
    activation_bytes: NDArray[np.float64]  # (slots,)
    inside_bytes: float
    across_bytes: float
    stage_bytes: float
    closing_seconds: float = 0.0


def simulate(
    plan: Plan,
    *,
    cost: Cost | None = None,
    pp: int = 1,
    vpp: int = 1,
    backward: bool | None = None,
    row_bytes: RowBytes | None = None,
) -> Simulation:
    """Run a plan through `pp` pipeline stages of `vpp` model chunks; without `backward`, as an evaluation.

    >>> simulate(plan, pp=4).bubble

    The cost is the plan's own unless given; `cost.shared_by(tp)` makes that of tensor-parallel slots. `backward` None
    runs the passes that the plan's own cost is of; an evaluation is priced by `Cost.forward_only`. Raises PlanError for
    a free plan on more than one stage, whose micro-batches do not move together, and where backward passes are asked of
    a cost without them.

    The pipeline of a lockstep plan is run action by action, and a free plan's seconds are those of its slots. `once` is
    what a step takes once, whatever its documents: the update, and in free mode the closing sums. Bytes between stages
    cross each boundary once a pass.
    """
    if plan.mode == "free" and pp > 1:
        raise PlanError(f"free mode has no {pp} pipeline stages: its slots do not move together; plan in lockstep")
    backward = plan.cost.passes != "forward" if backward is None else backward
    cost, row_bytes = _pass_cost(plan.cost if cost is None else cost, backward), row_bytes or RowBytes()
    times = plan.timeline(cost)
    closing = cost.closing_seconds if plan.mode == "free" else 0.0
    run = _run_plan(plan, cost, pp, vpp) if plan.mode == "lockstep" else run_pipeline([], [], 1)
    seconds = run.seconds + cost.update_seconds if plan.mode == "lockstep" else times.step_seconds
    once = closing + cost.update_seconds
    # A free plan has no actions: one micro-batch of a slot runs at a time.
    peak = _peak_rows(times.rows, run, pp * vpp) if run.actions[0] else times.rows.max(axis=0, initial=0) * 1.0
    inside, across = _link_bytes(plan, cost)
    hops = (pp * vpp - 1) * (2 if backward else 1)
    return Simulation(
        plan=plan,
        cost=cost,
        seconds=seconds,
        lower_bound_seconds=_lower_bound(plan, cost, pp) + once,
        bubble=run.bubble,
        # 1e-300: where a step takes no time, nothing is divided by 0.
        idle=max(0.0, 1 - float(times.busy.sum()) / max(plan.slots * (times.step_seconds - once), 1e-300)),
        peak_rows=peak,
        # Peak rows are of the whole model, which is pp · vpp parts: each of them holds `on_each_stage` of a row.
        activation_bytes=peak * (row_bytes.activations + pp * vpp * row_bytes.on_each_stage),
        inside_bytes=inside,
        across_bytes=across,
        stage_bytes=hops * row_bytes.between_stages * float(times.rows.sum()),
        closing_seconds=closing,
    )


def step_seconds(plan: Plan, stages: tuple[int, int] = (1, 1), cost: Cost | None = None) -> float:
    """Return the seconds of a step by a plan, through a pipeline of so many stages and chunks of each.

    >>> step_seconds(plan, stages=(2, 1))

    The cost is the plan's own unless given.
    """
    if stages[0] > 1:
        return simulate(plan, cost=cost, pp=stages[0], vpp=stages[1]).seconds
    return plan.predicted_seconds if cost is None else plan.timeline(cost).step_seconds


def simulate_run(plans: Sequence[Plan], **keywords: int | bool | Cost | RowBytes | None) -> tuple[Simulation, ...]:
    """Simulate every step of a run through `simulate`, with the same keywords.

    >>> sum(step.seconds for step in simulate_run(plans, pp=2))
    """
    return tuple(simulate(plan, **keywords) for plan in plans)  # pyright: ignore[reportArgumentType]


def _pass_cost(cost: Cost, backward: bool) -> Cost:
    """Return the cost of what is run. Raises PlanError where backward passes are asked of a cost that has none."""
    if backward and cost.passes == "forward":
        raise PlanError(
            f"backward passes cannot be priced by {cost.source or 'a cost'}, which is of forward passes alone; "
            "simulate with backward=False, or give the cost of both"
        )
    return cost if backward else cost.forward_only()


def _run_plan(plan: Plan, cost: Cost, pp: int, vpp: int) -> PipelineRun:
    """Run the plan's micro-batches through the stages; each takes the seconds of its slowest slot.

    The backward pass takes what remains of both passes after the forward pass. A forward pass may be priced by
    measurements of its own, and counts as no longer than both passes.
    """
    pass_seconds = np.maximum(plan.timeline(cost).busy.max(axis=1), cost.launch_seconds)  # the host launches no faster
    if cost.passes == "forward":
        return run_pipeline(pass_seconds.tolist(), None, pp, vpp)
    forward = np.minimum(plan.timeline(cost.forward_only()).busy.max(axis=1), pass_seconds)
    return run_pipeline(forward.tolist(), (pass_seconds - forward).tolist(), pp, vpp)


def _lower_bound(plan: Plan, cost: Cost, pp: int) -> float:
    """Return the seconds that no plan of these documents beats, with groups of the types that the plan was made for.

    Work and messages are spread over the stages too; the longest document goes through all of them.
    """
    cost = cost.under(plan.cost.cp_comm_type, plan.cost.a2a_size, heads=plan.cost.heads)
    bound = lower_bound_seconds(
        plan.lengths, plan.slots, plan.max_tokens_per_slot, cost, plan.mode, node_size=plan.node_size
    )
    return replace(bound, area=bound.area / pp, crossing=bound.crossing / pp).seconds


def _peak_rows(rows: NDArray[np.int64], run: PipelineRun, parts: int) -> NDArray[np.float64]:
    """Return the most rows that each slot's first stage, which holds most, keeps for its backward passes (slots,).

    A forward pass adds its micro-batch's rows, a backward pass frees them; the peak is of their running sum. A pass
    runs one of `parts` equal parts of the model, so a row counts as 1 / parts of a row of the whole model.
    """
    sign = np.array([1 if action.kind == "forward" else -1 for action in run.actions[0]], np.int64)
    rows_of_actions = rows[[action.micro_batch for action in run.actions[0]]]
    if not (sign < 0).any():  # nothing is kept: one micro-batch passes at a time
        return rows_of_actions.max(axis=0) / parts
    return np.cumsum(sign[:, None] * rows_of_actions, axis=0).max(axis=0) / parts


def _link_bytes(plan: Plan, cost: Cost) -> tuple[float, float]:
    """Return the bytes that all groups put on links inside and between nodes, by their own communication types.

    A group with a type for each layer counts by the commonest. Its degree is `inner` members that exchange heads times
    members of a ring: all exchange under a2a, the first level under a2a+p2p, none otherwise. States of mixers go
    between nodes if the group does.
    """
    inside = across = 0.0
    for group in (group for batch in plan.micro_batches for group in batch.groups if group.degree > 1):
        types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
        kind, levels = max(types, key=types.count), group.hierarchical_context_parallel_sizes
        inner = group.degree if kind == "a2a" else levels[0] if kind == "a2a+p2p" and levels else 1
        nodes, rows = [slot // plan.node_size for slot in group.slots], sum(group.laid_out)
        sent = bytes_by_level(cost, kind, (inner, group.degree // inner), rows, nodes)
        states = 0.0
        if cost.states:
            state_cost = cost.states.for_partition(group.partition)
            states = float(state_cost.wire_bytes(float(len(group.lengths)), float(rows), float(group.degree)))
        crosses = len(set(nodes)) > 1
        inside, across = inside + sent["inside"] + states * (not crosses), across + sent["across"] + states * crosses
    return inside, across
