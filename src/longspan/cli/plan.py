"""`longspan plan`: document lengths to a plan: a table, JSON, a page, a picture. Imports no torch.

With `--gpu` or `--compare` it says what fits GPUs and how long it takes (`plans/answer.py`).
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from longspan.cli.flags import Groups, check_flags_at_least, flag_text, parse_flags, write_text_file
from longspan.cli.plans.answer import answer_gpu_question
from longspan.cli.plans.planning import PlanningFlags, read_lengths
from longspan.cli.plans.question import GpuFlags, is_gpu_question, parse_question, preset_line
from longspan.cli.plans.which_gpu import ALL_GPUS, answer_which_gpu
from longspan.config.keys import AUTO
from longspan.config.plan_section import PLANNERS
from longspan.errors import ConfigError, PlanError, plural
from longspan.hub import find_local_path, hub_name
from longspan.layout import Layout
from longspan.model.presets import PRESETS, find_published_preset
from longspan.plan import Plan, PlanOptions
from longspan.plan.check import check_comm_types, heads_allow_degree, replace_argument_names
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.cost.machine import CostSettings, read_machine
from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.shape.model_shape import QWEN3_8B, read_query_heads
from longspan.resolve.evaluation import compare_degrees
from longspan.resolve.partition import compare_partitions
from longspan.resolve.planner_config import KEYS, PlannerConfig, check_planner_exists
from longspan.resolve.ways import fastest_plan

USUAL_ROWS = 8192  # of a slot
UNPRICED = (
    "free mode: gathering sharded parameters and summing their gradients, once a step, is not in these seconds;\n"
    "--gpu NAME --gpus N --model FOLDER prices it by the model's weights"
)

READ_BY_DEGREES = {field.name for field in fields(PlanningFlags)} - {"planner", "mode", "cp"}
READ_BY_DEGREES |= {"world", "tp", "pp", "vpp", "compare", "which_eval_degree"}


@dataclass(frozen=True, kw_only=True)
class PlanFlags(GpuFlags):
    """Plan one step of some documents: which slots work together on which of them, micro-batch by micro-batch.

    With --gpu, say whether a model and its documents fit so many GPUs, with which keys, and how long it takes: the
    longest document (--longest), a step (--same 1x262144) or a run (--data). A config.json is enough; every key of
    longspan train may stand behind it. Planner, degree, rows of a slot and measures are chosen where they are not
    given.

    With --compare, every planner and degree is a row of that table; --which-eval-degree says at which degree an
    evaluation is fastest.

    longspan plan --same 8x8192 --slots 4

    longspan plan --model Qwen3-8B --gpu h100 --gpus 4 --same 1x262144

    longspan plan --compare --lengths lengths.json --slots 16 --machine h100
    """

    SHOWN: ClassVar[Groups] = {
        "a plan of one step": (
            "--lengths",
            "--distribution",
            "--same",
            "--slots",
            "--max_tokens_per_slot",
            "--cp_comm_type",
            "--model",
            "--machine",
            "--plot",
            "--json",
        ),
        "what fits GPUs (--gpu)": (
            "--gpu",
            "--gpus",
            "--longest",
            "--data",
            "--tokens_per_step",
            "--epochs",
            "--write",
        ),
        "planners or degrees compared": ("--compare", "--world", "--tp", "--pp", "--which_eval_degree"),
    }
    partition: Literal["auto", "zigzag", "contiguous"] = "auto"
    """How a group's rows are dealt out: zigzag: equal causal work; contiguous: one run a slot, fewer copies under a2a,
    and slower than predicted under the other types; auto: of hybrids the faster, otherwise zigzag."""
    which_eval_degree: bool = False
    """Price an evaluation of the documents (forward passes) at each degree, and by a dynamic plan."""
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
    asks_for_degree = any(word.replace("_", "-").startswith("--which-eval-degree") for word in argv)
    if not asks_for_degree and is_gpu_question(argv):
        flags, question = parse_question(PlanFlags, argv)
        answer = answer_which_gpu if flags.gpu.lower() == ALL_GPUS else answer_gpu_question
        return answer(flags, question)
    flags = parse_flags(PlanFlags, argv, "longspan plan")
    if not find_published_preset(flags.model):
        flags = replace(flags, model=find_local_path(flags.model, "--model"))
    if flags.planner not in ("auto", *PLANNERS):
        check_planner_exists(flags.planner, "--planner")
    try:
        return _answer_eval_degree(flags) if asks_for_degree else _plan_one_step(flags)
    except PlanError as error:
        flag_names = {name: f"--{name.replace('_', '-')}" for name in KEYS if name != "cp"}  # "cp 4" is a degree
        raise PlanError(replace_argument_names(str(error), flag_names)) from error


def _plan_one_step(flags: PlanFlags) -> int:
    """Plan a step of the documents that flags name, print the plan and draw it; returns the exit code. Raises
    ConfigError for a drawing that cannot be written.
    """
    for path in flags.plot:
        if Path(path).suffix.lower() not in (".html", ".svg", ".png"):
            raise ConfigError(f"--plot {path}: a plan is drawn as .html, .svg or .png; give a name that ends so")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")
    home, lengths, source, options = _read_request(flags)
    began = time.perf_counter()
    plan, reason = plan_by_flags(flags, lengths, home, options)
    seconds = time.perf_counter() - began
    if flags.plot:
        from longspan.report import plan_document, plan_page, write_png

        title = f"plan of {plural(len(plan.lengths), 'document')} from {source}"
        for path in flags.plot:
            if path.lower().endswith(".png"):
                write_png(plan, path, title=title)
            else:
                draw = plan_page if path.lower().endswith(".html") else plan_document
                write_text_file(path, draw(plan, title=title))
    notes = [
        f"{plural(len(lengths), 'document')} from {source}, planned in {seconds:.3f} s",
        *(f"wrote {path}" for path in flags.plot),
        *([UNPRICED] if flags.mode == "free" and not plan.cost.closing_seconds else []),
        *([reason] if reason else []),
    ]
    if preset := find_published_preset(flags.model):
        notes.append(preset_line(flags.model, preset))
    with suppress(PlanError):  # of a model without a tower whose work is known
        if flags.model and EncoderShape.of(flags.model):
            notes.append("the model has a tower for images, which is not in these seconds (docs/planning.md)")
    print(plan.to_json() if flags.json else plan.table())
    print("\n".join(notes), file=sys.stderr if flags.json else sys.stdout)
    return 0


def _answer_eval_degree(flags: PlanFlags) -> int:
    """Print at which degree an evaluation of the documents is fastest; returns the exit code.

    Raises ConfigError for flags that such a question does not read.
    """
    for name in (field.name for field in fields(flags) if getattr(flags, field.name) != field.default):
        if name not in READ_BY_DEGREES:
            raise ConfigError(f"--which-eval-degree does not take {flag_text('--' + name)}; leave it out")
    home, lengths, source, options = _read_request(flags)
    if options.cost.states:  # of a hybrid: contiguous rows are one run a slot, so fewest states are sent
        options = replace(options, partition="contiguous", cost=options.cost.for_partition("contiguous"))
    options = replace(options, cost=options.cost.shared_by(home.tp), micro_batch_multiple=home.pp)
    comparison = compare_degrees(lengths, home, options=options, dynamic_degrees=(flags.min_cp, flags.max_cp))
    seconds = {choice.cp: choice.planned.predicted_seconds for choice in comparison.choices}
    dynamic_seconds = comparison.dynamic and comparison.dynamic.predicted_seconds  # None without a dynamic plan
    answer = {"best_cp": comparison.best.cp, "reason": comparison.reason(), "seconds": seconds}
    answer["dynamic"] = dynamic_seconds
    print(json.dumps(answer) if flags.json else f"{comparison.reason()}; lengths from {source}")
    return 0


def _read_request(flags: PlanFlags) -> tuple[Layout, tuple[int, ...], str, PlanOptions]:
    """Read the home, the documents, where they are from, and the planners' options. Raises ConfigError for flags that
    are impossible or missing.

    The price of a model includes FSDP2's gathers and sums; without --machine it is that on H200s, and without --model
    too it is DEFAULT_COST. The limit of rows "auto" is USUAL_ROWS, or what the longest document needs at the widest
    degree, if that is more.
    """
    check_flags_at_least(flags, world=0, slots=0, tp=1, pp=1, vpp=1, node_size=1, cp=0, min_cp=1, max_cp=0)
    if 0 < flags.max_cp < flags.min_cp:
        raise ConfigError(
            f"--min-cp is {flags.min_cp} and --max-cp {flags.max_cp}; give a --max-cp that is not less"
        )
    if not (ranks := flags.world or flags.slots * flags.tp * flags.pp):
        raise ConfigError(
            "longspan plan needs documents and slots (GPUs / (tp x pp)): longspan plan --same 8x8192 --slots 4; or ask "
            "what fits GPUs: longspan plan --model FOLDER --gpu h100 --gpus 4 --same 8x8192"
        )
    home = Layout(ranks, tp=flags.tp, pp=flags.pp)
    lengths, source = read_lengths(flags, home.slots)
    cost = DEFAULT_COST
    preset = find_published_preset(flags.model)
    model: Any = PRESETS[preset].values if preset else flags.model or QWEN3_8B
    if flags.machine or flags.model:
        path = Path(flags.model).resolve()
        folder = path.parent if path.is_file() else path
        name = (hub_name(folder) or folder.name) if flags.model else "Qwen3-8B"
        settings = CostSettings(shards=home.slots, free=flags.mode == "free", weight_ranks=home.tp)
        cost = read_machine(flags.machine or "h200", "--machine").cost(model, settings)
        cost = replace(cost, source=(cost.source or "").replace("the model", name, 1))
    options = PlanOptions(
        cost=replace(cost, chunks=flags.vpp),
        node_size=max(1, flags.node_size // home.tp),  # in slots, where the flag counts ranks
        mode=flags.mode,
        cp_comm_type=flags.cp_comm_type,
        hierarchical_context_parallel_sizes=flags.hierarchical_context_parallel_sizes or None,
        heads=read_query_heads(model),
    )
    rows = flags.max_tokens_per_slot
    if isinstance(rows, int):
        check_flags_at_least(flags, max_tokens_per_slot=0)
    elif rows != AUTO:
        raise ConfigError(f"--max-tokens-per-slot is {rows!r}; give an integer, or {AUTO}")
    else:
        types = check_comm_types(options.cp_comm_type)
        most_slots = min(flags.max_cp or home.slots, home.slots)
        degrees = (d for d in range(most_slots, 0, -1) if home.slots % d == 0)
        widest_degree = flags.cp or next(d for d in degrees if heads_allow_degree(d, options.heads, types, home.tp))
        rows = max(USUAL_ROWS, -(-max(lengths) // widest_degree))
    return home, lengths, source, replace(options, max_tokens_per_slot=rows or None)


def plan_by_flags(flags: PlanFlags, lengths: Sequence[int], home: Layout, options: PlanOptions) -> tuple[Plan, str]:
    """Plan these documents by the planner and degrees of flags, under `options`; of a hybrid under the faster partition
    of rows, unless a flag names one.

    Also returns why the rows of a hybrid are dealt out as they are ("" for others). Raises ConfigError for --cp beside
    dynamic plans.
    """
    if flags.planner == "dynamic" and flags.cp:
        raise ConfigError(
            "--cp is the degree of fixed and padded plans; use --min-cp and --max-cp, or --planner fixed"
        )
    planner = flags.planner
    if planner == AUTO and flags.cp:  # as with a run's keys, degrees that are given decide the planner
        planner = "fixed"
    elif planner == AUTO and (flags.min_cp, flags.max_cp) != (1, 0):
        planner = "dynamic"
    choice = PlannerConfig(planner, flags.cp, flags.min_cp, flags.max_cp, options, prefix="--")

    def make_with_options(plan_options: PlanOptions) -> Plan:
        return fastest_plan(replace(choice, options=plan_options), lengths, home)

    if options.cost.states is None:  # no hybrid
        partition = "zigzag" if flags.partition == AUTO else flags.partition
        return make_with_options(replace(options, partition=partition)), ""
    comparison = compare_partitions(
        lambda plan_options: make_with_options(plan_options).predicted_seconds, options, flags.partition
    )
    return make_with_options(comparison.options), f"rows {comparison.reason}"
