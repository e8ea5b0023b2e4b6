"""`longspan simulate`: what planners and degrees would cost on a cluster, without one. Imports no torch."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from longspan.cli.flags import Switch, check_least, parse_flags
from longspan.cli.planning.lengths import SourceFlags, read_lengths
from longspan.cli.planning.pictures import check_pictures, kind_of_picture, write_file
from longspan.cli.planning.pricing import (
    ClosingFlags,
    PricingFlags,
    check_weights,
    heads_of,
    notes_on,
    plan_options,
    planned,
    read_price,
    with_weights,
)
from longspan.cli.simulation.comparison import (
    Row,
    comparison_json,
    comparison_picture,
    comparison_table,
    title_of_saved_plans,
)
from longspan.cli.simulation.degrees import degrees_json, degrees_picture, degrees_table
from longspan.errors import ConfigError, LongspanError, counted
from longspan.layout import Layout
from longspan.plan import Cost, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.check import heads_allow
from longspan.plan.planners.options import PlanOptions
from longspan.plan.simulate.evaluation_plan import plan_evaluation, widest_degree
from longspan.plan.simulate.row_bytes import QWEN3_8B, Checkpointing, RowBytes
from longspan.plan.simulate.simulate import Simulation, shared_by, simulate
from longspan.plan.simulate.which_degree import which_degree
from longspan.plan.simulate.which_type import options_of_types, type_of
from longspan.report.markup import tag
from longspan.report.page import page


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
    node_size: int = 8
    """Ranks of one host."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """How slots wait for each other; free needs --pp 1."""
    activation_checkpointing: Checkpointing = "full"
    """What of the layers rows are counted by in the column "kept", as train.activation_checkpointing says it; seconds
    are without recomputation."""
    evaluation: Switch = False
    """Forward passes only."""
    which_eval_degree: Switch = False
    """Instead: price an evaluation of the documents at each degree, filled up and planned, beside a dynamic plan."""
    accumulation: int = 0
    """With --which-eval-degree: micro-batches that keep the pipeline full; 0: the stages."""
    plot: tuple[str, ...] = ()
    """Draw the seconds of each row of the table to these files, .svg or .html."""
    plans: tuple[str, ...] = ()
    """Instead: simulate these saved plans, or those in a run's folder."""
    json: Switch = False
    """Print the result as JSON, and nothing else, on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    flags = parse_flags(SimulateFlags, argv, "longspan simulate")
    check_least(flags, world=0, slots=0, tp=1, pp=1, vpp=1, max_tokens_per_slot=0, node_size=1, accumulation=0)
    check_weights(flags, free=flags.mode == "free" or bool(flags.plans))
    check_pictures(flags.plot, ("svg", "html"), "a comparison")
    if flags.plans:
        rows: list[Row] = list(_saved(flags))
        title = title_of_saved_plans(rows)
        table = comparison_table(title, rows, flags.activation_checkpointing)
        print(comparison_json(title, rows) if flags.json else table)
        _draw(flags, title, comparison_picture(title, rows) if flags.plot else "")
        return 0
    home = home_of(flags)
    lengths, source = read_lengths(flags, home.slots)
    documents, tokens = counted(len(lengths), "document"), counted(sum(lengths), "token")
    title = (
        f"{documents} ({tokens}, longest {max(lengths):,}) from {source}\n"
        f"{counted(len(home.ranks), 'rank')} = {counted(home.slots, 'slot')} x tp {home.tp} x pp {home.pp}"
    )
    if flags.which_eval_degree:
        _print_degrees(flags, title, lengths, home)
        return 0
    rows = list(_compared(flags, lengths, home))
    table = comparison_table(title, rows, flags.activation_checkpointing)
    print(comparison_json(title, rows) if flags.json else "\n".join([table, *_notes(flags)]))
    _draw(flags, title, comparison_picture(title, rows) if flags.plot else "")
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
    price = read_price(flags, training=not (flags.evaluation or flags.which_eval_degree))
    return shared_by(price, flags.tp), max(1, flags.node_size // flags.tp)


def _print_degrees(flags: SimulateFlags, title: str, lengths: Sequence[int], home: Layout) -> None:
    options = _options(flags, home)
    if options.cost.states:
        options = replace(options, partition="contiguous", cost=options.cost.for_partition("contiguous"))
    comparison = which_degree(lengths, home, options=options, accumulation=flags.accumulation or None, vpp=flags.vpp)
    accumulation = flags.accumulation or flags.pp
    print(degrees_json(title, comparison) if flags.json else degrees_table(title, comparison, accumulation))
    if not flags.json:
        print("\n".join(_notes(flags)), end="\n" if _notes(flags) else "")
    _draw(flags, title, degrees_picture(title, comparison) if flags.plot else "")


def _draw(flags: SimulateFlags, title: str, picture: str) -> None:
    """Write a picture to the files that the flags name, as it is or in a page."""
    for path in flags.plot:
        heading = title.splitlines()[0]
        figure = tag("figure", picture, class_="chart")
        write_file(path, page(heading, [figure]) if kind_of_picture(path) == "html" else picture)
        print(f"wrote {path}", file=sys.stderr if flags.json else sys.stdout)


def _notes(flags: SimulateFlags) -> Sequence[str]:
    return notes_on(flags, flags.cp_comm_type or "auto")


def _options(flags: SimulateFlags, home: Layout) -> PlanOptions:
    cost, node_size = _machine(flags)
    return plan_options(
        flags,
        cp_comm_type=flags.cp_comm_type or "auto",
        cost=with_weights(cost, flags, slots=home.slots, node_size=node_size, tp=flags.tp),
        node_size=node_size,
        mode=flags.mode,
        micro_batch_multiple=flags.pp if flags.vpp > 1 else 1,
    )


def _compared(flags: SimulateFlags, lengths: Sequence[int], home: Layout) -> Iterator[Row]:
    options, cap = _options(flags, home), flags.max_tokens_per_slot
    fit = [d for d in degrees_of(flags, home) if not cap or max(lengths) <= cap * d][:5] or [home.slots]
    padded = partial(plan_padded, lengths, home, fit[0])
    yield f"padded, cp {fit[0]}", _fastest_simulation(padded, home, options, fit[0], flags)
    for degree in fit:
        fixed = partial(plan_fixed, lengths, home, degree)
        yield f"fixed, cp {degree}", _fastest_simulation(fixed, home, options, degree, flags)
    yield "dynamic", _fastest_simulation(partial(plan_dynamic, lengths, home), home, options, None, flags)


def _fastest_simulation(
    planner: partial[Plan], home: Layout, options: PlanOptions, cp: int | None, flags: SimulateFlags
) -> Simulation | str:
    """The simulation of a planner's fastest plan over communication types, at a degree or of dynamic degrees; or why
    there is none: the other rows are worth printing all the same.
    """
    simulations, refusals = list[Simulation](), list[str]()
    for typed in [options] if options.cost.states else options_of_types(options, home, cp):
        try:
            simulations.append(_simulation(planner, home, typed, cp, flags))
        except LongspanError as error:
            refusals.append(str(error))
    return min(simulations, key=lambda simulation: simulation.seconds) if simulations else refusals[0]


def _simulation(
    planner: partial[Plan], home: Layout, options: PlanOptions, cp: int | None, flags: SimulateFlags
) -> Simulation:
    def make(options: PlanOptions) -> Plan:
        return planner(options=options)

    def evaluated(options: PlanOptions) -> Plan:
        return plan_evaluation(make, planner.args[0], home, options, cp or widest_degree(home, options))

    plan, _ = planned(evaluated if flags.evaluation else make, options)
    return simulate(plan, pp=flags.pp, vpp=flags.vpp, row_bytes=_row_bytes(flags, plan))


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
            price = cost if flags.cost or flags.model else plan.cost
            price = with_weights(price, flags, slots=plan.slots, node_size=plan.node_size, tp=flags.tp)
            backward = plan.cost.passes != "forward" and not flags.evaluation
            yield (
                file.stem,
                simulate(
                    plan, cost=price, pp=flags.pp, vpp=flags.vpp, backward=backward, row_bytes=_row_bytes(flags, plan)
                ),
            )


def _row_bytes(flags: SimulateFlags, plan: Plan) -> RowBytes:
    """Of the model that is named, in bfloat16, or of Qwen3-8B; depths run in steps alone."""
    depths = 0 if flags.evaluation else flags.mtp_depths
    exchanged, checkpointing = "a2a" in type_of(plan), flags.activation_checkpointing
    return RowBytes.of(flags.model or QWEN3_8B, depths=depths, checkpointing=checkpointing, exchanged=exchanged)
