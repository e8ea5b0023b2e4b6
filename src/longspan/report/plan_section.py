"""The section of a page that shows plans: one at a time, in time or in rows, with what they are made of."""

import math
from collections.abc import Iterator, Mapping, Sequence

from longspan.errors import plural
from longspan.plain_text import number_text, seconds_text
from longspan.plan import Cost, Plan
from longspan.report.markup import PATTERNS, key, label, style_sheet, tag, text
from longspan.report.pictures.bars import Unit
from longspan.report.pictures.gantt import NARROW, WIDTH, gantt_svg

UNITS: tuple[Unit, ...] = ("seconds", "rows")
HEAD, FOOT = 68, 44  # above and below the drawing of a document: title and facts, and legend


def plan_section(
    plans: Sequence[tuple[str, Plan]],
    cost: Cost | None = None,
    measured_seconds: Mapping[str, float | None] | None = None,
    *,
    median: str = "",
    title: str = "Plan of a step",
) -> str:
    """Return pictures of plans with a selector between them, in time and in rows.

    `measured_seconds` has what a plan's step took, by the plan's name. The plan that shows first is the one named
    `median`, that of the step whose time is the median; without it the median by the ratio to the lower bound.
    """
    names = [name for name, _ in plans]
    first = names.index(median) if median in names else _median_plan_index(plans)
    words = [f"{name}, the median" if name == median else name for name in names]
    options = (tag("option", text(name), value=i, selected=i == first) for i, name in enumerate(words))
    choice = tag("label", "plan ", tag("select", *options, id="plan-choice")) if len(plans) > 1 else ""
    buttons = (
        tag("button", "time", type="button", data_unit="seconds", aria_pressed="true"),
        tag("button", "rows", type="button", data_unit="rows", aria_pressed="false"),
    )
    units = tag("span", *buttons, class_="switch", role="group", aria_label="unit")
    seconds = measured_seconds or {}
    cards = (_plan_card(i, plan, cost, seconds.get(name), is_shown=i == first) for i, (name, plan) in enumerate(plans))
    controls = tag("div", choice, units, class_="controls")
    return tag("section", tag("h2", text(title)), controls, *cards, _plan_legend(), id="plans")


