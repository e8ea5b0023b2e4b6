"""`longspan plan --compare`: what planners, saved plans and degrees of an evaluation would cost on a cluster.

Flags and their checks, saved plans, and the order of the steps; `comparison_tables.py` has what is printed and drawn,
`plan/simulate` makes the plans. Imports no torch.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from longspan.cli.flags import Switch, check_least
from longspan.cli.plans.comparison_tables import (
    comparison_json,
    comparison_picture,
    comparison_table,
    degrees_json,
    degrees_picture,
    degrees_table,
    sensitivity_lines,
    title_saved_plans,
)
from longspan.cli.plans.lengths import read_lengths
from longspan.cli.plans.planning import (
    PlanningFlags,
    add_closing,
    check_degrees,
    check_pictures,
    check_slots,
    own_planners,
    picture_kind,
    plan_options,
    read_price,
    type_notes,
    write_file,
)
from longspan.errors import ConfigError, plural
from longspan.layout import Layout
from longspan.plan import Cost, Plan, read_plans
from longspan.plan.planners.options import PlanOptions
from longspan.plan.simulate.compare import NamedPlan, PlannerComparison
from longspan.plan.simulate.evaluation import which_degree
from longspan.plan.simulate.sensitivity import Sensitivity
from longspan.report.markup import page, tag

NOTHING_POSSIBLE = 2  # status


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
    sensitivity: Switch = False
    """With --compare: also make the dynamic plan with each constant of the price 20 % lower and higher, and print how
    much longer it then takes: whether calibration is worth the time."""
    plans: tuple[str, ...] = ()
    """With --compare: price these saved plans instead, those in a run's folder, or those of all its steps
    (RUN/plans.jsonl)."""


def check_comparison_flags(flags: CompareFlags) -> None:
    """Raise ConfigError for a flag of one plan with --compare, and for a flag of comparisons without it."""
    shared_flags = {field.name for field in fields(PlanningFlags)} | {"compare"}
    comparison_flags = {field.name for field in fields(CompareFlags)} - shared_flags
    for field in fields(flags):
        if field.name in shared_flags or getattr(flags, field.name) == field.default:
            continue
        name = f"--{field.name.replace('_', '-')}"
        if flags.compare and field.name not in comparison_flags:
            raise ConfigError(f"{name} is of one plan, and --compare prices several; leave one of the two out")
        if not flags.compare and field.name in comparison_flags:
            raise ConfigError(f"{name} is of comparisons; add --compare, or leave it out")


def run_comparison(flags: CompareFlags) -> int:
    """Print a comparison and write its pictures; returns the exit code."""
    check_least(flags, world=0, slots=0, tp=1, pp=1, vpp=1, node_size=1, accumulation=0)
    check_degrees(flags)
    check_pictures(flags.plot, ("svg", "html"), "a comparison")
    _check_sensitivity(flags)
    _check_compared_degrees(flags)
    if flags.plans:
        rows = list(_price_saved_plans(flags))
        return _show_rows(flags, title_saved_plans(rows), rows)
    home = make_home(flags)
    lengths, source = read_lengths(flags, home.slots)
    documents, tokens = plural(len(lengths), "document"), plural(sum(lengths), "token")
    title = (
        f"{documents} ({tokens}, longest {max(lengths):,}) from {source}\n"
        f"{plural(len(home.ranks), 'rank')} = {plural(home.slots, 'slot')} x tp {home.tp} x pp {home.pp}"
    )
    if flags.which_eval_degree:
        _show_degrees(flags, title, lengths, home)
        return 0
    comparison = PlannerComparison(
        lengths=lengths,
        home=home,
        options=_comparison_options(flags, home, lengths),
        evaluation=flags.evaluation,
        cp=flags.cp,
        min_cp=flags.min_cp,
        max_cp=flags.max_cp,
        own=own_planners(flags),
    )
    changes = list(comparison.sensitivity()) if flags.sensitivity else []
    notes = type_notes(flags, flags.cp_comm_type or "auto")
    return _show_rows(flags, title, list(comparison.plans()), notes, changes)


def _check_sensitivity(flags: CompareFlags) -> None:
    """Raise ConfigError for --sensitivity with a flag under which no dynamic plan of a training step is made."""
    flags_of_other_plans = {
        "--plans": flags.plans,
        "--which-eval-degree": flags.which_eval_degree,
        "--evaluation": flags.evaluation,
    }
    for name, value in flags_of_other_plans.items():
        if flags.sensitivity and value:
            raise ConfigError(
                f"--sensitivity is of the dynamic plan of a training step, and {name} compares others; leave one out"
            )


def _check_compared_degrees(flags: CompareFlags) -> None:
    """Raise ConfigError for flags of degrees and micro-batches under which nothing changes.

    --which-eval-degree compares all degrees, and saved plans have the degrees that they were made with.
    """
    if flags.cp and flags.which_eval_degree:
        raise ConfigError(f"--cp {flags.cp} is one degree, and --which-eval-degree compares all; leave one of them out")
    for name in ("cp", "min_cp", "max_cp", "micro_batch_multiple"):
        if flags.plans and getattr(flags, name) != getattr(CompareFlags, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is of plans that are made, and those of --plans are as they were saved; leave it out"
            )


def make_home(flags: CompareFlags) -> Layout:
    """Make the home that the flags describe. Raises ConfigError or LayoutError if they do not fit."""
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
    cost = replace(cost, chunks=flags.vpp)
    return plan_options(
        flags,
        lengths,
        home,
        cp_comm_type=flags.cp_comm_type or "auto",
        cost=add_closing(cost, flags, slots=home.slots, node_size=node_size, tp=flags.tp),
        node_size=node_size,
        mode=flags.mode,
        micro_batch_multiple=math.lcm(flags.micro_batch_multiple, home.pp),
    )


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
    """Yield the plans in these files and folders, each with its name: the file's, or the step in a .jsonl file."""
    for file in _list_plan_files(names):
        if file.suffix == ".jsonl":
            yield from ((f"step {step}", plan) for step, plan in read_plans(file))
        else:
            yield file.stem, Plan.from_json(file.read_bytes())


