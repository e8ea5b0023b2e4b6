"""`longspan bench step`: whole training steps under several planners next to their predictions; the record in words.

Its flags make settings, which the ranks receive: a run's configuration with learning rate 0, and its documents.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedConfig

from longspan.bench.benches import BenchFlags, change_layer_count, origin_text, show_record, write_record
from longspan.cli.flags import Groups, Word, parse_flags
from longspan.cli.machine import machine_facts
from longspan.cli.plans.planning import SourceFlags, read_lengths
from longspan.cli.processes import run_on_ranks
from longspan.comm import World
from longspan.comm.device import allocator_retries, peak_reserved_bytes
from longspan.comm.world_machine import set_world_machine
from longspan.config.defaults import resolve_defaults
from longspan.config.dtypes import compute_dtype_name
from longspan.config.file import read_file
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.local_folders import with_local_folders
from longspan.config.plan_section import PLANNERS
from longspan.config.sections import (
    ContextConfig,
    LoraSection,
    MachineSection,
    ModelConfig,
    OptimizerSection,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from longspan.data.synthetic_documents import synthetic_documents
from longspan.errors import ConfigError, plural
from longspan.layout import Layout
from longspan.model.execution import model_execution
from longspan.model.layers import vocabulary_size
from longspan.model.weights.hf_folder import planned_configuration
from longspan.plain_text import bytes_text, markdown_table
from longspan.plan import Cost, Plan
from longspan.plan.form import Form
from longspan.plan.memory.memory_plan import policies_text
from longspan.plan.memory.stage_bytes import CONTEXT_BYTES
from longspan.plan.shape.model_shape import ModelShape, model_flops, peak_tflops, read_experts
from longspan.resolve.facts import Facts
from longspan.resolve.kept_rows import with_kept_rows
from longspan.resolve.planner_config import PlannerConfig, default_rows, home_of, query_heads
from longspan.resolve.resolved import Resolved, resolve
from longspan.resolve.run_cost import KEY, read_run_machine, run_machine, set_node_size
from longspan.resolve.ways import Way
from longspan.run.checks import check_config
from longspan.run.collect_facts import mixers_text
from longspan.run.profile import wait_for_gpu
from longspan.run.set_up import prepare_loaded_model
from longspan.run.watches import allocator_retries_text
from longspan.run.world_facts import gather_facts, resolve_on_ranks
from longspan.train.run_model.load import load_run_model, read_model_configuration
from longspan.train.run_model.rope_scaling import scale_positions
from longspan.train.training import Training, build_run_optimizer
from longspan.versions import versions

SECTIONS = ("model", "parallel", "context", "train", "optimizer", "lora")


@dataclass(frozen=True, kw_only=True)
class StepFlags(BenchFlags, SourceFlags):
    """Time whole training steps of `longspan train` (forward, backward, optimizer), over documents of given lengths.

    The model, its placement, plans and optimizer are those of a run: of CONFIG.toml where it is given, with the same
    keys as flags. Without it the model is a qwen3-8b with random weights on GPUs and a qwen3-tiny on CPUs. The learning
    rate is 0, so that all planners see the same weights and report the same loss.

    The documents come from --lengths (numbers with commas between, or a JSON file), --distribution or --same. One
    sequence over all GPUs is --sequences 65536 --planners fixed. Runs one process for each GPU of this machine, or
    torchrun's, or --world local processes. Under --train.device_memory_limit torch runs out of memory beyond the limit.
    """

    SHOWN: ClassVar[Groups] = {
        "documents": ("--sequences", "--lengths", "--same", "--distribution", "--tokens"),
        "model and layout": ("--model.path", "--model.preset", "--layers", "--context.context_parallel_size"),
        "what is timed": ("--planners", "--warmup", "--repeats", "--world", "--out", "--json"),
    }
    config: Annotated[str, Word("[CONFIG.toml]")] = ""
    """Configuration file of a run, whose step is timed."""
    planners: tuple[str, ...] = ()
    """Planners, or none; one of your own by its dotted name. Default: that of CONFIG.toml,
    otherwise padded, fixed and dynamic."""
    layers: int = 0
    """Number of layers, for random weights; 0: as in the model's configuration."""
    sequences: tuple[int, ...] = ()
    """Lengths in place of --lengths; each is timed as one sequence, in turn."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=lambda: ContextConfig(cp_comm_type="auto"))
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    run: MachineSection = field(default_factory=MachineSection)
    peak_tflops: float = 0.0
    """Peak TFLOP/s of a device, for the model FLOPs utilisation; 0: the vendor's figure for a known GPU."""
    warmup: int = 2
    """Steps before the timed ones."""
    repeats: int = 3
    """Timed steps; their median counts."""
    timeout_seconds: float = 600.0
    """Seconds that a rank waits for the others."""

    def check_flags(self) -> None:
        super().check_flags()
        if self.layers < 0:
            raise ConfigError(f"--layers is {self.layers}; it must be at least 0")


