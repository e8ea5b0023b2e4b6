"""Seconds of an evaluation at another degree than training, on the same ranks and weights, next to published figures.

    python bench/evaluation/evaluation_degrees.py --out bench/records/eval.json  # a rank for each GPU
    python bench/evaluation/evaluation_degrees.py                                # on CPUs, a tiny model

The exit code is 1 if the losses at two degrees differ by more than rounding explains. `--help` shows the flags.
"""

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig

from longspan.bench.benches import BenchFlags, change_layer_count, origin_text, show_record, write_record
from longspan.bench.calibrate import time_run
from longspan.cli.flags import check_flags_at_least, parse_flags
from longspan.cli.machine import machine_facts
from longspan.cli.processes import print_note, run_on_ranks
from longspan.comm import World
from longspan.data.synthetic_documents import synthetic_documents
from longspan.errors import ConfigError
from longspan.evaluation.live import evaluate
from longspan.evaluation.result import Evaluation
from longspan.layout import Layout
from longspan.model import load_model, prepare, preset_config
from longspan.plain_text import bytes_text, markdown_table, text_table
from longspan.plan import Machine, Plan, PlanOptions, plan_fixed
from longspan.resolve.planner_config import PlannerConfig, query_heads
from longspan.train.optim.optimizer import build_optimizer
from longspan.train.step import run_step
from longspan.versions import versions

DEGREES = (1, 2)
VOCABULARY = 10240  # of the published figures: a tokenizer of 10,000 ids, an untied head


