"""`longspan plan`: document lengths to a plan: a table, JSON, a page, a trace, a picture. Imports no torch.

With `--gpu` it says what fits GPUs and how long it takes (`plans/ask.py`), with `--compare` it prices planners and
degrees (`plans/compare.py`).
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from longspan.cli.flags import check_least, parse_flags
from longspan.cli.plans.ask import answer_gpu_question
from longspan.cli.plans.compare import CompareFlags, check_comparison_flags, run_comparison
from longspan.cli.plans.lengths import read_lengths
from longspan.cli.plans.planning import (
    UNPRICED,
    add_closing,
    check_degrees,
    check_slots,
    check_weights,
    own_planners,
    plan_options,
    read_price,
)
from longspan.cli.plans.question import GpuFlags, asks_for_gpus, parse_question
from longspan.errors import ConfigError, PlanError, plural
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.check import name_arguments
from longspan.plan.items.encoder_shape import EncoderLoad, EncoderShape
from longspan.plan.planners.fixed import smallest_degree
from longspan.plan.ways import plan_with_partition
from longspan.train.plans.choice import KEYS


@dataclass(frozen=True, kw_only=True)
class PlanFlags(CompareFlags, GpuFlags):
    """Plan one step of some documents: which slots work together on which of them, micro-batch by micro-batch.

    With --gpu, say whether a model and its documents fit so many GPUs, with which keys, and how long it takes: the
    longest document (--longest), a step (--same 1x262144) or a run (--data). A config.json is enough; every key of
    longspan train may stand behind it. Planner, degree, rows of a slot and measures are chosen where they are not
    given.

    With --compare, price plans on a machine that you describe instead: planners next to each other, saved plans, or
    degrees of an evaluation. Times follow the cost model; the wire between stages, optimizer steps and the weights'
    memory are not in them.
    """

    partition: Literal["auto", "zigzag", "contiguous"] = "auto"
    """How a group's rows are dealt out: zigzag: equal causal work; contiguous: one run a slot, fewer copies under a2a,
    and slower than predicted under the other types; auto: of hybrids the faster, otherwise zigzag."""
    row_multiple: int = 1
    """Rows of a slot are laid out in multiples of this (sequence parallelism)."""
    images: str = ""
    """With --model of a vision-language model: images of each document, such as 16x256: 16 images of 256 rows each,
    which are among its tokens. Their encoding is priced, dealt to all slots."""
    max_image_rows: int = 0
    """With --images: rows of images that a slot encodes at once; 0: all."""
    plot: tuple[str, ...] = ()
    """Draw the plan to these files: .html (a page to explore), .svg or .png (viz extra)."""
    trace: str = ""
    """Write the plan as Chrome trace (chrome://tracing, ui.perfetto.dev) to this file."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code. Raises ConfigError for a .toml file, unless it is a flag's value."""
    pairs = zip(["", *argv], argv, strict=False)  # each word behind the word before it
    files = [word for previous, word in pairs if word.endswith(".toml") and not previous.startswith("-")]
    if files:
        raise ConfigError(
            f"longspan plan reads no configuration; longspan train {files[0]} --dry-run --run.machine h100 --world 4 "
            "answers for one"
        )
    if asks_for_gpus(argv):
        return answer_gpu_question(*parse_question(PlanFlags, argv))
    flags = parse_flags(PlanFlags, argv, "longspan plan")
    check_comparison_flags(flags)
    own_planners(flags)  # checks the name
    check_weights(flags, free=flags.mode == "free" or bool(flags.plans))  # saved plans have modes of their own
    try:
        return run_comparison(flags) if flags.compare else _plan_step(flags)
    except PlanError as error:
        flag_names = {name: f"--{name.replace('_', '-')}" for name in KEYS if name != "cp"}  # "cp 4" is a degree
        raise PlanError(name_arguments(str(error), flag_names)) from error


def _plan_step(flags: PlanFlags) -> int:
    """Plan a step from flags, write its files, and print the plan and notes; return the exit code."""
    for path in flags.plot:
        if Path(path).suffix.lower() not in (".html", ".svg", ".png"):
            raise ConfigError(f"--plot {path}: a plan is drawn as .html, .svg or .png; give a name that ends so")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")
    check_degrees(flags)
    check_slots(flags)
    check_least(flags, max_image_rows=0)
    lengths, source = read_lengths(flags, flags.slots)
    began = time.perf_counter()
    price = read_price(flags, slots=flags.slots, mode=flags.mode)
    cost = add_closing(price, flags, slots=flags.slots, node_size=flags.node_size)
    plan, reason = make_plan(flags, lengths, cost)
    seconds = time.perf_counter() - began
    notes = [
        f"{plural(len(lengths), 'document')} from {source}, planned in {seconds:.3f} s",
        *([UNPRICED] if flags.mode == "free" and not cost.closing_seconds else []),
        *([reason] if reason else []),
        *_image_notes(flags, plan),
    ]
    # Files are written only now, because making the notes checks the images; their notes stand behind the first one.
    files = _write_files(flags, plan, source) if flags.plot or flags.trace else []
    notes[1:1] = [f"wrote {path}" for path in files]
    print(plan.to_json() if flags.json else plan.table())
    print("\n".join(notes), file=sys.stderr if flags.json else sys.stdout)
    return 0


def make_plan(flags: PlanFlags, lengths: Sequence[int], cost: Cost) -> tuple[Plan, str]:
    """Make the plan that the flags describe, and return it with the reason for a hybrid's partition ("" for others).

    Raises LongspanErrors for an impossible plan.
    """
    home = Layout(flags.slots)
    options = plan_options(
        flags,
        lengths,
        home,
        cost=cost,
        node_size=flags.node_size,
        micro_batch_multiple=flags.micro_batch_multiple,
        mode=flags.mode,
        row_multiple=flags.row_multiple,
    )
    default_kind = "fixed" if flags.cp else "dynamic"
    kind = default_kind if flags.planner == "auto" else flags.planner
    if kind == "dynamic" and flags.cp:
        raise ConfigError("--cp is the degree of fixed and padded plans; use --min-cp and --max-cp, or --planner fixed")
    return plan_with_partition(partial(_run_planner, flags, kind, lengths, home), options, flags.partition)


def _run_planner(flags: PlanFlags, kind: str, lengths: Sequence[int], home: Layout, options: PlanOptions) -> Plan:
    """Plan with the planner of this kind; a fixed or padded plan without --cp has the least degree that is enough."""
    if planners := own_planners(flags):
        return planners[kind](lengths, home, options=options)
    if kind == "dynamic":
        return plan_dynamic(lengths, home, min_cp=flags.min_cp, max_cp=flags.max_cp or None, options=options)
    planner = plan_padded if kind == "padded" else plan_fixed
    return planner(lengths, home, flags.cp or smallest_degree(lengths, home, options), options=options)


def _write_files(flags: PlanFlags, plan: Plan, source: str) -> list[str]:
    """Write the pictures and the trace that flags name; returns their paths."""
    from longspan.report import chrome_trace, plan_document, plan_page, write_png

    title = f"plan of {plural(len(plan.lengths), 'document')} from {source}"
    for path in flags.plot:
        kind = Path(path).suffix.lower()
        if kind == ".png":
            write_png(plan, path)
        else:
            _write_file(path, plan_page(plan, title=title) if kind == ".html" else plan_document(plan, title=title))
    if flags.trace:
        _write_file(flags.trace, chrome_trace(plan))
    return [*flags.plot, *([flags.trace] if flags.trace else [])]


def _write_file(path: str, content: str) -> None:
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _image_notes(flags: PlanFlags, plan: Plan) -> Iterator[str]:
    """Yield lines below a plan about the encoding of images.

    Raises ConfigError for images that do not fit, PlanError for an image encoder (tower) that cannot be priced.
    """
    if flags.images and not flags.model:
        raise ConfigError(f"--images {flags.images} needs the model whose tower encodes them; give its --model FOLDER")
    if not flags.images:
        if flags.model and _has_tower(flags.model):
            yield "the model has a tower for images, which is not in these seconds; --images COUNTxROWS adds it"
        return
    count, rows = _parse_images(flags.images)
    shape = EncoderShape.of(flags.model)
    if too_short := [n for n in plan.lengths if n < count * rows]:
        raise ConfigError(
            f"--images {flags.images} takes {count * rows:,} tokens of each document, and {len(too_short)} of "
            f"{len(plan.lengths)} are shorter (the shortest {min(too_short):,}); give fewer or smaller images"
        )
    images = [[rows] * count] * len(plan.lengths)
    load = EncoderLoad.of(plan, images, shape.cost(), max_rows=flags.max_image_rows or None)
    share = load.seconds / (load.seconds + plan.predicted_seconds)
    yield (
        f"encoder: {count * len(images):,} images of {rows:,} rows dealt to {plan.slots} slots take {load.seconds:.3g} "
        f"s beside the plan's {plan.predicted_seconds:.3g} s on H200s, {share:.0%} of the step; the busiest slot has "
        f"{load.balance:.2f} of the mean"
    )
    yield (
        f"every slot encoding all images of its documents would take {load.replicated_seconds:.3g} s, "
        f"{load.replicated_seconds / load.seconds:.1f} times as long"
    )


def _parse_images(text: str) -> tuple[int, int]:
    """Parse --images, as in 16x256: how many images a document has, and the rows of each."""
    count, _, rows = text.lower().partition("x")
    if not count.isdecimal() or not rows.isdecimal() or not int(count) * int(rows):
        raise ConfigError(f"--images {text!r} is not COUNTxROWS, such as 16x256")
    return int(count), int(rows)


def _has_tower(model: str) -> bool:
    """Return whether a model encodes images with a tower whose work is known."""
    try:
        return bool(EncoderShape.of(model))
    except PlanError:
        return False
