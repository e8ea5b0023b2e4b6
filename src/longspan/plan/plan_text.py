"""A plan as plain text that reads well in a terminal or a log: sizes and times first, then the micro-batches."""

from collections import Counter

import numpy as np

from longspan.errors import counted
from longspan.plan.cost.cost import Cost
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.plan_fields import PlanFields
from longspan.plan.timeline import Timeline

NO_MACHINE = "no machine: seconds only say how the parts of plans compare"


def plan_table(plan: PlanFields, cost: Cost | None = None, limit: int = 24) -> str:
    """The plan as text; of more than `limit` micro-batches the middle ones are counted, not shown."""
    times = plan.timeline(cost)
    return "\n".join([*_header(plan, cost or plan.cost, times), "", *_lines(plan, times, limit)])


def _header(plan: PlanFields, cost: Cost, times: Timeline) -> list[str]:
    cap = f"at most {plan.max_tokens_per_slot:,}" if plan.max_tokens_per_slot else "no limit on"
    lengths = sorted(plan.lengths)
    median = f", median {lengths[len(lengths) // 2]:,}" if lengths else ""
    spread = f"{lengths[0]:,} to {lengths[-1]:,} rows{median}" if lengths else "none"
    fullest = int(times.rows.max(initial=0))
    return [
        f"{plan.planner} plan, {plan.mode}: {counted(plan.slots, 'slot')}, "
        f"{counted(len(plan.micro_batches), 'micro-batch', 'es')}, {cap} rows a slot",
        f"  documents   {len(plan.lengths):>14,}   {spread}",
        f"  tokens      {plan.tokens:>14,}   {plan.targets:,} targets",
        f"  predicted   {_seconds(times.step_seconds):>14}   {_against_bound(plan, times)}",
        f"  priced for  {cost.source or NO_MACHINE}",
        *_closing(plan, cost, times),
        f"  rows used   {plan.efficiency:>14.1%}   of slots x micro-batches x the fullest slot's {fullest:,} rows",
    ]


def _against_bound(plan: PlanFields, times: Timeline) -> str:
    bound = plan.lower_bound_seconds
    return f"{times.step_seconds / bound:.3f} x the lower bound of {_seconds(bound)}" if bound else "no lower bound"


def _closing(plan: PlanFields, cost: Cost, times: Timeline) -> list[str]:
    """In free mode, what of the predicted seconds is neither a document's nor a wait for one."""
    if plan.mode == "lockstep" or not cost.closing_seconds:
        return []
    taken, share = _seconds(cost.closing_seconds), cost.closing_seconds / times.step_seconds
    return [f"  closing     {taken:>14}   {share:.1%} of it: parameters gathered, gradients summed"]


def _lines(plan: PlanFields, times: Timeline, limit: int) -> list[str]:
    count = len(plan.micro_batches)
    shown = (
        list(range(count)) if count <= limit + 1 else [*range(limit - limit // 3), *range(count - limit // 3, count)]
    )
    groups = {m: _degrees(plan.micro_batches[m]) for m in shown}
    width = max(len("groups"), *map(len, groups.values()))
    lines = [f"  micro-batch   {'groups':<{width}}   {'tokens':>11}   fullest slot      seconds    idle"]
    for before, m in zip([-1, *shown], shown, strict=False):
        if m - before > 1:
            lines.append(f"            …   {counted(m - before - 1, 'more micro-batch', 'es')}")
        batch, longest = plan.micro_batches[m], _seconds(float(np.max(times.busy[m], initial=0.0)))
        lines.append(
            f"  {m:>11}   {groups[m]:<{width}}   {batch.tokens:>11,}   {int(times.rows[m].max()):>12,}"
            f"   {longest:>10}   {times.idle[m]:>5.1%}"
        )
    return lines


def _degrees(batch: MicroBatch, most: int = 4) -> str:
    """The groups by degree, widest first, as in '2 x cp 8, 16 x cp 1'."""
    counts = sorted(Counter(group.degree for group in batch.groups).items(), reverse=True)
    named = [f"{count} x cp {degree}" for degree, count in counts]
    others = sum(count for _, count in counts[most:])
    return ", ".join(named[:most]) + (f", {others} more" if others else "") or "dummy"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 0.1:
            return f"{value * scale:,.3f} {unit}"
    return f"{value * 1e6:,.1f} us"
