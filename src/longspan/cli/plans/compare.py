"""`longspan plan --compare`: what planners and degrees of an evaluation would cost, in one table.

Each row is made at its best: under the fastest communication type, at the best partition of a hybrid and, of an
evaluation, at the limit of rows that suits the pipeline (`plan/ways.py`). Imports no torch.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from longspan.cli.flags import check_least
from longspan.cli.plans.planning import (
    UNPRICED,
    PlanningFlags,
    check_degrees,
    check_slots,
    own_planners,
    plan_options,
    read_lengths,
    read_price,
)
from longspan.cli.plans.question import GpuFlags
from longspan.errors import ConfigError, LongspanError, plural
from longspan.layout import Layout
from longspan.plain_text import seconds_text, text_table
from longspan.plan import Cost, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.planners.options import PlanOptions
from longspan.plan.ways import plan_evaluation, plan_type_text, plan_with_partition, which_degree, widest_degree

NamedPlan = tuple[str, Plan | str]  # its name; the plan, or why there is none
NOTHING_POSSIBLE = 2  # status
MOST_DEGREES = 5  # of fixed plans
LEAST_DIFFERENCE = 5e-4  # relative, of two plans' times; a smaller one is told as "as much time as"
NOTE = """\
type: how groups share attention, the fastest for each (--cp-comm-type chooses one for all). x bound: time over a lower
bound; 1.000 cannot be improved. bubble: share of a stage's time that the pipeline leaves empty; idle: share that slots
wait for slower ones. rows: the most that a slot holds at once; --gpu NAME --gpus N finds the rows that memory holds."""
CLOSING_NOTE = """\
closing: share of a free step that gathers sharded parameters before it and sums their gradients after it."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags(GpuFlags):
    """Flags that only a comparison has."""

    compare: bool = False
    """Instead of making one plan, price planners and degrees next to each other (a table or JSON); with --gpu at the
    rows that memory holds."""
    world: int = 0
    """With --compare: ranks of the machine; slots = world / (tp x pp). Give this or --slots."""
    tp: int = 1
    """With --compare: tensor-parallel degree."""
    pp: int = 1
    """With --compare: pipeline stages."""
    vpp: int = 1
    """With --compare: model chunks of each stage (interleaved schedule)."""
    evaluation: bool = False
    """With --compare: forward passes only."""
    which_eval_degree: bool = False
    """With --compare: price an evaluation of the documents at each degree, next to a dynamic plan."""
    accumulation: int = 0
    """With --which-eval-degree: micro-batches to which a loop fills up each pass, with which it is compared; 0: the
    stages."""


def check_comparison_flags(flags: CompareFlags) -> None:
    """Raise ConfigError for a flag of one plan with --compare, for one of comparisons without it, and for one that the
    comparison would not read: --which-eval-degree takes all degrees."""
    shared = {field.name for field in fields(PlanningFlags)} | {"compare"}
    of_comparisons = {field.name for field in fields(CompareFlags)} - {field.name for field in fields(GpuFlags)}
    for name in (field.name for field in fields(flags) if getattr(flags, field.name) != field.default):
        flag = f"--{name.replace('_', '-')}"
        if flags.compare and name not in shared | of_comparisons:
            raise ConfigError(f"{flag} is of one plan, and --compare prices several; leave one of the two out")
        if not flags.compare and name in of_comparisons:
            raise ConfigError(f"{flag} is of comparisons; add --compare, or leave it out")
        if flags.which_eval_degree and name in ("cp", "planner"):
            raise ConfigError(
                f"{flag} {getattr(flags, name)} is one row, and --which-eval-degree compares all degrees; leave one "
                "of them out"
            )


