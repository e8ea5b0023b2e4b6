"""What each rank does for `bench step`: one model, the same documents under every planner, whole steps timed."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from longspan.bench.record import missing_because, write_unfinished
from longspan.bench.step.hf_peer import PEER, peer_step
from longspan.bench.step.profile_parts import longest_kernels, parts_of, profiled_events
from longspan.bench.step.settings import Settings
from longspan.cli.machine import machine
from longspan.comm import World
from longspan.model import prepare
from longspan.model.layers import decoder_layers
from longspan.plan.cost.model_flops import model_flops
from longspan.plan.cost.model_shape import ModelShape
from longspan.train import build_optimizer, run_step
from longspan.train.versions import versions


@dataclass(frozen=True)
class Document:
    """Token ids that are a function of document and position, made when they are asked for."""

    number: int
    length: int
    vocabulary: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        mixed = (positions + 1) * 2654435761 + (self.number + 1) * 40503
        return (mixed ^ (mixed >> 13)) % self.vocabulary


def step_ranks(rank: int, settings: Settings) -> dict[str, Any]:
    """Open a world, time every planner and the peer; the record, equal on every rank."""
    backend = None if settings.backend == "nccl" else "gloo"
    with World(settings.home, backend=backend, timeout=settings.flags.timeout_seconds) as world:
        record = _empty_record(settings, world)
        for name, measure in _cases(settings, world):
            record["rows"].append({"name": name} | measure())
            _keep(record, settings, rank)
    return record


def _empty_record(settings: Settings, world: World) -> dict[str, Any]:
    about = {"backend": world.backend, "machine": machine(), "versions": versions()}
    return {"bench": "step", **settings.to_json(), **about, "rows": []}


def _cases(settings: Settings, world: World) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every planner over one model, then the peer, once that model is gone."""
    if settings.planners:
        model = _prepared(settings, world)
        optimizer = _optimizer(settings, model)
        for batch in settings.batches():
            for planner in settings.planners:
                yield (
                    f"longspan {planner}{_of(batch, settings)}",
                    partial(_planned, batch, planner, model, optimizer, world),
                )
        del model, optimizer
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    if settings.flags.peers:
        for batch in settings.batches():
            yield f"{PEER}{_of(batch, settings)}", partial(_peer, batch, world)


def _of(batch: Settings, settings: Settings) -> str:
    return f", {batch.lengths[0]:,} rows" if settings.sequences else ""


def random_model(settings: Settings, device: torch.device) -> PreTrainedModel:
    """The shape with random weights, made on the device, the same on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        config = settings.shape.config(max(settings.lengths))
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.flags.parameters))


def _prepared(settings: Settings, world: World) -> Any:
    model = prepare(
        random_model(settings, world.device),
        world,
        reshard_after_forward=not settings.flags.keep_gathered,
        activation_checkpointing=settings.flags.recompute,
        recompute_layers=settings.flags.recompute_layers,
        fused_norms=settings.flags.fused_norms,
        offload_activations=settings.flags.offload,
        compute_dtype=getattr(torch, settings.compute) if settings.compute else None,
    )
    if settings.flags.compiled:
        compile_layers(model)
    return model


def compile_layers(model: Any) -> None:
    """Compile the norms and MLPs inside decoder layers, in place; attention, hooks and checkpoints stay as they are."""
    for layer in decoder_layers(model).values():
        for inner in layer.modules():
            if type(inner).__name__.endswith(("RMSNorm", "MLP")):
                inner.compile(dynamic=True)


def _optimizer(settings: Settings, model: Any) -> Optimizer | None:
    """A learning rate of 0: every planner sees the same weights, and the optimizer works as ever."""
    return build_optimizer(model, settings.flags.optimizer, lr=0.0) if settings.flags.optimizer else None


def _planned(settings: Settings, planner: str, model: Any, optimizer: Optimizer | None, world: World) -> dict[str, Any]:
    started = time.perf_counter()
    plan = settings.plan(planner)
    planning = time.perf_counter() - started
    documents = [Document(i, n, settings.shape.vocabulary) for i, n in enumerate(settings.lengths)]
    losses: list[float] = []

    def step() -> None:
        world.prepare(plan)
        chunk = settings.flags.loss_chunk_rows
        losses.append(run_step(model, plan, documents, world, optimizer, loss_chunk_rows=chunk).loss)
        if optimizer is None:
            model.zero_grad(set_to_none=True)

    timings = measured(settings, step, world)
    return timings | {
        "loss": losses[0],
        "predicted_seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "prediction_ratio": plan.predicted_seconds / timings["seconds"],
        "packing": plan.efficiency,
        "micro_batches": len(plan.micro_batches),
        "widest": max(group.degree for batch in plan.micro_batches for group in batch.groups),
        "planning_seconds": planning,
    }


def _peer(settings: Settings, world: World) -> dict[str, Any]:
    try:
        with peer_step(settings, random_model, world) as (step, losses):
            return measured(settings, step, world) | {"loss": losses[0]}
    except Exception as error:  # whatever it cannot do is for the record to say
        return missing_because(error)


def measured(settings: Settings, step: Callable[[], None], world: World) -> dict[str, Any]:
    """Seconds of whole steps (the median, of the slowest rank), what follows from them, peak memory, and parts."""
    cuda = world.device.type == "cuda"
    for _ in range(settings.flags.warmup):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [_seconds(step, world) for _ in range(settings.flags.repeats)]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    of_ranks = world.control.gather_objects((statistics.median(times), peak))
    seconds, tokens = max(s for s, _ in of_ranks), sum(settings.lengths)
    flops = model_flops(ModelShape.of(settings.shape.config(max(settings.lengths))), settings.lengths)
    row: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / settings.ranks,
        "peak_bytes": max(p for _, p in of_ranks),
        "model_tflops_per_device": flops / seconds / settings.ranks / 1e12,
    }
    if settings.peak_tflops:
        row["mfu"] = row["model_tflops_per_device"] / settings.peak_tflops
    if settings.flags.profile:
        row |= _profiled(step, world)
    return row


def _seconds(step: Callable[[], None], world: World) -> float:
    world.control.barrier("start of a timed step")
    started = time.perf_counter()
    step()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _profiled(step: Callable[[], None], world: World) -> dict[str, Any]:
    """Seconds by part and by kernel of one more step, on the first rank; the profiler itself takes some time."""
    from torch.profiler import ProfilerActivity, profile

    cuda = world.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        seconds = _seconds(step, world)
    events = profiled_events(recorded, cuda=cuda)
    parts = parts_of(events, seconds) | {"step": seconds}
    return world.control.broadcast_object({"parts": parts, "kernels": longest_kernels(events)})


def _keep(record: dict[str, Any], settings: Settings, rank: int) -> None:
    """Rows that are finished stay where a bench is interrupted, and are told as they come."""
    if rank:
        return
    write_unfinished(record, settings.out)
    row = record["rows"][-1]
    outcome = (
        row.get("missing") or f"{row['seconds']:.3f} s, {row['tokens_per_second_per_device']:.0f} tokens/s a device"
    )
    print(f"{row['name']}: {outcome}", file=sys.stderr, flush=True)
