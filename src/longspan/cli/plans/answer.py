"""The answer to "which layout for my lengths" on GPUs: fits or not, the fastest way, the others beside it, the keys.

`longspan plan …` asks about the longest document, one step or a run of data, and chooses what its flags leave
open; `longspan train … --dry-run` asks about a configuration and its data. `resolve` finds the ways. No GPU, no torch.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from longspan.cli.flags import write_text_file
from longspan.cli.plans.documents import open_planned_documents
from longspan.cli.plans.gpu_run import GpuRun, choose_position_scaling, position_notes
from longspan.cli.plans.gpus import Gpus, bytes_unknown_text, choose_gpus, read_gpus
from longspan.cli.plans.planning import read_lengths
from longspan.cli.plans.question import GpuFlags, Question, find_document_source, preset_line
from longspan.cli.processes import prints_results
from longspan.config.defaults import resolve_defaults, source_dtype
from longspan.config.dtypes import DTYPE_BYTES
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.memory_keys import MEMORY_KEYS, read_key
from longspan.config.plan_section import ONE_DEGREE
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import ConfigError, LongspanError, PlanError, plural
from longspan.model.presets import find_published_preset
from longspan.plain_text import gib_text, number_text, seconds_text, text_table
from longspan.plan import MemoryPlan, Plan, group_counts, model_flops, peak_tflops
from longspan.plan.items.encoder_shape import EncoderShape
from longspan.plan.memory.model_numbers import ModelNumbers
from longspan.plan.memory.settings import Bytes
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.shape.packed import find_packed_form
from longspan.resolve.evaluation import plan_type_text
from longspan.resolve.facts import Facts, evenly_spaced_numbers
from longspan.resolve.kept_rows import resolve_by_kept_rows
from longspan.resolve.resolved import NothingFitsError, Reasons, Resolved, resolve
from longspan.resolve.ways import (
    UNIT,
    BindingKeys,
    Fit,
    Ranking,
    Way,
    find_longest,
    fit_way,
    leanest_fit,
    prefix_tree_notes,
    with_node_size_of_machine,
)
from longspan.run.checks import check_config, check_longest_training_document, check_paths_exist

PRICED = 64  # steps of a run whose seconds count where all plans have one degree, and are made fast
# This is a key of dynamic plans.
LOWEST_DEGREE = "context.min_dynamic_context_parallel_size"
HIGHEST_DEGREE = "context.max_dynamic_context_parallel_size"
SHOWN = (
    "train",
    "optimizer",
    "lora",
    "teacher",
    "distillation",
    "parallel",
    "context",
    "mtp",
    "encoder",
)  # sections whose keys an answer repeats
MODEL_KEYS = ("model.dtype", "model.compute_dtype", "model.frozen")
WRITTEN = "# keys of longspan plan; the rest is chosen or has a default"


def planned_memory(fit: Fit) -> MemoryPlan:
    """Return the plan of memory of a way on GPUs, which always has one, as their bytes are known."""
    assert fit.memory is not None
    return fit.memory


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was asked (`title`) of the GPUs of `run`, and the ways that were compared, the best first: its `config`.
    `nf4` is the best way with frozen weights in 4 bits, where a run of an adapter leaves open how they lie.

    Where nothing fits, the first way is the leanest, and `larger` has the fewest GPUs that do, with its keys.
    `longest` is the longest document that fits, in tokens, and `longest_nf4` the one that would, where nothing fits,
    with frozen weights in 4 bits (0: there is none, or they are packed). `steps` are those of a run (None: one step was
    asked about), of which `sampled` were planned.
    """

    title: str
    run: GpuRun
    config: RunConfig
    ways: tuple[Fit, ...]
    longest: int
    steps: int | None = None
    sampled: int = 0
    notes: tuple[str, ...] = ()
    larger: GpuRun | None = None
    longest_nf4: int = 0
    nf4: Fit | None = None
    reasons: Reasons = field(default_factory=Reasons)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step of the first way; None where nothing fits."""
        return self.ways[0].seconds

    @property
    def hours(self) -> float | None:
        """Hours of all steps of a run; None where nothing fits, and for a single step."""
        if self.seconds is None or self.steps is None:
            return None
        return self.seconds * self.steps / 3600

    @property
    def compared(self) -> tuple[Fit, ...]:
        """The rows of the table: the ways, and that with frozen weights in 4 bits."""
        return (*self.ways, self.nf4) if self.nf4 else self.ways

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `longspan plan --json` prints it: bytes as integers, `device` and `host` for one GPU.
        `device` is the moment at which a GPU holds most, `largest` has each part at its own largest.
        """
        gpus = self.run.gpus
        best = self.ways[0]
        hours = self.hours
        fits = self.seconds is not None
        memory = planned_memory(best)
        return {
            "device": memory.device.to_json(),
            "host": memory.host.to_json(),
            "checkpoint_policies": list(memory.checkpoint_policies),
            "longest": self.longest,
            "fits": fits,
            "keys": run_keys(self.config, self.run.given_keys),
            "largest": _largest_parts(best),
            "steps": self.steps,
            "step_seconds": self.seconds,
            "hours": hours,
            "gpu_hours": None if hours is None else hours * gpus.count,
            **way_figures(best),
            "degrees": _count_degrees(best.plans) if fits else [],
            "alternatives": [way_figures(way) for way in self.compared],
            "gpu": gpus.name,
            "gpus": gpus.count,
            "gpu_bytes": gpus.bytes,
            "host_bytes": gpus.host_bytes,
            "longest_nf4": self.longest_nf4,
            "notes": list(self.notes),
            "reasons": self.reasons.to_json(),
        }


