"""What `longspan simulate --which-eval-degree` shows: degrees of an evaluation, as text, as JSON and as a picture."""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from longspan.errors import counted
from longspan.plan import Plan, slot_rows
from longspan.plan.simulate.simulate import Simulation
from longspan.plan.simulate.which_degree import DegreeComparison
from longspan.report.charts.chart import Chart, Series
from longspan.report.charts.document import chart_document
from longspan.report.text_table import text_table
from longspan.report.value_text import seconds_text

SAME = 5e-3  # relative difference up to which a dynamic plan is no line of its own
_NOTE = """\
filled: one document a group and micro-batch, documents repeated to fill the last pass. planned: each document once,
under the fastest type of each degree (--cp-comm-type chooses one); micro-batches, rows (the most that a slot holds at
once) and bubble are the planned evaluation's. Memory of activations goes with the rows."""


def degrees_table(title: str, comparison: DegreeComparison, accumulation: int) -> str:
    """The degrees of an evaluation as text, what was left out, and which is fastest."""
    names = ["cp", "type", "groups", "passes", "document-steps", "wasted", "filled", "planned"]
    names += ["micro-batches", "rows", "bubble"]
    rows = [
        (
            f"{c.cp}",
            c.cp_comm_type if c.cp > 1 else "",
            f"{c.groups:,}",
            f"{c.passes:,}",
            f"{c.filled_steps:,}",
            f"{c.wasted_steps:,}",
            seconds_text(c.filled_seconds),
            *_planned(c.planned),
        )
        for c in comparison.choices
    ]
    if dynamic := comparison.dynamic:
        rows.append(("dynamic", "", "", "", f"{len(dynamic.plan.lengths):,}", "0", "", *_planned(dynamic)))
    lines = [title, "", text_table(names, rows), "", _fastest(comparison, accumulation)]
    return "\n".join([*lines, *comparison.left_out, "", _NOTE])


def _planned(simulation: Simulation) -> tuple[str, ...]:
    return (
        seconds_text(simulation.seconds),
        f"{len(simulation.plan.micro_batches):,}",
        f"{rows_of_slot(simulation.plan):,}",
        f"{100 * simulation.bubble:.0f}%",
    )


def _fastest(comparison: DegreeComparison, accumulation: int) -> str:
    first, best = comparison.choices[0], comparison.best
    count = len(best.planned.plan.lengths)
    faster = first.filled_seconds / best.planned.seconds
    return (
        f"cp {first.cp}, filled up to {counted(accumulation, 'micro-batch', 'es')} a pass to keep the pipeline full: "
        f"{first.filled_steps:,} document-steps for {counted(count, 'document')}, "
        f"{seconds_text(first.filled_seconds)}.\n"
        f"cp {best.cp}, planned: each document once, {count:,} document-steps in "
        f"{counted(len(best.planned.plan.micro_batches), 'micro-batch', 'es')}, {seconds_text(best.planned.seconds)} "
        f"({faster:.1f} times faster).\n{comparison.reason()}"
    )


def degrees_json(title: str, comparison: DegreeComparison) -> str:
    """The same as a JSON object."""
    rows = [
        {
            "cp": c.cp,
            "cp_comm_type": c.cp_comm_type,
            "groups": c.groups,
            "passes": c.passes,
            "filled_document_steps": c.filled_steps,
            "wasted_document_steps": c.wasted_steps,
            "filled_seconds": c.filled_seconds,
            **_planned_json(c.planned),
        }
        for c in comparison.choices
    ]
    dynamic = {"dynamic": _planned_json(comparison.dynamic)} if comparison.dynamic else {}
    answer = {"title": title, "degrees": rows, "best_cp": comparison.best.cp, "reason": comparison.reason()}
    return json.dumps(answer | {"left_out": list(comparison.left_out)} | dynamic, indent=1)


def _planned_json(simulation: Simulation) -> dict[str, float | int | None]:
    return {
        "planned_document_steps": len(simulation.plan.lengths),
        "planned_seconds": simulation.seconds,
        "planned_lower_bound_seconds": simulation.lower_bound_seconds,
        "planned_micro_batches": len(simulation.plan.micro_batches),
        "planned_max_tokens_per_slot": simulation.plan.max_tokens_per_slot,
        "planned_rows_of_slot": rows_of_slot(simulation.plan),
        "bubble": simulation.bubble,
    }


def rows_of_slot(plan: Plan) -> int:
    """The most rows that a slot holds in a micro-batch."""
    return int(slot_rows(plan.micro_batches, plan.slots, plan.row_multiple).max())


def degrees_picture(title: str, comparison: DegreeComparison) -> str:
    """Seconds over the degrees, filled and planned, with words at the best one, and lines at the first one filled and
    at the dynamic plan, where that takes another time than the best. An SVG document.
    """
    choices, best = comparison.choices, comparison.best
    places = np.arange(len(choices), dtype=np.float64)
    filled = Series("filled up, documents repeated", places, _array([c.filled_seconds for c in choices]), 0)
    planned = Series("planned, each once", places, _array([c.planned.seconds for c in choices]), 1, "marks")
    first, dynamic = choices[0], comparison.dynamic
    lines = [(first.filled_seconds, f"cp {first.cp}, filled up: {seconds_text(first.filled_seconds)}")]
    same = dynamic is not None and abs(dynamic.seconds / best.planned.seconds - 1) < SAME
    if dynamic and not same:
        lines.append((dynamic.seconds, f"dynamic plan: {seconds_text(dynamic.seconds)}"))
    kind = f", {best.cp_comm_type}" if best.cp > 1 else ""
    faster = f"{first.filled_seconds / best.planned.seconds:.1f} times faster than cp {first.cp} filled up"
    also = ", as the dynamic plan" if same else ""
    words = f"cp {best.cp}{kind}: {seconds_text(best.planned.seconds)}{also}; {faster}"
    doubled = all(b.cp == 2 * a.cp for a, b in pairwise(choices))
    chart = Chart(
        title=f"Predicted time of an evaluation over its degree\n{title}",
        series=(filled, planned),
        y_label="predicted seconds, logarithmic axis",
        x_label=f"context-parallel degree, {'logarithmic axis' if doubled else 'one after another'}",
        width=760,
        height=340,
        references=tuple(lines),
        notes=((float(choices.index(best)), best.planned.seconds, words),),
        x_names=tuple(f"{c.cp}" for c in choices),
        log=True,
    )
    return chart_document(chart)


def _array(values: Sequence[float]) -> np.ndarray:
    return np.array(values, dtype=np.float64)
