"""`longspan bench step`: whole training steps under several planners next to their predictions; the record in words."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch

from longspan.bench.benches import origin_text, show_record, write_record
from longspan.bench.step.settings import PLANNERS, StepSettings, make_settings, parse_step_flags
from longspan.cli.machine import machine_facts
from longspan.cli.processes import run_on_ranks
from longspan.comm import World
from longspan.comm.device import allocator_retries, peak_reserved_bytes
from longspan.comm.world_machine import set_world_machine
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.data.synthetic_documents import synthetic_documents
from longspan.errors import ConfigError
from longspan.model.execution import model_execution
from longspan.model.layers import vocabulary_size
from longspan.model.seams.randomness import refuse_randomness
from longspan.plain_text import bytes_text, markdown_table
from longspan.plan.memory.memory_plan import measures_text, once_a_step_text
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.resolve.facts import Facts
from longspan.resolve.kept_rows import read_kept_rows, set_rows
from longspan.resolve.resolved import Resolved, resolve
from longspan.resolve.run_cost import KEY, read_run_machine, set_node_size
from longspan.resolve.ways import Way
from longspan.run.collect_facts import mixers_text
from longspan.run.profile import wait_for_gpu
from longspan.run.watches import allocator_retries_text
from longspan.run.world_facts import gather_facts, resolve_on_ranks
from longspan.train.run_model.load import load_run_model
from longspan.train.run_model.prepare import prepare_run_model
from longspan.train.training import Training, build_run_optimizer
from longspan.versions import versions

Cases = Iterator[tuple[str, Callable[[], dict[str, Any]]]]  # names of rows, and what measures each
Peers = Callable[[StepSettings, World], Cases]  # of the repository: bench/training/step_peers.py


def measure_step_on_rank(rank: int, settings: StepSettings, peers: Peers | None = None) -> dict[str, Any]:
    """Open a world, time every planner, then the peers; returns the record, which is equal on every rank. The cost and
    the plan of memory, which all planners share, move from their rows to the record.
    """
    backend = None if settings.backend == "nccl" else "gloo"
    with World(settings.home, backend=backend, timeout=settings.flags.timeout_seconds) as world:
        settings = replace(settings, config=set_node_size(settings.config, world.node_size))
        set_world_machine(world, partial(read_run_machine, settings.config), KEY)
        record: dict[str, Any] = {"bench": "step", **settings.to_json(), "cost": settings.cost.to_json()}
        about = {"backend": world.backend, "machine": machine_facts(), "versions": versions()}
        record |= {"memory": None, **about, "rows": []}
        cases = _planner_cases(settings, world)
        for name, measure in chain(cases, peers(settings, world)) if peers else cases:
            row = {"name": name} | measure()
            record |= {key: row.pop(key) for key in ("cost", "memory") if key in row}
            record["rows"].append(row)
            _report_row(record, settings, rank)
    return record


def _planner_cases(settings: StepSettings, world: World) -> Cases:
    """Yield a case for each planner and batch, all over one model, whose memory is free once the last is measured."""
    if settings.planners:
        training = make_training(settings, world)
        for batch in settings.batches():
            for planner in settings.planners:
                name = f"longspan {planner}{rows_note(batch, settings)}"
                yield name, partial(_measure_planner, batch, planner, training)
        training.finish_update()
        del training
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def rows_note(batch: StepSettings, settings: StepSettings) -> str:
    """The rows of a batch's one sequence, as a part of a row's name; "" if documents are timed together."""
    return f", {batch.lengths[0]:,} rows" if settings.sequences else ""


def make_training(settings: StepSettings, world: World) -> Training:
    """Load and prepare the model of a bench, with its optimizer; entered by all ranks.

    As a run does: what layers keep, and the rows of a slot if "auto", are chosen before the model is made."""

    def log(line: str) -> None:
        if world.rank == 0:
            print(line, file=sys.stderr)

    # Every batch is a coming step, under all planners: they share one model, whose layers must suit all plans.
    batches = [batch.lengths for batch in settings.batches()]
    facts = gather_facts(settings.config, world, settings.configuration, batches.__getitem__, len(batches))
    decide = partial(_resolve_for_planners, settings.planners)
    resolved = resolve_on_ranks(settings.config, facts, world, log, decide)
    config = resolved.config
    memory = resolved.memory
    loaded = load_run_model(config, settings.configuration)
    model = prepare_run_model(config, world, loaded, memory=memory)
    refuse_randomness(model)
    if (execution := model_execution(model)).mixers:
        log(mixers_text(execution, world.device, config.context.partition))
    optimizer = build_run_optimizer(config, world, model, memory=memory)
    return Training(config, world, model, optimizer, resolved.cost, memory=memory)


def _resolve_for_planners(planners: Sequence[str], config: RunConfig, facts: Facts) -> Resolved:
    """Decide what the configuration leaves open: rows and mode are those of the first planner, or the rows that a run
    has kept; memory suits all planners.
    """
    if config.context.max_tokens_per_slot == AUTO and (kept_rows := read_kept_rows(config, len(facts.home.ranks))):
        config = set_rows(config, kept_rows.rows)
    resolved = resolve(config.with_keys("context", planner=planners[0]), facts)
    if resolved.memory is None or len(planners) == 1:
        return resolved
    ways = [Way(resolved.config, facts).with_context(planner=planner) for planner in planners]
    assert facts.budget is not None
    memory = ways[0].choose_memory(
        [plan for way in ways for plan in way.fullest_plans(rows_open=True)], facts.budget
    )
    return replace(resolved, memory=memory, cost=ways[0].cost(memory))


def _measure_planner(settings: StepSettings, planner: str, training: Training) -> dict[str, Any]:
    """Time steps of synthetic documents under a planner, and return their row of the record."""
    training = replace(training, config=training.config.with_keys("context", planner=planner))
    started = time.perf_counter()
    plan = training.training_choice.plan(settings.lengths, settings.home)
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
        "widest": max(group.degree for group in plan.groups),
        "planning_seconds": planning_seconds,
        "cost": plan.cost.to_json(),
        "memory": training.memory.to_json() if training.memory is not None else None,
    }


def measure_steps(settings: StepSettings, step: Callable[[], None], world: World) -> dict[str, Any]:
    """Measure seconds of whole steps (the median, of the slowest rank) and peak memory. Steps come one after another,
    as in training: the end of one and the beginning of the next overlap where they can.
    """
    cuda = world.device.type == "cuda"
    for _ in range(settings.flags.warmup):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    retries_before = allocator_retries(world.device)
    wait_for_gpu(world)
    world.control.barrier("start of timed steps")
    ends = list[float]()  # a step's seconds are those from the end before to its own: the first is not timed
    for _ in range(1 + settings.flags.repeats):
        step()
        ends.append(time.perf_counter())
    wait_for_gpu(world)
    times = [end - end_before for end_before, end in pairwise(ends)]
    retries_of_step = (allocator_retries(world.device) - retries_before) / len(ends)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    figures_of_ranks = world.control.gather_objects(
        (statistics.median(times), peak, peak_reserved_bytes(world.device), retries_of_step)
    )
    seconds, peak, reserved, retries = (max(figures) for figures in zip(*figures_of_ranks, strict=True))
    tokens = sum(settings.lengths)
    shape = ModelShape.of(settings.configuration)
    flops = model_flops(shape, settings.lengths, frozen=settings.config.lora.rank > 0)
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
    """Write the record with its newest row, so that rows survive an interruption, and say the row; the first rank alone
    does.
    """
    if rank:
        return
    write_record(record, settings.out)
    row = record["rows"][-1]
    seconds = row.get("seconds", 0.0)
    speed = row.get("tokens_per_second_per_device", 0.0)
    outcome = row.get("missing") or f"{seconds:.3f} s, {speed:.0f} tokens/s a device"
    print(f"{row['name']}: {outcome}", file=sys.stderr)


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
    "planned",
)


def record_text(record: dict[str, Any]) -> str:
    """Write the page of a record, which is printed and stands beside its file."""
    shape = record["shape"]
    documents = "one sequence at a time"
    keys = record["configuration"]
    context = keys["context"]
    dtype = keys["model"]["dtype"]
    if not record["sequences"]:
        documents = (
            f"{record['documents']:,} documents, {record['tokens']:,} tokens, longest {record['longest']:,} "
        )
        documents += f"({record['source']})"
    title = (
        f"Steps of {record['shape_name']} ({shape['layers']} layers, hidden {shape['hidden']}) over {record['ranks']} "
        f"ranks ({record['backend']}): {documents}; {context['mode']}, {context['cp_comm_type']}, at most "
        f"{context['max_tokens_per_slot'] or 'any'} rows a slot, "
        f"recomputation {keys['train']['activation_checkpointing']}, "
        f"{dtype}{' computed in ' + record['compute'] if record['compute'] else ''}"
    )
    lines = list[str]()
    planned_bytes = ""
    if memory := record.get("memory"):
        gathered = once_a_step_text(memory["gathered_once"], memory["summed_once"])
        host = f"; {bytes_text(memory['host']['total'])} on the host" * bool(memory["host"]["total"])
        lines.append(f"memory: {measures_text(memory['measures'])}{gathered}{host}.")
        planned_bytes = bytes_text(memory["device"]["total"] - memory["device"]["communicators"])
    for row in record["rows"]:
        if "missing" in row:
            lines.append(f"- {row['name']}: not available: {row['missing']}")
        elif retries := row["allocator_retries"]:
            lines.append(
                f"{row['name']}: {allocator_retries_text(retries, row['peak_bytes'], row['reserved_bytes'])}."
            )
    rows = [_record_row(row, planned_bytes) for row in record["rows"] if "missing" not in row]
    about = (
        "Whole steps with forward, backward and optimizer, at learning rate 0: the loss is that of the same weights. "
        f"Seconds are the median of {record['repeats']} steps after {record['warmup']}, of the slowest rank. "
        f"Predicted under {record['cost_source']}. Model FLOPs are 6 a weight and token (4 of frozen ones) and causal "
        "attention, without recomputation; padding does not count."
    )
    return "\n\n".join([f"# {title}", origin_text(record), markdown_table(_NAMES, rows), *lines, about]) + "\n"


def _record_row(row: dict[str, Any], planned_memory: str) -> tuple[str, ...]:
    """Return the cells of a row under `_NAMES`; a peer, which has no plan, lacks what is predicted."""
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
        bytes_text(row["peak_bytes"]) if row["peak_bytes"] else "",
        planned_memory if planned else "",
    )


CPU_RANKS = 2


def main(argv: Sequence[str], peers: Peers | None = None) -> int:
    """Run the bench, and after the planners what `peers` measure; returns the exit code."""
    flags, config = parse_step_flags(argv)
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, config, ranks, backend, ["longspan", "bench", "step", *argv])
    if not (settings.planners or peers):
        raise ConfigError(f"--planners is none: nothing to time; name some of {', '.join(PLANNERS)}")
    record = run_on_ranks(measure_step_on_rank, (settings, peers), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_text(record))
    return 0
