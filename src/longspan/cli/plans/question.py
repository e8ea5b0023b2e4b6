"""Flags of `longspan plan` that ask what fits GPUs, the keys of runs behind them, and the GPUs that they name.

With `--gpu`, `--gpu-bytes` or `--compare` every key of `longspan train` stands on the command line by its own name, and
flags of plans that mean the same as a key are read as that key. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from longspan.cli.flags import (
    KEYS,
    TrainFlags,
    check_flag_names,
    check_flags_at_least,
    flag_text,
    flag_types,
    parse_flags,
    split_flags,
)
from longspan.cli.machine import NO_GPUS, find_gpus
from longspan.cli.plans.planning import PlanningFlags
from longspan.cli.processes import count_host_ranks, has_torchrun
from longspan.config.local_folders import set_local_folders
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import ConfigError, plural
from longspan.host import free_host_bytes
from longspan.model.presets import find_published_preset
from longspan.plain_text import gib_text
from longspan.plan import Machine
from longspan.plan.cost.machine import find_machine_of_device, read_machine, scale_product_speeds
from longspan.plan.memory.settings import HOST_SHARE, LEAST_OF_GPU, bytes_hint

AnyFlags = TypeVar("AnyFlags", bound="GpuFlags")
PROG = "longspan plan"
HOST_BYTES = 128 << 30  # a GPU's share of its host, where nothing else is known
ASKING = ("--gpu", "--gpu_bytes", "--compare")  # one of them makes a question of memory and time
DEFAULT_MODEL = "qwen3-8b"  # of a comparison that names none
OF_PRESET = "{} is not on this machine: its sizes are those of the preset {}"
OF_DOCUMENTS = ("lengths", "same", "distribution", "tokens", "longest_document", "seed")


@dataclass(frozen=True, kw_only=True)
class GpuFlags(PlanningFlags):
    """Whether a run fits GPUs, with which keys, and how long it takes: flags that only such a question has."""

    gpu: str = ""
    """GPUs to plan memory and time for: h200, by data sheet a100-40, a100-80, h100, b200, b300, gh200, l40s, rtx4090,
    rtx5090, rtxpro6000, or a file of longspan bench calibrate. Every key of longspan train may stand behind it, as
    --lora.rank 16."""
    gpus: int = 1
    """With --gpu or --gpu-bytes: how many of them."""
    gpu_bytes: int = 0
    """Bytes of a GPU, in place of those of --gpu; of another GPU with --tflops. 0: those of --gpu."""
    tflops: float = 0.0
    """With --gpu or --gpu-bytes: what a GPU sustains, in 1e12 FLOP/s; 0: that of --gpu or --machine."""
    host_bytes: int = 0
    """With --gpu or --gpu-bytes: bytes of the host's memory that are free for each GPU; 0: 128 GiB, an assumption."""
    longest: bool = False
    """With --gpu or --gpu-bytes: the most tokens of one document over all of them, and what takes which bytes."""
    data: str = ""
    """With --gpu: rows of data, whose steps are planned as training would: as data.path, a folder or file, or stdlib.
    Tokens are estimated as bytes / 4 where neither --data.tokenizer nor the model's folder has a tokenizer."""
    tokens_per_step: int = 0
    """With --gpu and --data: as train.tokens_per_step; 0: its default."""
    epochs: float = 0.0
    """With --gpu and --data: as train.epochs; 0: one, unless train.steps is given."""
    compare: bool = False
    """Price every planner and degree next to each other, at the rows that memory holds: on --gpu, or on --machine (an
    H200) where none is named; of --model or else of Qwen3-8B."""
    world: int = 0
    """With --compare: ranks of the machine, in place of --gpus or --slots."""
    tp: int = 1
    """With --compare or --gpu: as parallel.tp."""
    pp: int = 1
    """With --compare or --gpu: as parallel.pp."""
    vpp: int = 1
    """With --compare or --gpu: as parallel.vpp."""
    write: str = ""
    """With --gpu or --gpu-bytes: write the keys of the answer to this file, which longspan train takes."""


