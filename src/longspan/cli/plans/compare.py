"""`longspan plan --compare`: what planners, saved plans and degrees of an evaluation would cost, in one table.

Each row is made at its best: under the fastest communication type, at the best partition of a hybrid and, of an
evaluation, at the limit of rows that suits the pipeline (`plan/ways.py`). Imports no torch.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from longspan.cli.flags import Switch, check_least
from longspan.cli.plans.lengths import read_lengths
from longspan.cli.plans.planning import (
    UNPRICED,
    PlanningFlags,
    add_closing,
    check_degrees,
    check_slots,
    own_planners,
    plan_options,
    read_price,
)
from longspan.errors import ConfigError, LongspanError, plural
from longspan.layout import Layout
from longspan.plain_text import seconds_text, text_table
from longspan.plan import Cost, Plan, plan_dynamic, plan_fixed, plan_padded, read_plans
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.planners.options import PlanOptions
from longspan.plan.ways import (
    DegreeComparison,
    plan_evaluation,
    plan_type_text,
    plan_with_partition,
    which_degree,
    widest_degree,
)

NamedPlan = tuple[str, Plan | str]  # its name; the plan, or why there is none
NOTHING_POSSIBLE = 2  # status
MOST_DEGREES = 5  # of fixed plans
LEAST_DIFFERENCE = 5e-4  # relative, of two plans' times; a smaller one is told as "as much time as"
NOTE = """\
type: how groups share attention, the fastest for each (--cp-comm-type chooses one for all). x bound: time over a lower
bound; 1.000 cannot be improved. bubble: share of a stage's time that the pipeline leaves empty; idle: share that slots
wait for slower ones. rows: the most that a slot holds at once; longspan plan --gpu NAME --gpus N says what fits
memory."""
CLOSING_NOTE = """\
closing: share of a free step that gathers sharded parameters before it and sums their gradients after it."""
UNTIMED = (
    "relative: the plans are of a run on CPUs, whose speed nothing told; the numbers only compare plans.\n"
    "--machine FILE, of longspan bench calibrate, or --model FOLDER, on H200s, makes seconds of them"
)
DEGREES_NOTE = """\
filled: one document a group and micro-batch, documents repeated to fill the last pass. planned: each document once,
under the fastest type of each degree (--cp-comm-type chooses one); micro-batches, rows (the most that a slot holds at
once) and bubble are the planned evaluation's. Memory of activations goes with the rows."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags(PlanningFlags):
    """Flags that only a comparison has."""

    compare: Switch = False
    """Instead of making one plan, price planners and degrees next to each other (a table or JSON)."""
    world: int = 0
    """With --compare: ranks of the machine; slots = world / (tp x pp). Give this or --slots."""
    tp: int = 1
    """With --compare: tensor-parallel degree."""
    pp: int = 1
    """With --compare: pipeline stages."""
    vpp: int = 1
    """With --compare: model chunks of each stage (interleaved schedule)."""
    evaluation: Switch = False
    """With --compare: forward passes only."""
    which_eval_degree: Switch = False
    """With --compare: price an evaluation of the documents at each degree, filled up and planned, next to a dynamic
    plan."""
    accumulation: int = 0
    """With --which-eval-degree: micro-batches that keep the pipeline full; 0: the stages."""
    plans: tuple[str, ...] = ()
    """With --compare: price these saved plans instead, those in a run's folder, or those of all its steps
    (RUN/plans.jsonl)."""


def check_comparison_flags(flags: CompareFlags) -> None:
    """Raise ConfigError for a flag of one plan with --compare, for one of comparisons without it, and for one that the
    comparison would not read: saved plans are as they were made, and --which-eval-degree takes all degrees."""
    shared = {field.name for field in fields(PlanningFlags)} | {"compare"}
    of_comparisons = {field.name for field in fields(CompareFlags)} - shared
    changed = {field.name for field in fields(flags) if getattr(flags, field.name) != field.default}
    for name in (field.name for field in fields(flags) if field.name in changed - shared):
        flag = f"--{name.replace('_', '-')}"
        if flags.compare and name not in of_comparisons:
            raise ConfigError(f"{flag} is of one plan, and --compare prices several; leave one of the two out")
        if not flags.compare and name in of_comparisons:
            raise ConfigError(f"{flag} is of comparisons; add --compare, or leave it out")
    if flags.which_eval_degree and flags.cp:
        raise ConfigError(f"--cp {flags.cp} is one degree, and --which-eval-degree compares all; leave one of them out")
    if flags.which_eval_degree and flags.planner != "auto":
        raise ConfigError(
            f"--planner {flags.planner} plans no evaluation of --which-eval-degree, which compares degrees; leave one "
            "of them out"
        )
    for name in ("planner", "cp", "min_cp", "max_cp", "micro_batch_multiple"):
        if flags.plans and name in changed:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of plans that are made, and those of --plans are as they were saved; "
                "leave it out"
            )


