"""What `longspan plan --compare` shows of planners, saved plans and degrees of an evaluation: text, JSON, a picture."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from longspan.cli.plans.planning import UNPRICED
from longspan.errors import plural
from longspan.plain_text import seconds_text, text_table
from longspan.plan import Plan, slot_rows
from longspan.plan.simulate.compare import NamedPlan
from longspan.plan.simulate.evaluation import DegreeComparison
from longspan.plan.simulate.sensitivity import Sensitivity
from longspan.plan.simulate.type_and_partition import plan_type_text
from longspan.report.chart import Chart, Series
from longspan.report.chart_documents import NamedBar, bar_document, chart_document

_COMPARISON_NOTE = """\
type: how groups share attention, the fastest for each (--cp-comm-type chooses one for all). x bound: time over a lower
bound; 1.000 cannot be improved. bubble: share of a stage's time that the pipeline leaves empty; idle: share that slots
wait for slower ones. rows: the most that a slot holds at once; longspan plan --gpu NAME --gpus N says what fits
memory."""
LEAST_DIFFERENCE = 5e-4  # relative, of two plans' times; a smaller one is told as "as much time as"
NO_MACHINE = "no machine"
UNTIMED = (
    "relative: the plans are of a run on CPUs, whose speed nothing told; the numbers only compare plans.\n"
    "--machine FILE, of longspan bench calibrate, or --model FOLDER, on H200s, makes seconds of them"
)
_CLOSING_NOTE = """\
closing: share of a free step that gathers sharded parameters before it and sums their gradients after it."""
_SENSITIVITY_NOTE = """\
rows moved: share of rows in groups of another degree or type. longer by: time of the plan that is made with the wrong
constant over that of the right one, both at the right price; 0 also where it is faster by chance."""
SAME = 5e-3  # relative difference in time up to which the dynamic plan gets no line of its own in the picture
_NOTE = """\
filled: one document a group and micro-batch, documents repeated to fill the last pass. planned: each document once,
under the fastest type of each degree (--cp-comm-type chooses one); micro-batches, rows (the most that a slot holds at
once) and bubble are the planned evaluation's. Memory of activations goes with the rows."""


def title_saved_plans(rows: Sequence[NamedPlan]) -> str:
    """Write how many saved plans there are, their seconds together, and what they were priced for."""
    plans = _possible_plans(rows)
    total = sum(plan.predicted_seconds for _, plan in plans)
    total_text = f", {seconds_text(total)} together" if _have_seconds(rows) else ""
    sources = ", ".join(dict.fromkeys(plan.cost.source or NO_MACHINE for _, plan in plans))
    return f"{plural(len(rows), 'saved plan')}{total_text}, priced for {sources}"


def comparison_table(title: str, rows: Sequence[NamedPlan]) -> str:
    """Write plans as text: a line for each, those that are not possible, and notes."""
    plans, timed = _possible_plans(rows), _have_seconds(rows)
    free = [plan for _, plan in plans if plan.mode == "free"]
    failed = [f"{name}: not possible: {reason}" for name, reason in rows if isinstance(reason, str)]
    if not plans:
        return "\n".join([title, "", *failed])
    names = ["plan", "type", "seconds" if timed else "relative", "x bound", "micro-batches", "bubble", "idle", "rows"]
    names += ["closing"] if free else []
    lines = [(name, *_plan_cells(plan), *([_closing_share(plan)] if free else [])) for name, plan in plans]
    notes = [_COMPARISON_NOTE, *([_CLOSING_NOTE] if free else [])]
    if not all(plan.cost.closing_seconds for plan in free):
        notes.append(UNPRICED)
    if not timed:
        notes.append(UNTIMED)
    return "\n".join([title, "", text_table(names, lines, left=2), *failed, *compare_with_fixed(rows), "", *notes])


def compare_with_fixed(rows: Sequence[NamedPlan]) -> list[str]:
    """Compare the dynamic plan and the fastest plan of one degree, in a line.

    There is no line without a plan of one degree, nor unless exactly one plan is dynamic: saved steps have several.
    """
    possible = list(_possible_plans(rows))
    fixed, dynamic = ([row for row in possible if row[1].planner == planner] for planner in ("fixed", "dynamic"))
    if not fixed or len(dynamic) != 1:
        return []
    name, fastest_fixed = min(fixed, key=lambda row: row[1].predicted_seconds)
    difference = dynamic[0][1].predicted_seconds / fastest_fixed.predicted_seconds - 1
    difference_words = f"{abs(difference):.1%} {'less' if difference < 0 else 'more'} time than"
    words = "as much time as" if abs(difference) < LEAST_DIFFERENCE else difference_words
    kind = f" under {plan_type_text(fastest_fixed)}" if plan_type_text(fastest_fixed) else ""
    return [f"the dynamic plan takes {words} the fastest plan of one degree ({name}{kind})"]