# Flags that only a question about GPUs has, and all that it reads.
OF_GPUS = {f"--{field.name}" for field in fields(GpuFlags)} - {f"--{field.name}" for field in fields(PlanningFlags)}
READ = OF_GPUS | {f"--{name}" for name in (*OF_DOCUMENTS, "model", "json", "help", "slots")}


@dataclass(frozen=True)
class Question:
    """What a command line asks of GPUs: the configuration of its keys without defaults, and the keys that it gives."""

    config: RunConfig
    given_keys: frozenset[str]

    def gives_any(self, *keys: str) -> bool:
        return not self.given_keys.isdisjoint(keys)


def is_gpu_question(argv: Sequence[str]) -> bool:
    """Return whether the words of a command name GPUs, and so ask whether a run fits them. Raises ConfigError, if no
    GPUs are named, for flags and keys that only such a question has.
    """
    names = [name for name, _, _ in split_flags(argv)]
    if not set(names).isdisjoint(ASKING):
        return True
    for name in names:
        if name in OF_GPUS or "." in name:
            raise ConfigError(
                f"{flag_text(name)} is of a question about GPUs; name them with --gpu, such as --gpu h100 --gpus 4"
            )
    return False


def parse_question(kind: type[AnyFlags], argv: Sequence[str]) -> tuple[AnyFlags, Question]:
    """Parse the flags and the keys of a command line that names GPUs; some keys also have a short flag (KEYS). Raises
    ConfigError for an unknown flag, for a key that is given by both of its names, for a flag of plans that such a
    question does not read, and where no model is named, or two are.
    """
    types = flag_types(kind) | {name: hint for name, hint in flag_types(TrainFlags).items() if "." in name}
    check_flag_names(argv, types, PROG)
    words = list[str]()
    keys = list[str]()
    flag_of = dict[str, str]()
    for name, values, _ in split_flags(argv):
        key = name if "." in name else KEYS.get(name, "")
        if not key:
            if name and name not in READ:
                raise ConfigError(
                    f"with --gpu, longspan plan finds what fits GPUs and does not take {flag_text(name)}; leave it out"
                )
            words += [name, *values]
            continue
        if (other := flag_of.get(key, name)) != name:
            both = f"{flag_text(other)} and {flag_text(name)}"
            raise ConfigError(f"{both} are the same key, and both are given; leave one out")
        flag_of[key] = name
        keys += [key, *values]
    flags = parse_flags(kind, words, PROG)
    key_flags = parse_flags(TrainFlags, keys, PROG)
    sections: dict[str, Any] = {name: getattr(key_flags, name) for name in section_kinds()}
    model = sections["model"]
    named = [key for key in ("path", "config", "preset") if getattr(model, key)]
    if flags.model and named:
        raise ConfigError(
            f"--model {flags.model} and model.{named[0]} {getattr(model, named[0])!r} both name a model"
        )
    if flags.compare and not flags.model and not named:
        model = replace(model, preset=DEFAULT_MODEL)
    elif not flags.model and not named:
        raise ConfigError(
            "which model? give --model FOLDER (its config.json is enough), or --model.preset NAME, such as qwen3-8b"
        )
    sections["model"] = replace(model, path=flags.model) if flags.model else model
    ranks = flags.world or flags.slots * sections["parallel"].tp * sections["parallel"].pp
    if ranks and (not flags.compare or flags.gpus > 1 or (flags.world and flags.slots)):
        raise ConfigError(
            "--gpus N is how many GPUs there are; a comparison may have --world N or --slots N in its place"
        )
    flags = replace(flags, gpus=ranks or flags.gpus)
    config = RunConfig(**sections)
    try:
        config = set_local_folders(config, weights=False)
    except ConfigError:
        if not find_published_preset(path := config.model.path):
            raise
        rest = set_local_folders(config.with_keys("model", path=""), weights=False)
        config = rest.with_keys("model", path=path)  # for the keys; its sizes are the preset's
    return flags, Question(config, frozenset(key[2:] for key in flag_of))


