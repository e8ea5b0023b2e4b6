"""`longspan simulate`: what planners and degrees would cost on a cluster, without one. Imports no torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from longspan.cli.free_mode_flags import UNPRICED, ClosingFlags, check_weights, with_weights
from longspan.cli.lengths import SourceFlags, read_lengths
from longspan.cli.parse import check_least, parse_flags
from longspan.cli.pricing import PricingFlags, heads_of, notes_on, read_price, shared_arguments
from longspan.errors import ConfigError, LongspanError, counted
from longspan.layout import Layout
from longspan.plan import Cost, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.check import heads_allow
from longspan.plan.simulate.simulate import Simulation, shared_by, simulate
from longspan.plan.simulate.which_degree import DegreeChoice, which_degree
from longspan.report.series import write_bytes, write_number, write_seconds
from longspan.report.text_table import text_table

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class SimulateFlags(PricingFlags, ClosingFlags, SourceFlags):
    """Price plans on a machine that you describe: planners beside each other, saved plans, or evaluation degrees.

    Times follow the cost model; the wire between stages, optimizer steps and the weights' memory are not in them.
    """

    world: int = 0
    """Ranks of the machine; slots = world / (tp x pp). Give this or --slots."""
    slots: int = 0
    """Slots of the home, where no --world is given."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks of each stage (interleaved schedule)."""
    max_tokens_per_slot: int = 8192
    """Rows that a slot holds in one micro-batch, at most; 0: no limit."""
    node_size: int = 8
    """Ranks of one host."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """How slots wait for each other; free needs --pp 1."""
    evaluation: Switch = False
    """Forward passes only."""
    which_eval_degree: Switch = False
    """Instead: price an evaluation of the documents at each degree, filled up and planned."""
    accumulation: int = 0
    """With --which-eval-degree: micro-batches that keep the pipeline full; 0: the stages."""
    plans: tuple[str, ...] = ()
    """Instead: simulate these saved plans, or those in a run's folder."""
    json: Switch = False
    """Print the result as JSON, and nothing else, on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    flags = parse_flags(SimulateFlags, argv, "longspan simulate")
    check_least(flags, world=0, slots=0, tp=1, pp=1, vpp=1, max_tokens_per_slot=0, node_size=1, accumulation=0)
    check_weights(flags, free=flags.mode == "free" or bool(flags.plans))
    if flags.plans:
        rows = list(_saved(flags))
        total = sum(found.seconds for _, found in rows)
        together = f", {write_seconds(total)} together" if _timed(rows) else ""
        title = f"{counted(len(rows), 'saved plan')}{together}, priced for {_sources(rows)}"
        print(_json(title, rows) if flags.json else _comparison(title, rows))
        return 0
    home = home_of(flags)
    lengths, source = read_lengths(flags, home.slots)
    documents, tokens = counted(len(lengths), "document"), counted(sum(lengths), "token")
    title = (
        f"{documents} ({tokens}, longest {max(lengths):,}) from {source}\n"
        f"{counted(len(home.ranks), 'rank')} = {counted(home.slots, 'slot')} x tp {home.tp} x pp {home.pp}"
    )
    if flags.which_eval_degree:
        choices = which_degree(lengths, home, **_degree_arguments(flags, home))
        print(_degrees_json(title, choices) if flags.json else _degrees(title, choices, flags))
        return 0
    rows = list(_compared(flags, lengths, home))
    print(_json(title, rows) if flags.json else "\n".join([_comparison(title, rows), *notes_on(flags)]))
    return 0


def home_of(flags: SimulateFlags) -> Layout:
    """The home that the flags describe. Raises ConfigError or LayoutError where they do not fit."""
    if bool(flags.world) == bool(flags.slots):
        raise ConfigError(f"give --world or --slots, one of them; got --world {flags.world} --slots {flags.slots}")
    world = flags.world or flags.slots * flags.tp * flags.pp
    return Layout(world, tp=flags.tp, pp=flags.pp)


def degrees_of(flags: SimulateFlags, home: Layout) -> list[int]:
    """Degrees 1, 2, 4, … that divide the slots, and that the query heads allow."""
    powers = [1 << i for i in range(home.slots.bit_length()) if home.slots % (1 << i) == 0]
    return [d for d in powers if heads_allow(d, heads_of(flags), (flags.cp_comm_type,), home.tp)]


def _machine(flags: SimulateFlags) -> tuple[Cost, int]:
    """The cost of a slot, and the slots of a host."""
    return shared_by(read_price(flags), flags.tp), max(1, flags.node_size // flags.tp)


def _compared(flags: SimulateFlags, lengths: Sequence[int], home: Layout) -> Iterator[tuple[str, Simulation | str]]:
    cost, node_size = _machine(flags)
    cost = with_weights(cost, flags, slots=home.slots, node_size=node_size, tp=flags.tp)
    cap = flags.max_tokens_per_slot or None
    shared: dict[str, Any] = {"max_tokens_per_slot": cap, "cost": cost, "node_size": node_size, "mode": flags.mode}
    shared |= shared_arguments(flags)
    if flags.vpp > 1:
        shared["micro_batch_multiple"] = flags.pp
    fit = [d for d in degrees_of(flags, home) if not cap or max(lengths) <= cap * d][:5] or [home.slots]
    makers: list[tuple[str, Any]] = [(f"padded, cp {fit[0]}", lambda: plan_padded(lengths, home, fit[0], **shared))]
    makers += [(f"fixed, cp {d}", lambda d=d: plan_fixed(lengths, home, d, **shared)) for d in fit]
    makers.append(("dynamic", lambda: plan_dynamic(lengths, home, **shared)))
    for name, make in makers:
        yield name, _tried(make, flags)


def _tried(make: Any, flags: SimulateFlags) -> Simulation | str:
    """One plan's simulation, or why there is none: the other rows are worth printing all the same."""
    try:
        return simulate(make(), pp=flags.pp, vpp=flags.vpp, backward=not flags.evaluation)
    except LongspanError as error:
        return str(error)