def comparison_picture(title: str, rows: Sequence[NamedPlan]) -> str:
    """Draw a bar for each plan's seconds, the dynamic one in a second colour, and a line at the least bound; an SVG."""
    plans, timed = _possible_plans(rows), _have_seconds(rows)
    bars = [
        NamedBar(name, plan.predicted_seconds, _bar_text(plan, timed), int(plan.planner == "dynamic"))
        for name, plan in plans
    ]
    bound = min((plan.lower_bound_seconds for _, plan in plans), default=0.0)
    line = (bound, f"lower bound{f', {seconds_text(bound)}' if timed else ''}")
    unit = "predicted seconds" if timed else "predicted time, of no machine"
    heading = "\n".join(
        [f"Predicted time of a step: {title.splitlines()[0]}", *title.splitlines()[1:], *compare_with_fixed(rows)]
    )
    return bar_document(heading, bars, unit, line)


def _bar_text(plan: Plan, timed: bool) -> str:
    """Write the text behind a plan's bar: seconds (if `timed`), communication type, and time over its bound."""
    texts = seconds_text(plan.predicted_seconds) if timed else "", plan_type_text(plan), f"{plan.ratio:.3f} x bound"
    return " · ".join(filter(None, texts))


def comparison_json(title: str, rows: Sequence[NamedPlan], changes: Sequence[Sensitivity] = ()) -> str:
    """Write plans as a JSON object, or why a plan is impossible; with `changes`, what wrong constants change."""
    plans = [{"name": name} | ({"error": s} if isinstance(s, str) else _plan_json(s)) for name, s in rows]
    content: dict[str, Any] = {"title": title, "plans": plans}
    if changes:
        names = ("constant", "factor", "moved", "regret")
        content["sensitivity"] = [{name: getattr(change, name) for name in names} for change in changes]
    return json.dumps(content, indent=1)


def sensitivity_lines(changes: Sequence[Sensitivity]) -> list[str]:
    """Write how the dynamic plan changes with each constant, the most harmful first; nothing if it was not computed."""
    if not changes:
        return []
    worst_first = sorted(changes, key=lambda change: -change.regret)
    names = ["constant", "wrong by", "rows moved", "longer by"]
    cells = [(c.constant, f"{c.factor - 1:+.0%}", f"{c.moved:.0%}", f"{max(0.0, c.regret):.2%}") for c in worst_first]
    return ["", "If a constant is wrong, the dynamic plan changes:", text_table(names, cells), _SENSITIVITY_NOTE]


def _possible_plans(rows: Sequence[NamedPlan]) -> list[tuple[str, Plan]]:
    """Return the plans with their names; those that are not possible have a reason in place of one."""
    return [(name, plan) for name, plan in rows if isinstance(plan, Plan)]


def _have_seconds(rows: Sequence[NamedPlan]) -> bool:
    """Return whether times are seconds: every plan's cost names the machine it is of."""
    return all(plan.cost.source for _, plan in _possible_plans(rows))


def _plan_cells(plan: Plan) -> tuple[str, ...]:
    bubble, idle = _waits(plan)
    return (
        plan_type_text(plan),
        f"{plan.predicted_seconds:.4g}",
        f"{plan.ratio:.3f}",
        f"{len(plan.micro_batches)}",
        f"{bubble:.1%}",
        f"{idle:.1%}",
        f"{most_slot_rows(plan):,}",
    )


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
    """Return the share of a free plan's time in which it gathers weights and sums gradients; "none" in lockstep.

    It is "not priced" where the cost has no seconds for them.
    """
    if plan.mode == "lockstep":
        return "none"
    closing = plan.cost.closing_seconds
    return f"{closing / plan.predicted_seconds:.1%}" if closing else "not priced"