def find_document_source(flags: GpuFlags, question: Question) -> str:
    """Find which documents are asked about: "longest", "data", or the flag of their lengths, such as "same"."""
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


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one kind: `count` of them, the bytes of each, and those of its host that are free for each."""

    machine: Machine
    count: int
    bytes: int
    host_bytes: int
    name: str

    @property
    def title(self) -> str:
        of = self.machine.source.removeprefix("the model on ")
        source = "by data sheet" if self.machine.assumed else f"priced as {of}"
        host = f"{gib_text(self.host_bytes)} of host memory for each"
        return f"{self.count} x {self.name}, {gib_text(self.bytes)} each, {host} ({source})"

    @property
    def count_and_name(self) -> str:
        """Their number and name, as in "4 H100s" or "2 GPUs of 85,899,345,920 bytes"."""
        kind, of, size = self.name.partition(" of ")
        return f"{plural(self.count, kind)}{of}{size}"


def read_gpus(flags: GpuFlags, run_machine: str) -> Gpus:
    """Read the GPUs that flags name; `run_machine` is the key run.machine. The speed is that of run.machine or of
    --tflops, else that of --gpu; with only --gpu-bytes that of an H200.
    """
    check_flags_at_least(flags, gpus=1, gpu_bytes=0, host_bytes=0)
    for name, size in (("gpu-bytes", flags.gpu_bytes), ("host-bytes", flags.host_bytes)):
        if 0 < size < LEAST_OF_GPU:
            raise ConfigError(f"--{name} is {size}: {bytes_hint(size)}")
    if not 0 <= flags.tflops < math.inf or (flags.tflops and run_machine):
        reason = f"run.machine {run_machine} has its own speed" if run_machine else "a speed is above 0"
        raise ConfigError(f"--tflops {flags.tflops:g}: {reason}; give --tflops N, such as 400, or --machine")
    gpu = flags.gpu or (run_machine or "h200") * (flags.compare and not flags.gpu_bytes)
    named = read_machine(gpu, "--gpu") if gpu else None
    machine = named or Machine()
    of_size = f" of {flags.gpu_bytes:,} bytes" * bool(flags.gpu_bytes)
    size = flags.gpu_bytes or machine.memory_bytes
    speed = machine
    if run_machine:
        speed = read_machine(run_machine, "run.machine")
    elif flags.tflops:
        speed = scale_product_speeds(machine, flags.tflops * 1e12 / machine.product_flops_per_second)
        speed = replace(speed, assumed=False, source=f"the model on GPUs of {flags.tflops:g} TFLOP/s")
    if not size:
        raise ConfigError(
            f"--gpu {gpu} does not say how many bytes a GPU has: longspan bench calibrate wrote it before it "
            "measured them; give --gpu-bytes, or measure again"
        )
    return Gpus(
        machine=replace(speed, memory_bytes=machine.memory_bytes),
        count=flags.gpus,
        bytes=size,
        host_bytes=flags.host_bytes or HOST_BYTES,
        name=f"{machine.device if named else 'GPU'}{of_size}",
    )


def choose_gpus(config: RunConfig, ranks: int, *, on_gpus: bool) -> Gpus:
    """Choose the GPUs of a run: with `on_gpus` those here, if there are any, else those of run.machine, else H200s.
    Those here are as fast as run.machine or, without it, the machine of their name says; with neither, as H200s.
    """
    here = find_gpus() if on_gpus else NO_GPUS
    name = here.name
    named = read_machine(config.run.machine, "run.machine") if config.run.machine else find_machine_of_device(name)
    machine = named or Machine.known("H200")
    host = 0
    if name:
        host_ranks = count_host_ranks() if has_torchrun() else ranks
        host = int(HOST_SHARE * (free_host_bytes() or 0) / max(1, host_ranks))
    size = here.bytes or machine.memory_bytes or Machine().memory_bytes
    return Gpus(
        machine=machine, count=ranks, bytes=size, host_bytes=host or HOST_BYTES, name=name or machine.device
    )
