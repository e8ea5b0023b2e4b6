"""What the ranks of `longspan bench step` are told: its flags, and what follows from them and from the machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longspan.bench.step.cost import cost_and_source
from longspan.bench.step.flags import PLANNERS, StepFlags
from longspan.bench.step.shapes import Shape, shape_named
from longspan.cli.lengths import read_lengths
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.cost.model_flops import peak_tflops
from longspan.plan.planners.fixed import smallest_degree

CPU_LENGTHS = (96, 40, 24, 16, 16)
_LEAST = {"tp": 1, "ep": 1, "dp_replicate": 1, "node_size": 1, "cp": 0, "max_tokens_per_slot": 0, "loss_chunk_rows": 0}
# Of the flags: what a record says as it was given.
RECORDED = (
    "cp_comm_type",
    "partition",
    "mode",
    "node_size",
    "tp",
    "ep",
    "dp_replicate",
    "recompute",
    "recompute_layers",
    "offload",
    "parameters",
    "fused_norms",
    "compiled",
    "optimizer",
    "loss_chunk_rows",
    "warmup",
    "repeats",
    "profile",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure: the flags, and what stands in place of those that were left open."""

    flags: StepFlags
    ranks: int
    backend: str
    command: str
    shape: Shape
    shape_name: str
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]  # each alone, in turn, in place of the lengths together
    source: str
    cp: int
    max_tokens_per_slot: int  # 0: no limit
    hierarchical: tuple[int, int] | None
    compute: str  # "": as the parameters
    cost: Cost
    cost_source: str
    peak_tflops: float  # of a device; 0: unknown

    @property
    def home(self) -> Layout:
        """The home of the model on these ranks."""
        return home_of(self.flags, self.ranks)

    @property
    def planners(self) -> tuple[str, ...]:
        """The planners to compare."""
        return planners_of(self.flags)

    @property
    def out(self) -> str:
        """Where the first rank keeps what it has so far; "": nowhere."""
        return str(Path(self.flags.out).resolve()) if self.flags.out else ""

    def batches(self) -> "list[Settings]":
        """These settings, or as many as there are sequences, each of one alone."""
        return [replace(self, lengths=(n,), sequences=()) for n in self.sequences] or [self]

    def plan(self, planner: str) -> Plan:
        """The plan of the documents under one of the planners."""
        options: dict[str, Any] = {
            "max_tokens_per_slot": self.max_tokens_per_slot or None,
            "cp_comm_type": self.flags.cp_comm_type,
            "partition": self.flags.partition,
            "hierarchical_context_parallel_sizes": self.hierarchical,
            "cost": self.cost,
            "node_size": self.flags.node_size,
            "mode": self.flags.mode,
            "heads": self.shape.heads,
        }
        if planner == "dynamic":
            return plan_dynamic(self.lengths, self.home, **options)
        make = plan_padded if planner == "padded" else plan_fixed
        return make(self.lengths, self.home, self.cp, **options)

    def to_json(self) -> dict[str, Any]:
        """What a record says of them."""
        resolved = ("ranks", "backend", "command", "shape_name", "sequences", "source", "cp", "max_tokens_per_slot")
        return {
            "shape": asdict(self.shape),
            "cost": self.cost.to_json(),
            "reshard": not self.flags.keep_gathered,
            **{
                name: getattr(self, name)
                for name in (*resolved, "hierarchical", "compute", "cost_source", "peak_tflops")
            },
            **{name: getattr(self.flags, name) for name in RECORDED},
            "documents": len(self.lengths),
            "tokens": sum(self.lengths),
            "longest": max(self.lengths),
            "lengths": list(self.lengths),
        }


