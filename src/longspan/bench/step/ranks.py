"""What each rank does for `bench step`: one model, the same documents under every planner, whole steps timed."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from longspan.bench.record import write_unfinished
from longspan.bench.step.settings import StepSettings
from longspan.bench.timing import time_in_turn
from longspan.cli.machine import machine_facts
from longspan.comm import World
from longspan.data.document import synthetic_documents
from longspan.model.execution import model_execution
from longspan.model.prepared import vocabulary_size
from longspan.model.seams.call_rules import refuse_randomness
from longspan.plan.cost.model_flops import model_flops
from longspan.plan.shape.model_shape import ModelShape
from longspan.run.records import mixers_text
from longspan.train.plans import find_run_cost, query_heads
from longspan.train.plans.resolve import set_node_size, use_machine
from longspan.train.run_memory import ComingSteps, RunMemory, allocator_retries, choose_rows, peak_reserved_bytes
from longspan.train.training import Training, load_run_model, make_optimizer, prepare_run_model
from longspan.versions import versions

Cases = Iterator[tuple[str, Callable[[], dict[str, Any]]]]  # names of rows, and what measures each
Peers = Callable[[StepSettings, World], Cases]  # of the repository: bench/training/step_peers.py


def measure_step_on_rank(rank: int, settings: StepSettings, peers: Peers | None = None) -> dict[str, Any]:
    """Open a world, time every planner, then the peers; returns the record, which is equal on every rank.

    The cost and the plan of memory, which all planners share, move from their rows to the record.
    """
    backend = None if settings.backend == "nccl" else "gloo"
    with World(settings.home, backend=backend, timeout=settings.flags.timeout_seconds) as world:
        settings = replace(settings, config=set_node_size(settings.config, world))
        use_machine(settings.config, world, partial(_log_first_rank, rank))
        record = _empty_record(settings, world)
        cases = _planner_cases(settings, world)
        for name, measure in chain(cases, peers(settings, world)) if peers else cases:
            row = {"name": name} | measure()
            record |= {key: row.pop(key) for key in ("cost", "memory") if key in row}
            record["rows"].append(row)
            _report_row(record, settings, rank)
    return record


def _log_first_rank(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr)


def _empty_record(settings: StepSettings, world: World) -> dict[str, Any]:
    about = {"backend": world.backend, "machine": machine_facts(), "versions": versions()}
    return {"bench": "step", **settings.to_json(), "cost": settings.cost.to_json(), "memory": None, **about, "rows": []}


def _planner_cases(settings: StepSettings, world: World) -> Cases:
    if settings.planners:
        training = _make_training(settings, world)
        for batch in settings.batches():
            for planner in settings.planners:
                yield (
                    f"longspan {planner}{rows_note(batch, settings)}",
                    partial(_measure_planner, batch, planner, training),
                )
        del training
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def rows_note(batch: StepSettings, settings: StepSettings) -> str:
    """Write the rows of a batch's one sequence, as a part of a row's name; "" if documents are timed together."""
    return f", {batch.lengths[0]:,} rows" if settings.sequences else ""


def _make_training(settings: StepSettings, world: World) -> Training:
    """Make the model and optimizer of a run, by the functions that set up a run.

    What layers keep, and the rows of a slot where they are "auto", are chosen before the model is made.
    """
    log = partial(_log_first_rank, world.rank)
    config, memory = choose_rows(_make_run_memory(settings, world), world, log)
    loaded = load_run_model(config, config.data.vocab_size, settings.configuration)
    model = prepare_run_model(config, world, loaded, memory=memory)
    refuse_randomness(model)
    if text := mixers_text(model_execution(model), world.device, config.context.partition):
        log(text)
    optimizer = make_optimizer(config, world, model, memory=memory)
    cost = settings.cost
    if memory is not None:
        gpu, slots = settings.device == "cuda", settings.home.slots
        cost = find_run_cost(settings.config, settings.configuration, log, gpu=gpu, slots=slots, memory=memory)
    return Training(config, world, model, optimizer, cost, memory=memory)


def _make_run_memory(settings: StepSettings, world: World) -> RunMemory:
    """Make the value from which memory is planned: every batch is a coming step, under all planners.

    The planners share one model, so that what its layers keep must fit the plans of all.
    """
    batches = [batch.lengths for batch in settings.batches()]
    heads = query_heads(settings.configuration)
    ahead = ComingSteps(lambda step: batches[step], settings.home, heads, 0, len(batches), settings.planners)
    return RunMemory(config=settings.config, model=settings.configuration, ahead=ahead, gpu=world.device.type == "cuda")


def _measure_planner(settings: StepSettings, planner: str, training: Training) -> dict[str, Any]:
    """Measure steps of a run of this planner, by the function that takes a run's steps."""
    context = replace(training.config.context, planner=planner)
    training, started = replace(training, config=replace(training.config, context=context)), time.perf_counter()
    plan = training.choice.plan(settings.lengths, settings.home)
    planning_seconds = time.perf_counter() - started
    documents = synthetic_documents(settings.lengths, vocabulary_size(training.model) or 2)
    losses: list[float] = []

    def take_step() -> None:
        losses.append(training.take_step(plan, documents, len(losses)).loss)

    timings = measure_steps(settings, take_step, training.world)
    predicted = plan.predicted_seconds
    return timings | {
        "loss": losses[0],
        "predicted_seconds": predicted,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "prediction_ratio": predicted / timings["seconds"],
        "packing": plan.efficiency,
        "micro_batches": len(plan.micro_batches),
        "widest": max(group.degree for batch in plan.micro_batches for group in batch.groups),
        "planning_seconds": planning_seconds,
        "cost": plan.cost.to_json(),
        "memory": training.memory.to_json() if training.memory is not None else None,
    }


def measure_steps(settings: StepSettings, step: Callable[[], None], world: World) -> dict[str, Any]:
    """Measure seconds of whole steps (the median, of the slowest rank) and peak memory.

    Steps come one after another, as in training: the end of one and the beginning of the next overlap where they can.
    """
    cuda = world.device.type == "cuda"
    for _ in range(settings.flags.warmup):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    retries_before = allocator_retries(world.device)
    times = time_in_turn(step, settings.flags.repeats, world)
    untimed_steps = 1  # of `time_in_turn`
    retries_of_step = (allocator_retries(world.device) - retries_before) / (untimed_steps + settings.flags.repeats)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    figures_of_ranks = world.control.gather_objects(
        (statistics.median(times), peak, peak_reserved_bytes(world.device), retries_of_step)
    )
    seconds, peak, reserved, retries = (max(figures) for figures in zip(*figures_of_ranks, strict=True))
    tokens = sum(settings.lengths)
    flops = model_flops(ModelShape.of(settings.configuration), settings.lengths)
    row: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / settings.ranks,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "allocator_retries": retries,
        "model_tflops_per_device": flops / seconds / settings.ranks / 1e12,
    }
    if settings.peak_tflops:
        row["mfu"] = row["model_tflops_per_device"] / settings.peak_tflops
    return row


def _report_row(record: dict[str, Any], settings: StepSettings, rank: int) -> None:
    """Write the record with its newest row to the file, so that rows survive an interruption; print the row.

    Only the first rank does so.
    """
    if rank:
        return
    write_unfinished(record, settings.out)
    row = record["rows"][-1]
    outcome = (
        row.get("missing") or f"{row['seconds']:.3f} s, {row['tokens_per_second_per_device']:.0f} tokens/s a device"
    )
    print(f"{row['name']}: {outcome}", file=sys.stderr)