def run_comparison(flags: CompareFlags) -> int:
    """Print a comparison; returns the exit code, 2 where nothing is possible."""
    check_least(flags, world=0, slots=0, tp=1, pp=1, vpp=1, node_size=1, accumulation=0)
    check_degrees(flags)
    if flags.plans:
        rows = [*_price_saved_plans(flags)]
        plans = _possible_plans(rows)
        together = f", {seconds_text(sum(plan.predicted_seconds for _, plan in plans))} together"
        sources = ", ".join(dict.fromkeys(plan.cost.source or "no machine" for _, plan in plans))
        title = f"{plural(len(rows), 'saved plan')}{together * _have_seconds(plans)}, priced for {sources}"
        return _show_rows(flags, title, rows)
    home = _make_home(flags)
    lengths, source = read_lengths(flags, home.slots)
    documents, tokens = plural(len(lengths), "document"), plural(sum(lengths), "token")
    title = (
        f"{documents} ({tokens}, longest {max(lengths):,}) from {source}\n"
        f"{plural(len(home.ranks), 'rank')} = {plural(home.slots, 'slot')} x tp {home.tp} x pp {home.pp}"
    )
    options = _comparison_options(flags, home, lengths)
    if not flags.which_eval_degree:
        return _show_rows(flags, title, [*_compared_plans(flags, lengths, home, options)])
    if options.cost.states:  # of a hybrid: contiguous rows are one run a slot, so fewest states are sent
        options = replace(options, partition="contiguous", cost=options.cost.for_partition("contiguous"))
    comparison = which_degree(
        lengths,
        home,
        options=options,
        accumulation=flags.accumulation or None,
        dynamic_degrees=(flags.min_cp, flags.max_cp),
    )
    print(_degrees_json(title, comparison) if flags.json else _degrees_table(title, comparison, flags))
    return 0


def _make_home(flags: CompareFlags) -> Layout:
    if flags.world and flags.slots:
        raise ConfigError(f"give --world or --slots, one of them; got --world {flags.world} --slots {flags.slots}")
    if not flags.world:
        check_slots(flags)
    world = flags.world or flags.slots * flags.tp * flags.pp
    return Layout(world, tp=flags.tp, pp=flags.pp)


def _slot_price(flags: CompareFlags, slots: int, mode: str) -> Cost:
    """Return the cost of one of `slots` slots: the price of a device, whose work the slot's tp ranks share."""
    training = not (flags.evaluation or flags.which_eval_degree)
    return read_price(flags, slots=slots, tp=flags.tp, mode=mode, training=training).shared_by(flags.tp)


