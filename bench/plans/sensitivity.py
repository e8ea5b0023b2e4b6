"""How a plan changes if a constant of its cost is wrong, and what that costs: is calibration worth the time?

A plan is made with one constant a share lower or higher, and priced with the right cost. Only constants of the machine
are changed; bytes and heads are those of the model. Nothing here covers two constants that are wrong at the same time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from longspan.plan.cost.cost import Cost
from longspan.plan.cost.links import LEVELS, Level, Link, Wire
from longspan.plan.plan import Plan

SHARE = 0.2
OF_COST = {
    "time of linear layers": "linear_seconds",
    "time of attention": "attention_seconds",
    "time of a ring's merging": "merge_seconds",
    "time of laying out what is gathered": "copy_seconds",
    "time of a micro-batch's launches": "micro_batch_seconds",
    "time of gathers and sums of sharded parameters": "sharding_seconds",
    "time of closing a free step": "closing_seconds",
}


@dataclass(frozen=True)
class Sensitivity:
    """A plan that was made with a constant `factor` times as large as it is.

    `moved` is the share of rows in groups of another degree or type than in the plan of the right cost, by degree and
    type in total. `regret` is how much longer the plan takes than that one, relative, both priced by the right cost;
    it is below 0 if the plan of the wrong cost is faster by chance, since planners search.
    """

    constant: str
    factor: float
    plan: Plan
    moved: float
    regret: float


def plan_sensitivity(make: Callable[[Cost], Plan], cost: Cost, share: float = SHARE) -> Iterator[Sensitivity]:
    """Make a plan with each constant of a cost a share lower and higher, and compare it with the plan of the cost.

    >>> make = lambda cost: plan_dynamic(lengths, home, cost=cost, max_tokens_per_slot=8192)
    >>> max(changed.regret for changed in plan_sensitivity(make, Cost()))  # doctest: +SKIP
    0.004
    """
    right_plan = make(cost)
    right_rows = rows_by_way(right_plan)
    for constant, factor, wrong_cost in wrong_costs(cost, share):
        plan = make(wrong_cost)
        rows = rows_by_way(plan)
        moved = sum((right_rows - rows).values()) / max(1, right_plan.tokens)
        yield Sensitivity(
            constant, factor, plan, moved, plan.timeline(cost).step_seconds / right_plan.predicted_seconds - 1
        )


def rows_by_way(plan: Plan) -> Counter[tuple[int, str]]:
    """Count the rows of a plan by the degree and the type of their group; the type of a group of one slot is ""."""
    rows = Counter[tuple[int, str]]()
    for group in plan.groups:
        kind = group.cp_comm_type if isinstance(group.cp_comm_type, str) else "/".join(group.cp_comm_type)
        rows[group.degree, kind if group.degree > 1 else ""] += group.tokens
    return rows


def wrong_costs(cost: Cost, share: float = SHARE) -> Iterator[tuple[str, float, Cost]]:
    """Yield each constant's name, a factor of 1 − `share` or 1 + `share`, and the cost in which it is multiplied.

    Times that are 0 are left out. Those of state-space layers are of summaries and messages: their scans are among the
    linear layers.
    """
    for factor in (1 - share, 1 + share):
        for constant, name in OF_COST.items():
            if value := getattr(cost, name):
                more = {"real_row_seconds": cost.real_row_seconds * factor} if name == "linear_seconds" else {}
                yield constant, factor, replace(cost, **{name: value * factor}, **more)
        if cost.network and cost.network.half_speed_rows:
            network = replace(cost.network, half_speed_rows=cost.network.half_speed_rows * factor)
            yield "rows at which kernels reach half their speed", factor, replace(cost, network=network)
        network = cost.network and replace(cost.network, step_seconds=cost.network.step_seconds * factor)
        slower = replace(cost, ring_step_seconds=cost.ring_step_seconds * factor, network=network)
        yield "latency of a message", factor, slower
        for level in LEVELS:
            yield f"speed of links {level} hosts", factor, _with_speed(cost, level, factor)
        if cost.states:
            seconds = {name: s * factor for name, s in cost.states.constants().items() if name.endswith("_seconds")}
            yield "time of state-space layers", factor, replace(cost, states=replace(cost.states, **seconds))


def slower_link(link: Link, factor: float) -> Link:
    wires = {k: Wire(w.latency * factor, w.bytes_per_second / factor) for k, w in link.wires().items()}
    return Link(**wires)


def _with_speed(cost: Cost, level: Level, factor: float) -> Cost:
    name = f"{level}_bytes_per_second"
    network = cost.network and replace(cost.network, **{level: slower_link(getattr(cost.network, level), 1 / factor)})
    return replace(cost, network=network, **{name: getattr(cost, name) * factor})
