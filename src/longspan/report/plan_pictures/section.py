"""The section of a page that shows plans: one at a time, in time or in rows, with what they are made of."""

import math
from collections.abc import Iterator, Mapping, Sequence

from longspan.errors import counted
from longspan.plan import Cost, Plan
from longspan.report.markup import key, tag, text
from longspan.report.plan_pictures.gantt import gantt_svg
from longspan.report.value_text import number_text, seconds_text


def plan_section(
    plans: Sequence[tuple[str, Plan]], cost: Cost | None = None, took: Mapping[str, float | None] | None = None
) -> str:
    """Pictures of plans with a selector between them, in time and in rows; `took` is what a plan by name took.

    The step that shows first is a usual one.
    """
    first = _usual(plans)
    options = (tag("option", text(name), value=i, selected=i == first) for i, (name, _) in enumerate(plans))
    choice = tag("label", "plan ", tag("select", *options, id="plan-choice")) if len(plans) > 1 else ""
    buttons = (
        tag("button", "time", type="button", data_unit="seconds", aria_pressed="true"),
        tag("button", "rows", type="button", data_unit="rows", aria_pressed="false"),
    )
    units = tag("span", *buttons, class_="switch", role="group", aria_label="unit")
    cards = (_plan_card(i, plan, cost, (took or {}).get(name), i == first) for i, (name, plan) in enumerate(plans))
    title, controls = tag("h2", "Plan of a step"), tag("div", choice, units, class_="controls")
    return tag("section", title, controls, *cards, _legend(), id="plans")


def _legend() -> str:
    box = {"width": 22, "height": 12}
    keys = (
        (key(tag("rect", class_="b k0", **box)), "a document: one colour, one block over the slots that share it"),
        (key(tag("rect", class_="many", **box)), "busy with documents too short to draw apart"),
        (key(tag("rect", class_="launch", **box)), "fixed time of a micro-batch"),
        (key(tag("rect", class_="panel", **box), tag("rect", fill="url(#idle)", **box)), "nothing to do"),
    )
    note = (
        "Times are predicted by the plan's cost model, not measured. Within a micro-batch the documents of the widest "
        "groups come first here, whatever a slot's own order."
    )
    entries = (tag("li", drawing, words) for drawing, words in keys)
    return tag("ul", *entries, class_="legend") + tag("p", note, class_="note")


def _usual(plans: Sequence[tuple[str, Plan]]) -> int:
    """The place of the plan whose step is the median by ratio to the bound, the better of two; evaluations come last."""
    steps = [place for place, (name, _) in enumerate(plans) if not name.startswith("evaluation")] or range(len(plans))
    by_ratio = sorted(steps, key=lambda place: (math.isnan(ratio := plans[place][1].ratio), ratio))
    return by_ratio[(len(by_ratio) - 1) // 2]


def _plan_card(index: int, plan: Plan, cost: Cost | None, took: float | None, first: bool) -> str:
    facts = (tag("div", tag("dt", text(name)), tag("dd", text(value))) for name, value in _plan_facts(plan, took))
    pictures = {unit: gantt_svg(plan, cost, unit=unit) for unit in ("seconds", "rows")}
    # Only the picture that shows is part of the document; the others wait in templates.
    shown = pictures.pop("seconds") if first else ""
    waiting = (tag("template", svg, data_unit=unit) for unit, svg in pictures.items())
    content = tag("dl", *facts, class_="facts"), tag("div", shown, class_="picture scroll"), *waiting
    return tag("div", *content, class_="plan", data_plan_index=index, hidden=not first)


def _plan_facts(plan: Plan, took: float | None) -> Iterator[tuple[str, str]]:
    degrees = sorted({group.degree for m in plan.micro_batches for group in m.groups})
    yield "planner", f"{plan.planner}, {plan.mode}"
    yield "documents", f"{len(plan.lengths):,}, longest {max(plan.lengths, default=0):,}"
    yield "tokens", f"{plan.tokens:,}"
    yield "micro-batches", f"{len(plan.micro_batches)} on {counted(plan.slots, 'slot')}"
    if degrees:
        yield "degrees", ", ".join(map(str, degrees)) if len(degrees) <= 6 else f"{degrees[0]} to {degrees[-1]}"
    yield "rows of the fullest slot's, mean", f"{100 * plan.efficiency:.0f}%"
    if plan.cost.source:
        yield "predicted", seconds_text(plan.predicted_seconds)
    if took is not None:
        yield "measured", seconds_text(took)
    yield "priced for", plan.cost.source or "no machine: times only compare"
    if plan.mode == "free" and plan.cost.closing_seconds:
        yield "of these, closing", f"{seconds_text(plan.cost.closing_seconds)}: parameters gathered, gradients summed"
    if plan.lower_bound_seconds:
        yield "over the lower bound", f"× {number_text(plan.ratio, 4)}"
