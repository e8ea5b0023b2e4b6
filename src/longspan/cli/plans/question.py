"""Flags of `longspan plan`: what shall fit which GPUs, and the keys of runs behind them. Imports no torch.

Every key of `longspan train` stands on the command line by its own name, and flags of plans that mean the same as a key
are read as that key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from longspan.cli.flags import (
    HELP,
    KEY_OF_PLAN_FLAG,
    check_flag_names,
    flag_text,
    flag_types,
    parse_flags,
    split_flags,
)
from longspan.cli.plans.planning import PlanningFlags
from longspan.cli.train_flags import TrainFlags
from longspan.config.keys import NOT_GIVEN
from longspan.config.local_folders import with_local_folders
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import ConfigError
from longspan.model.presets import PRESETS, find_published_preset

AnyFlags = TypeVar("AnyFlags", bound="GpuFlags")
PROG = "longspan plan"
DEFAULT_MODEL = "qwen3-8b"  # where neither a model nor GPUs are named
DOCUMENT_FLAGS = ("lengths", "same", "distribution", "tokens", "longest_document", "seed")


@dataclass(frozen=True, kw_only=True)
class GpuFlags(PlanningFlags):
    """Whether a run fits GPUs, with which keys, and how long it takes."""

    gpu: str = ""
    """GPUs to plan memory and time for: h200, by data sheet a100-40, a100-80, h100, b200, b300, gh200, l40s, l4, a10,
    a6000, 3090, 4090, 5090, pro6000, or a file of longspan bench calibrate; all: each of these in one table. Every key
    of longspan train may stand behind it, as --lora.rank 16. Default: those of --machine, or H200s."""
    gpus: int = 1
    """How many GPUs."""
    gpu_bytes: int = 0
    """Bytes of a GPU, in place of those of --gpu; of another GPU with --tflops. 0: those of --gpu."""
    tflops: float = 0.0
    """What a GPU sustains, in 1e12 FLOP/s; 0: that of --gpu or --machine."""
    host_bytes: int = 0
    """Bytes of the host's memory that are free for each GPU, of which 85 % are filled; 0: 128 GiB, an assumption."""
    host_speed: float = 0.0
    """GB/s of copies to the host's memory, each way; 0: those of --gpu or --machine. A card on 16 lanes of PCIe 4 has
    27.5, on 8 of them, or on 16 of PCIe 3, 13.75."""
    longest: bool = False
    """The most tokens of one document over all of them, and what takes which bytes."""
    data: str = ""
    """Rows of data, whose steps are planned as training would: as data.path, a folder or file, or stdlib.
    Tokens are estimated as bytes / 4 where neither --data.tokenizer nor the model's folder has a tokenizer."""
    tokens_per_step: int = 0
    """With --data: as train.tokens_per_step; 0: its default."""
    epochs: float = 0.0
    """With --data: as train.epochs; 0: one, unless train.steps is given."""
    compare: bool = False
    """Price every planner and degree next to each other, at the rows that memory holds."""
    world: int = 0
    """Ranks of the machine, in place of --gpus or --slots."""
    tp: int = 1
    """As parallel.tp."""
    pp: int = 1
    """As parallel.pp."""
    vpp: int = 1
    """As parallel.vpp."""
    write: str = ""
    """Write the keys of the answer to this file, which longspan train takes."""
    show: bool = False
    """Show the plan of the step, or of the first one, micro-batch by micro-batch."""
    plot: tuple[str, ...] = ()
    """Draw that plan to these files: .html (a page to explore), .svg or .png (viz extra)."""

    @property
    def names_gpus(self) -> bool:
        return bool(self.gpu or self.gpu_bytes)

    @property
    def prints_plan(self) -> bool:
        """Whether JSON is that of a plan."""
        return self.json and (self.show or not (self.names_gpus or self.compare))


@dataclass(frozen=True)
class Question:
    """What a command line asks of GPUs: the configuration of its keys without defaults, and the keys that it gives."""

    config: RunConfig
    given_keys: frozenset[str]

    def gives_any(self, *keys: str) -> bool:
        return not self.given_keys.isdisjoint(keys)