def _comparison_options(flags: CompareFlags, home: Layout, lengths: Sequence[int]) -> PlanOptions:
    """Return the options of all compared plans, priced for a slot of tp ranks.

    --node-size counts ranks here, and a planner's node size counts slots. As in a run, the number of micro-batches is a
    multiple of the stages.
    """
    cost, node_size = _slot_price(flags, home.slots, flags.mode), max(1, flags.node_size // flags.tp)
    cost = add_closing(replace(cost, chunks=flags.vpp), flags, slots=home.slots, node_size=node_size, tp=flags.tp)
    multiple = math.lcm(flags.micro_batch_multiple, home.pp)
    return plan_options(
        flags, lengths, home, cost=cost, node_size=node_size, mode=flags.mode, micro_batch_multiple=multiple
    )


def _compared_plans(
    flags: CompareFlags, lengths: Sequence[int], home: Layout, options: PlanOptions
) -> Iterator[NamedPlan]:
    """Yield the padded plan, a baseline at the lowest degree, fixed ones, those of one's own planner, the dynamic one.

    Fixed degrees are that of --cp, or the lowest powers of two that divide the slots, hold the longest document, suit
    the query heads and are in the range of the dynamic plan; all slots if there is none.
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


def _price_saved_plans(flags: CompareFlags) -> Iterator[NamedPlan]:
    """Yield every saved plan under the flags' price or, without one, under its own.

    Plans of evaluations, whose cost is of forward passes, are priced without backward passes.
    """
    for name, plan in _read_saved_plans(flags.plans):
        if plan.mode == "free" and flags.pp > 1:
            raise ConfigError(f"{name} is a plan of free mode, which has no {flags.pp} pipeline stages; leave --pp out")
        flags_price = _slot_price(flags, plan.slots, plan.mode)  # checks the flags even where it is not used
        price = flags_price if flags.machine or flags.model or flags.tflops or flags.cost_model else plan.cost
        price = add_closing(price, flags, slots=plan.slots, node_size=plan.node_size, tp=flags.tp)
        if flags.evaluation or plan.cost.passes == "forward":
            price = price.forward_only()
        stages, chunks = (flags.pp, flags.vpp) if flags.pp > 1 else (plan.cost.stages, plan.cost.chunks)
        yield name, plan.reprice(replace(price, stages=stages, chunks=chunks))


def _read_saved_plans(names: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of --plans, each with its name: the file's, or the step in a .jsonl file.

    A name is a file, or a folder, of which the JSON files are taken; of a run's folder those in its folder `plans`.
    Raises ConfigError for a name without plans.
    """
    for name in names:
        path = Path(name)
        folder = path / "plans" if (path / "plans").is_dir() else path
        files = sorted(folder.glob("*.json")) if folder.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(f"{name} is neither a plan's JSON file nor a folder with plans")
        for file in files:
            if file.suffix == ".jsonl":
                yield from ((f"step {step}", plan) for step, plan in read_plans(file))
            else:
                yield file.stem, Plan.from_json(file.read_bytes())


def _show_rows(flags: CompareFlags, title: str, rows: Sequence[NamedPlan]) -> int:
    """Print compared plans as a table or JSON; returns the exit code: 2 where no plan is possible."""
    plans = _possible_plans(rows)
    if flags.json:
        values = [{"name": name} | ({"error": s} if isinstance(s, str) else _plan_json(s)) for name, s in rows]
        print(json.dumps({"title": title, "plans": values}, indent=1))
        return 0 if plans else NOTHING_POSSIBLE
    failed = [f"{name}: not possible: {reason}" for name, reason in rows if isinstance(reason, str)]
    if not plans:
        print("\n".join([title, "", *failed]))
        return NOTHING_POSSIBLE
    free, timed = [plan for _, plan in plans if plan.mode == "free"], _have_seconds(plans)
    names = ["plan", "type", "seconds" if timed else "relative", "x bound", "micro-batches", "bubble", "idle", "rows"]
    names += ["closing"] * bool(free)
    cells = [(name, *_plan_cells(plan), *([_closing_share(plan)] * bool(free))) for name, plan in plans]
    notes = [NOTE, *([CLOSING_NOTE] * bool(free))]
    notes += [UNPRICED] * (not all(plan.cost.closing_seconds for plan in free)) + [UNTIMED] * (not timed)
    print("\n".join([title, "", text_table(names, cells, left=2), *failed, *_fastest_line(plans), "", *notes]))
    return 0


def _fastest_line(plans: Sequence[tuple[str, Plan]]) -> list[str]:
    """Say which plan is fastest, and how much less time it takes than the fastest plan of one degree.

    There is no line without a plan of one degree, nor unless exactly one plan is dynamic: saved steps have several.
    """
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


def _possible_plans(rows: Sequence[NamedPlan]) -> list[tuple[str, Plan]]:
    return [(name, plan) for name, plan in rows if isinstance(plan, Plan)]


def _have_seconds(plans: Sequence[tuple[str, Plan]]) -> bool:
    """Return whether times are seconds: every plan's cost names the machine it is of."""
    return all(plan.cost.source for _, plan in plans)


def _plan_cells(plan: Plan) -> tuple[str, ...]:
    bubble, idle = _waits(plan)
    time, count = f"{plan.predicted_seconds:.4g}", f"{len(plan.micro_batches)}"
    rows = f"{plan.most_rows:,}"
    return plan_type_text(plan), time, f"{plan.ratio:.3f}", count, f"{bubble:.1%}", f"{idle:.1%}", rows


def _plan_json(plan: Plan) -> dict[str, Any]:
    bubble, idle = _waits(plan)
    return {
        "planner": plan.planner,
        "cp_comm_type": plan_type_text(plan),
        "seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "micro_batches": len(plan.micro_batches),
        "bubble": bubble,
        "idle": idle,
        "closing_seconds": plan.cost.closing_seconds if plan.mode == "free" else 0.0,
        "rows": plan.most_rows,
    }


def _waits(plan: Plan) -> tuple[float, float]:
    """Return the shares of time in which stages wait for other stages, and slots for slower slots.

    What a step takes once, its update and free mode's closing, is left out.
    """
    times = plan.timeline()
    once = plan.cost.update_seconds + (plan.cost.closing_seconds if plan.mode == "free" else 0.0)
    slots_end = max(float(times.end.max(initial=0.0)), 1e-300)  # nothing is divided by 0 where a step takes no time
    bubble = 1 - slots_end / plan.cost.stages / max(plan.predicted_seconds - once, 1e-300)
    return max(0.0, bubble), max(0.0, 1 - float(times.busy.sum()) / (plan.slots * slots_end))


def _closing_share(plan: Plan) -> str:
    """Return the share of a free plan's time that is its closing; "none" in lockstep."""
    if plan.mode == "lockstep":
        return "none"
    closing = plan.cost.closing_seconds
    return f"{closing / plan.predicted_seconds:.1%}" if closing else "not priced"


def _degrees_table(title: str, comparison: DegreeComparison, flags: CompareFlags) -> str:
    """Write the degrees of an evaluation as text, what was left out, and which is fastest.

    A document-step is one pass over one document; those that only fill up a micro-batch are wasted.
    """
    names = ["cp", "type", "document-steps", "wasted", "filled", "planned", "micro-batches", "rows", "bubble"]
    cells = list[tuple[str, ...]]()
    for choice in comparison.choices:
        steps, documents = choice.filled_steps, len(choice.planned.lengths)
        filled = f"{steps:,}", f"{steps - documents:,}", seconds_text(choice.filled_seconds)
        cells.append((f"{choice.cp}", plan_type_text(choice.planned), *filled, *_evaluation_cells(choice.planned)))
    if dynamic := comparison.dynamic:
        cells.append(("dynamic", "", f"{len(dynamic.lengths):,}", "0", "", *_evaluation_cells(dynamic)))
    filled, best = comparison.choices[0], comparison.best
    count, seconds = len(best.planned.lengths), best.planned.predicted_seconds
    passes = plural(flags.accumulation or flags.pp, "micro-batch", "es")
    lines = [
        f"cp {filled.cp}, filled up to {passes} a pass to keep the pipeline full: {filled.filled_steps:,} "
        f"document-steps for {plural(count, 'document')}, {seconds_text(filled.filled_seconds)}.",
        f"cp {best.cp}, planned: each document once, {count:,} document-steps in "
        f"{plural(len(best.planned.micro_batches), 'micro-batch', 'es')}, {seconds_text(seconds)} "
        f"({filled.filled_seconds / seconds:.1f} times faster).",
        comparison.reason(),
    ]
    return "\n".join([title, "", text_table(names, cells), "", *lines, *comparison.left_out, "", DEGREES_NOTE])


def _evaluation_cells(plan: Plan) -> tuple[str, ...]:
    time, count = seconds_text(plan.predicted_seconds), f"{len(plan.micro_batches):,}"
    return time, count, f"{plan.most_rows:,}", f"{_waits(plan)[0]:.0%}"


def _degrees_json(title: str, comparison: DegreeComparison) -> str:
    rows = [
        {
            "cp": choice.cp,
            "cp_comm_type": plan_type_text(choice.planned),
            "filled_document_steps": choice.filled_steps,
            "filled_seconds": choice.filled_seconds,
            **_evaluation_json(choice.planned),
        }
        for choice in comparison.choices
    ]
    dynamic = {"dynamic": _evaluation_json(comparison.dynamic)} if comparison.dynamic else {}
    answer = {"title": title, "degrees": rows, "best_cp": comparison.best.cp, "reason": comparison.reason()}
    return json.dumps(answer | {"left_out": list(comparison.left_out)} | dynamic, indent=1)


def _evaluation_json(plan: Plan) -> dict[str, float | int | None]:
    return {
        "planned_document_steps": len(plan.lengths),
        "planned_seconds": plan.predicted_seconds,
        "planned_lower_bound_seconds": plan.lower_bound_seconds,
        "planned_micro_batches": len(plan.micro_batches),
        "planned_max_tokens_per_slot": plan.max_tokens_per_slot,
        "planned_rows_of_slot": plan.most_rows,
        "bubble": _waits(plan)[0],
    }