def plan_document(plan: Plan, cost: Cost | None = None, *, title: str = "plan") -> str:
    """Return the picture of one plan in time as the text of an .svg file, with its title and its legend.

    >>> Path("plan.svg").write_text(plan_document(plan))
    """
    picture, facts = gantt_svg(plan, cost), [f"{name} {value}" for name, value in _plan_facts(plan, None)]
    # the picture's height is the last number of its viewBox
    height = float(picture.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
    lines = " · ".join(facts[:5]), " · ".join(facts[5:])  # as one line they would be wider than the picture
    entries = (
        tag("g", _set_size(drawing, 22, 12), label(words, 28, 10, "start"), transform=f"translate({x} {y})")
        for (drawing, words), (x, y) in zip(_legend_drawings(), _legend_places(HEAD + height), strict=True)
    )
    return tag(
        "svg",
        tag("style", style_sheet()),
        PATTERNS,
        tag("rect", fill="var(--card)", width=WIDTH, height=round(HEAD + height + FOOT)),
        tag("text", text(title), x=12, y=22, style="font-size: 15px; font-weight: 600; fill: var(--ink)"),
        *(label(line, 12, 42 + 16 * i, "start") for i, line in enumerate(lines)),
        tag("g", _set_size(picture, WIDTH, height), transform=f"translate(0 {HEAD})"),
        *entries,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {round(HEAD + height + FOOT)}",
    )


def _set_size(svg: str, width: float, height: float) -> str:
    return svg.replace("<svg", f'<svg width="{width:g}" height="{height:g}"', 1)


def _legend_places(top: float) -> Iterator[tuple[int, int]]:
    yield from ((54 + 540 * column, round(top) + 4 + 18 * row) for row in range(2) for column in range(2))


def _plan_legend() -> str:
    note = (
        "Times are predicted by the plan's cost model, not measured. Within a micro-batch the documents of the widest "
        "groups come first here, whatever a slot's own order."
    )
    entries = (tag("li", drawing, words) for drawing, words in _legend_drawings())
    return tag("ul", *entries, class_="legend") + tag("p", note, class_="note")


def _legend_drawings() -> tuple[tuple[str, str], ...]:
    box = {"width": 22, "height": 12}
    return (
        (
            key(tag("rect", class_="b k0", **box)),
            "a document: one block over the slots that share it, in another colour than its neighbours",
        ),
        (key(tag("rect", class_="many", **box)), "busy with documents too short to draw apart"),
        (key(tag("rect", class_="launch", **box)), "fixed time of a micro-batch"),
        (key(tag("rect", class_="panel", **box), tag("rect", fill="url(#idle)", **box)), "nothing to do"),
    )


def _median_plan_index(plans: Sequence[tuple[str, Plan]]) -> int:
    """Return the index of the plan whose ratio to the lower bound is the median, the better of two middle ones.

    Plans of evaluations count only if there are none of steps; a plan whose ratio is NaN counts as the worst.
    """
    steps = [index for index, (name, _) in enumerate(plans) if not name.startswith("evaluation")] or range(len(plans))
    by_ratio = sorted(steps, key=lambda index: (math.isnan(ratio := plans[index][1].ratio), ratio))
    return by_ratio[(len(by_ratio) - 1) // 2]


def _plan_card(index: int, plan: Plan, cost: Cost | None, seconds: float | None, *, is_shown: bool) -> str:
    """`seconds` are the measured ones of its step, None if there are none. One plan `is_shown`, and a script shows
    others.
    """
    facts = (tag("div", tag("dt", text(name)), tag("dd", text(value))) for name, value in _plan_facts(plan, seconds))
    # Each picture is there twice, and the style sheet shows the one that suits the page's width.
    wide, narrow = (
        {unit: gantt_svg(plan, cost, unit=unit, width=width) for unit in UNITS} for width in (WIDTH, NARROW)
    )
    pictures = {unit: wide[unit] + narrow[unit] for unit in UNITS}
    # Only the picture that shows is part of the document; page.js takes other pictures out of templates.
    first_picture = pictures.pop("seconds") if is_shown else ""
    templates = (tag("template", svg, data_unit=unit) for unit, svg in pictures.items())
    content = tag("dl", *facts, class_="facts"), tag("div", first_picture, class_="picture"), *templates
    return tag("div", *content, class_="plan", data_plan_index=index, hidden=not is_shown)


def _plan_facts(plan: Plan, seconds: float | None) -> Iterator[tuple[str, str]]:
    """Yield the facts of a plan as names and values: what it holds, how it is cut, predicted and measured `seconds`."""
    degrees = sorted({group.degree for m in plan.micro_batches for group in m.groups})
    yield "planner", f"{plan.planner}, {plan.mode}"
    yield "documents", f"{len(plan.lengths):,}, longest {max(plan.lengths, default=0):,}"
    yield "tokens", f"{plan.tokens:,}"
    yield "micro-batches", f"{len(plan.micro_batches)} on {plural(plan.slots, 'slot')}"
    if degrees:
        yield "degrees", ", ".join(map(str, degrees)) if len(degrees) <= 6 else f"{degrees[0]} to {degrees[-1]}"
    yield "rows used", f"{100 * plan.efficiency:.0f}% of the fullest slot's"
    if plan.cost.source:
        yield "predicted", seconds_text(plan.predicted_seconds)
    if seconds is not None:
        yield "measured", seconds_text(seconds)
    yield "priced for", plan.cost.source or "no machine: times only compare"
    if plan.mode == "free" and plan.cost.closing_seconds:
        yield "of these, closing", f"{seconds_text(plan.cost.closing_seconds)}: parameters gathered, gradients summed"
    if plan.lower_bound_seconds:
        yield "over the lower bound", f"× {number_text(plan.ratio, 4)}"