def parse_step_flags(argv: Sequence[str]) -> tuple[StepFlags, RunConfig]:
    """Parse the flags; returns them and the configuration of the file with the keys that flags change."""
    file_config = RunConfig()

    def file_sections(words: Sequence[str]) -> dict[str, Any]:
        nonlocal file_config
        if not words:
            return {}
        file_config = read_file(words[0])
        return {name: getattr(file_config, name) for name in SECTIONS} | {
            "run": MachineSection(file_config.run.machine)
        }

    flags = parse_flags(StepFlags, argv, "longspan bench step", file_sections)
    config = replace(
        file_config,
        run=replace(file_config.run, machine=flags.run.machine),
        **{name: getattr(flags, name) for name in SECTIONS},
    )
    return flags, with_local_folders(config)


CPU_LENGTHS = (96, 40, 24, 16, 16)
# A slot has so many rows.
CPU_ROWS = 256


class TimedLengths(NamedTuple):
    """Lengths of documents, where they came from, and whether they were listed as numbers."""

    lengths: tuple[int, ...]
    source: str
    listed: bool = False


def read_documents(flags: StepFlags, slots: int, *, gpu: bool) -> TimedLengths:
    """Read the documents that flags name; on CPUs there is a default. Raises ConfigError where there are none, and for
    flags that contradict each other.
    """
    entries = [*map(str, flags.sequences)] or flags.lengths.split(",")
    are_numbers = all(entry.strip().isdecimal() for entry in entries)  # --lengths may name a file instead
    has_source = flags.distribution or flags.same
    if flags.sequences and (not are_numbers or has_source or flags.lengths):
        raise ConfigError(
            f"--sequences {','.join(entries)} are lengths such as 16384,65536, timed one after another; no other flag "
            "may name documents beside them"
        )
    if are_numbers and not has_source:
        return TimedLengths(tuple(map(int, entries)), "given", listed=True)
    if flags.lengths or has_source:
        return TimedLengths(*read_lengths(flags, slots))
    if not gpu:
        return TimedLengths(CPU_LENGTHS, "given")
    raise ConfigError("give documents: --lengths 65536, --lengths FILE.json, --distribution lognorm, or --same")


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What to measure: a run's configuration with learning rate 0, and all that a record has besides results."""

    flags: StepFlags
    config: RunConfig
    planners: tuple[str, ...]
    ranks: int
    backend: str
    command: str
    configuration: PreTrainedConfig
    lengths: tuple[int, ...]
    # Sequences run one at a time, in place of the lengths together.
    sequences: tuple[int, ...]
    source: str
    cost: Cost
    # A device reaches so many; 0: unknown.
    peak_tflops: float

    @property
    def home(self) -> Layout:
        return home_of(self.config.parallel, self.ranks)

    @property
    def model_name(self) -> str:
        return self.config.model.source or self.config.model.preset_name

    @property
    def compute(self) -> str:
        """The dtype of the arithmetic; "" where it is that of the parameters."""
        name = compute_dtype_name(self.config.model, self.device)
        return "" if name == self.config.model.dtype else name

    @property
    def device(self) -> str:
        return "cpu" if self.backend == "gloo" else "cuda"

    @property
    def out(self) -> str:
        """Where the first rank keeps what it has so far; "": nowhere."""
        return str(Path(self.flags.out).resolve()) if self.flags.out else ""

    def batches(self) -> "list[StepSettings]":
        """Return the settings of what is timed together: these, or one of each sequence that is timed alone."""
        return [replace(self, lengths=(n,), sequences=()) for n in self.sequences] or [self]

    def plan(self, planner: str) -> Plan:
        """Plan the documents together by this planner. Raises PlanError where they do not fit."""
        choice = PlannerConfig.training(
            self.config.with_keys("context", planner=planner),
            cost=self.cost,
            heads=query_heads(self.configuration),
        )
        return choice.plan(self.lengths, self.home)

    def to_json(self) -> dict[str, Any]:
        """Return what the record of a bench says of its settings."""
        config = self.config
        text = self.configuration.get_text_config()
        experts = read_experts(text).of_layer
        return {
            "shape": {"hidden": text.hidden_size, "layers": text.num_hidden_layers, "experts": experts},
            "shape_name": self.model_name,
            **{
                name: getattr(self, name)
                for name in ("ranks", "backend", "command", "sequences", "source", "compute")
            },
            "cost_source": self.cost.source or "a cost of no machine in particular",
            **{name: getattr(self.flags, name) for name in ("warmup", "repeats")},
            "peak_tflops": self.peak_tflops,
            "configuration": config.tables(),
            "documents": len(self.lengths),
            "tokens": sum(self.lengths),
            "longest": max(self.lengths),
            "lengths": list(self.lengths),
        }


