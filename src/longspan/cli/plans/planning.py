"""Flags of plans, and the lengths of documents that they name: of a JSON file, alike or of a distribution. No torch."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.config.keys import AUTO
from longspan.errors import ConfigError
from longspan.files import parse_json
from longspan.layout import check_lengths
from longspan.plan.distributions import DISTRIBUTIONS, sample_lengths


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Where the documents come from: exactly one of --lengths, --distribution and --same."""

    lengths: str = ""
    """JSON file with a list of document lengths in tokens, or a plan; - reads standard input."""
    distribution: str = ""
    """Lengths drawn at random instead: lognorm, bimodal, uniform, expo or files."""
    tokens: int = 0
    """With --distribution: draw documents of so many tokens together; 0: 32768 for each slot."""
    longest_document: int = 131072
    """With --distribution: no document is longer."""
    seed: int = 0
    """With --distribution: seed of the draw."""
    same: str = ""
    """Documents of one length instead, such as 1024x8192: 1024 documents of 8192 tokens."""


def read_lengths(flags: SourceFlags, slots: int) -> tuple[tuple[int, ...], str]:
    """Read the lengths of the one source that the flags name, and return them with a text that names it. A distribution
    is drawn for `slots` where --tokens is not given. Raises ConfigError or LayoutError.
    """
    sources = [name for name in ("lengths", "distribution", "same") if getattr(flags, name)]
    if len(sources) != 1:
        several = " and ".join(f"--{name}" for name in sources) or "none of them, and it needs documents"
        names = "--lengths FILE.json, --distribution NAME and --same COUNTxLENGTH (such as --same 8x8192)"
        raise ConfigError(f"give one of {names}; got {several}")
    if flags.same:
        count, _, length = flags.same.lower().partition("x")
        if not count.isdecimal() or not length.isdecimal() or not int(count):
            raise ConfigError(f"--same {flags.same!r} is not COUNTxLENGTH, such as 1024x8192")
        return check_lengths([int(length)] * int(count)), "equal lengths"
    if flags.lengths:
        return read_json_lengths(flags.lengths), flags.lengths
    if flags.distribution not in DISTRIBUTIONS:
        raise ConfigError(
            f"--distribution {flags.distribution!r} is unknown; use one of {', '.join(DISTRIBUTIONS)}"
        )
    total = flags.tokens or 32768 * slots
    sample = sample_lengths(flags.distribution, total, seed=flags.seed, longest=flags.longest_document)
    return tuple(sample.tolist()), f"{flags.distribution} lengths, seed {flags.seed}"


def read_json_lengths(path: str) -> tuple[int, ...]:
    """Read lengths from a JSON list, or the "lengths" of an object such as a plan; "-" is standard input. Raises
    ConfigError for a file that cannot be read or has no lengths.
    """
    try:
        value = parse_json(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read lengths from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cannot read lengths from {path}: it is not JSON ({error})") from error
    if isinstance(value, dict):
        value = value.get("lengths")
    if not isinstance(value, list):
        raise ConfigError(
            f'{path} holds no lengths; give a JSON list such as [300, 20], or an object with "lengths"'
        )
    if not value:
        raise ConfigError(f"{path} holds no documents: its list of lengths is empty; give at least one length")
    return check_lengths(value)


@dataclass(frozen=True, kw_only=True)
class PlanningFlags(SourceFlags):
    """Documents, slots and a price: flags that stand for keys of a run, and how many slots there are."""

    planner: str = "auto"
    """As context.planner. fixed: packed, one degree; padded: one document a row, padded; dynamic: a degree for each
    document; auto: fixed where --cp is given, else the faster of dynamic and fixed. A function of your own by its
    dotted name; with --compare, a row beside these."""
    slots: int = 0
    """Slots of the home, in place of --gpus: GPUs / (tensor-parallel degree x pipeline stages)."""
    node_size: int = 8
    """Slots of one host, as context.node_size; groups inside a host talk over its fast links. Default: those of the
    machine."""
    mode: Literal["auto", "lockstep", "free"] = "auto"
    """As context.mode. lockstep: all slots end a micro-batch together (FSDP, EP, pipelines); free: only members of a
    group wait; auto: the faster."""
    machine: str = ""
    """JSON file of longspan bench calibrate, or a known GPU, such as h100 (those of --gpu), which prices the plan.
    Default: --gpu, or H200s."""
    model: str = ""
    """Folder or config.json of a transformers model, whose sizes price the plan; its query heads limit the degrees of
    a2a. Without it and --gpu: Qwen3-8B."""
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a", "a2a+p2p"] = "auto"
    """How the slots of a group share attention; auto: the fastest way of each group."""
    hierarchical_context_parallel_sizes: int | tuple[int, ...] = 0
    """With a2a+p2p: the a2a and the p2p size, or the a2a size of groups of any degree (2 2, or 2); 0: the best
    ones of each group."""
    cp: int = 0
    """Degree of fixed and padded plans; 0: the fastest."""
    min_cp: int = 1
    """Smallest degree that a dynamic plan may choose."""
    max_cp: int = 0
    """Largest degree that a dynamic plan may choose; 0: no limit."""
    max_tokens_per_slot: int | str = AUTO
    """Rows that a slot holds in one micro-batch, at most; auto: as memory holds them (docs/memory.md); 0: no limit."""
    json: bool = False
    """Print JSON, and nothing else, on standard output: the answer where --gpu or --compare is given, else the plan of
    the step, as with --show."""
