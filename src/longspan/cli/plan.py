"""`longspan plan`: document lengths to a plan: a table, JSON, a page, a trace, a picture. Imports no torch."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from longspan.cli.flags import Switch, check_least, parse_flags
from longspan.cli.planning.images import ImageFlags, image_notes, with_images
from longspan.cli.planning.lengths import SourceFlags, read_lengths
from longspan.cli.planning.pictures import check_pictures, kind_of_picture, write_file
from longspan.cli.planning.pricing import (
    UNPRICED,
    ClosingFlags,
    PricingFlags,
    check_weights,
    notes_on,
    plan_options,
    planned,
    read_price,
    with_weights,
)
from longspan.errors import ConfigError, counted
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.planners.fixed import smallest_degree


@dataclass(frozen=True, kw_only=True)
class PlanFlags(ImageFlags, PricingFlags, ClosingFlags, SourceFlags):
    """Plan one step of some documents: which slots work together on which of them, micro-batch by micro-batch."""

    slots: int
    """Slots of the home: ranks / (tensor-parallel degree x pipeline stages)."""
    planner: Literal["auto", "fixed", "padded", "dynamic"] = "auto"
    """fixed: packed, one degree; padded: one document a row, padded; dynamic: a degree for each document; auto: fixed
    where --cp is given, else dynamic."""
    cp: int = 0
    """Degree of fixed and padded plans; 0: the smallest that divides the slots and holds the longest document."""
    min_cp: int = 1
    """Smallest degree that a dynamic plan may choose."""
    max_cp: int = 0
    """Largest degree that a dynamic plan may choose; 0: no limit."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """lockstep: all slots end a micro-batch together (FSDP, EP, pipelines); free: only members of a group wait."""
    partition: Literal["auto", "zigzag", "contiguous"] = "auto"
    """How a group's rows are dealt out: zigzag: equal causal work; contiguous: one run a slot, fewer copies under a2a,
    and slower than predicted under the other types; auto: of hybrids the faster, otherwise zigzag."""
    node_size: int = 8
    """Slots of one host; groups inside a host talk over its fast links."""
    micro_batch_multiple: int = 1
    """Round the number of micro-batches up to a multiple of this (pipelines with several chunks a stage)."""
    row_multiple: int = 1
    """Rows of a slot are laid out in multiples of this (sequence parallelism)."""
    json: Switch = False
    """Print the plan as JSON, and nothing else, on standard output."""
    plot: tuple[str, ...] = ()
    """Draw the plan to these files: .html (a page to explore), .svg, or .png (needs the viz extra)."""
    trace: str = ""
    """Write the plan as Chrome trace (chrome://tracing, ui.perfetto.dev) to this file."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    flags = parse_flags(PlanFlags, argv, "longspan plan")
    check_weights(flags, free=flags.mode == "free")
    check_pictures(flags.plot, ("html", "svg", "png"), "a plan")
    check_least(flags, slots=1, max_tokens_per_slot=0, cp=0, max_cp=0, max_image_rows=0)
    lengths, source = read_lengths(flags, flags.slots)
    began = time.perf_counter()
    cost = with_weights(read_price(flags), flags, slots=flags.slots, node_size=flags.node_size)
    cost = with_images(flags, flags.model, lengths, cost)
    plan, why = make_plan(flags, lengths, cost)
    seconds = time.perf_counter() - began
    of_images = [*image_notes(flags, flags.model, plan)]
    wrote = _write_files(flags, plan, source)
    if flags.json:
        print(plan.to_json())
    else:
        print(plan.table())
    lines = [
        f"{counted(len(lengths), 'document')} from {source}, planned in {seconds:.3f} s",
        *(f"wrote {path}" for path in wrote),
        *([UNPRICED] if flags.mode == "free" and not cost.closing_seconds else []),
        *([why] if why else []),
        *notes_on(flags),
        *of_images,
    ]
    print("\n".join(lines), file=sys.stderr if flags.json else sys.stdout)
    return 0


def make_plan(flags: PlanFlags, lengths: Sequence[int], cost: Cost) -> tuple[Plan, str]:
    """The plan that the flags ask for, and why a hybrid's rows are dealt out so. Raises LongspanError's children where
    it is impossible.
    """
    home = Layout(flags.slots)
    options = plan_options(
        flags,
        cost=cost,
        node_size=flags.node_size,
        micro_batch_multiple=flags.micro_batch_multiple,
        mode=flags.mode,
        row_multiple=flags.row_multiple,
    )
    kind = flags.planner if flags.planner != "auto" else "fixed" if flags.cp else "dynamic"
    if kind == "dynamic" and flags.cp:
        raise ConfigError("--cp is the degree of fixed and padded plans; use --min-cp and --max-cp, or --planner fixed")
    return planned(partial(_planned, flags, kind, lengths, home), options, flags.partition)


def _planned(flags: PlanFlags, kind: str, lengths: Sequence[int], home: Layout, options: PlanOptions) -> Plan:
    if kind == "dynamic":
        return plan_dynamic(lengths, home, min_cp=flags.min_cp, max_cp=flags.max_cp or None, options=options)
    planner = plan_padded if kind == "padded" else plan_fixed
    return planner(lengths, home, flags.cp or smallest_degree(lengths, home, options), options=options)


def _write_files(flags: PlanFlags, plan: Plan, source: str) -> list[str]:
    title = f"plan of {counted(len(plan.lengths), 'document')} from {source}"
    for path in flags.plot:
        _draw(plan, path, title)
    if flags.trace:
        from longspan.report import chrome_trace

        write_file(flags.trace, chrome_trace(plan))
    return [*flags.plot, *([flags.trace] if flags.trace else [])]


def _draw(plan: Plan, path: str, title: str) -> None:
    """Write the picture of a plan as the kind of file that its name says."""
    from longspan.report import plan_document, plan_page, write_png

    kind = kind_of_picture(path)
    if kind == "png":
        write_png(plan, path)
    else:
        write_file(path, plan_page(plan, title=title) if kind == "html" else plan_document(plan, title=title))