def _largest_parts(fit: Fit) -> dict[str, int]:
    """Where a part is largest, over all moments and stages."""
    memory = planned_memory(fit)
    needs = fit.way.memory_needs(fit.plans)
    places = needs.with_settings(needs.places[0].settings.with_form(memory)).places
    moments = [
        moment for place in places for moment in place.bytes_at_moments(needs.loads, memory.checkpoint_policies)
    ]
    return {part.name: max(getattr(moment, part.name) for moment in moments) for part in fields(Bytes)}


def way_figures(fit: Fit) -> dict[str, Any]:
    """Return the figures of a way that JSON and the table have. Seconds and speed are None where it does not fit, MFU
    also where the device's peak is not known.
    """
    planner, degree, ep = fit.layout
    facts = fit.way.facts
    config = fit.way.config
    memory = planned_memory(fit)
    per_gpu = None
    mfu = None
    count = len(facts.home.ranks)
    if fit.seconds is not None:
        tokens = sum(plan.tokens + plan.spared_rows for plan in fit.plans) / len(fit.plans)
        per_gpu = tokens / fit.seconds / count
        peak = peak_tflops(facts.machine.device, "bfloat16")
        trains_all = not config.lora.rank
        shape = ModelShape.of(facts.model, mtp_layers=config.mtp.num_layers)
        step_flops = [
            model_flops(shape, plan.lengths, trains_all=trains_all, bases=plan.bases) for plan in fit.plans
        ]
        flops = sum(step_flops) / len(fit.plans)
        mfu = flops / fit.seconds / count / 1e12 / peak if peak else None
    types = dict.fromkeys(filter(None, map(plan_type_text, fit.plans)))
    return {
        "planner": planner,
        "degree": degree,
        "ep": ep,
        "frozen": _frozen_form(fit) or None,
        "cp_comm_type": "; ".join(types),
        "rows": max(plan.most_rows for plan in fit.plans),
        "micro_batches": max(len(plan.micro_batches) for plan in fit.plans),
        "seconds": fit.seconds,
        "tokens_per_second_per_gpu": per_gpu,
        "mfu": mfu,
        "device_bytes": memory.device.total,
        "host_bytes_used": memory.host.total,
    }


def _frozen_form(fit: Fit) -> str:
    """The text says in which dtype, or packed how; "" for other runs."""
    config = fit.way.config
    if not config.lora.rank:
        return ""
    packed = find_packed_form(fit.way.facts.model, config.model.frozen)
    return packed.name if packed else config.model.dtype