def make_settings(flags: StepFlags, ranks: int, backend: str, command: Sequence[str]) -> Settings:
    """What the ranks are told. Raises ConfigError or PlanError for what cannot be, before a process starts."""
    gpu, name = backend == "nccl", flags.shape or ("qwen3-8b" if backend == "nccl" else "small")
    _check(flags)
    lengths, source, listed = _lengths(flags, ranks // flags.tp, gpu)
    home, shape = home_of(flags, ranks), shape_named(name).changed(flags)
    cap = flags.max_tokens_per_slot or (0 if listed else 8192 if gpu else 256)
    cost, source_of_cost = cost_and_source(flags, shape, max(lengths), home, gpu=gpu)
    limits = PlanOptions(max_tokens_per_slot=cap or None, heads=shape.heads, cp_comm_type=flags.cp_comm_type)
    least = smallest_degree(lengths, home, limits)
    compute = flags.compute or ("bfloat16" if gpu else "")
    settings = Settings(
        flags=flags,
        ranks=ranks,
        backend=backend,
        command=" ".join(command),
        shape=shape,
        shape_name=name,
        lengths=lengths,
        sequences=lengths if flags.sequences else (),
        source=source,
        cp=flags.cp or (home.slots if flags.sequences else least),
        max_tokens_per_slot=cap,
        hierarchical=_sizes(flags.hierarchical),
        compute=compute,
        cost=cost,
        cost_source=source_of_cost,
        peak_tflops=flags.peak_tflops or (_known_peak(compute) if gpu else 0.0),
    )
    for batch in settings.batches():
        for planner in settings.planners:
            batch.plan(planner)
    return settings


def home_of(flags: StepFlags, ranks: int) -> Layout:
    """The home that flags ask for on so many ranks."""
    return Layout(ranks, tp=flags.tp, ep=flags.ep, dp_replicate=flags.dp_replicate)


def planners_of(flags: StepFlags) -> tuple[str, ...]:
    """The planners that flags name."""
    return tuple(planner for planner in flags.planners.split(",") if planner)


def _check(flags: StepFlags) -> None:
    planners, known = planners_of(flags), ", ".join(PLANNERS)
    if any(planner not in PLANNERS for planner in planners):
        raise ConfigError(f"--planners {flags.planners!r}: this release has {known}")
    if not (planners or flags.peers):
        raise ConfigError(f"--planners is empty and there is no --peers: nothing to time; name some of {known}")
    flags.check_runs()
    if flags.mode == "free" and flags.ep > 1:
        raise ConfigError(f"--mode free with --ep {flags.ep}: experts join slots in every layer; use --mode lockstep")
    for name, least in _LEAST.items():
        if (value := getattr(flags, name)) < least:
            raise ConfigError(f"--{name} is {value}; it must be at least {least}")


def _lengths(flags: StepFlags, slots: int, gpu: bool) -> tuple[tuple[int, ...], str, bool]:
    """Lengths, where they came from, and whether they were listed as numbers."""
    words = (flags.sequences or flags.lengths).split(",")
    has_source = flags.data or flags.distribution or flags.same
    if flags.sequences and not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--sequences {flags.sequences!r} is not a list of lengths such as 16384,65536")
    if flags.sequences and (has_source or flags.lengths):
        raise ConfigError("--sequences are timed one after another; leave --lengths and other documents out")
    if (flags.lengths or flags.sequences) and not has_source and all(word.strip().isdecimal() for word in words):
        return tuple(int(word) for word in words), "given", True
    if not (flags.lengths or has_source):
        if not gpu:
            return CPU_LENGTHS, "given", False
        raise ConfigError(
            "give documents: --lengths 65536, --lengths FILE.json, --distribution lognorm, --data or --same"
        )
    lengths, source = read_lengths(flags, slots)
    return lengths, source, False


def _sizes(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        raise ConfigError(f"--hierarchical {text!r}: give two sizes, as in 2,2")
    return int(words[0]), int(words[1])


def _known_peak(dtype: str) -> float:
    import torch

    return peak_tflops(torch.cuda.get_device_name(0), dtype) or 0.0
