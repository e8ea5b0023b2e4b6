"""How fast attention over several ranks is, each communication type next to torch's own `context_parallel`.

    python bench/attention/attention_types.py --lengths 16384,65536 --out bench/records/attention.json  # a rank a GPU
    python bench/attention/attention_types.py --world 4                                                 # on CPUs

Before anything is timed, output and gradients are compared with dense attention in float32. The exit code is 1 if one
of longspan's is wrong. `--help` shows the flags.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.attention.type_cases import AttentionSettings
from bench.attention.type_ranks import attention_ranks

from longspan.bench.benches import BenchFlags
from longspan.bench.record import origin_text, show_record
from longspan.cli.flags import parse_flags
from longspan.cli.processes import run_on_ranks
from longspan.errors import ConfigError, plural
from longspan.plain_text import bytes_text, markdown_table, text_table

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
CPU_RANKS = 4
PROGRAM = "bench/attention/attention_types.py"
GPU_DEFAULTS = {"lengths": "16384,65536", "heads": 32, "key_value_heads": 8, "head_size": 128, "dtype": "bfloat16"}
CPU_DEFAULTS = {"lengths": "1024,2048", "heads": 8, "key_value_heads": 2, "head_size": 64, "dtype": "float32"}


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(BenchFlags):
    """Time forward and backward of causal attention: one sequence (or equal packed documents) split over all ranks.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes. Before anything
    is timed, output and gradients at a short length are compared with dense attention in float32 on one device.
    torch's context_parallel runs in the same processes, where it can.
    """

    types: str = ",".join(TYPES)
    """Communication types, with commas between."""
    lengths: str = ""
    """Sequence lengths, with commas between; empty: 16384,65536 on GPUs, 1024,2048 on CPUs."""
    documents: int = 1
    """Equal packed documents that share the sequence."""
    partition: Literal["zigzag", "contiguous"] = "zigzag"
    """Which rows a rank holds: zigzag: equal causal work; contiguous: one run of rows, fewer copies under a2a."""
    window: int = 0
    """How many positions a query sees, its own included; 0: all earlier ones."""
    sinks: bool = False
    """Use attention sinks: a learnt logit for each query head, which takes weight and contributes no value."""
    kernel: str = ""
    """Name of the kernel (fa4, cudnn, torch_flash, cpu_flash, reference); empty: the first that supports the call."""
    hierarchical: str = ""
    """Sizes of a2a+p2p, as in 2,4; empty: 2 and half of the ranks, or 1 and all where they are odd."""
    heads: int = 0
    """Query heads; 0: 32 on GPUs, 8 on CPUs."""
    key_value_heads: int = 0
    """Key and value heads; 0: 8 on GPUs, 2 on CPUs."""
    head_size: int = 0
    """Size of a head; 0: 128 on GPUs, 64 on CPUs."""
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Dtype of queries, keys and values; empty: bfloat16 on GPUs, float32 on CPUs."""
    cuda_graph: bool = False
    """Time every type a second time, captured in a CUDA graph and replayed, without the host's work. Needs GPUs."""
    no_peers: bool = False
    """Do not time torch's context_parallel."""
    warmup: int = 3
    """Runs before the timed ones."""
    warm_seconds: float = 1.0
    """On GPUs, seconds of further runs before the timed ones: a GPU that has rested is faster than one in training."""
    repeats: int = 10
    """Timed runs; their median counts."""