def _saved(flags: SimulateFlags) -> Iterator[tuple[str, Simulation]]:
    cost, _ = _machine(flags)
    for name in flags.plans:
        path = Path(name)
        folder = path / "plans" if (path / "plans").is_dir() else path
        files = sorted(folder.glob("*.json")) if folder.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(f"{name} is neither a plan's JSON file nor a folder with plans")
        for file in files:
            plan = Plan.from_json(file.read_bytes())
            own = cost if flags.cost or flags.model else plan.cost
            own = with_weights(own, flags, slots=plan.slots, node_size=plan.node_size, tp=flags.tp)
            yield file.stem, simulate(plan, cost=own, pp=flags.pp, vpp=flags.vpp, backward=not flags.evaluation)


def _timed(rows: Sequence[tuple[str, Simulation | str]]) -> bool:
    return all(isinstance(found, str) or found.cost.source for _, found in rows)


def _sources(rows: Sequence[tuple[str, Simulation]]) -> str:
    """What the plans were priced for, each source once."""
    return ", ".join(dict.fromkeys(found.cost.source or NO_MACHINE for _, found in rows))


def _comparison(title: str, rows: Sequence[tuple[str, Simulation | str]]) -> str:
    names = (
        "plan",
        "seconds" if _timed(rows) else "relative",
        "x bound",
        "micro-batches",
        "bubble",
        "idle",
        "peak rows",
        "kept",
        "ring inside",
        "ring across",
    )
    found = [(name, each) for name, each in rows if isinstance(each, Simulation)]
    free = any(each.plan.mode == "free" for _, each in found)
    names += ("closing",) if free else ()
    cells = [(name, *_cells(each), *([_closing(each)] if free else [])) for name, each in found]
    failed = [f"{name}: not possible: {found}" for name, found in rows if isinstance(found, str)]
    notes = [_COMPARISON_NOTE, *([_CLOSING_NOTE] if free else [])]
    if any(each.plan.mode == "free" and not each.closing_seconds for _, each in found):
        notes.append(UNPRICED)
    if not _timed(rows):
        notes.append(UNTIMED)
    return "\n".join([title, "", text_table(names, cells), *failed, "", *notes])


_COMPARISON_NOTE = """\
x bound: over what no plan can beat on these slots and stages. bubble: share of a stage's time that the pipeline
leaves empty; idle: share that slots wait for slower ones. peak rows and kept: what the fullest slot's first stage
holds for its backward passes, as rows of the whole model and in bytes. ring: bytes of the step on all links."""
NO_MACHINE = "no machine"
UNTIMED = (
    "relative: the plans are of a run on CPUs, whose speed nothing told; the numbers only compare plans.\n"
    "--cost FILE, of longspan bench calibrate, or --model FOLDER, on H200s, makes seconds of them"
)
_CLOSING_NOTE = """\
closing: share of a free step that gathers sharded parameters before it and sums their gradients after it."""
_DEGREE_NOTE = """\
filled: one document a group and micro-batch, documents repeated to fill the last pass. planned: each document once,
packed up to `cap` rows a slot; micro-batches, cap and bubble are the planned evaluation's."""