def _count_degrees(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Degrees rise."""
    groups = Counter[int]()
    tokens = Counter[int]()
    for row in (row for plan in plans for row in group_counts(plan)):
        groups[row["degree"]] += row["count"]
        tokens[row["degree"]] += row["tokens"]
    total = tokens.total() or 1
    return [{"degree": d, "groups": groups[d], "share": tokens[d] / total} for d in sorted(groups)]


def run_keys(config: RunConfig, given_keys: frozenset[str]) -> dict[str, Any]:
    """Return the keys, as in "context.planner", that make a run what the answer says, with their values.

    Models and data are named elsewhere; train.plan_memory decides MEMORY_KEYS that are not given.
    """
    names = {name for name in given_keys if name.partition(".")[0] in SHOWN or name in MODEL_KEYS}
    for section, kind in section_kinds().items():
        if section in ("lora", "teacher", "distillation", "mtp", "parallel"):
            values = vars(getattr(config, section))
            defaults = vars(kind())
            names |= {f"{section}.{key}" for key in values if values[key] != defaults[key]}
    names -= {*MEMORY_KEYS} - given_keys
    names |= {"train.plan_memory", "context.planner", "context.cp_comm_type", "context.max_tokens_per_slot"}
    names |= {"context.mode"} if config.context.mode != AUTO else set()
    one_degree = config.context.planner in ONE_DEGREE
    names |= {"context.context_parallel_size"} if one_degree else {LOWEST_DEGREE, HIGHEST_DEGREE}
    names |= {"model.rope_scaling"} if config.model.rope_scaling else set()
    return {name: read_key(config, name) for name in sorted(names)}


def flags_of_keys(keys: Mapping[str, Any]) -> str:
    """Write keys as flags, whose strings and lists stand without JSON's marks."""
    return re.sub('[],"[]', "", " ".join(f"--{key} {json.dumps(value)}" for key, value in keys.items()))


def answer_gpu_question(flags: GpuFlags, question: Question) -> int:
    """Answer a question about GPUs; returns the exit code. Raises LongspanError for one that cannot be answered."""
    source = find_document_source(flags, question)
    check_plot_files(flags.plot)
    if flags.write and flags.prints_plan:
        raise ConfigError(
            f"--write {flags.write} writes the keys of an answer, and --json prints the plan of the step in its place; "
            "leave one of them out, or ask about GPUs: --gpu h200"
        )
    run = make_run(flags, question, read_gpus(flags, question.config.run.machine), source)
    print_preset(run)
    if source == "data":
        run.known_budget()
        answer = _answer_by_data(run, estimate=True)
    elif source == "longest":
        run.known_budget()
        answer = answer_by_longest(run)
        if _leaves_frozen_open(run) and not answer.longest_nf4:
            nf4 = _find_longest_in_nf4(run, run.facts_of_step((answer.longest,)))
            answer = replace(answer, longest_nf4=nf4)
    else:
        lengths, title = read_step(flags, run)
        facts = run.facts_of_step(lengths)
        asks_for_bytes = flags.names_gpus or flags.compare or flags.write
        if flags.prints_plan or not (asks_for_bytes or _knows_bytes(run, facts)):
            return _show_plan_alone(flags, run, facts, title)
        run.known_budget()
        answer = _with_nf4(answer_ways(title, run, facts), facts)
    if answer.seconds is None and (files := [*flags.plot, *filter(None, [flags.write])]):
        print(f"nothing fits, and no file is written: {', '.join(files)}", file=sys.stderr)
    code = _show_answer(answer, as_json=flags.json, write=flags.write, compare=flags.compare)
    if answer.seconds is not None:
        plan = _shown_plan(answer.ways[0])
        if flags.show and not flags.json:
            print(f"\n{plan.table()}")
        draw_plan(plan, flags.plot, answer.title)
    return code


def _show_plan_alone(flags: GpuFlags, run: GpuRun, facts: Facts, title: str) -> int:
    """Neither the bytes of the model nor those of a GPU need be known."""
    resolved, ranking = _resolve_ways(run, facts, counted=False)
    notes = [*resolved.reasons.notes, *filter(None, [ranking.best.refusal])]
    if run.budget is None:
        name = f"--machine {run.config.run.machine}"
        notes.append(f"memory: not planned: {bytes_unknown_text(name, run.gpus.machine)}")
    plan = _shown_plan(ranking.best)
    print(plan.to_json() if flags.json else f"{title}\n{plan.table()}")
    print("\n".join(notes), end="\n" * bool(notes), file=sys.stderr if flags.json else sys.stdout)
    draw_plan(plan, flags.plot, title)
    return 0


def _knows_bytes(run: GpuRun, facts: Facts) -> bool:
    try:
        _count_numbers(run, facts)
    except PlanError:
        return False
    return run.budget is not None


def _count_numbers(run: GpuRun, facts: Facts) -> None:
    """Raises PlanError for a model whose bytes cannot be counted."""
    ModelNumbers.from_configuration(facts.model, facts.home, Way(run.config, facts).memory_settings)


def _shown_plan(fit: Fit) -> Plan:
    home = fit.way.facts.home
    return fit.plans[0].reprice(fit.way.cost(fit.memory).shared_by(home.tp))


def check_plot_files(paths: Sequence[str]) -> None:
    """Raise ConfigError for drawings that cannot be written."""
    for path in paths:
        if Path(path).suffix.lower() not in (".html", ".svg", ".png"):
            raise ConfigError(f"--plot {path}: a plan is drawn as .html, .svg or .png; give a name that ends so")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")


def draw_plan(plan: Plan, paths: Sequence[str], title: str) -> None:
    """Draw a plan to these files, and name them on standard error."""
    if not paths:
        return
    from longspan.report import plan_document, plan_page, write_png

    for path in paths:
        if path.lower().endswith(".png"):
            write_png(plan, path, title=title)
        else:
            draw = plan_page if path.lower().endswith(".html") else plan_document
            write_text_file(path, draw(plan, title=title))
        print(f"wrote {path}", file=sys.stderr)


def make_run(flags: GpuFlags, question: Question, gpus: Gpus, source: str) -> GpuRun:
    """Make the run that a question about documents of this `source` asks about, on these GPUs."""
    config = question.config
    gives = question.gives_any
    if not gives("context.cp_comm_type"):  # then the fastest type
        config = config.with_keys("context", cp_comm_type=AUTO)
    config = resolve_defaults(config, gpus.count)
    if source == "data" and not gives("train.epochs", "train.steps"):
        config = config.with_keys("train", epochs=1.0)
    # what the question does not give is open, also where a run's default is another value
    open_keys = dict[str, Any]()
    if not gives("context.context_parallel_size"):
        open_keys["context_parallel_size"] = 0
        if not gives("context.planner", LOWEST_DEGREE, HIGHEST_DEGREE):
            open_keys["planner"] = AUTO
    if not gives("context.max_tokens_per_slot"):
        open_keys["max_tokens_per_slot"] = AUTO
    return replace(
        GpuRun.with_model(config, gpus),
        config=config.with_keys("context", **open_keys),
        given_keys=question.given_keys,
        given=BindingKeys(planner=not flags.compare, ep=gives("parallel.ep")),
        keeps_rows=source == "data" and gives("run.dir"),
    )


def print_preset(run: GpuRun) -> None:
    """Say on standard error that a preset stands for a model that is not here."""
    source = run.config.model.source
    if preset := find_published_preset(source):
        print(preset_line(source, preset), file=sys.stderr)


def read_step(flags: GpuFlags, run: GpuRun) -> tuple[tuple[int, ...], str]:
    """Read the documents of a step that flags name, and return them with a title for an answer."""
    lengths, source = read_lengths(flags, run.home.slots)
    title = f"a step of {plural(len(lengths), 'document')} ({plural(sum(lengths), 'token')}) from {source}"
    return lengths, title


def show_dry_run(config: RunConfig, *, ranks: int, on_gpus: bool, as_json: bool) -> int:
    """Print what a run of this configuration would hold and take; returns the exit code. `on_gpus` False leaves the
    GPUs here aside. Raises ConfigError for keys and files that the run refuses, and PlanError where it does not fit;
    with `as_json` the answer says so, and 0 is returned.
    """
    check_config(config, ranks)
    # Of torchrun's ranks the first answers for all.
    if not prints_results():
        return 0
    check_paths_exist(config)
    run = GpuRun.with_model(config, choose_gpus(config, ranks, on_gpus=on_gpus))
    return _show_answer(_answer_by_data(replace(run, keeps_rows=True), estimate=False), as_json=as_json)


def _answer_by_data(run: GpuRun, *, estimate: bool) -> Answer:
    with open_documents(run, estimate=estimate) as (run_of_data, facts, title):
        return _with_nf4(answer_by_steps(title, run_of_data, facts), facts)


@contextmanager
def open_documents(run: GpuRun, *, estimate: bool) -> Iterator[tuple[GpuRun, Facts, str]]:
    """Open the documents of a run as `open_planned_documents` does, with a title for an answer. Lines go to standard
    error.
    """

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with open_planned_documents(run, log, estimate=estimate) as (run_of_data, facts, line):
        length_key = "train.epochs" if run_of_data.config.train.epochs else "train.steps"
        run_of_data = replace(run_of_data, given_keys=run.given_keys | {"train.tokens_per_step", length_key})
        yield run_of_data, facts, f"a run of {plural(facts.steps, 'step')}: {line}"


def answer_by_steps(title: str, run: GpuRun, facts: Facts) -> Answer:
    """Answer for the steps of a run over its data.

    The ways that fit are ranked on few steps, as the run itself chooses. If all of them have plans of one degree, which
    are made fast, their seconds are then means over more steps; the way that was chosen stays the first.
    """
    answer = answer_ways(title, run, facts)
    fitting = [fit for fit in answer.ways if fit.seconds is not None]
    if not fitting:
        return replace(answer, steps=facts.steps)
    sampled = len(fitting[0].plans)
    if all(fit.way.choice.has_one_degree for fit in fitting):
        sample = evenly_spaced_numbers(facts.steps, PRICED)
        sampled = len(sample)
        fitting = [_price_steps(fit, sample) for fit in fitting]
        fitting[1:] = sorted(fitting[1:], key=lambda fit: fit.rank)
    notes = answer.notes
    if facts.image_rows:
        images = f"images: {facts.image_rows:,.0f} rows in a step, whose encoding is not in these seconds"
        notes = (images, *notes)
    return replace(
        answer,
        steps=facts.steps,
        ways=(*fitting, *answer.ways[len(fitting) :]),
        sampled=sampled,
        notes=notes,
    )


def _price_steps(fit: Fit, sample: Sequence[int]) -> Fit:
    plans = tuple(fit.way.plan_steps(sample))
    return replace(fit, plans=plans, seconds=fit.way.step_seconds(plans, fit.memory))


def answer_by_longest(run: GpuRun) -> Answer:
    """Answer for the longest document that fits; where none does, for the shortest one that all slots can share."""
    tokens, way = find_longest(run.config, run.facts_of_step((UNIT * run.home.slots,)))
    if not tokens:
        tokens = UNIT * run.home.slots
        return answer_ways(f"a document of {tokens:,} tokens", run, run.facts_of_step((tokens,)))
    facts = run.facts_of_step((tokens,))
    way = replace(way, facts=facts)
    fit = fit_way(way, way.plan_steps(facts.timed_steps))
    config = choose_position_scaling(way.config, facts.model, tokens)
    return Answer(
        title=f"the longest document that fits has {tokens:,} tokens",
        run=run,
        config=config,
        ways=(fit,),
        longest=tokens,
        notes=(*fit.notes, *position_notes(config, facts, tokens)),
        reasons=Reasons(notes=fit.notes),
    )


def answer_ways(title: str, run: GpuRun, facts: Facts) -> Answer:
    """Compare the ways to run the documents of `facts`, and answer with the best, or with what is missing.

    Raises ConfigError or PlanError where no way can be planned. `title` says in the answer, and in errors, what the
    documents are.
    """
    longest = facts.longest_document
    try:
        resolved, ranking = _resolve_ways(run, facts)
    except PlanError:  # the limit of rows that is given may be below what the longest document needs
        check_longest_training_document(run.config, run.home, longest, title, facts.heads)
        raise
    best = ranking.best
    notes = [f"{resolved.rows_line}, which {run.config.run.dir} keeps"] if resolved.rows_line else []
    notes += [f"{text}: not possible: {reason}" for text, reason in ranking.refused]
    fits = best.seconds is not None
    larger = None
    if fits:
        notes += [*best.notes, *prefix_tree_notes(run.config, best)]
    else:
        larger = _fit_more_gpus(run, facts)
    # A model may have no tower whose work is known.
    with suppress(PlanError):
        if not facts.image_rows and EncoderShape.of(facts.model):
            notes.append("the model has a tower for images, which is not in these seconds (docs/planning.md)")
    chosen = choose_position_scaling(resolved.config, facts.model, longest)
    if fits and run.given.planner:
        notes += position_notes(chosen, facts, longest)
    return Answer(
        title=title,
        run=run,
        config=chosen,
        ways=ranking.fits,
        longest=find_longest(run.config, facts)[0],
        notes=tuple(notes),
        larger=larger,
        longest_nf4=0 if fits else _find_longest_in_nf4(run, facts),
        reasons=resolved.reasons,
    )


def _resolve_ways(run: GpuRun, facts: Facts, *, counted: bool = True) -> tuple[Resolved, Ranking]:
    """Where nothing fits the configuration is that of the leanest way; where a run has halved the rows that it keeps,
    its way is the only one. PlanError for a model that cannot be counted, if it must be."""
    config = run.config
    if counted:
        _count_numbers(run, facts)
    try:
        if run.keeps_rows:
            # Rows are kept for a number of slots of a host.
            resolved = resolve_by_kept_rows(with_node_size_of_machine(config, facts), facts, run.given)
        else:
            resolved = resolve(config, facts, run.given)
    except NothingFitsError as error:
        way = error.ranking.best.way
        return Resolved(way.config, None, way.cost(), Reasons(partition=error.partition)), error.ranking
    ranking = resolved.ranking
    if ranking is None:
        way = Way(resolved.config, facts)
        plans = tuple(way.plan_steps(facts.timed_steps))
        ranking = Ranking((Fit(way, plans, resolved.memory, way.step_seconds(plans, resolved.memory)),))
    return replace(
        resolved, config=resolved.config.with_keys("context", node_size=config.context.node_size)
    ), ranking


def _with_nf4(answer: Answer, facts: Facts) -> Answer:
    """In 4 bits only where an adapter's run leaves open how frozen weights lie."""
    run = answer.run
    if not _leaves_frozen_open(run):
        return answer
    try:
        packed = replace(run, config=run.config.with_keys("model", frozen="nf4"))
        _, ranking = _resolve_ways(packed, facts)
    except LongspanError:  # rows that blocks do not divide
        return answer
    fit = ranking.best
    if fit.seconds is not None and answer.sampled > len(fit.plans) and fit.way.choice.has_one_degree:
        fit = _price_steps(fit, evenly_spaced_numbers(facts.steps, answer.sampled))
    return replace(answer, nf4=fit)


def _leaves_frozen_open(run: GpuRun) -> bool:
    model = run.config.model
    return run.config.lora.rank > 0 and model.frozen == AUTO and not find_packed_form(run.model, AUTO)


def _find_longest_in_nf4(run: GpuRun, facts: Facts) -> int:
    """0 for runs without an adapter."""
    config = run.config
    if not config.lora.rank or find_packed_form(run.model, config.model.frozen):
        return 0
    try:
        return find_longest(config.with_keys("model", frozen="nf4"), facts)[0]
    except PlanError:  # rows that blocks do not divide
        return 0


def _fit_more_gpus(run: GpuRun, facts: Facts) -> GpuRun | None:
    """The fewest of 2, 4, 8 … 1,024 times as many GPUs; None where no number holds the steps. Of each number the
    leanest layout (all slots, fewest rows) is tried first, and the ways are only compared where that fits."""
    open_planner = replace(run.given, planner=True)
    for count in (run.gpus.count << doublings for doublings in range(1, 11)):
        with suppress(LongspanError):  # degrees that do not suit this number
            larger = replace(run, gpus=replace(run.gpus, count=count))
            wider = replace(facts, home=larger.home)
            if leanest_fit(run.config, wider).seconds is not None:
                config = resolve(run.config, wider, open_planner).config
                return replace(larger, config=choose_position_scaling(config, facts.model, facts.longest_document))
    return None


def _show_answer(answer: Answer, *, as_json: bool, write: str = "", compare: bool = False) -> int:
    """Returns the exit code. With `as_json` the record says what does not fit, and the code is 2 only for a
    comparison."""
    fits = answer.seconds is not None
    if as_json:
        print(json.dumps(answer.to_json(), ensure_ascii=False))
    elif not fits:
        raise PlanError(_refusal_line(answer))
    else:
        print("\n".join(_answer_lines(answer)))
    if write and fits:
        write_text_file(write, "\n".join([WRITTEN, *_key_lines(answer)]) + "\n")
    return 2 if compare and not fits else 0


def _answer_lines(answer: Answer) -> Iterator[str]:
    best = answer.ways[0]
    figures = way_figures(best)
    budget = answer.run.known_budget()
    host_speed = answer.run.gpus.machine.host_copy_bytes_per_second
    memory = planned_memory(best)
    assert answer.seconds is not None
    yield from (answer.title, f"on {answer.run.gpus.title}", "", memory.summary_line(budget))
    speed = f"{figures['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU"
    speed += f", MFU {number_text(100 * figures['mfu'], 2)}%" if figures["mfu"] else ""
    hours = answer.hours
    if hours is None or answer.steps is None:
        yield f"a step is predicted to take {seconds_text(answer.seconds)}: {speed}"
    else:
        total = f"{hours:,.2f} hours" if hours >= 1 else seconds_text(hours * 3600)
        sample = f", the mean of {answer.sampled} of them" if answer.sampled < answer.steps else ""
        yield (
            f"{plural(answer.steps, 'step')} of {seconds_text(answer.seconds)}{sample}: {total}, "
            f"{hours * answer.run.gpus.count:,.2f} GPU-hours, without evaluations and checkpoints; {speed}"
        )
    degrees = _count_degrees(best.plans)
    shares = ", ".join(f"{row['degree']}: {row['share']:.1%}" for row in degrees)
    yield f"tokens by degree: {shares}" if len(degrees) > 1 else f"degree {degrees[0]['degree']} for all documents"
    if best.way.config.lora.rank:
        yield _frozen_line(answer)
    yield from (*answer.notes, "", _ways_table(answer), "")
    at_fullest_moment = memory.device.to_json()
    columns = _largest_parts(best), at_fullest_moment, memory.host.to_json()
    model_bytes = at_fullest_moment["total"] - at_fullest_moment["communicators"]
    unit, size = ("GiB", 1 << 30) if model_bytes >= 1 << 30 else ("MiB", 1 << 20)
    rows = [
        (name, *(f"{column[name] / size:,.2f}" if name in column else "" for column in columns))
        for name, bytes_of_part in at_fullest_moment.items()
        if name != "packed" or bytes_of_part
    ]
    yield text_table([f"{unit} of one GPU", "at its largest", "at the fullest moment", "host"], rows)
    yield (
        f"a GPU may be filled up to {gib_text(budget.device)} (train.device_memory_limit), the host up to "
        f"{gib_text(budget.host)} for each GPU, over a bus of {host_speed / 1e9:g} GB/s each way"
    )
    yield from ("", "the keys, as a file of longspan train (longspan plan --write FILE writes it):")
    yield from _key_lines(answer)


def _frozen_line(answer: Answer) -> str:
    best = answer.ways[0]
    form = _frozen_form(best)
    model = best.way.config.model
    line = f"frozen weights: {form} (model.{'dtype' if form == model.dtype else 'frozen'})"
    if answer.nf4:
        line += "; the row nf4 has them in 4 bits: --model.frozen nf4"
    if answer.longest_nf4:
        line += f"; the longest document that fits with --model.frozen nf4 has {answer.longest_nf4:,} tokens"
    return line


def _ways_table(answer: Answer) -> str:
    """The best first, also of those that do not fit."""
    # A layout is of planner, degree and ep.
    has_ep_column = len({way.layout[2] for way in answer.compared}) > 1
    names = [
        *(["frozen"] if answer.nf4 else []),
        "layout",
        *(["ep"] if has_ep_column else []),
        "type",
        "rows",
        "micro-batches",
        "a step",
        "tokens/s",
        "MFU",
        "GPU",
        "host",
    ]
    rows = list[tuple[str, ...]]()
    for way in answer.compared:
        figures = way_figures(way)
        layout = f"{figures['planner']}, cp {figures['degree']}" if figures["degree"] else str(figures["planner"])
        timed = figures["seconds"] is not None
        rows.append(
            (
                *([figures["frozen"]] if answer.nf4 else []),
                layout,
                *([f"{figures['ep']}"] if has_ep_column else []),
                figures["cp_comm_type"],
                f"{figures['rows']:,}",
                f"{figures['micro_batches']}",
                seconds_text(figures["seconds"]) if timed else "does not fit",
                f"{figures['tokens_per_second_per_gpu']:,.0f}" if timed else "",
                f"{number_text(100 * figures['mfu'], 2)}%" if figures["mfu"] else "",
                gib_text(figures["device_bytes"]),
                gib_text(figures["host_bytes_used"]),
            )
        )
    return text_table(names, rows, left=2 + has_ep_column + (answer.nf4 is not None))


def _refusal_line(answer: Answer) -> str:
    memory = planned_memory(answer.ways[0])
    budget = answer.run.known_budget()
    larger = answer.larger
    line = (
        f"{answer.title} does not fit {answer.run.gpus.count_and_name}: at least {gib_text(memory.device.total)} "
    )
    line += (
        f"({memory.device.total:,} bytes) are needed of a GPU that may be filled up to {gib_text(budget.device)}, "
    )
    line += f"and {gib_text(memory.host.total)} of the host's {gib_text(budget.host)}; "
    if larger:
        keys = run_keys(larger.config, larger.given_keys)
        line += f"it fits {larger.gpus.count_and_name}, with {flags_of_keys(keys)}"
    else:
        line += f"it fits no number of GPUs up to {1024 * answer.run.gpus.count:,}; "
        line += "use a higher parallel.tp or parallel.pp"
    config = answer.run.config
    defaults = RunConfig()
    names = [key for key in MEMORY_KEYS if read_key(config, key) != read_key(defaults, key)]
    if config.lora.rank and _exceeds_source(config):
        names.append("model.dtype")
    line += f", or leave {' and '.join(names)} out" if names else ""
    if answer.longest:
        line += f"; the longest document that fits has {answer.longest:,} tokens"
    if answer.nf4:
        line += _nf4_outcome(answer.nf4)
    if answer.longest_nf4:
        line += f"; the longest document that fits has {answer.longest_nf4:,} tokens"
        line += " with --model.frozen nf4, the frozen weights in 4 bits"
    return line


def _nf4_outcome(fit: Fit) -> str:
    if fit.seconds is None:
        return "; nor does it fit with --model.frozen nf4"
    memory = planned_memory(fit)
    return (
        f"; with --model.frozen nf4 it fits: a step is predicted to take {seconds_text(fit.seconds)}, with "
        f"{gib_text(memory.device.total)} of a GPU and {gib_text(memory.host.total)} of the host"
    )


def _exceeds_source(config: RunConfig) -> bool:
    published = source_dtype(config.model)
    return published in DTYPE_BYTES and DTYPE_BYTES[config.model.dtype] > DTYPE_BYTES[published]


def _key_lines(answer: Answer) -> Iterator[str]:
    config = answer.config
    given_keys = answer.run.given_keys
    named = {name for name in given_keys if name.partition(".")[0] in ("model", "data", "run")}
    named |= {f"model.{key}" for key in ("path", "preset", "config", "num_labels") if getattr(config.model, key)}
    named |= {"optimizer.lr"} if config.optimizer.lr != NOT_GIVEN else set()
    values = {name: read_key(config, name) for name in named} | run_keys(config, given_keys)
    last_section = ""
    for name in sorted(values):
        section, _, key = name.partition(".")
        if section != last_section:
            yield from ("", f"[{section}]")
        # JSON of strings, numbers, true and false, and lists of them is TOML too.
        yield f"{key} = {json.dumps(values[name], ensure_ascii=False)}"
        last_section = section
