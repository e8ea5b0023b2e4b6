"""Flags of `longspan bench step`, and the settings that the ranks receive: a run's configuration, its documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from longspan.bench.benches import BenchFlags, change_layer_count
from longspan.cli.flags import Groups, Word, parse_flags
from longspan.cli.plans.planning import SourceFlags, read_lengths
from longspan.config.defaults import resolve_defaults
from longspan.config.dtypes import compute_dtype
from longspan.config.file import read_file
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.local_folders import with_local_folders
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
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Cost, Plan
from longspan.plan.shape.model_shape import peak_tflops, read_experts
from longspan.resolve.choice import PlannerConfig, home_of, query_heads
from longspan.resolve.facts import Facts
from longspan.resolve.partition import choose_partition
from longspan.resolve.run_cost import find_run_cost, run_machine
from longspan.resolve.ways import rank_ways
from longspan.run.checks import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


PLANNERS = ("padded", "fixed", "dynamic")
SECTIONS = ("model", "parallel", "context", "train", "optimizer", "lora")


@dataclass(frozen=True, kw_only=True)
class StepFlags(BenchFlags, SourceFlags):
    """Time whole training steps of `longspan train` (forward, backward, optimizer), over documents of given lengths.

    The model, its placement, plans and optimizer are those of a run: of CONFIG.toml where it is given, with the same
    keys as flags. Without it the model is a qwen3-8b with random weights on GPUs and a qwen3-tiny on CPUs. The learning
    rate is 0, so that all planners see the same weights and report the same loss.

    The documents come from --lengths (numbers with commas between, or a JSON file), --distribution or --same. One
    sequence over all GPUs is --sequences 65536 --planners fixed. Runs one process for each GPU of this machine, or
    torchrun's, or --world local processes.
    """

    SHOWN: ClassVar[Groups] = {
        "documents": ("--sequences", "--lengths", "--same", "--distribution", "--tokens"),
        "model and layout": ("--model.path", "--model.preset", "--layers", "--context.context_parallel_size"),
        "what is timed": ("--planners", "--warmup", "--repeats", "--world", "--out", "--json"),
    }
    config: Annotated[str, Word("[CONFIG.toml]")] = ""
    """Configuration file of a run, whose step is timed."""
    planners: str = ""
    """Planners, with commas between, or none; one of your own by its dotted name. Default: that of CONFIG.toml,
    otherwise padded,fixed,dynamic."""
    layers: int = 0
    """Number of layers, for random weights; 0: as in the model's configuration."""
    sequences: str = ""
    """Lengths with commas between, in place of --lengths; each is timed as one sequence, in turn."""
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
    """Parse the flags; returns them and the configuration of the file with the keys that flags change. Flags are parsed
    a second time with the values of the file that they name as defaults.
    """
    flags = parse_flags(StepFlags, argv, "longspan bench step")
    file_config = RunConfig()
    if flags.config:
        file_config = read_file(flags.config)
        defaults = {name: getattr(file_config, name) for name in SECTIONS}
        defaults["run"] = MachineSection(file_config.run.machine)
        flags = parse_flags(StepFlags, argv, "longspan bench step", defaults)
    config = replace(
        file_config,
        run=replace(file_config.run, machine=flags.run.machine),
        **{name: getattr(flags, name) for name in SECTIONS},
    )
    return flags, with_local_folders(config)


CPU_LENGTHS = (96, 40, 24, 16, 16)


class TimedLengths(NamedTuple):
    """Lengths of documents, where they came from, and whether they were listed as numbers."""

    lengths: tuple[int, ...]
    source: str
    listed: bool = False