def make_settings(
    flags: StepFlags, config: RunConfig, ranks: int, backend: str, command: Sequence[str]
) -> StepSettings:
    """Make the settings of the flags: read documents and the model's configuration, and choose what is open.

    Raises a LongspanError for impossible ones, and for documents that do not fit, before a process starts.
    """
    gpu = backend != "gloo"
    planners = _choose_planners(flags, config)
    flags.check_flags()
    home = home_of(config.parallel, ranks)
    documents = read_documents(flags, home.slots, gpu=gpu)
    if gpu and not (flags.config or config.model.source or config.model.preset):
        config = config.with_keys("model", preset="qwen3-8b")
    configuration = _read_timed_configuration(flags, config, max(documents.lengths))
    if not flags.config:
        config = _set_limits(flags, config, documents, home, gpu=gpu)
    config = _make_timed_config(resolve_defaults(config, ranks), max(documents.lengths), ranks, planners)
    peak = flags.peak_tflops
    if gpu and not peak:
        peak = peak_tflops(torch.cuda.get_device_name(0), compute_dtype_name(config.model, "cuda")) or 0.0
    facts = Facts(
        home=home,
        machine=run_machine(config, gpu=gpu),
        model=planned_configuration(configuration, config.model.path),
        lengths_of_step=lambda step: documents.lengths,
        steps=1,
        longest=max(documents.lengths),
        gpu=gpu,
    )
    resolved = resolve(config.with_keys("context", planner="fixed"), facts)
    settings = StepSettings(
        flags=flags,
        config=_share_degree(config, resolved.config),
        planners=planners,
        ranks=ranks,
        backend=backend,
        command=" ".join(command),
        configuration=configuration,
        lengths=documents.lengths,
        sequences=documents.lengths if flags.sequences else (),
        source=documents.source,
        cost=resolved.cost,
        peak_tflops=peak,
    )
    for batch in settings.batches():
        for planner in planners:
            batch.plan(planner)  # only for its errors, before a process starts
    return settings


def _share_degree(config: RunConfig, packed: RunConfig) -> RunConfig:
    """`packed` is resolved for packed documents: planners of one degree share its partition, and its degree and type
    where they are open."""
    context = replace(config.context, partition=packed.context.partition)
    if config.context.partition == AUTO:
        context = replace(context, cp_comm_type=packed.context.cp_comm_type)
    if not config.context.context_parallel_size:
        context = replace(context, context_parallel_size=packed.context.context_parallel_size)
    return replace(config, context=context)


def _choose_planners(flags: StepFlags, config: RunConfig) -> tuple[str, ...]:
    """Those of --planners, else that of CONFIG.toml, else PLANNERS; () for "none"."""
    names = ", ".join(PLANNERS)
    named = config.context.planner if flags.config else AUTO
    default = PLANNERS if named in (NOT_GIVEN, AUTO) else (named,)
    planners = tuple(planner for planner in flags.planners or default if planner != "none")
    if any(planner not in PLANNERS and "." not in planner for planner in planners):
        raise ConfigError(
            f"--planners {','.join(flags.planners)!r}: this release has {names}, or none; one of your own has its "
            "module in front"
        )
    return planners


def _read_timed_configuration(flags: StepFlags, config: RunConfig, longest: int) -> PreTrainedConfig:
    configuration = read_model_configuration(config, config.data.vocab_size)
    if flags.layers:
        if config.model.path:
            raise ConfigError(f"--layers {flags.layers} and the weights of {config.model.path}: use --model.config")
        configuration = change_layer_count(configuration, flags.layers)
    return scale_positions(configuration, config.model, longest, "of the bench", lambda _: None)