def _list_plan_files(names: Sequence[str]) -> Iterator[Path]:
    """Yield the plan files of --plans: each name is a file, or a folder, of which the JSON files are taken.

    Of a run's folder those in its folder `plans` are taken. Raises ConfigError for a name without plans.
    """
    for name in names:
        path = Path(name)
        folder = path / "plans" if (path / "plans").is_dir() else path
        files = sorted(folder.glob("*.json")) if folder.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(f"{name} is neither a plan's JSON file nor a folder with plans")
        yield from files


def _show_rows(
    flags: CompareFlags,
    title: str,
    rows: Sequence[NamedPlan],
    notes: Sequence[str] = (),
    changes: Sequence[Sensitivity] = (),
) -> int:
    """Print compared plans as a table or JSON, and write their picture where --plot asks for one.

    `notes` are lines below the table, `changes` is what wrong constants would change, empty without --sensitivity.
    Returns the exit code: 2 where no plan is possible.
    """
    possible = any(isinstance(plan, Plan) for _, plan in rows)
    if flags.json:
        print(comparison_json(title, rows, changes))
    else:
        print("\n".join([comparison_table(title, rows), *(notes if possible else ()), *sensitivity_lines(changes)]))
    if possible:
        _write_pictures(flags, title, comparison_picture(title, rows) if flags.plot else "")
    return 0 if possible else NOTHING_POSSIBLE


def _show_degrees(flags: CompareFlags, title: str, lengths: Sequence[int], home: Layout) -> None:
    """Compare the degrees of an evaluation; print their table or JSON, and write their pictures."""
    options = _comparison_options(flags, home, lengths)
    if options.cost.states:  # of a hybrid: contiguous rows are one run a slot, so fewest states are sent
        options = replace(options, partition="contiguous", cost=options.cost.for_partition("contiguous"))
    comparison = which_degree(
        lengths,
        home,
        options=options,
        accumulation=flags.accumulation or None,
        dynamic_degrees=(flags.min_cp, flags.max_cp),
    )
    if flags.json:
        print(degrees_json(title, comparison))
    else:
        table = degrees_table(title, comparison, flags.accumulation or flags.pp)
        print("\n".join([table, *type_notes(flags, flags.cp_comm_type or "auto")]))
    _write_pictures(flags, title, degrees_picture(title, comparison) if flags.plot else "")


def _write_pictures(flags: CompareFlags, title: str, picture: str) -> None:
    """Write a picture to the files of --plot: into a page for .html, else as it is, which is SVG."""
    for path in flags.plot:
        heading = title.splitlines()[0]
        figure = tag("figure", picture, class_="chart")
        write_file(path, page(heading, [figure]) if picture_kind(path) == "html" else picture)
        print(f"wrote {path}", file=sys.stderr if flags.json else sys.stdout)
