"""The ranks of `evaluation_degrees.py`: a model for each case, training steps, and timed evaluations."""

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench.evaluation.degree_cases import EvaluationCase, EvaluationSettings
from bench.profiled import profile_run
from torch import nn
from torch.optim import Optimizer

from longspan.bench.record import write_unfinished
from longspan.bench.timing import time_run
from longspan.cli.machine import machine_facts
from longspan.comm import World
from longspan.data.document import synthetic_documents
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.result import Evaluation
from longspan.model import load_model, prepare
from longspan.plan import Machine, Plan, PlanOptions, plan_fixed
from longspan.train.optim.optimizer import build_optimizer
from longspan.train.plans import PlanChoice, query_heads
from longspan.train.step import run_step
from longspan.versions import versions

BOUND = {torch.bfloat16: 5e-3, torch.float32: 1e-5}  # of the difference of two losses, by what computes them


def eval_ranks(rank: int, settings: EvaluationSettings) -> dict[str, Any]:
    """Run every case in a world of its own; the record, equal on every rank."""
    about = {"backend": settings.backend, "machine": machine_facts(), "versions": versions()}
    record: dict[str, Any] = {"bench": "eval", **settings.to_json(), **about, "rows": []}
    backend = "gloo" if not settings.gpu else None
    for case in settings.cases:
        with World(case.home(settings.ranks), backend=backend, timeout=settings.flags.timeout_seconds) as world:
            record["rows"].append(_measure_case(case, settings, world))
        gc.collect()
        if settings.gpu:
            torch.cuda.empty_cache()
        if not rank:
            write_unfinished(record, settings.out)
            print(f"{case.name}: {_line(record['rows'][-1])}", file=sys.stderr, flush=True)
    return record


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{run['name']} {1e3 * run['mean']:.1f} ms" for run in row["runs"])
    return f"{times}; losses differ by {row['difference']:.1e}"


@dataclass(frozen=True)
class _Bench:
    """A case's model and documents, under training."""

    settings: EvaluationSettings
    world: World
    model: nn.Module
    optimizer: Optimizer
    documents: Sequence[np.ndarray]
    options: PlanOptions  # of all plans, without a cap

    def at_fixed_degree(self, degree: int) -> Plan:
        """One document for each group of slots in a micro-batch, as published figures count."""
        lengths, multiple = [len(document) for document in self.documents], self.options.row_multiple
        rows = -(-max(lengths) // degree)
        cap = -(-rows // multiple) * multiple
        return plan_fixed(lengths, self.world.home, degree, options=self.options, max_tokens_per_slot=cap)

    def train_step(self, plan: Plan) -> None:
        """One optimizer step on the same documents."""
        self.world.prepare(plan)
        run_step(self.model, plan, self.documents, self.world, optimizer=self.optimizer)


def _bench(case: EvaluationCase, settings: EvaluationSettings, world: World) -> _Bench:
    flags, configuration = settings.flags, case.configuration(settings.flags.vocabulary)
    loaded = load_model(config=configuration, sharded=True)
    split = case.tp > 1
    compute = torch.bfloat16 if settings.gpu else None
    model = prepare(loaded, world, sequence_parallel=split, compute_dtype=compute, compiled=flags.compiled)
    lengths = [case.tokens] * flags.documents
    documents = [d[np.arange(len(d))] for d in synthetic_documents(lengths, flags.vocabulary)]
    options = PlanOptions(
        cp_comm_type=flags.cp_comm_type,
        cost=(Machine.known("H200") if settings.gpu else Machine.cpus()).cost(configuration),
        node_size=world.node_size,
        row_multiple=case.tp if split else 1,
        heads=query_heads(configuration),
    )
    return _Bench(settings, world, model, build_optimizer(model, lr=1e-5), documents, options)


def _measure_case(case: EvaluationCase, settings: EvaluationSettings, world: World) -> dict[str, Any]:
    bench = _bench(case, settings, world)
    degrees = case.degrees(settings.ranks)
    plans = {degree: bench.at_fixed_degree(degree) for degree in degrees}
    runs: list[dict[str, Any]] = []
    for trained in degrees:
        bench.train_step(plans[trained])
        for degree in sorted(degrees, key=trained.__ne__):  # first that of training
            named = {"name": f"train {trained}, eval {degree}", "trained": trained, "degree": degree}
            runs.append(named | _measure(bench, plans[degree]))
    dynamic: dict[str, Any] = vars(bench.options)  # with any number of rows on a slot
    runs.append({"name": "planned"} | _measure(bench, PlanChoice.dynamic(**dynamic)))
    losses = [[run["loss"] for run in runs if run.get("trained") == trained] for trained in degrees]
    difference = max(max(values) - min(values) for values in losses)
    kind = torch.bfloat16 if settings.gpu else torch.float32
    row: dict[str, Any] = {name: getattr(case, name) for name in ("name", "tokens", "layers", "tp", "pp", "preset")}
    row |= {"known": case.known, "runs": runs, "difference": difference, "good": difference <= BOUND[kind]}
    if settings.flags.profile:
        row["parts"] = {str(degree): _parts(bench, plans[degree]) for degree in degrees}
    return row


def _measure(bench: _Bench, choice: Plan | PlanChoice) -> dict[str, Any]:
    """Seconds of whole evaluations, each of the slowest rank; the most memory of a rank, and the result."""
    settings, world = bench.settings, bench.world
    results: list[Evaluation] = []
    times, peak = list[float](), 0

    def run() -> None:
        results.append(evaluate(bench.model, bench.documents, choice, world))

    for _ in range(settings.flags.warmup):
        run()
    for _ in range(settings.flags.repeats):
        times.append(time_run(run, world))
        peak = max(peak, torch.cuda.max_memory_allocated() if settings.gpu else 0)
    of_ranks = world.control.gather_objects((times, peak))
    slowest = [max(seconds) for seconds in zip(*(times for times, _ in of_ranks), strict=True)]
    return {
        "seconds": slowest,
        "mean": statistics.mean(slowest),
        "median": statistics.median(slowest),
        "deviation": statistics.stdev(slowest) if len(slowest) > 1 else 0.0,
        "peak_bytes": max(peak for _, peak in of_ranks),
        "activation_bytes": results[-1].activation_bytes,
        "loss": results[-1].loss,
        "tokens": results[-1].tokens,
        "micro_batches": len(results[-1].plan.micro_batches),
        "widest": results[-1].cp,
    }


def _parts(bench: _Bench, plan: Plan) -> dict[str, Any]:
    """Seconds by part and by kernel of one more evaluation, on the first rank."""
    world = bench.world
    parts, kernels, seconds = profile_run(lambda: evaluate(bench.model, bench.documents, plan, world), world)
    return world.control.broadcast_object({"seconds": parts | {"evaluation": seconds}, "kernels": kernels})
