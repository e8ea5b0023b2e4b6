"""Flags of `longspan bench step`: what to time and how often, and the keys of `longspan train` that decide a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from longspan.bench.benches import BenchFlags
from longspan.cli.flags import parse_flags
from longspan.cli.help import Groups, Word
from longspan.cli.plans.lengths import SourceFlags
from longspan.config.defaults import find_folders
from longspan.config.file import read_file
from longspan.config.sections import ContextConfig, MachineSection, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from longspan.errors import ConfigError

PLANNERS = ("padded", "fixed", "dynamic")
SECTIONS = ("model", "parallel", "context", "train")


@dataclass(frozen=True, kw_only=True)
class StepFlags(BenchFlags, SourceFlags):
    """Time whole training steps of `longspan train` (forward, backward, optimizer), over documents of given lengths.

    The model, its placement, plans and optimizer are those of a run: of CONFIG.toml where it is given, with the same
    keys as flags. Without it the model is a qwen3-8b with random weights on GPUs and a qwen3-tiny on CPUs. The learning
    rate is 0, so that all planners see the same weights and report the same loss.

    The documents come from --lengths (numbers with commas between, or a JSON file), --data, --distribution or --same;
    else they are those of step 1 of CONFIG.toml's corpus. One sequence over all GPUs is --sequences 65536 --planners
    fixed. Runs one process for each GPU of this machine, or torchrun's, or --world local processes.
    """

    SHOWN: ClassVar[Groups] = {
        "documents": ("--sequences", "--lengths", "--same", "--distribution", "--tokens"),
        "model and layout": ("--model.path", "--model.preset", "--layers", "--context.context_parallel_size"),
        "what is timed": ("--planners", "--warmup", "--repeats", "--world", "--out", "--json"),
    }
    config: Annotated[str, Word("[CONFIG.toml]")] = ""
    """Configuration file of a run, whose own step is timed."""
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
        """Raise ConfigError for what `BenchFlags.check_flags` refuses, and for fewer than no layers."""
        super().check_flags()
        if self.layers < 0:
            raise ConfigError(f"--layers is {self.layers}; it must be at least 0")


def parse_step(argv: Sequence[str]) -> tuple[StepFlags, RunConfig]:
    """Parse the flags; returns them and the configuration of the file with the keys that flags change.

    Flags are parsed a second time with the values of the file that they name as defaults.
    """
    flags, file_config = parse_flags(StepFlags, argv, "longspan bench step"), RunConfig()
    if flags.config:
        file_config = read_file(flags.config)
        defaults = {name: getattr(file_config, name) for name in SECTIONS}
        defaults["run"] = MachineSection(file_config.run.machine)
        flags = parse_flags(StepFlags, argv, "longspan bench step", defaults)
    run = replace(file_config.run, machine=flags.run.machine)
    config = replace(file_config, run=run, **{name: getattr(flags, name) for name in SECTIONS})
    return flags, find_folders(config)