def main(argv: Sequence[str]) -> int:
    """Run the bench. Returns 0, or 1 if an output or a gradient was wrong."""
    flags = parse_flags(AttentionFlags, argv, PROGRAM)
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, ranks, backend, ["python", PROGRAM, *argv])
    record = run_on_ranks(attention_ranks, (settings,), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0 if all(row.get("good", True) for row in record["checks"]) else 1


# Settings that are copied from the flags of the same name.
_COPIED = ("documents", "partition", "window", "sinks", "kernel", "warmup", "warm_seconds", "repeats")
_COPIED += ("timeout_seconds", "cuda_graph")


def make_settings(flags: AttentionFlags, ranks: int, backend: str, command: Sequence[str]) -> AttentionSettings:
    """The settings that the ranks receive. Raises ConfigError for impossible types, lengths and sizes."""
    defaults: dict[str, Any] = GPU_DEFAULTS if backend == "nccl" else CPU_DEFAULTS
    types = tuple(name for name in flags.types.split(",") if name)
    unknown = [name for name in types if name not in TYPES]
    if unknown or not types:
        raise ConfigError(f"--types {flags.types!r}: this release has {' and '.join(TYPES)}")
    try:
        lengths = tuple(int(length) for length in (flags.lengths or defaults["lengths"]).split(","))
    except ValueError:
        raise ConfigError(f"--lengths {flags.lengths!r} is not a list of integers such as 16384,65536") from None
    if min(lengths) < flags.documents or flags.documents < 1:
        raise ConfigError(f"{flags.documents} documents do not share {min(lengths)} rows; use at least a row each")
    if flags.window < 0:
        raise ConfigError(f"--window {flags.window}: at least 1, or 0 for none")
    if flags.cuda_graph and backend != "nccl":
        raise ConfigError(f"--cuda-graph needs a GPU for each rank; these {ranks} talk through {backend}")
    flags.check_flags()
    return AttentionSettings(
        types=types,
        lengths=lengths,
        hierarchical=_sizes(flags.hierarchical, ranks),
        peers=not flags.no_peers,
        ranks=ranks,
        backend=backend,
        command=" ".join(command),
        out=str(Path(flags.out).resolve()) if flags.out else "",
        **{name: getattr(flags, name) for name in _COPIED},
        **{name: getattr(flags, name) or defaults[name] for name in ("heads", "key_value_heads", "head_size", "dtype")},
    )


def _sizes(text: str, ranks: int) -> tuple[int, int]:
    if not text:
        return (1, ranks) if ranks % 2 else (2, ranks // 2)
    sizes = tuple(int(size) for size in text.split(",") if size.isdecimal())
    if len(sizes) != 2 or sizes[0] * sizes[1] != ranks:
        raise ConfigError(f"--hierarchical {text!r}: give two sizes whose product is the {ranks} ranks, as in 2,2")
    return sizes


def record_text(record: dict[str, Any]) -> str:
    """A record for a terminal."""
    return f"{_title(record)}\n\n{text_table(_NAMES, _table_lines(record))}\n\n{_checks(record)}{_missing(record)}"


def record_markdown(record: dict[str, Any]) -> str:
    """A record as Markdown, for bench/records."""
    warm = f" and {seconds:g} s on GPUs" if (seconds := record.get("warm_seconds")) else ""
    return (
        f"# {_title(record)}\n\n"
        f"{origin_text(record)}\n\n"
        f"{markdown_table(_NAMES, _table_lines(record))}\n\n"
        "TFLOP/s per device count 3.5 × the forward FLOPs (4 · heads · head size · the pairs of positions that see "
        "each other, which are S² / 2 a document without a window) for forward and backward together. "
        f"Median of {record['repeats']} runs after {record['warmup']}{warm}, the slowest rank.\n\n"
        f"{_checks(record)}{_missing(record)}\n"
    )


_NAMES = ("attention", "length", "forward ms", "both ms", "TFLOP/s per device", "peak memory")


def _title(record: dict[str, Any]) -> str:
    packed = f", {record['documents']} packed documents" if record["documents"] > 1 else ""
    packed += f", window {record['window']}" if record["window"] else ""
    packed += ", sinks" if record.get("sinks") else ""
    packed += f", longspan's rows {record['partition']}" if record.get("partition", "zigzag") != "zigzag" else ""
    return (
        f"Causal attention over {plural(record['ranks'], 'rank')} ({record['backend']}): {record['heads']} query and "
        f"{record['key_value_heads']} key/value heads of {record['head_size']}, {record['dtype']}{packed}, "
        f"kernel {record['kernel']}"
    )


def _table_lines(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """What the table shows of each case that was measured."""
    lines = []
    for case in record["rows"]:
        if "missing" in case:
            continue
        times = (f"{1e3 * case['forward_seconds']:.2f}", f"{1e3 * case['seconds']:.2f}")
        speed = (
            f"{case['tflops_per_device']:.0f}"
            if case["tflops_per_device"] >= 10
            else f"{case['tflops_per_device']:.3g}"
        )
        memory = bytes_text(case["peak_bytes"]) if case["peak_bytes"] else ""
        lines.append((case["name"], f"{case['length']:,}", *times, speed, memory))
    return lines


def _checks(record: dict[str, Any]) -> str:
    lines = []
    for row in record["checks"]:
        if "missing" in row:
            continue
        errors = ", ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
        verdict = "good" if row["good"] else "WRONG"
        lines.append(f"- {row['name']}: {verdict}: {errors} (allowed {row['tolerance']:.1e})")
    return f"Relative to dense attention in float32 at {record['check_length']:,} rows:\n\n" + "\n".join(lines)


def _missing(record: dict[str, Any]) -> str:
    """One line for each peer that did not run, with the reason."""
    reasons = dict.fromkeys(
        (row["name"], row["missing"]) for row in (*record["checks"], *record["rows"]) if "missing" in row
    )
    return "".join(f"\n- {name}: not available: {reason}" for name, reason in reasons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