def run_comparison(flags: CompareFlags) -> int:
    check_least(flags, world=0, slots=0, tp=1, pp=1, vpp=1, node_size=1, accumulation=0)
    check_degrees(flags)
    if flags.world and flags.slots:
        raise ConfigError(f"give --world or --slots, one of them; got --world {flags.world} --slots {flags.slots}")
    if not flags.world:
        check_slots(flags)
    home = Layout(flags.world or flags.slots * flags.tp * flags.pp, tp=flags.tp, pp=flags.pp)
    lengths, source = read_lengths(flags, home.slots)
    title = (
        f"{plural(len(lengths), 'document')} ({plural(sum(lengths), 'token')}, longest {max(lengths):,}) from {source}"
        f"\n{plural(len(home.ranks), 'rank')} = {plural(home.slots, 'slot')} x tp {home.tp} x pp {home.pp}"
    )
    node_size = max(1, flags.node_size // flags.tp)  # in slots, where the flag counts ranks
    cost = replace(_slot_price(flags, home.slots, flags.mode), chunks=flags.vpp)
    options = plan_options(
        flags,
        lengths,
        home,
        cost=cost,
        node_size=node_size,
        mode=flags.mode,
        micro_batch_multiple=math.lcm(flags.micro_batch_multiple, home.pp),  # a multiple of the stages, as in a run
    )
    if flags.which_eval_degree:
        return _compare_degrees(flags, title, lengths, home, options)
    return _show_rows(flags, title, [*_compared_plans(flags, lengths, home, options)])


def _slot_price(flags: CompareFlags, slots: int, mode: str) -> Cost:
    training = not (flags.evaluation or flags.which_eval_degree)
    return read_price(flags, slots=slots, tp=flags.tp, mode=mode, training=training).shared_by(flags.tp)


def _compared_plans(
    flags: CompareFlags, lengths: Sequence[int], home: Layout, options: PlanOptions
) -> Iterator[NamedPlan]:
    """Fixed degrees are that of --cp, or the lowest powers of two that divide the slots, hold the longest document,
    suit the query heads and are in the range of the dynamic plan; all slots if there is none. The padded plan, a
    baseline, has the lowest.
    """
    slots, types = home.slots, check_comm_types(options.cp_comm_type)
    degrees = [
        cp
        for cp in (1 << power for power in range(slots.bit_length()))
        if slots % cp == 0
        and flags.min_cp <= cp <= (flags.max_cp or slots)
        and heads_allow(cp, options.heads, types, home.tp)
        and (not options.rows or max(lengths) <= options.rows * cp)
    ][:MOST_DEGREES] or [slots]
    degrees = [flags.cp] if flags.cp else degrees
    dynamic = partial(plan_dynamic, min_cp=flags.min_cp, max_cp=flags.max_cp or None)
    planners: list[tuple[str, Callable[..., Plan], int]] = [
        (f"padded, cp {degrees[0]}", partial(plan_padded, cp=degrees[0]), degrees[0]),
        *((f"fixed, cp {cp}", partial(plan_fixed, cp=cp), cp) for cp in degrees),
        *((name, planner, slots) for name, planner in own_planners(flags).items()),
        ("dynamic", dynamic, widest_degree(home, options, flags.max_cp)),
    ]
    for name, planner, widest in planners:

        def make(way: PlanOptions, planner: Callable[..., Plan] = planner, widest: int = widest) -> Plan:
            if not flags.evaluation:
                return planner(lengths, home, options=way)
            return plan_evaluation(lambda limited: planner(lengths, home, options=limited), lengths, home, way, widest)

        try:
            yield name, plan_with_partition(make, options)[0]
        except LongspanError as error:  # the other rows are worth printing all the same
            yield name, str(error)


def _compare_degrees(
    flags: CompareFlags, title: str, lengths: Sequence[int], home: Layout, options: PlanOptions
) -> int:
    if options.cost.states:  # of a hybrid: contiguous rows are one run a slot, so fewest states are sent
        options = replace(options, partition="contiguous", cost=options.cost.for_partition("contiguous"))
    degrees, count = (flags.min_cp, flags.max_cp), flags.accumulation or home.pp
    comparison = which_degree(lengths, home, options=options, accumulation=count, dynamic_degrees=degrees)
    rows: list[NamedPlan] = [(f"fixed, cp {choice.cp}", choice.planned) for choice in comparison.choices]
    rows += [("dynamic", comparison.dynamic)] if comparison.dynamic else []
    filled, seconds = comparison.choices[0], comparison.best.planned.predicted_seconds
    loop = (
        f"a loop that fills up each pass to {plural(count, 'micro-batch', 'es')} at cp {filled.cp}: "
        f"{filled.filled_steps:,} documents in place of {len(lengths):,}, {seconds_text(filled.filled_seconds)}, "
        f"{filled.filled_seconds / seconds:.1f} times as long as cp {comparison.best.cp}"
    )
    conclusion = {"best_cp": comparison.best.cp, "reason": comparison.reason(), "filled": loop}
    return _show_rows(flags, title, rows, conclusion)


def _show_rows(
    flags: CompareFlags, title: str, rows: Sequence[NamedPlan], conclusion: dict[str, Any] | None = None
) -> int:
    plans = [(name, plan) for name, plan in rows if isinstance(plan, Plan)]
    if flags.json:
        values = [{"name": name} | ({"error": p} if isinstance(p, str) else _plan_figures(p)) for name, p in rows]
        print(json.dumps({"title": title, "plans": values} | (conclusion or {}), indent=1))
        return 0 if plans else NOTHING_POSSIBLE
    lines = [f"{name}: not possible: {reason}" for name, reason in rows if isinstance(reason, str)]
    if not plans:
        print("\n".join([title, "", *lines]))
        return NOTHING_POSSIBLE
    free = [plan for _, plan in plans if plan.mode == "free"]
    names = ["plan", "type", "seconds", "x bound", "micro-batches", "bubble", "idle", "rows"]
    cells = list[tuple[str, ...]]()
    for name, plan in plans:
        of = _plan_figures(plan)
        time, waits = f"{plan.predicted_seconds:.4g}", (f"{of['bubble']:.1%}", f"{of['idle']:.1%}")
        row = name, of["cp_comm_type"], time, f"{plan.ratio:.3f}", f"{of['micro_batches']}", *waits, f"{of['rows']:,}"
        share = of["closing_seconds"] / plan.predicted_seconds
        closing = "none" if plan.mode == "lockstep" else f"{share:.1%}" if share else "not priced"
        cells.append((*row, *[closing] * bool(free)))
    lines += [conclusion["reason"], conclusion["filled"]] if conclusion else _fastest_line(plans)
    notes = [NOTE] + [CLOSING_NOTE] * bool(free)
    notes += [UNPRICED] * (not all(plan.cost.closing_seconds for plan in free))
    print("\n".join([title, "", text_table([*names, *["closing"] * bool(free)], cells, left=2), *lines, "", *notes]))
    return 0


def _fastest_line(plans: Sequence[tuple[str, Plan]]) -> list[str]:
    fixed = [row for row in plans if row[1].planner == "fixed"]
    if not fixed or [plan.planner for _, plan in plans].count("dynamic") != 1:
        return []
    (name, best), (fixed_name, best_fixed) = (
        min(those, key=lambda row: row[1].predicted_seconds) for those in (plans, fixed)
    )
    kind = f" under {plan_type_text(best_fixed)}" if plan_type_text(best_fixed) else ""
    if best is best_fixed:
        return [f"the fastest is the plan of one degree {fixed_name}{kind}"]
    less = 1 - best.predicted_seconds / best_fixed.predicted_seconds
    words = "as much time as" if less < LEAST_DIFFERENCE else f"{less:.1%} less time than"
    return [f"the {name} plan takes {words} the fastest plan of one degree ({fixed_name}{kind})"]


def _plan_figures(plan: Plan) -> dict[str, Any]:
    times, closing = plan.timeline(), plan.cost.closing_seconds if plan.mode == "free" else 0.0
    slots_end = max(float(times.end.max(initial=0.0)), 1e-300)  # nothing is divided by 0 where a step takes no time
    seconds = max(plan.predicted_seconds - plan.cost.update_seconds - closing, 1e-300)
    return {
        "planner": plan.planner,
        "cp_comm_type": plan_type_text(plan),
        "seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "micro_batches": len(plan.micro_batches),
        "bubble": max(0.0, 1 - slots_end / plan.cost.stages / seconds),
        "idle": max(0.0, 1 - float(times.busy.sum()) / (plan.slots * slots_end)),
        "closing_seconds": closing,
        "rows": plan.most_rows,
    }