def _plan_json(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan as an object of JSON."""
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
        "rows": most_slot_rows(plan),
    }


def degrees_table(title: str, comparison: DegreeComparison, accumulation: int) -> str:
    """Write the degrees of an evaluation as text, what was left out, and which is fastest.

    A document-step is one pass over one document; passes that only fill up a micro-batch are wasted. A filled-up pass
    has `accumulation` micro-batches.
    """
    names = ["cp", "type", "groups", "passes", "document-steps", "wasted", "filled", "planned"]
    names += ["micro-batches", "rows", "bubble"]
    rows = [
        (
            f"{choice.cp}",
            choice.cp_comm_type if choice.cp > 1 else "",
            f"{choice.groups:,}",
            f"{choice.passes:,}",
            f"{choice.filled_steps:,}",
            f"{choice.wasted_steps:,}",
            seconds_text(choice.filled_seconds),
            *_evaluation_cells(choice.planned),
        )
        for choice in comparison.choices
    ]
    if dynamic := comparison.dynamic:
        rows.append(("dynamic", "", "", "", f"{len(dynamic.lengths):,}", "0", "", *_evaluation_cells(dynamic)))
    lines = [title, "", text_table(names, rows), "", _fastest_text(comparison, accumulation)]
    return "\n".join([*lines, *comparison.left_out, "", _NOTE])


def _evaluation_cells(plan: Plan) -> tuple[str, ...]:
    """Return the cells of an evaluation's plan: seconds, micro-batches, rows of a slot, bubble."""
    rows = f"{most_slot_rows(plan):,}"
    return seconds_text(plan.predicted_seconds), f"{len(plan.micro_batches):,}", rows, f"{_waits(plan)[0]:.0%}"


def _fastest_text(comparison: DegreeComparison, accumulation: int) -> str:
    """Compare two times in words: of the first degree filled up, and of the best degree with each document once.

    A filled-up pass has `accumulation` micro-batches, in which documents are repeated to keep the pipeline full.
    """
    filled, best = comparison.choices[0], comparison.best
    count, seconds = len(best.planned.lengths), best.planned.predicted_seconds
    return (
        f"cp {filled.cp}, filled up to {plural(accumulation, 'micro-batch', 'es')} a pass to keep the pipeline full: "
        f"{filled.filled_steps:,} document-steps for {plural(count, 'document')}, "
        f"{seconds_text(filled.filled_seconds)}.\n"
        f"cp {best.cp}, planned: each document once, {count:,} document-steps in "
        f"{plural(len(best.planned.micro_batches), 'micro-batch', 'es')}, {seconds_text(seconds)} "
        f"({filled.filled_seconds / seconds:.1f} times faster).\n{comparison.reason()}"
    )


def degrees_json(title: str, comparison: DegreeComparison) -> str:
    """Write the degrees of an evaluation as a JSON object."""
    rows = [
        {
            "cp": choice.cp,
            "cp_comm_type": choice.cp_comm_type,
            "groups": choice.groups,
            "passes": choice.passes,
            "filled_document_steps": choice.filled_steps,
            "wasted_document_steps": choice.wasted_steps,
            "filled_seconds": choice.filled_seconds,
            **_evaluation_json(choice.planned),
        }
        for choice in comparison.choices
    ]
    dynamic = {"dynamic": _evaluation_json(comparison.dynamic)} if comparison.dynamic else {}
    answer = {"title": title, "degrees": rows, "best_cp": comparison.best.cp, "reason": comparison.reason()}
    return json.dumps(answer | {"left_out": list(comparison.left_out)} | dynamic, indent=1)


def _evaluation_json(plan: Plan) -> dict[str, float | int | None]:
    """Return the figures of an evaluation's plan as an object of JSON."""
    return {
        "planned_document_steps": len(plan.lengths),
        "planned_seconds": plan.predicted_seconds,
        "planned_lower_bound_seconds": plan.lower_bound_seconds,
        "planned_micro_batches": len(plan.micro_batches),
        "planned_max_tokens_per_slot": plan.max_tokens_per_slot,
        "planned_rows_of_slot": most_slot_rows(plan),
        "bubble": _waits(plan)[0],
    }


def most_slot_rows(plan: Plan) -> int:
    """Return the most rows that a slot holds in a micro-batch."""
    return int(slot_rows(plan.micro_batches, plan.slots, plan.row_multiple).max())


def degrees_picture(title: str, comparison: DegreeComparison) -> str:
    """Draw the predicted seconds of an evaluation over its degree, as an SVG document.

    One curve is of micro-batches that repeat documents until all groups have one, the other of plans that hold each
    document once. The best degree is labelled. Lines mark the first degree's time and that of the dynamic plan, if it
    differs from the best.
    """
    choices, best = comparison.choices, comparison.best
    indices = np.arange(len(choices), dtype=np.float64)  # degrees stand at equal distances
    filled_curve = Series(
        "filled up, documents repeated", indices, _float_array([choice.filled_seconds for choice in choices]), 0
    )
    planned_curve = Series(
        "planned, each once",
        indices,
        _float_array([choice.planned.predicted_seconds for choice in choices]),
        1,
        "marks",
    )
    filled, dynamic, seconds = choices[0], comparison.dynamic, best.planned.predicted_seconds
    lines = [(filled.filled_seconds, f"cp {filled.cp}, filled up: {seconds_text(filled.filled_seconds)}")]
    is_same_time = dynamic is not None and abs(dynamic.predicted_seconds / seconds - 1) < SAME
    if dynamic and not is_same_time:
        lines.append((dynamic.predicted_seconds, f"dynamic plan: {seconds_text(dynamic.predicted_seconds)}"))
    kind = f", {best.cp_comm_type}" if best.cp > 1 else ""
    speedup_text = f"{filled.filled_seconds / seconds:.1f} times faster than cp {filled.cp} filled up"
    dynamic_text = ", as the dynamic plan" if is_same_time else ""
    best_label = f"cp {best.cp}{kind}: {seconds_text(seconds)}{dynamic_text}; {speedup_text}"
    each_doubles = all(b.cp == 2 * a.cp for a, b in pairwise(choices))
    chart = Chart(
        title=f"Predicted time of an evaluation over its degree\n{title}",
        series=(filled_curve, planned_curve),
        y_label="predicted seconds, logarithmic axis",
        x_label=f"context-parallel degree, {'logarithmic axis' if each_doubles else 'one after another'}",
        width=760,
        height=340,
        references=tuple(lines),
        notes=((float(choices.index(best)), seconds, best_label),),
        x_names=tuple(f"{choice.cp}" for choice in choices),
        log=True,
    )
    return chart_document(chart)


def _float_array(values: Sequence[float]) -> np.ndarray:
    return np.array(values, dtype=np.float64)
