"""`max_tokens_per_slot = "auto"`: how many rows of a micro-batch fit in a slot's memory, measured on the model at hand.

Two probe micro-batches of different sizes, forward and backward, give the bytes that do not depend on rows and those of
a row; the rows are what the budget then leaves room for, the least of all ranks. A third probe nearer to these corrects
them, as gradients may need more than the activations of few rows. Weights and moments are accounted for beforehand:
probes change neither. A run keeps what it found in its folder and goes on with it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model.hf import vocabulary_size
from longspan.plan import Plan
from longspan.train.config import AUTO, RunConfig
from longspan.train.live_bytes import LiveBytes
from longspan.train.metrics import write_whole
from longspan.train.plans import PlanChoice, row_multiple_of
from longspan.train.step import run_step
from longspan.train.together import first_does

FILE = "max_tokens_per_slot.json"
PROBES = {"cuda": (1024, 4096)}  # rows of a slot
PROBES_ELSEWHERE = (64, 256)
FARTHEST = 8  # times the larger probe, at most, is the third
CPU_BUDGET = 1 << 30
_OF_CONTEXT = (
    "planner",
    "mode",
    "context_parallel_size",
    "max_dynamic_context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "attention_kernel",
)
_OF_TRAINING = (
    "optimizer",
    "activation_checkpointing",
    "recompute_layers",
    "offload_activations",
    "loss_chunk_rows",
    "memory_fraction",
    "memory_bytes",
)


@dataclass(frozen=True)
class RowsThatFit:
    """What was found: `rows` of a slot in a micro-batch, and from what: bytes, on the rank with the least room.

    `measured_for` are the keys of the configuration that it depends on.
    """

    rows: int
    bytes_per_row: float
    fixed_bytes: float
    budget_bytes: float
    ranks: int
    measured_for: dict[str, Any] = field(default_factory=dict[str, Any])


def fitted(probes: Sequence[tuple[int, int]], budget: float, ranks: int) -> RowsThatFit:
    """The rows that a budget holds, from two measurements (rows, most bytes). Raises ConfigError where none fit.

    >>> fitted([(100, 3000), (300, 7000)], 10_000, ranks=1).rows
    450
    """
    (few, small), (many, large) = probes
    each = max((large - small) / (many - few), 1.0)
    fixed = max(small - each * few, 0.0)
    rows = int((budget - fixed) // each)
    if rows < 1:
        raise ConfigError(
            f'context.max_tokens_per_slot is "{AUTO}": a row takes {each:,.0f} bytes beside {fixed:,.0f} for any '
            f"number of rows, and the budget is {budget:,.0f}; raise train.memory_fraction or train.memory_bytes, "
            "recompute activations (train.activation_checkpointing), or start more processes"
        )
    return RowsThatFit(rows, each, fixed, budget, ranks)


def with_rows_that_fit(config: RunConfig, model: nn.Module, optimizer: Optimizer, world: World, say: Any) -> RunConfig:
    """The configuration with a number in place of "auto": the run's own, or measured now; entered by all ranks."""
    if config.context.max_tokens_per_slot != AUTO:
        return config
    file = Path(config.run.dir) / FILE
    now = conditions(config)
    found: RowsThatFit | None = first_does(world, lambda: _read(file, len(world.home.ranks), now), refuse=ConfigError)
    if found is None:
        found = replace(measure(config, model, optimizer, world), measured_for=now)
        text = json.dumps(asdict(found), indent=1)
        first_does(world, lambda: write_whole(file, text), refuse=ConfigError)
    say(
        f"max_tokens_per_slot: {found.rows} rows of {found.bytes_per_row:,.0f} bytes each, in {found.budget_bytes:,.0f}"
    )
    return replace(config, context=replace(config.context, max_tokens_per_slot=found.rows))