def read_documents(flags: StepFlags, slots: int, *, gpu: bool) -> TimedLengths:
    """Read the documents that flags name; on CPUs there is a default. Raises ConfigError where there are none, and for
    flags that contradict each other.
    """
    entries = (flags.sequences or flags.lengths).split(",")
    are_numbers = all(entry.strip().isdecimal() for entry in entries)  # --lengths may name a file instead
    has_source = flags.distribution or flags.same
    if flags.sequences and (not are_numbers or has_source or flags.lengths):
        raise ConfigError(
            f"--sequences {flags.sequences} are lengths such as 16384,65536, timed one after another; no other flag "
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
    configuration: "PreTrainedConfig"
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]  # one at a time, in place of the lengths together
    source: str
    cost: Cost
    peak_tflops: float  # of a device; 0: unknown

    @property
    def home(self) -> Layout:
        return home_of(self.config.parallel, self.ranks)

    @property
    def compute(self) -> str:
        """The dtype of the arithmetic; "" where it is that of the parameters."""
        kind = str(compute_dtype(self.config.model, self.device)).removeprefix("torch.")
        return "" if kind == self.config.model.dtype else kind

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
            "shape_name": config.model.source or config.model.preset_name,
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
    """Make the settings of the flags. Raises a LongspanError for impossible ones, before a process starts."""
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
    if config.context.max_tokens_per_slot == AUTO and not (flags.config and Path(config.run.dir).is_dir()):
        lack = f"there is no {config.run.dir}" if flags.config else "no CONFIG.toml names one"
        raise ConfigError(
            f'context.max_tokens_per_slot is "auto", which is kept in a run\'s folder, and {lack}; give a number'
        )
    cost = find_run_cost(config, configuration, lambda _: None, gpu=gpu, slots=home.slots)
    peak = flags.peak_tflops
    if gpu and not peak:
        import torch

        kind = str(compute_dtype(config.model, "cuda")).removeprefix("torch.")
        peak = peak_tflops(torch.cuda.get_device_name(0), kind) or 0.0
    facts = Facts(
        home=home,
        machine=run_machine(config, gpu=gpu),
        model=configuration,
        lengths_of_step=lambda step: documents.lengths,
        steps=1,
        longest=max(documents.lengths),
        gpu=gpu,
    )
    config, _ = choose_partition(config, facts)
    if (
        not config.context.context_parallel_size
    ):  # planners of one degree share that at which packed documents are fastest
        packed = config.with_keys("context", planner="fixed")
        degree = rank_ways(packed, facts).best.way.choice.degree
        config = config.with_keys("context", context_parallel_size=degree)
    settings = StepSettings(
        flags=flags,
        config=config,
        planners=planners,
        ranks=ranks,
        backend=backend,
        command=" ".join(command),
        configuration=configuration,
        lengths=documents.lengths,
        sequences=documents.lengths if flags.sequences else (),
        source=documents.source,
        cost=cost,
        peak_tflops=peak,
    )
    for batch in settings.batches():
        for planner in planners:
            batch.plan(planner)  # only for its errors, before a process starts
    return settings


def _choose_planners(flags: StepFlags, config: RunConfig) -> tuple[str, ...]:
    """Return the planners to time: those of --planners, else that of CONFIG.toml, else PLANNERS; () for "none".

    Raises ConfigError for a name that is neither one of PLANNERS nor dotted.
    """
    names = ", ".join(PLANNERS)
    named = config.context.planner if flags.config else ""
    default = ",".join(PLANNERS) if named in ("", AUTO) else named
    planners = tuple(planner for planner in (flags.planners or default).split(",") if planner != "none")
    if any(planner not in PLANNERS and "." not in planner for planner in planners):
        raise ConfigError(
            f"--planners {flags.planners!r}: this release has {names}, or none; one of your own has its module in front"
        )
    return planners


def _read_timed_configuration(flags: StepFlags, config: RunConfig, longest: int) -> "PreTrainedConfig":
    """Return the model's configuration, with the layers of --layers and positions for the longest document. Raises
    ConfigError for --layers beside weights.
    """
    from longspan.train.run_model.load import read_model_configuration
    from longspan.train.run_model.rope_scaling import scale_positions

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
    """Return the configuration with a cap of rows and a degree where flags give none. Documents listed by length are
    few and get no cap (0). Others may be many, and are packed into micro-batches of at most 8192 rows on a slot, or 256
    on CPUs; more where the longest needs more on all slots. Sequences that are timed one by one get all slots.
    """
    context = config.context
    if context.max_tokens_per_slot == NOT_GIVEN:
        usual = 8192 if gpu else 256
        cap = 0 if documents.listed else max(usual, ceil(max(documents.lengths) / home.slots))
        context = replace(context, max_tokens_per_slot=cap)
    if context.context_parallel_size == NOT_GIVEN:  # 0: the fastest, chosen later
        context = replace(context, context_parallel_size=home.slots if flags.sequences else 0)
    return replace(config, context=context)


def _make_timed_config(config: RunConfig, longest: int, ranks: int, planners: Sequence[str]) -> RunConfig:
    """Return the configuration with learning rate 0, for documents of up to `longest` tokens and without evaluations.

    It is checked under each planner first, with the rate that it gives or else 1, as a run must have one. Raises
    ConfigError or LayoutError.
    """
    data = replace(config.data, max_document_tokens=longest)
    evaluation = replace(config.evaluation, documents=0)
    optimizer = replace(config.optimizer, lr=config.optimizer.lr if config.optimizer.lr != NOT_GIVEN else 1.0)
    config = replace(config, data=data, evaluation=evaluation, optimizer=optimizer)
    for planner in planners:
        check_config(config.with_keys("context", planner=planner), ranks)
    return config.with_keys("optimizer", lr=0.0)
