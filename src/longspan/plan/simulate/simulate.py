"""What a plan would do on a machine: time through pipeline stages, bubbles, memory of each slot, bytes on the links.

It follows the cost model and the plan to the letter; what neither holds (the wire between stages, optimizer steps, the
weights' own memory) is not in the numbers. `which_degree.py` asks it which evaluation degree is best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.plan.cost.bound import lower_bound_seconds
from longspan.plan.cost.cost import Cost
from longspan.plan.plan import Plan
from longspan.plan.simulate.pipeline_time import PipelineRun, run_pipeline
from longspan.plan.simulate.row_bytes import RowBytes
from longspan.plan.timeline import GroupTable


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

    The cost is the plan's own unless given; `shared_by(cost, tp)` makes that of tensor-parallel slots. `backward` None
    runs the passes that the plan's own cost is of; an evaluation is priced by `Cost.forward_only`. Raises PlanError for
    a free plan on more than one stage, whose micro-batches do not move together, and where backward passes are asked of
    a cost without them.
    """
    if plan.mode == "free" and pp > 1:
        raise PlanError(f"free mode has no {pp} pipeline stages: its slots do not move together; plan in lockstep")
    backward = plan.cost.passes != "forward" if backward is None else backward
    cost, row_bytes = _cost_of_passes(plan.cost if cost is None else cost, backward), row_bytes or RowBytes()
    times = plan.timeline(cost)
    closing = cost.closing_seconds if plan.mode == "free" else 0.0
    run = _run(plan, cost, pp, vpp) if plan.mode == "lockstep" else run_pipeline([], [], 1)
    seconds = run.seconds if plan.mode == "lockstep" else times.step_seconds
    peak = _peak_rows(times.rows, run, pp * vpp) if run.actions[0] else times.rows.max(axis=0, initial=0) * 1.0
    inside, across = _sent_bytes(plan, cost)
    hops = (pp * vpp - 1) * (2 if backward else 1)
    return Simulation(
        plan=plan,
        cost=cost,
        seconds=seconds,
        lower_bound_seconds=_lower_bound(plan, cost, pp) + closing,
        bubble=run.bubble,
        idle=max(0.0, 1 - float(times.busy.sum()) / max(plan.slots * (times.step_seconds - closing), 1e-300)),
        peak_rows=peak,
        activation_bytes=peak * (row_bytes.kept + pp * vpp * row_bytes.on_each_stage),
        inside_bytes=inside,
        across_bytes=across,
        stage_bytes=hops * row_bytes.between_stages * float(times.rows.sum()),
        closing_seconds=closing,
    )


def simulate_run(plans: Sequence[Plan], **how: int | bool | Cost | RowBytes | None) -> tuple[Simulation, ...]:
    """Every step of a run through `simulate`, with the same keywords.

    >>> sum(step.seconds for step in simulate_run(plans, pp=2))
    """
    return tuple(simulate(plan, **how) for plan in plans)  # pyright: ignore[reportArgumentType]


def shared_by(cost: Cost, tp: int) -> Cost:
    """The cost of a slot of `tp` tensor-parallel ranks: compute and keys and values divide, latencies do not."""
    if isinstance(tp, bool) or tp < 1:
        raise PlanError(f"tp is {tp!r}; a degree is an integer of at least 1")
    return replace(
        cost,
        linear_seconds=cost.linear_seconds / tp,
        attention_seconds=cost.attention_seconds / tp,
        ring_bytes=cost.ring_bytes / tp,
        exchange_bytes=cost.exchange_bytes / tp,
        states=cost.states and cost.states.shared_by(tp),
        forward=cost.forward and shared_by(cost.forward, tp),
    )


def _cost_of_passes(cost: Cost, backward: bool) -> Cost:
    """The cost of what is run. Raises PlanError where backward passes are asked of a cost that has none."""
    if backward and cost.passes == "forward":
        raise PlanError(
            f"backward passes cannot be priced by {cost.source or 'a cost'}, which is of forward passes alone; "
            "simulate with backward=False, or give the cost of both"
        )
    return cost if backward else cost.forward_only()


def _run(plan: Plan, cost: Cost, pp: int, vpp: int) -> PipelineRun:
    """The plan's micro-batches, each of its slowest slot's seconds, through the stages."""
    whole = np.maximum(plan.timeline(cost).busy.max(axis=1), cost.launch_seconds)
    if cost.passes == "forward":
        return run_pipeline(whole.tolist(), None, pp, vpp)
    forward = np.minimum(plan.timeline(cost.forward_only()).busy.max(axis=1), whole)
    return run_pipeline(forward.tolist(), (whole - forward).tolist(), pp, vpp)


def _lower_bound(plan: Plan, cost: Cost, pp: int) -> float:
    bound = lower_bound_seconds(
        plan.lengths, plan.slots, plan.max_tokens_per_slot, cost, plan.mode, node_size=plan.node_size
    )
    return replace(bound, area=bound.area / pp).seconds


def _peak_rows(rows: NDArray[np.int64], run: PipelineRun, parts: int) -> NDArray[np.float64]:
    """The most rows that each slot's first stage, which holds most, keeps for its backward passes (slots,)."""
    sign = np.array([1 if action.kind == "forward" else -1 for action in run.actions[0]], np.int64)
    rows_of_actions = rows[[action.micro_batch for action in run.actions[0]]]
    if not (sign < 0).any():  # nothing is kept: one micro-batch passes at a time
        return rows_of_actions.max(axis=0) / parts
    return np.cumsum(sign[:, None] * rows_of_actions, axis=0).max(axis=0) / parts


def _sent_bytes(plan: Plan, cost: Cost) -> tuple[float, float]:
    """Bytes that all groups put on links inside and between nodes."""
    table = GroupTable.of(plan.micro_batches)
    sent = cost.group_bytes(table.tokens, table.degree, table.documents)
    inside = table.inside(plan.node_size)
    return float(sent[inside].sum()), float(sent[~inside].sum())