def measure(config: RunConfig, model: nn.Module, optimizer: Optimizer, world: World) -> RowsThatFit:
    """Run two probes and one that is nearer, and agree on the rows that fit on every rank."""
    budget = _budget(config, model, optimizer, world.device)
    multiple = row_multiple_of(config.parallel)
    rows = [n - n % multiple for n in PROBES.get(world.device.type, PROBES_ELSEWHERE)]
    probes = [(n, _most_bytes(config, model, world, n)) for n in (rows[0], *rows)][1:]  # the first one warms up
    found = _agreed(probes, budget, world)
    nearer = min(found.rows // 2, FARTHEST * rows[1])
    nearer -= nearer % multiple
    if nearer <= rows[1]:
        return found
    return _agreed([probes[1], (nearer, _most_bytes(config, model, world, nearer))], budget, world)


def _agreed(probes: Sequence[tuple[int, int]], budget: float, world: World) -> RowsThatFit:
    """The fit of the rank on which the fewest rows fit."""
    told = world.gather_objects((probes, budget))
    worst = min(range(len(told)), key=lambda i: _rows_of(*told[i]))
    return fitted(*told[worst], ranks=len(world.home.ranks))


def _rows_of(probes: Sequence[tuple[int, int]], budget: float) -> float:
    (few, small), (many, large) = probes
    each = max((large - small) / (many - few), 1.0)
    return (budget - max(small - each * few, 0.0)) / each


def _budget(config: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device) -> float:
    """Bytes for gradients and activations, beside weights and moments."""
    if config.train.memory_bytes:
        return float(config.train.memory_bytes)
    if device.type != "cuda":
        return float(CPU_BUDGET)
    torch.cuda.empty_cache()
    return config.train.memory_fraction * torch.cuda.mem_get_info(device)[0] - _moments_to_come(model, optimizer)


def _moments_to_come(model: nn.Module, optimizer: Optimizer) -> float:
    """Bytes that the optimizer's first step will take."""
    if optimizer.state or type(optimizer).__name__ != "AdamW":
        return 0.0
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters() if p.requires_grad)
    return 2.0 * sum(p.numel() * p.element_size() for p in local)


def _most_bytes(config: RunConfig, model: nn.Module, world: World, rows: int) -> int:
    """The most bytes at a time of a step of micro-batches of so many rows on every slot, above those before."""
    plan = probe_plan(config, world.home, rows)
    random, vocabulary = np.random.default_rng(0), vocabulary_size(model) or 2
    documents = [random.integers(0, vocabulary, size=n) for n in plan.lengths]
    world.prepare(plan)
    try:
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
            before = torch.cuda.memory_allocated(world.device)
            run_step(model, plan, documents, world, loss_chunk_rows=config.train.loss_chunk_rows)
            return torch.cuda.max_memory_allocated(world.device) - before
        with LiveBytes() as counted:
            run_step(model, plan, documents, world, loss_chunk_rows=config.train.loss_chunk_rows)
        return counted.peak
    finally:
        model.zero_grad(set_to_none=True)


def probe_plan(config: RunConfig, home: Layout, rows: int) -> Plan:
    """Every slot holds so many rows of a document of the widest group that training uses, in each micro-batch.

    Under sequence parallelism `rows` is a multiple of tp.
    """
    choice = PlanChoice.training(config.context, row_multiple=row_multiple_of(config.parallel))
    widest = choice.degree if choice.planner != "dynamic" else min(choice.max_degree or home.slots, home.slots)
    degree = max(d for d in range(1, widest + 1) if home.slots % d == 0)
    in_flight = max(1, home.pp * config.parallel.vpp)  # micro-batches that a pipeline holds at once
    lengths = [rows * degree] * (home.slots // degree * in_flight)
    probe = replace(choice, planner="fixed", max_tokens_per_slot=rows).at_degree(degree, longest=rows * degree)
    return probe.plan(lengths, home)


def conditions(config: RunConfig) -> dict[str, Any]:
    """The keys of a configuration on which the rows depend, with their values as JSON keeps them."""
    found = {f"parallel.{key}": value for key, value in asdict(config.parallel).items()}
    found |= {f"context.{key}": getattr(config.context, key) for key in _OF_CONTEXT}
    found |= {f"train.{key}": getattr(config.train, key) for key in _OF_TRAINING}
    return json.loads(json.dumps(found))


def _read(file: Path, ranks: int, now: dict[str, Any]) -> RowsThatFit | None:
    """What the run found before on as many ranks under the same keys."""
    if not file.is_file():
        return None
    try:
        found = RowsThatFit(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}; remove it and it is measured again") from error
    return found if found.ranks == ranks and found.measured_for == now else None