@dataclass(frozen=True, kw_only=True)
class EvaluationCase:
    """Equal documents through a model of a preset with so many layers, on `tp` x `pp` ranks a slot.

    `known` are milliseconds at degrees 1 and 2 that were published for 8 × H100: of one fixed batch on every rank.
    """

    name: str
    tokens: int
    layers: int
    tp: int = 1
    pp: int = 1
    preset: str = "qwen3-4b"
    known: tuple[float, float] | None = None

    @property
    def ranks(self) -> int:
        """The fewest ranks that it runs on, one slot; more must be a multiple, and of two slots for degree 2."""
        return self.tp * self.pp

    def degrees(self, ranks: int) -> tuple[int, ...]:
        return tuple(degree for degree in DEGREES if ranks // self.ranks % degree == 0)

    def home(self, ranks: int) -> Layout:
        return Layout(ranks, tp=self.tp, pp=self.pp)

    def configuration(self, vocabulary: int) -> PreTrainedConfig:
        """The model's configuration, with an untied head. Raises ModelError for an unknown preset."""
        configuration = change_layer_count(preset_config(self.preset, vocab_size=vocabulary), self.layers)
        configuration.vocab_size = vocabulary
        configuration.tie_word_embeddings = False
        return configuration


CASES = (
    EvaluationCase(name="1k-tp2", tokens=1024, layers=4, tp=2, known=(8.9, 12.4)),
    EvaluationCase(name="8k-tp2", tokens=8192, layers=8, tp=2, known=(26.3, 21.3)),
    EvaluationCase(name="1k-tp1", tokens=1024, layers=4),
    EvaluationCase(name="8k-tp1", tokens=8192, layers=8),
    EvaluationCase(name="8k-pp2", tokens=8192, layers=8, pp=2),
    EvaluationCase(name="16k-pp2", tokens=16384, layers=8, pp=2),
    EvaluationCase(name="8k-tp2-pp2", tokens=8192, layers=8, tp=2, pp=2, known=(39.5, 32.2)),
    EvaluationCase(name="8k-pp4", tokens=8192, layers=8, pp=4, known=(53.1, 32.3)),
    EvaluationCase(name="16k-tp2-pp2", tokens=16384, layers=8, tp=2, pp=2, known=(82.5, 46.5)),
    EvaluationCase(name="16k-pp4", tokens=16384, layers=8, pp=4, known=(117.7, 62.8)),
)
TINY_CASES = (
    EvaluationCase(name="tiny-tp1", tokens=48, layers=2, preset="qwen3-tiny"),
    EvaluationCase(name="tiny-tp2", tokens=48, layers=2, tp=2, preset="qwen3-tiny"),
    EvaluationCase(name="tiny-pp2", tokens=48, layers=2, pp=2, preset="qwen3-tiny"),
)


@dataclass(frozen=True, kw_only=True)
class EvalBenchFlags(BenchFlags):
    """Time the evaluation of four documents at degrees 1 and 2, and under a plan that chooses, on the same weights.

    A case is a number of tokens of each document, a number of layers of a Qwen3-4B shape, and degrees of tensor and
    pipeline parallelism. Its model is prepared as for training, with FSDP2. A training step at degree 1 goes before
    evaluations at 1 and at 2, and one at degree 2 before evaluations at 2 and at 1. At a fixed degree each group of
    slots has one document in a micro-batch, as published figures count; the planned evaluation is longspan's own
    choice. Every evaluation holds each document once. Cases that need another number of GPUs are left out by name.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes.
    """

    cases: str = ""
    """Names of cases, with commas between; empty: all on GPUs, tiny ones on CPUs."""
    documents: int = 4
    """Documents of an evaluation; with 1 and --whole the work of the published figures."""
    layers: int = 0
    """Number of layers in place of the cases'; 0: theirs."""
    tokens: int = 0
    """Tokens of each document in place of the cases'; 0: theirs."""
    preset: str = ""
    """Preset that gives the model its shape, in place of qwen3-4b."""
    vocabulary: int = VOCABULARY
    """Rows of the embedding and of the head."""
    cp_comm_type: str = "auto"
    """How the slots of a group share attention."""
    compiled: str = "auto"
    """Whether layers are compiled, as `train.compile`; auto: as a run of `longspan train` has them."""
    whole: bool = False
    """Every rank keeps all weights of its part, in bfloat16 on GPUs, as published figures have it; not FSDP2."""
    warmup: int = 3
    """Evaluations before the timed ones."""
    repeats: int = 10
    """Timed evaluations."""
    timeout_seconds: float = 300.0
    """How long a rank waits for the others."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What the ranks measure."""

    flags: EvalBenchFlags
    cases: tuple[EvaluationCase, ...]  # that these ranks can run
    left_out: tuple[EvaluationCase, ...]
    ranks: int
    backend: str
    command: str

    @property
    def gpu(self) -> bool:
        return self.backend != "gloo"

    @property
    def out(self) -> str:
        return str(Path(self.flags.out).resolve()) if self.flags.out else ""

    def to_json(self) -> dict[str, Any]:
        names = ("documents", "vocabulary", "cp_comm_type", "compiled", "whole", "warmup", "repeats")
        return {
            **{name: getattr(self.flags, name) for name in names},
            "ranks": self.ranks,
            "command": self.command,
            "left_out": [case.name for case in self.left_out],
        }


def make_settings(flags: EvalBenchFlags, ranks: int, backend: str, command: Sequence[str]) -> EvaluationSettings:
    flags.check_flags()
    check_flags_at_least(flags, documents=1, layers=0, tokens=0, vocabulary=8)
    by_name = {case.name: case for case in (*CASES, *TINY_CASES)}
    default = TINY_CASES if backend == "gloo" else CASES
    chosen = [word.strip() for word in flags.cases.split(",") if word.strip()] or [case.name for case in default]
    if unknown := [name for name in chosen if name not in by_name]:
        raise ConfigError(f"--cases has {', '.join(unknown)}; cases are {', '.join(by_name)}")
    changes = {name: getattr(flags, name) for name in ("preset", "layers", "tokens") if getattr(flags, name)}
    changes |= {"known": None} if changes else {}  # published figures belong to unchanged cases
    cases = tuple(replace(by_name[name], **changes) for name in chosen)
    run = tuple(case for case in cases if ranks % case.ranks == 0)
    if not run:
        need = ", ".join(f"{case.name} {case.ranks}" for case in cases)
        raise ConfigError(f"none of the cases runs on {ranks} ranks; they need multiples of: {need}")
    left_out = tuple(case for case in cases if case not in run)
    command = " ".join(command)
    return EvaluationSettings(flags=flags, cases=run, left_out=left_out, ranks=ranks, backend=backend, command=command)


BOUND = {torch.bfloat16: 5e-3, torch.float32: 1e-5}  # of the difference of two losses, by what computes them


def eval_ranks(rank: int, settings: EvaluationSettings) -> dict[str, Any]:
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
            write_record(record, settings.out)
            row = record["rows"][-1]
            times = ", ".join(f"{run['name']} {1e3 * run['mean']:.1f} ms" for run in row["runs"])
            print(f"{case.name}: {times}; losses differ by {row['difference']:.1e}", file=sys.stderr, flush=True)
    return record


@dataclass(frozen=True)
class PreparedCase:
    """A case's model and documents, under training."""

    settings: EvaluationSettings
    world: World
    model: nn.Module
    optimizer: Optimizer
    documents: Sequence[np.ndarray]
    options: PlanOptions  # of all plans, without a cap

    def at_fixed_degree(self, degree: int, **changes: Any) -> Plan:
        """One document for each group of slots in a micro-batch, as published figures count; `changes` of options."""
        lengths = [len(document) for document in self.documents]
        multiple = self.options.row_multiple
        rows = -(-max(lengths) // degree)
        cap = -(-rows // multiple) * multiple
        options = replace(self.options, **changes)
        return plan_fixed(lengths, self.world.home, degree, options=options, max_tokens_per_slot=cap)

    def train_step(self, plan: Plan) -> None:
        self.world.prepare(plan)
        run_step(self.model, plan, self.documents, self.world, optimizer=self.optimizer)


def prepare_case(case: EvaluationCase, settings: EvaluationSettings, world: World) -> PreparedCase:
    flags = settings.flags
    configuration = case.configuration(settings.flags.vocabulary)
    dtype = torch.bfloat16 if settings.gpu else torch.float32
    loaded = load_model(config=configuration, sharded=True, dtype=dtype if flags.whole else torch.float32)
    split = case.tp > 1
    weights = {"shard_parameters": False} if flags.whole else {"compute_dtype": dtype if settings.gpu else None}
    model = prepare(loaded, world, sequence_parallel=split, compiled=flags.compiled, **weights)
    lengths = [case.tokens] * flags.documents
    documents = [d[np.arange(len(d))] for d in synthetic_documents(lengths, flags.vocabulary)]
    options = PlanOptions(
        cp_comm_type=flags.cp_comm_type,
        cost=(Machine.known("H200") if settings.gpu else Machine.cpus()).cost(configuration),
        node_size=world.node_size,
        row_multiple=case.tp if split else 1,
        heads=query_heads(configuration),
    )
    return PreparedCase(settings, world, model, build_optimizer(model, lr=1e-5), documents, options)


def _measure_case(case: EvaluationCase, settings: EvaluationSettings, world: World) -> dict[str, Any]:
    bench = prepare_case(case, settings, world)
    degrees = case.degrees(settings.ranks)
    plans = {degree: bench.at_fixed_degree(degree) for degree in degrees}
    runs: list[dict[str, Any]] = []
    for trained in degrees:
        bench.train_step(plans[trained])
        for degree in sorted(degrees, key=trained.__ne__):  # first that of training
            named = {"name": f"train {trained}, eval {degree}", "trained": trained, "degree": degree}
            runs.append(named | measure_evaluation(bench, plans[degree]))
    dynamic: dict[str, Any] = vars(bench.options)  # with any number of rows on a slot
    runs.append({"name": "planned"} | measure_evaluation(bench, PlannerConfig.dynamic(**dynamic)))
    losses = [[run["loss"] for run in runs if run.get("trained") == trained] for trained in degrees]
    difference = max(max(values) - min(values) for values in losses)
    kind = torch.bfloat16 if settings.gpu else torch.float32
    row: dict[str, Any] = {name: getattr(case, name) for name in ("name", "tokens", "layers", "tp", "pp", "preset")}
    row |= {"known": case.known, "runs": runs, "difference": difference, "good": difference <= BOUND[kind]}
    return row


def measure_evaluation(bench: PreparedCase, choice: Plan | PlannerConfig) -> dict[str, Any]:
    """Seconds of whole evaluations, each of the slowest rank; the most memory of a rank, and the result."""
    settings = bench.settings
    world = bench.world
    results: list[Evaluation] = []
    times = list[float]()
    peak = 0

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


_SUMMARY = ("case", "published 1 → 2, ms", "ratio", "after training at 1: 1 → 2, ms", "ratio")
_SUMMARY += ("after training at 2: 1 → 2, ms", "ratio", "planned, ms", "ratio", "loss difference")
RUN_COLUMNS = ("case", "run", "mean ms", "median", "deviation", "peak memory", "activations", "micro-batches", "loss")


def record_text(record: dict[str, Any]) -> str:
    tables = [text_table(_SUMMARY, _summary(record)), text_table(RUN_COLUMNS, run_rows(record), left=2)]
    return "\n\n".join([_title(record), *tables, _cases_left_out(record)]).rstrip()


def record_markdown(record: dict[str, Any]) -> str:
    shapes = [
        (r["name"], r["preset"], f"{r['tokens']:,}", *(str(r[name]) for name in ("layers", "tp", "pp")))
        for r in record["rows"]
    ]
    return (
        f"# {_title(record)}\n\n"
        f"{origin_text(record)}\n\n"
        f"{markdown_table(_SUMMARY, _summary(record))}\n\n"
        f"Whole evaluations of {record['documents']} documents, the slowest rank of each, means over "
        f"{record['repeats']} after {record['warmup']}: planning, agreement of the ranks, reading, forward passes "
        f"{'with whole weights' if record.get('whole') else 'under FSDP2'}, loss, token "
        "accuracy, and sums over ranks. Both degrees run on the same ranks and weights, after a training step at one "
        "of them. At a fixed degree each group of slots has one document in a micro-batch; a ratio is the time at "
        "degree 1 over that at degree 2, or over the planned one. Loss difference: of the same documents, at degrees "
        "1 and 2. Published: on 8 × H100, weights not sharded, loss alone, one fixed batch that every rank has (here "
        "--documents 1 --whole true).\n\n"
        f"{markdown_table(('case', 'shape', 'tokens', 'layers', 'TP', 'PP'), shapes)}\n\n"
        f"{markdown_table(RUN_COLUMNS, run_rows(record))}\n\n{_cases_left_out(record)}\n"
    )


def _title(record: dict[str, Any]) -> str:
    return (
        f"Evaluation at degrees 1 and 2 over {record['ranks']} ranks ({record['backend']}): {record['documents']} "
        f"documents, {record['cp_comm_type']}, vocabulary {record['vocabulary']:,}"
    )


def _cases_left_out(record: dict[str, Any]) -> str:
    names = record["left_out"]
    return f"Left out, for they need another number of ranks: {', '.join(names)}." if names else ""


def _summary(record: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for row in record["rows"]:
        times = {(run.get("trained"), run.get("degree")): 1e3 * run["mean"] for run in row["runs"]}
        planned = next(1e3 * run["mean"] for run in row["runs"] if "trained" not in run)
        cells = [row["name"]]
        for pair in (row["known"], *([times.get((trained, degree)) for degree in DEGREES] for trained in DEGREES)):
            cells += _pair(pair)
        best = times[DEGREES[0], DEGREES[0]]
        lines.append((*cells, f"{planned:.1f}", f"{best / planned:.2f}", f"{row['difference']:.1e}"))
    return lines


def _pair(times: Sequence[float | None] | None) -> tuple[str, str]:
    first, second = times or (None, None)
    if first is None or second is None:
        return "" if first is None else f"{first:.1f}", ""
    return f"{first:.1f} → {second:.1f}", f"{first / second:.2f}"


def run_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["name"],
            run["name"],
            *(f"{1e3 * run[name]:.2f}" for name in ("mean", "median", "deviation")),
            *(bytes_text(run[name]) if run[name] else "" for name in ("peak_bytes", "activation_bytes")),
            str(run["micro_batches"]),
            f"{run['loss']:.6f}",
        )
        for row in record["rows"]
        for run in row["runs"]
    ]


CPU_RANKS = 4
PROGRAM = "bench/evaluation/evaluation_degrees.py"


def main(argv: Sequence[str]) -> int:
    flags = parse_flags(EvalBenchFlags, argv, PROGRAM)
    ranks, backend = flags.choose_processes(CPU_RANKS)
    settings = make_settings(flags, ranks, backend, ["python", PROGRAM, *argv])
    for case in settings.left_out:
        print_note(f"{case.name} is left out: it runs on multiples of {case.ranks} ranks, here are {ranks}", sys.stderr)
    record = run_on_ranks(eval_ranks, (settings,), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0 if all(row["good"] for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