def parse_question(kind: type[AnyFlags], argv: Sequence[str]) -> tuple[AnyFlags, Question]:
    """Parse the flags and the keys of a command line.

    A key may be given by its own name or by the flag of plans that stands for it (KEY_OF_PLAN_FLAG). Raises
    ConfigError for an unknown flag, for a key that is given by both names, where two models are named, and for GPUs
    without a model.
    """
    if not HELP.isdisjoint(argv):
        parse_flags(kind, argv, PROG)  # prints and exits
    types = flag_types(kind) | {name: hint for name, hint in flag_types(TrainFlags).items() if "." in name}
    check_flag_names(argv, types, PROG)
    plan_words = list[str]()
    key_words = list[str]()
    flag_by_key = dict[str, str]()
    for flag, values, _ in split_flags(argv):
        key = flag if "." in flag else KEY_OF_PLAN_FLAG.get(flag, "")
        if not key:
            plan_words += [flag, *values]
            continue
        if (other := flag_by_key.get(key, flag)) != flag:
            both = f"{flag_text(other)} and {flag_text(flag)}"
            raise ConfigError(f"{both} are the same key, and both are given; leave one out")
        flag_by_key[key] = flag
        key_words += [key, *values]
    flags = parse_flags(kind, plan_words, PROG)
    key_flags = parse_flags(TrainFlags, key_words, PROG)
    sections: dict[str, Any] = {name: getattr(key_flags, name) for name in section_kinds()}
    model = sections["model"]
    naming_keys = [key for key in ("path", "config", "preset") if getattr(model, key)]
    if flags.model:
        if naming_keys:
            value = getattr(model, naming_keys[0])
            raise ConfigError(f"--model {flags.model} and model.{naming_keys[0]} {value!r} both name a model")
        sections["model"] = replace(model, path=flags.model)
    elif not naming_keys:
        if flags.names_gpus and not flags.compare:
            raise ConfigError(
                "which model? give --model FOLDER (its config.json is enough), or --model.preset NAME, such as qwen3-8b"
            )
        sections["model"] = replace(model, preset=DEFAULT_MODEL)
    ranks = flags.world or flags.slots * sections["parallel"].tp * sections["parallel"].pp
    if ranks and (flags.gpus > 1 or (flags.world and flags.slots)):
        raise ConfigError("--gpus N, --world N and --slots N each say how many GPUs there are; give one of them")
    flags = replace(flags, gpus=ranks or flags.gpus)
    config = RunConfig(**sections)
    if config.context.planner == "dynamic" and config.context.context_parallel_size not in (NOT_GIVEN, 0):
        raise ConfigError(
            f"--cp {config.context.context_parallel_size} is the degree of fixed and padded plans, and --planner is "
            "dynamic; use --min-cp and --max-cp, or --planner fixed"
        )
    try:
        config = with_local_folders(config, weights=False)
    except ConfigError:  # the model, or its teacher, has no folder here, unless another one is missing
        paths = {"model": config.model.path, "teacher": config.teacher.path}
        published = {section: path for section, path in paths.items() if find_published_preset(path)}
        if not published:
            raise
        for section in published:
            config = config.with_keys(section, path="")
        config = with_local_folders(config, weights=False)
        for section, path in published.items():
            # The sizes are those of the preset.
            config = config.with_keys(section, path=path)
    return flags, Question(config, frozenset(key[2:] for key in flag_by_key))


def preset_line(model: str, preset: str) -> str:
    """Say that a preset stands for a model that is not here."""
    line = f"{model} is not on this machine: its sizes are those of the preset {preset}"
    return f"{line}, without its tower" if PRESETS[preset].config_class.endswith("TextConfig") else line


def find_document_source(flags: GpuFlags, question: Question) -> str:
    """Find which documents are asked about: "longest", "data", or the flag of their lengths, such as "same". Raises
    ConfigError where flags name none, or several.
    """
    sources = [name for name in ("lengths", "same", "distribution") if getattr(flags, name)]
    sources += ["data"] * question.gives_any("data.path")
    if flags.longest and sources:
        raise ConfigError(
            f"--longest asks for the longest document, and --{sources[0]} names documents; leave one of them out"
        )
    if len(sources) > 1:
        raise ConfigError(f"--{' and --'.join(sources)} are both given; give one of them")
    if not sources and not flags.longest:
        raise ConfigError(
            "what shall fit? give --longest, documents of a step (--same 1x262144, --lengths FILE.json, "
            "--distribution NAME), or a run's --data PATH"
        )
    for key in ("data.tokenizer", "train.epochs", "train.tokens_per_step"):
        if question.gives_any(key) and "data" not in sources:
            raise ConfigError(f"{key} is of a run, whose documents --data names; add --data PATH, or leave it out")
    return sources[0] if sources else "longest"