def _set_limits(
    flags: StepFlags,
    config: RunConfig,
    documents: TimedLengths,
    home: Layout,
    *,
    gpu: bool,
) -> RunConfig:
    """Documents listed by length are few and get no cap (0). Others may be many, and are packed into micro-batches
    of at most DEFAULT_ROWS rows on a slot, or CPU_ROWS; more where the longest needs more on all slots. Sequences
    that are timed one by one get all slots; any other degree stays open (0)."""
    context = config.context
    if context.max_tokens_per_slot == NOT_GIVEN:
        least = ceil(max(documents.lengths) / home.slots)
        cap = default_rows(least) if gpu else max(CPU_ROWS, least)
        cap = 0 if documents.listed else cap
        context = replace(context, max_tokens_per_slot=cap)
    if context.context_parallel_size == NOT_GIVEN:  # 0: the fastest, chosen later
        context = replace(context, context_parallel_size=home.slots if flags.sequences else 0)
    return replace(config, context=context)


def _make_timed_config(config: RunConfig, longest: int, ranks: int, planners: Sequence[str]) -> RunConfig:
    """The learning rate is 0. The configuration is checked under each planner first, with the rate that it gives or
    else 1, as a run must have one."""
    data = replace(config.data, max_document_tokens=longest)
    evaluation = replace(config.evaluation, documents=0)
    optimizer = replace(config.optimizer, lr=config.optimizer.lr if config.optimizer.lr != NOT_GIVEN else 1.0)
    config = replace(config, data=data, evaluation=evaluation, optimizer=optimizer)
    for planner in planners:
        check_config(config.with_keys("context", planner=planner), ranks)
    return config.with_keys("optimizer", lr=0.0)


Cases = Iterator[tuple[str, Callable[[], dict[str, Any]]]]  # names of rows, and what measures each
# The repository has such: bench/training/step_peers.py.
Peers = Callable[[StepSettings, World], Cases]


def measure_step_on_rank(rank: int, settings: StepSettings, peers: Peers | None = None) -> dict[str, Any]:
    """Open a world, time every planner, then the peers; returns the record, which is equal on every rank. The cost and
    the plan of memory, which all planners share, move from their rows to the record.
    """
    backend = None if settings.backend == "nccl" else "gloo"
    with World(settings.home, backend=backend, timeout=settings.flags.timeout_seconds) as world:
        settings = replace(settings, config=set_node_size(settings.config, world.node_size))
        set_world_machine(world, partial(read_run_machine, settings.config), KEY)
        _cap_allocator(settings.config.train.device_memory_limit, world.device)
        record: dict[str, Any] = {"bench": "step", **settings.to_json(), "cost": settings.cost.to_json()}
        about = {"backend": world.backend, "machine": machine_facts(), "versions": versions()}
        record |= {"memory": None, **about, "rows": []}
        cases = _planner_cases(settings, world)
        steps = settings.flags.warmup + 1 + settings.flags.repeats
        for name, measure in chain(cases, peers(settings, world)) if peers else cases:
            if rank == 0:
                print(f"{name}: {plural(steps, 'step')}", file=sys.stderr, flush=True)
            row = {"name": name} | measure()
            record |= {key: row.pop(key) for key in ("cost", "memory") if key in row}
            record["rows"].append(row)
            if rank == 0:  # rows survive an interruption
                write_record(record, settings.out)
                seconds = row.get("seconds", 0.0)
                speed = row.get("tokens_per_second_per_device", 0.0)
                outcome = row.get("missing") or f"{seconds:.3f} s, {speed:.0f} tokens/s a device"
                print(f"{name}: {outcome}", file=sys.stderr)
    return record


def _cap_allocator(limit: int, device: torch.device) -> None:
    """Have torch run out of memory beyond the limit, less the context that a plan counts in it; 0: no limit."""
    if limit and device.type == "cuda":
        _, all_bytes = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - CONTEXT_BYTES) / all_bytes), device)


def _planner_cases(settings: StepSettings, world: World) -> Cases:
    """A model's memory is free once the last case is measured."""
    if settings.planners:
        training = make_training(settings, world)
        for batch in settings.batches():
            for planner in settings.planners:
                name = f"longspan {planner}{rows_note(batch, settings)}"
                yield name, partial(_measure_planner, batch, planner, training)
        training.finish_update()
        del training
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def rows_note(batch: StepSettings, settings: StepSettings) -> str:
    """The rows of a batch's one sequence, as a part of a row's name; "" if documents are timed together."""
    return f", {batch.lengths[0]:,} rows" if settings.sequences else ""


