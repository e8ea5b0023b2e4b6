"""What `longspan simulate` prints: simulations beside each other, as text and as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from longspan.cli.planning.pricing import UNPRICED
from longspan.errors import counted
from longspan.plan.simulate.row_bytes import Checkpointing
from longspan.plan.simulate.simulate import Simulation
from longspan.plan.simulate.which_type import type_of
from longspan.report.charts.bar_chart import NamedBar, bar_document
from longspan.report.text_table import text_table
from longspan.report.value_text import bytes_text, number_text, seconds_text

Row = tuple[str, Simulation | str]  # a plan's name; its simulation, or why there is none

_COMPARISON_NOTE = """\
type: how groups share attention, of each plan the fastest (--cp-comm-type chooses one for all). x bound: over what no
plan of that type can beat on these slots and stages. bubble: share of a stage's time that the pipeline leaves empty;
idle: share that slots wait for slower ones. peak rows and kept: what the fullest slot's first stage holds for its
backward passes, as rows of the whole model and as bytes of activations in bfloat16,
{activations}.
Weights, gradients, optimizer states, logits and second forward passes are not counted. sent: bytes of the step on all
links."""
_ACTIVATIONS = {
    "full": "of layers recomputed in full their inputs alone; --activation-checkpointing none, which training has by "
    "itself,\nkeeps several times as much",
    "selective": "of layers recomputed selectively their inputs and outputs of attention",
    "none": "of layers without recomputation all that their backward passes read",
}
LEAST_DIFFERENCE = 5e-4  # of two plans, that is worth a number
NO_MACHINE = "no machine"
UNTIMED = (
    "relative: the plans are of a run on CPUs, whose speed nothing told; the numbers only compare plans.\n"
    "--cost FILE, of longspan bench calibrate, or --model FOLDER, on H200s, makes seconds of them"
)
_CLOSING_NOTE = """\
closing: share of a free step that gathers sharded parameters before it and sums their gradients after it."""


def title_of_saved_plans(rows: Sequence[Row]) -> str:
    """How many saved plans there are, their seconds together, and what they were priced for."""
    simulations = _simulations(rows)
    total = sum(simulation.seconds for _, simulation in simulations)
    together = f", {seconds_text(total)} together" if _timed(rows) else ""
    sources = ", ".join(dict.fromkeys(simulation.cost.source or NO_MACHINE for _, simulation in simulations))
    return f"{counted(len(rows), 'saved plan')}{together}, priced for {sources}"


def comparison_table(title: str, rows: Sequence[Row], checkpointing: Checkpointing) -> str:
    """Simulations as text: a line for each, the plans that are not possible, and notes."""
    simulations, timed = _simulations(rows), _timed(rows)
    free = [simulation for _, simulation in simulations if simulation.plan.mode == "free"]
    names = ["plan", "type", "seconds" if timed else "relative", "x bound", "micro-batches", "bubble", "idle"]
    names += ["peak rows", f"kept, {checkpointing}", "sent inside", "sent across", *(["closing"] if free else [])]
    lines = [(name, type_of(s.plan), *_columns(s), *([_closing(s)] if free else [])) for name, s in simulations]
    failed = [f"{name}: not possible: {reason}" for name, reason in rows if isinstance(reason, str)]
    notes = [_COMPARISON_NOTE.format(activations=_ACTIVATIONS[checkpointing]), *([_CLOSING_NOTE] if free else [])]
    if not all(simulation.closing_seconds for simulation in free):
        notes.append(UNPRICED)
    if not timed:
        notes.append(UNTIMED)
    return "\n".join([title, "", text_table(names, lines, left=2), *failed, *comparison_with_fixed(rows), "", *notes])


def comparison_with_fixed(rows: Sequence[Row]) -> list[str]:
    """The dynamic plan beside the fastest plan of one degree, in a line; none where either is missing."""
    of_kind = {
        kind: [row for row in _simulations(rows) if row[1].plan.planner == kind] for kind in ("fixed", "dynamic")
    }
    if not of_kind["fixed"] or len(of_kind["dynamic"]) != 1:
        return []
    name, best = min(of_kind["fixed"], key=lambda row: row[1].seconds)
    difference = of_kind["dynamic"][0][1].seconds / best.seconds - 1
    less = f"{abs(difference):.1%} {'less' if difference < 0 else 'more'} time than"
    words = "as much time as" if abs(difference) < LEAST_DIFFERENCE else less
    kind = f" under {type_of(best.plan)}" if type_of(best.plan) else ""
    return [f"the dynamic plan takes {words} the fastest plan of one degree ({name}{kind})"]


def comparison_picture(title: str, rows: Sequence[Row]) -> str:
    """A bar for the seconds of each plan, with its type, and a line at the least bound. An SVG document."""
    simulations, timed = _simulations(rows), _timed(rows)
    bars = [
        NamedBar(name, s.seconds, _bar_words(s, timed), int(s.plan.planner == "dynamic")) for name, s in simulations
    ]
    bound = min((s.lower_bound_seconds for _, s in simulations), default=0.0)
    line = (bound, f"lower bound{f', {seconds_text(bound)}' if timed else ''}")
    unit = "predicted seconds" if timed else "predicted time, of no machine"
    heading = "\n".join(
        [f"Predicted time of a step: {title.splitlines()[0]}", *title.splitlines()[1:], *comparison_with_fixed(rows)]
    )
    return bar_document(heading, bars, unit, line)


def _bar_words(simulation: Simulation, timed: bool) -> str:
    """What stands behind the bar of a plan."""
    bound = f"{simulation.seconds / simulation.lower_bound_seconds:.3f} x bound"
    return " · ".join(
        filter(None, [seconds_text(simulation.seconds) if timed else "", type_of(simulation.plan), bound])
    )


def comparison_json(title: str, rows: Sequence[Row]) -> str:
    """The same as a JSON object."""
    plans = [{"name": name} | ({"error": s} if isinstance(s, str) else _as_object(s)) for name, s in rows]
    return json.dumps({"title": title, "plans": plans}, indent=1)


def _simulations(rows: Sequence[Row]) -> list[tuple[str, Simulation]]:
    return [(name, simulation) for name, simulation in rows if isinstance(simulation, Simulation)]


def _timed(rows: Sequence[Row]) -> bool:
    return all(simulation.cost.source for _, simulation in _simulations(rows))


def _columns(simulation: Simulation) -> tuple[str, ...]:
    return (
        f"{simulation.seconds:.4g}",
        f"{simulation.seconds / simulation.lower_bound_seconds:.3f}",
        f"{len(simulation.plan.micro_batches)}",
        f"{100 * simulation.bubble:.1f}%",
        f"{100 * simulation.idle:.1f}%",
        number_text(round(float(simulation.peak_rows.max(initial=0)))),
        bytes_text(float(simulation.activation_bytes.max(initial=0))),
        bytes_text(simulation.inside_bytes),
        bytes_text(simulation.across_bytes),
    )


def _closing(simulation: Simulation) -> str:
    if simulation.plan.mode == "lockstep":
        return "none"
    share = simulation.closing_seconds / simulation.seconds
    return f"{100 * share:.1f}%" if simulation.closing_seconds else "not priced"


def _as_object(simulation: Simulation) -> dict[str, Any]:
    return {
        "planner": simulation.plan.planner,
        "cp_comm_type": type_of(simulation.plan),
        "seconds": simulation.seconds,
        "predicted_seconds": simulation.plan.predicted_seconds,
        "lower_bound_seconds": simulation.lower_bound_seconds,
        "micro_batches": len(simulation.plan.micro_batches),
        "bubble": simulation.bubble,
        "idle": simulation.idle,
        "closing_seconds": simulation.closing_seconds,
        "peak_rows": float(simulation.peak_rows.max(initial=0)),
        "activation_bytes": float(simulation.activation_bytes.max(initial=0)),
        "ring_inside_bytes": simulation.inside_bytes,
        "ring_across_bytes": simulation.across_bytes,
        "stage_bytes": simulation.stage_bytes,
    }
