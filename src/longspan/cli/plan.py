"""`longspan plan`: document lengths to a plan: a table, JSON, a page, a picture. Imports no torch.

With `--gpu` it says what fits GPUs and how long it takes (`plans/answer.py`), with `--compare` it prices planners and
degrees (`plans/compare.py`).
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from longspan.cli.flags import Groups, parse_flags, write_text
from longspan.cli.plans.answer import answer_gpu_question
from longspan.cli.plans.compare import CompareFlags, check_comparison_flags, run_comparison
from longspan.cli.plans.planning import (
    UNPRICED,
    check_degrees,
    check_slots,
    own_planners,
    plan_options,
    read_lengths,
    read_price,
)
from longspan.cli.plans.question import asks_for_gpus, parse_question
from longspan.errors import ConfigError, PlanError, plural
from longspan.hub import find_local
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.check import name_arguments
from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.planners.fixed import smallest_degree
from longspan.plan.ways import plan_with_partition
from longspan.train.plans.choice import KEYS


@dataclass(frozen=True, kw_only=True)
class PlanFlags(CompareFlags):
    """Plan one step of some documents: which slots work together on which of them, micro-batch by micro-batch.

    With --gpu, say whether a model and its documents fit so many GPUs, with which keys, and how long it takes: the
    longest document (--longest), a step (--same 1x262144) or a run (--data). A config.json is enough; every key of
    longspan train may stand behind it. Planner, degree, rows of a slot and measures are chosen where they are not
    given.

    With --compare, price planners next to each other, or degrees of an evaluation: with --gpu at the rows that memory
    holds, without it by the cost model alone.

    longspan plan --same 8x8192 --slots 4

    longspan plan --model Qwen3-8B --gpu h100 --gpus 4 --same 1x262144

    longspan plan --compare --lengths lengths.json --slots 16 --machine h100
    """

    SHOWN: ClassVar[Groups] = {
        "a plan of one step": (
            *("--lengths", "--data", "--distribution", "--same", "--slots", "--max_tokens_per_slot", "--cp_comm_type"),
            *("--model", "--machine", "--plot", "--json"),
        ),
        "what fits GPUs (--gpu)": ("--gpu", "--gpus", "--longest", "--tokens_per_step", "--epochs", "--write"),
        "planners or degrees compared (--compare)": (
            "--compare",
            "--world",
            "--tp",
            "--pp",
            "--which_eval_degree",
        ),
    }
    partition: Literal["auto", "zigzag", "contiguous"] = "auto"
    """How a group's rows are dealt out: zigzag: equal causal work; contiguous: one run a slot, fewer copies under a2a,
    and slower than predicted under the other types; auto: of hybrids the faster, otherwise zigzag."""
    row_multiple: int = 1
    """Rows of a slot are laid out in multiples of this (sequence parallelism)."""
    plot: tuple[str, ...] = ()
    """Draw the plan to these files: .html (a page to explore), .svg or .png (viz extra)."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; a .toml file among the words is refused, unless it is a flag's value."""
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
    tokenizer = find_local(flags.tokenizer, "--tokenizer")
    flags = replace(flags, model=find_local(flags.model, "--model"), tokenizer=tokenizer)
    check_comparison_flags(flags)
    own_planners(flags)  # checks the name
    try:
        return run_comparison(flags) if flags.compare else _plan_step(flags)
    except PlanError as error:
        flag_names = {name: f"--{name.replace('_', '-')}" for name in KEYS if name != "cp"}  # "cp 4" is a degree
        raise PlanError(name_arguments(str(error), flag_names)) from error


def _plan_step(flags: PlanFlags) -> int:
    for path in flags.plot:
        if Path(path).suffix.lower() not in (".html", ".svg", ".png"):
            raise ConfigError(f"--plot {path}: a plan is drawn as .html, .svg or .png; give a name that ends so")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")
    check_degrees(flags)
    check_slots(flags)
    lengths, source = read_lengths(flags, flags.slots)
    began = time.perf_counter()
    plan, reason = make_plan(flags, lengths, read_price(flags, slots=flags.slots, mode=flags.mode))
    seconds = time.perf_counter() - began
    if flags.plot:
        from longspan.report import plan_document, plan_page, write_png

        title = f"plan of {plural(len(plan.lengths), 'document')} from {source}"
        for path in flags.plot:
            if path.lower().endswith(".png"):
                write_png(plan, path)
            else:
                draw = plan_page if path.lower().endswith(".html") else plan_document
                write_text(path, draw(plan, title=title))
    notes = [
        f"{plural(len(lengths), 'document')} from {source}, planned in {seconds:.3f} s",
        *(f"wrote {path}" for path in flags.plot),
        *([UNPRICED] if flags.mode == "free" and not plan.cost.closing_seconds else []),
        *([reason] if reason else []),
    ]
    with suppress(PlanError):  # of a model without a tower whose work is known
        if flags.model and EncoderShape.of(flags.model):
            notes.append("the model has a tower for images, which is not in these seconds (docs/planning.md)")
    print(plan.to_json() if flags.json else plan.table())
    print("\n".join(notes), file=sys.stderr if flags.json else sys.stdout)
    return 0


def make_plan(flags: PlanFlags, lengths: Sequence[int], cost: Cost) -> tuple[Plan, str]:
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
    kind = ("fixed" if flags.cp else "dynamic") if flags.planner == "auto" else flags.planner
    if kind == "dynamic" and flags.cp:
        raise ConfigError("--cp is the degree of fixed and padded plans; use --min-cp and --max-cp, or --planner fixed")

    def make(way: PlanOptions) -> Plan:
        if planners := own_planners(flags):
            return planners[kind](lengths, home, options=way)
        if kind == "dynamic":
            return plan_dynamic(lengths, home, min_cp=flags.min_cp, max_cp=flags.max_cp or None, options=way)
        planner = plan_padded if kind == "padded" else plan_fixed
        return planner(lengths, home, flags.cp or smallest_degree(lengths, home, way), options=way)

    return plan_with_partition(make, options, flags.partition)