def make_training(settings: StepSettings, world: World) -> Training:
    """Load and prepare the model of a bench, with its optimizer; entered by all ranks.

    As a run does: what layers keep, and the rows of a slot if "auto", are chosen before the model is made."""

    def log(line: str) -> None:
        if world.rank == 0:
            print(line, file=sys.stderr)

    # Every batch is a coming step, under all planners: they share one model, whose layers must suit all plans.
    batches = [batch.lengths for batch in settings.batches()]
    facts = gather_facts(settings.config, world, settings.configuration, batches.__getitem__, len(batches))
    decide = partial(_resolve_for_planners, settings.planners)
    resolved = resolve_on_ranks(settings.config, facts, world, log, decide)
    config = resolved.config
    memory = resolved.memory
    log(
        f"model: {settings.model_name}, {plural(settings.configuration.get_text_config().num_hidden_layers, 'layer')}"
    )
    loaded = load_run_model(config, settings.configuration)
    model = prepare_loaded_model(config, world, loaded, memory)
    if (execution := model_execution(model)).mixers:
        log(mixers_text(execution, world.device, config.context.partition))
    optimizer = build_run_optimizer(config, world, model, memory=memory)
    return Training(config, world, model, optimizer, resolved.cost, memory=memory)


def _resolve_for_planners(planners: Sequence[str], config: RunConfig, facts: Facts) -> Resolved:
    """The first planner's rows and mode are those of all, and memory suits all planners."""
    config = with_kept_rows(config, len(facts.home.ranks))
    resolved = resolve(config.with_keys("context", planner=planners[0]), facts)
    if resolved.memory is None or len(planners) == 1:
        return resolved
    ways = [Way(resolved.config, facts).with_context(planner=planner) for planner in planners]
    assert facts.budget is not None
    memory = ways[0].choose_memory(
        [plan for way in ways for plan in way.fullest_plans(rows_open=True)], facts.budget
    )
    return replace(resolved, memory=memory, cost=ways[0].cost(memory))


def _measure_planner(settings: StepSettings, planner: str, training: Training) -> dict[str, Any]:
    training = replace(training, config=training.config.with_keys("context", planner=planner))
    started = time.perf_counter()
    plan = training.training_choice.plan(settings.lengths, settings.home)
    planning_seconds = time.perf_counter() - started
    documents = synthetic_documents(settings.lengths, vocabulary_size(training.model) or 2)
    losses = list[float]()

    def take_step() -> None:
        losses.append(training.take_step(plan, documents, len(losses)).loss)

    timings = measure_steps(settings, take_step, training.world)
    predicted = plan.predicted_seconds
    return timings | {
        "loss": losses[0],
        "predicted_seconds": predicted,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "prediction_ratio": predicted / timings["seconds"],
        "packing": plan.efficiency,
        "micro_batches": len(plan.micro_batches),
        "widest": max(group.degree for group in plan.groups),
        "planning_seconds": planning_seconds,
        "cost": plan.cost.to_json(),
        "memory": training.memory.to_json() if training.memory is not None else None,
    }


def measure_steps(settings: StepSettings, step: Callable[[], None], world: World) -> dict[str, Any]:
    """Measure whole steps, and return the figures of a row, which are the same on every rank; entered by all ranks.

    Seconds are the median of the slowest rank, peak memory and retries of the allocator those of the worst. Steps come
    one after another, as in training: the end of one and the beginning of the next overlap where they can.
    """
    cuda = world.device.type == "cuda"
    for _ in range(settings.flags.warmup):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    retries_before = allocator_retries(world.device)
    wait_for_gpu(world)
    world.control.barrier("start of timed steps")
    ends = list[float]()  # a step's seconds are those from the end before to its own: the first is not timed
    for _ in range(1 + settings.flags.repeats):
        step()
        ends.append(time.perf_counter())
    wait_for_gpu(world)
    times = [end - end_before for end_before, end in pairwise(ends)]
    retries_of_step = (allocator_retries(world.device) - retries_before) / len(ends)
    own_peak = torch.cuda.max_memory_allocated() if cuda else 0
    figures_of_ranks = world.control.gather_objects(
        (statistics.median(times), own_peak, peak_reserved_bytes(world.device), retries_of_step)
    )
    seconds, peak, reserved, retries = (max(figures) for figures in zip(*figures_of_ranks, strict=True))
    tokens = sum(settings.lengths)
    shape = ModelShape.of(settings.configuration, mtp_layers=settings.config.mtp.num_layers)
    flops = model_flops(shape, settings.lengths, trains_all=not settings.config.lora.rank)
    row: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / settings.ranks,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "allocator_retries": retries,
        "model_tflops_per_device": flops / seconds / settings.ranks / 1e12,
    }
    if settings.peak_tflops:
        row["mfu"] = row["model_tflops_per_device"] / settings.peak_tflops
    return row


