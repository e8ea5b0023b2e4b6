"""`longspan bench step`: whole training steps of a model under several planners, beside what their plans predict."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from longspan.cli.bench_step_ranks import Settings, step_ranks
from longspan.cli.bench_step_shapes import Shape, shape_named
from longspan.cli.lengths import SourceFlags, read_cost, read_lengths
from longspan.cli.machine import machine_text
from longspan.cli.parse import parse_flags
from longspan.cli.plan import smallest_degree
from longspan.cli.ranks import ranks_wanted, reports_here, run_on_ranks, under_torchrun
from longspan.cli.step_parts import ORDER
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Cost
from longspan.report.series import write_bytes
from longspan.report.text_table import markdown_table, text_table

PLANNERS = ("padded", "fixed", "dynamic")
CPU_RANKS = 2
CPU_LENGTHS = (96, 40, 24, 16, 16)
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # bfloat16, dense, by the vendor


@dataclass(frozen=True, kw_only=True)
class StepFlags(SourceFlags):
    """Time whole training steps (forward, backward, optimizer) of a model with random weights, on the same documents.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes on the CPU. The learning
    rate is 0, so that all planners see the same weights and report the same loss. The documents come from --lengths
    (numbers with commas between, or a JSON file), --data, --distribution or --same; one sequence over all GPUs is
    --lengths 65536 --planners fixed --cp 4.
    """

    planners: str = ",".join(PLANNERS)
    """Planners, with commas between; empty: none, as with --peers alone."""
    shape: str = ""
    """Sizes of the model: qwen3-8b, qwen3-30b-a3b or small; empty: qwen3-8b on GPUs, small on CPUs."""
    layers: int = 0
    """Other number of layers than the shape's; so are the flags below. 0: the shape's."""
    hidden: int = 0
    """Width."""
    heads: int = 0
    """Query heads."""
    key_value_heads: int = 0
    """Key and value heads."""
    head_size: int = 0
    """Size of a head."""
    ffn: int = 0
    """Width of the MLP."""
    vocabulary: int = 0
    """Token ids."""
    experts: int = 0
    """Experts of a layer."""
    experts_per_token: int = 0
    """Experts that a token visits."""
    expert_ffn: int = 0
    """Width of an expert."""
    sequences: str = ""
    """Lengths with commas between, each one sequence of its own that is timed in turn, in place of --lengths."""
    cp: int = 0
    """Degree of fixed and padded; 0: the smallest that holds the longest document."""
    max_tokens_per_slot: int = 0
    """Rows of a slot in a micro-batch; 0: no limit where --lengths lists numbers, else 8192 on GPUs and 256 on CPUs."""
    cp_comm_type: str = "auto"
    """How groups communicate: p2p, all_gather, a2a, a2a+p2p or auto."""
    hierarchical: str = ""
    """Sizes of a2a+p2p, as in 2,2."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """Who waits for whom."""
    node_size: int = 8
    """Slots of one host."""
    tp: int = 1
    """Tensor-parallel degree."""
    ep: int = 1
    """Expert-parallel degree."""
    recompute: Literal["none", "full", "selective"] = "selective"
    """What is recomputed in the backward pass."""
    recompute_layers: int = 0
    """Recompute this many of the layers alone, the first ones; 0: each."""
    offload: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep what checkpointed layers start from in the host's memory."""
    parameters: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters, gradients and moments."""
    compute: Literal["", "bfloat16", "float32"] = ""
    """Type of the arithmetic; empty: bfloat16 on GPUs, as the parameters on CPUs."""
    keep_gathered: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep a layer's gathered parameters between its forward and its backward pass."""
    compiled: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile norms and MLPs with torch.compile; warm up with 3 steps or more."""
    optimizer: Literal["adamw", "sgd", ""] = "adamw"
    """Optimizer; empty: none."""
    loss_chunk_rows: int = 0
    """Rows whose logits are formed at a time; 0: by a budget of bytes."""
    cost: str = ""
    """File of `longspan bench calibrate`; empty: the model at 400 TFLOP/s on GPUs, at 0.05 on CPUs."""
    peak_tflops: float = 0.0
    """Of a device, for the model FLOPs utilisation; 0: of a GPU that is known."""
    warmup: int = 2
    """Steps before the timed ones."""
    repeats: int = 3
    """Timed steps; their median counts."""
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Profile one more step: seconds of attention, other layers, exposed communication, optimizer, idle."""
    peers: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Time Hugging Face + FSDP2 + torch's context_parallel as well, where there is one sequence."""
    world: int = 0
    """Local processes on the CPU; 0: one for each GPU, or torchrun's, or 2 where there is no GPU."""
    out: str = ""
    """Write the record to this JSON file, row by row, and at the end as a table to the .md file beside it."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the record as JSON, and nothing else, on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    flags = parse_flags(StepFlags, argv, "longspan bench step")
    ranks, backend = _ranks(flags)
    settings = make_settings(flags, ranks, backend, ["longspan", "bench", "step", *argv])
    record = run_on_ranks(step_ranks, (settings,), ranks)
    if reports_here():
        if flags.out:
            write_record(record, Path(flags.out))
        print(json.dumps(record, indent=1) if flags.json else record_text(record))
    return 0


def make_settings(flags: StepFlags, ranks: int, backend: str, command: Sequence[str]) -> Settings:
    """What the ranks are told. Raises ConfigError or PlanError for what cannot be, before a process starts."""
    gpu = backend == "nccl"
    _check(flags)
    lengths, source, listed = _lengths(flags, ranks // flags.tp, gpu)
    home = Layout(ranks, tp=flags.tp, ep=flags.ep)
    cap = flags.max_tokens_per_slot or (0 if listed else 8192 if gpu else 256)
    name = flags.shape or ("qwen3-8b" if gpu else "small")
    shape = shape_named(name).changed(flags)
    settings = Settings(
        planners=tuple(planner for planner in flags.planners.split(",") if planner),
        shape=shape,
        shape_name=name,
        lengths=lengths,
        sequences=lengths if flags.sequences else (),
        source=source,
        cp=flags.cp or (home.slots if flags.sequences else smallest_degree(lengths, home, cap or None)),
        max_tokens_per_slot=cap,
        cp_comm_type=flags.cp_comm_type,
        hierarchical=_sizes(flags.hierarchical),
        mode=flags.mode,
        node_size=flags.node_size,
        tp=flags.tp,
        ep=flags.ep,
        recompute=flags.recompute,
        recompute_layers=flags.recompute_layers,
        offload=flags.offload,
        parameters=flags.parameters,
        compute=flags.compute or ("bfloat16" if gpu else ""),
        reshard=not flags.keep_gathered,
        compiled=flags.compiled,
        optimizer=flags.optimizer,
        loss_chunk_rows=flags.loss_chunk_rows,
        cost=_cost(flags, shape, lengths, home, gpu=gpu),
        cost_source=flags.cost or "the model at " + ("400 TFLOP/s" if gpu else "0.05 TFLOP/s"),
        peak_tflops=flags.peak_tflops or (_known_peak() if gpu else 0.0),
        warmup=flags.warmup,
        repeats=flags.repeats,
        profile=flags.profile,
        peers=flags.peers,
        ranks=ranks,
        backend=backend,
        timeout_seconds=flags.timeout_seconds,
        command=" ".join(command),
        out=str(Path(flags.out).resolve()) if flags.out else "",
    )
    for batch in settings.batches():
        for planner in settings.planners:
            batch.plan(planner)
    return settings


def _check(flags: StepFlags) -> None:
    planners = [planner for planner in flags.planners.split(",") if planner]
    if any(planner not in PLANNERS for planner in planners) or not (planners or flags.peers):
        raise ConfigError(f"--planners {flags.planners!r}: this release has {', '.join(PLANNERS)}")
    if flags.repeats < 1 or flags.warmup < 0:
        raise ConfigError(f"--repeats {flags.repeats} --warmup {flags.warmup}: at least 1 and 0")
    if flags.mode == "free" and flags.ep > 1:
        raise ConfigError(f"--mode free with --ep {flags.ep}: experts join slots in every layer; use --mode lockstep")
    if min(flags.tp, flags.ep, flags.node_size) < 1 or min(flags.cp, flags.max_tokens_per_slot) < 0:
        raise ConfigError("--tp, --ep and --node_size are at least 1, --cp and --max_tokens_per_slot at least 0")


def _lengths(flags: StepFlags, slots: int, gpu: bool) -> tuple[tuple[int, ...], str, bool]:
    """Lengths, where they came from, and whether they were listed as numbers."""
    words = (flags.sequences or flags.lengths).split(",")
    elsewhere = flags.data or flags.distribution or flags.same
    if flags.sequences and not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--sequences {flags.sequences!r} is not a list of lengths such as 16384,65536")
    if flags.sequences and (elsewhere or flags.lengths):
        raise ConfigError("--sequences are timed one after another; leave --lengths and other documents out")
    if (flags.lengths or flags.sequences) and not elsewhere and all(word.strip().isdecimal() for word in words):
        return tuple(int(word) for word in words), "given", True
    if not (flags.lengths or elsewhere):
        if not gpu:
            return CPU_LENGTHS, "given", False
        raise ConfigError(
            "give documents: --lengths 65536, --lengths FILE.json, --distribution lognorm, --data or --same"
        )
    found, source = read_lengths(flags, slots)
    return found, source, False


def _sizes(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    sizes = tuple(int(size) for size in text.split(",") if size.isdecimal())
    if len(sizes) != 2:
        raise ConfigError(f"--hierarchical {text!r}: give two sizes, as in 2,2")
    return sizes[0], sizes[1]


def _cost(flags: StepFlags, shape: Shape, lengths: Sequence[int], home: Layout, *, gpu: bool) -> Cost:
    """The file's cost, or the model's on a device of plain speed; in free mode with what gathering weights adds."""
    config = shape.config(max(lengths))
    cost = read_cost(flags.cost) if flags.cost else Cost.for_model(config, tflops=400.0 if gpu else 0.05)
    if flags.mode == "lockstep":
        return cost
    experts = 3 * shape.hidden * shape.expert_ffn * shape.experts
    attention = shape.hidden * shape.head_size * 2 * (shape.heads + shape.key_value_heads)
    layer = attention + (experts or 3 * shape.hidden * shape.ffn)
    weights = shape.layers * layer + 2 * shape.hidden * shape.vocabulary
    return cost.with_closing(weights, home.slots, inside=home.slots <= flags.node_size)


def _known_peak() -> float:
    import torch

    name = torch.cuda.get_device_name(0)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), 0.0)


def record_text(record: dict[str, Any]) -> str:
    """A record for a terminal."""
    parts = f"\n\n{text_table(_PARTS, rows)}" if (rows := _part_rows(record)) else ""
    return f"{_title(record)}\n\n{text_table(_NAMES, _rows(record))}{parts}{_missing(record)}"


def record_markdown(record: dict[str, Any]) -> str:
    """A record for people who read bench/records."""
    found = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    parts = f"{markdown_table(_PARTS, rows)}\n\n" if (rows := _part_rows(record)) else ""
    return (
        f"# {_title(record)}\n\n"
        f"Machine: {machine_text(record['machine'])}. Versions: {found}. Command: `{record['command']}`.\n\n"
        f"{markdown_table(_NAMES, _rows(record))}\n\n{parts}"
        "Whole steps with forward, backward and optimizer, at learning rate 0: the loss is that of the same weights. "
        f"Seconds are the median of {record['repeats']} steps after {record['warmup']}, of the slowest rank. "
        f"Predicted under {record['cost_source']}. Model FLOPs are 6 a weight and token and causal attention, without "
        f"recomputation; padding does not count.\n{_missing(record)}\n"
    )


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON, and as Markdown beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(record_markdown(record), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


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
)
_PARTS = ("part of a profiled step, ms", *ORDER, "idle", "step")


def _title(record: dict[str, Any]) -> str:
    shape = record["shape"]
    experts = f", {shape['experts']} experts" if shape["experts"] else ""
    kept = " offloaded" if record["offload"] else ""
    some = f" of {record['recompute_layers']} layers" if record["recompute_layers"] else ""
    return (
        f"Steps of {record['shape_name']} ({shape['layers']} layers, hidden {shape['hidden']}{experts}) over "
        f"{record['ranks']} ranks ({record['backend']}): {_what(record)}; {record['mode']}, {record['cp_comm_type']}, "
        f"at most {record['max_tokens_per_slot'] or 'any'} rows a slot, "
        f"recomputation {record['recompute']}{some}{kept}, "
        f"{record['parameters']}{' computed in ' + record['compute'] if record['compute'] else ''}"
    )


def _what(record: dict[str, Any]) -> str:
    if record["sequences"]:
        return "one sequence at a time"
    return (
        f"{record['documents']:,} documents, {record['tokens']:,} tokens, longest {record['longest']:,} "
        f"({record['source']})"
    )


def _rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [_row(row) for row in record["rows"] if "missing" not in row]


def _row(row: dict[str, Any]) -> tuple[str, ...]:
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
        write_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
    )


def _part_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [row for row in record["rows"] if "parts" in row]
    return [(row["name"], *(f"{1e3 * row['parts'][part]:.1f}" for part in _PARTS[1:])) for row in rows]


def _missing(record: dict[str, Any]) -> str:
    return "".join(f"\n- {row['name']}: not available: {row['missing']}" for row in record["rows"] if "missing" in row)


def _ranks(flags: StepFlags) -> tuple[int, str]:
    import torch

    gpus, ranks = torch.cuda.device_count(), ranks_wanted(flags.world)
    if under_torchrun():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return ranks, "nccl" if gpus >= local else "gloo"
    return (gpus, "nccl") if gpus and not flags.world else (flags.world or CPU_RANKS, "gloo")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