def _cells(found: Simulation) -> tuple[str, ...]:
    return (
        f"{found.seconds:.4g}",
        f"{found.seconds / found.lower_bound_seconds:.3f}",
        f"{len(found.plan.micro_batches)}",
        f"{100 * found.bubble:.1f}%",
        f"{100 * found.idle:.1f}%",
        write_number(round(float(found.peak_rows.max(initial=0)))),
        write_bytes(float(found.activation_bytes.max(initial=0))),
        write_bytes(found.inside_bytes),
        write_bytes(found.across_bytes),
    )


def _closing(found: Simulation) -> str:
    if found.plan.mode == "lockstep":
        return "none"
    return f"{100 * found.closing_seconds / found.seconds:.1f}%" if found.closing_seconds else "not priced"


def _json(title: str, rows: Sequence[tuple[str, Simulation | str]]) -> str:
    return json.dumps({"title": title, "plans": [{"name": name} | _as_object(found) for name, found in rows]}, indent=1)


def _as_object(found: Simulation | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"error": found}
    return {
        "planner": found.plan.planner,
        "seconds": found.seconds,
        "predicted_seconds": found.plan.predicted_seconds,
        "lower_bound_seconds": found.lower_bound_seconds,
        "micro_batches": len(found.plan.micro_batches),
        "bubble": found.bubble,
        "idle": found.idle,
        "closing_seconds": found.closing_seconds,
        "peak_rows": float(found.peak_rows.max(initial=0)),
        "activation_bytes": float(found.activation_bytes.max(initial=0)),
        "ring_inside_bytes": found.inside_bytes,
        "ring_across_bytes": found.across_bytes,
        "stage_bytes": found.stage_bytes,
    }


def _degree_arguments(flags: SimulateFlags, home: Layout) -> dict[str, Any]:
    cost, node_size = _machine(flags)
    return {
        "max_tokens_per_slot": flags.max_tokens_per_slot or None,
        "degrees": degrees_of(flags, home),
        "accumulation": flags.accumulation or None,
        "cost": cost,
        "node_size": node_size,
    }


def _degrees(title: str, choices: Sequence[DegreeChoice], flags: SimulateFlags) -> str:
    names = (
        "cp",
        "groups",
        "passes",
        "document-steps",
        "wasted",
        "filled",
        "planned",
        "micro-batches",
        "cap",
        "bubble",
    )
    rows = [
        (
            f"{c.cp}",
            f"{c.groups:,}",
            f"{c.passes:,}",
            f"{c.filled_steps:,}",
            f"{c.wasted_steps:,}",
            write_seconds(c.filled_seconds),
            write_seconds(c.planned.seconds),
            f"{len(c.planned.plan.micro_batches):,}",
            f"{c.planned.plan.max_tokens_per_slot:,}",
            f"{100 * c.planned.bubble:.0f}%",
        )
        for c in choices
    ]
    return "\n".join([title, "", text_table(names, rows), "", _answer(choices, flags), "", _DEGREE_NOTE])


def _answer(choices: Sequence[DegreeChoice], flags: SimulateFlags) -> str:
    first, best = choices[0], min(choices, key=lambda c: c.planned.seconds)
    count, full = len(first.planned.plan.lengths), flags.accumulation or flags.pp
    faster = first.filled_seconds / best.planned.seconds
    return (
        f"cp {first.cp}, filled up to {counted(full, 'micro-batch', 'es')} a pass to keep the pipeline full: "
        f"{first.filled_steps:,} document-steps for {counted(count, 'document')}, "
        f"{write_seconds(first.filled_seconds)}.\n"
        f"cp {best.cp}, planned: each document once, {count:,} document-steps in "
        f"{counted(len(best.planned.plan.micro_batches), 'micro-batch', 'es')}, {write_seconds(best.planned.seconds)} "
        f"({faster:.1f} times faster)."
    )


def _degrees_json(title: str, choices: Sequence[DegreeChoice]) -> str:
    rows = [
        {
            "cp": c.cp,
            "groups": c.groups,
            "passes": c.passes,
            "filled_document_steps": c.filled_steps,
            "wasted_document_steps": c.wasted_steps,
            "filled_seconds": c.filled_seconds,
            "planned_document_steps": len(c.planned.plan.lengths),
            "planned_seconds": c.planned.seconds,
            "planned_micro_batches": len(c.planned.plan.micro_batches),
            "planned_max_tokens_per_slot": c.planned.plan.max_tokens_per_slot,
        }
        for c in choices
    ]
    best = min(choices, key=lambda c: c.planned.seconds)
    return json.dumps({"title": title, "degrees": rows, "best_cp": best.cp}, indent=1)