_NAMES = (
    "step",
    "loss",
    "seconds",
    "tokens/s/device",
    "predicted",
    "ratio",
    "packing",
    "TFLOP/s",
    "MFU",
    "peak memory",
    "planned",
)


def record_text(record: dict[str, Any]) -> str:
    """Write the page of a record, which is printed and stands beside its file."""
    lines = list[str]()
    planned_memory = ""
    if memory := record.get("memory"):
        gathered = Form.from_values(memory).once_a_step_text
        host_bytes = memory["host"]["total"]
        host = f"; {bytes_text(host_bytes)} on the host" if host_bytes else ""
        lines.append(f"memory: {policies_text(memory['checkpoint_policies'])}{gathered}{host}.")
        planned_memory = bytes_text(memory["device"]["total"] - memory["device"]["communicators"])
    for row in record["rows"]:
        if "missing" in row:
            lines.append(f"- {row['name']}: not available: {row['missing']}")
        elif retries := row["allocator_retries"]:
            lines.append(
                f"{row['name']}: {allocator_retries_text(retries, row['peak_bytes'], row['reserved_bytes'])}."
            )
    rows = [_record_row(row, planned_memory) for row in record["rows"] if "missing" not in row]
    about = (
        "Whole steps with forward, backward and optimizer, at learning rate 0: the loss is that of the same weights. "
        f"Seconds are the median of {record['repeats']} steps after {record['warmup']}, of the slowest rank. "
        f"Predicted under {record['cost_source']}. Model FLOPs are 6 a weight and token (4 of frozen ones) and causal "
        "attention, without recomputation; padding does not count."
    )
    sections = [f"# {_title_text(record)}", origin_text(record), markdown_table(_NAMES, rows), *lines, about]
    return "\n\n".join(sections) + "\n"


def _title_text(record: dict[str, Any]) -> str:
    shape = record["shape"]
    keys = record["configuration"]
    context = keys["context"]
    if record["sequences"]:
        documents = "one sequence at a time"
    else:
        documents = (
            f"{record['documents']:,} documents, {record['tokens']:,} tokens, longest {record['longest']:,} "
            f"({record['source']})"
        )
    dtype = keys["model"]["dtype"]
    if record["compute"]:
        dtype += f" computed in {record['compute']}"
    return (
        f"Steps of {record['shape_name']} ({shape['layers']} layers, hidden {shape['hidden']}) over {record['ranks']} "
        f"ranks ({record['backend']}): {documents}; {context['mode']}, {context['cp_comm_type']}, at most "
        f"{context['max_tokens_per_slot'] or 'any'} rows a slot, "
        f"recomputation {keys['train']['activation_checkpointing']}, {dtype}"
    )


def _record_row(row: dict[str, Any], planned_memory: str) -> tuple[str, ...]:
    """A peer, which has no plan, lacks what is predicted."""
    planned = "predicted_seconds" in row
    return (
        row["name"],
        f"{row['loss']:.6f}",
        f"{row['seconds']:.3f}",
        f"{row['tokens_per_second_per_device']:,.0f}",
        f"{row['predicted_seconds']:.3f}" if planned else "",
        f"{row['prediction_ratio']:.2f}" if planned else "",
        f"{row['packing']:.2f}" if planned else "",
        f"{row['model_tflops_per_device']:.3g}",
        f"{100 * row['mfu']:.1f} %" if "mfu" in row else "",
        bytes_text(row["peak_bytes"]) if row["peak_bytes"] else "",
        planned_memory if planned else "",
    )


CPU_RANKS = 2


def main(argv: Sequence[str], peers: Peers | None = None) -> int:
    """Run the bench, and after the planners what `peers` measure; returns the exit code."""
    flags, config = parse_step_flags(argv)
    ranks, backend = flags.choose_processes(CPU_RANKS)
    settings = make_settings(flags, config, ranks, backend, ["longspan", "bench", "step", *argv])
    if not (settings.planners or peers):
        raise ConfigError(f"--planners is none: nothing to time; name some of {', '.join(PLANNERS)}")
    record = run_on_ranks(measure_step_on_rank, (settings, peers), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_text(record))
    return 0
