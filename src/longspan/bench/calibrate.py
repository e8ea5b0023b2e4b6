"""`longspan bench calibrate`: measures this machine and its network, and fits the Machine that prices plans.

Timed are steps of a model without sharded parameters, the host's launches, attention, memory and messages; fitted are
five lines of non-negative least squares of relative errors.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longspan.attention import attend
from longspan.bench.benches import BenchFlags, change_layer_count
from longspan.cli.flags import parse_flags, write_text_file
from longspan.cli.machine import machine_facts, machine_text
from longspan.cli.processes import prints_results, run_on_ranks
from longspan.comm import SequenceShard, World, bind
from longspan.comm.channel import Channel
from longspan.comm.device import device_name
from longspan.errors import ConfigError, plural
from longspan.layout import Floats, Layout
from longspan.model import load_model, prepare
from longspan.model.fsdp_params import drop_unsummed_gradients
from longspan.model.presets import preset_config
from longspan.model.sharding import keep_parameters_whole
from longspan.plain_text import text_table
from longspan.plan import Machine, Plan, plan_fixed
from longspan.plan.cost.links import KINDS, LEVELS, Level, Link, Wire
from longspan.plan.cost.machine import LAYER_BYTES, find_machine_of_device
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.shape.model_shape import ModelShape
from longspan.run.profile import wait_for_gpu
from longspan.train import run_step
from longspan.versions import versions

Part = Literal["attention", "memory", "step", "host", "link"]


def time_run(run: Callable[[], object], world: World) -> float:
    """Time one run, from a moment at which all ranks have come and their GPUs are idle."""
    wait_for_gpu(world)
    world.control.barrier("start of a timed run")
    started = time.perf_counter()
    run()
    wait_for_gpu(world)
    return time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class CalibrationSample:
    """One measurement: its seconds, and `counts`, how much it has of each thing whose seconds are fitted.

    `level` and `kind` are those of a message.
    """

    part: Part
    name: str
    seconds: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    level: Level = "inside"
    kind: str = ""


@dataclass(frozen=True)
class Calibration:
    """A machine, and the measured and fitted seconds of each sample."""

    machine: Machine
    samples: tuple[CalibrationSample, ...]
    fitted_seconds: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """The mean relative error of the fitted seconds."""
        pairs = zip(self.fitted_seconds, self.samples, strict=True)
        return float(np.mean([abs(seconds / sample.seconds - 1) for seconds, sample in pairs]))


class _Fit(NamedTuple):
    """What a part's samples decide: figures by the names of the machine's fields, and fitted seconds by sample."""

    figures: dict[str, Any]
    seconds: dict[str, float]


def fit_samples(
    samples: Sequence[CalibrationSample], base: Machine, *, device_is_known: bool = False
) -> Calibration:
    """Fit the machine under which the samples' relative errors are least, in squares.

    Figures that no sample decides are those of `base`, and their names stand in `assumed_parts`. The rate of experts is
    always one of these: that of `base`, which is scaled by how much faster the measured products are than those of
    `base`, unless this device is known and `base` is its own machine (`device_is_known`).
    """
    by_part = defaultdict[Part, list[CalibrationSample]](list)
    for sample in samples:
        by_part[sample.part].append(sample)
    attention = _fit_attention(by_part["attention"])
    memory = _fit_memory(by_part["memory"])
    rates = replace(base, **attention.figures, **memory.figures)
    fits = (
        attention,
        memory,
        _fit_steps(by_part["step"], rates),
        _fit_host(by_part["host"]),
        _fit_links(by_part["link"]),
    )
    figures = {name: figure for fit in fits for name, figure in fit.figures.items()}
    fitted_seconds = {name: seconds for fit in fits for name, seconds in fit.seconds.items()}
    assumed_parts = tuple(name for name in [*base.float_fields(), *LEVELS] if name not in figures)
    if not device_is_known and "product_flops_per_second" in figures:
        ratio = figures["product_flops_per_second"] / base.product_flops_per_second
        figures["expert_flops_per_second"] = base.expert_flops_per_second * ratio
    machine = replace(base, **figures, assumed=False, assumed_parts=assumed_parts)
    return Calibration(machine, tuple(samples), tuple(fitted_seconds[sample.name] for sample in samples))


def _fit_line(samples: Sequence[CalibrationSample], *names: str) -> tuple[dict[str, float], dict[str, float]]:
    """Counts that take no seconds are left out."""
    counts = [[sample.counts.get(name, 0.0) for name in names] for sample in samples]
    columns = np.array(counts).reshape(-1, len(names))
    seconds = np.array([sample.seconds for sample in samples])
    solution = least_squares(columns, seconds, seconds)
    seconds_of_one = {name: value for name, value in zip(names, solution, strict=True) if value}
    return seconds_of_one, dict(zip((s.name for s in samples), (columns @ solution).tolist(), strict=True))


def _fit_attention(samples: Sequence[CalibrationSample]) -> _Fit:
    seconds_of_one, fitted_seconds = _fit_line(samples, "flops", "flops a row", "calls")
    figures = dict[str, float]()
    if flop_seconds := seconds_of_one.get("flops"):
        figures["attention_flops_per_second"] = 1 / flop_seconds
        figures["half_speed_rows"] = seconds_of_one.get("flops a row", 0.0) / flop_seconds
    return _Fit(figures, fitted_seconds)


def _fit_memory(samples: Sequence[CalibrationSample]) -> _Fit:
    seconds_of_one, fitted_seconds = _fit_line(samples, "bytes", "calls")
    byte_seconds = seconds_of_one.get("bytes")
    return _Fit({"memory_bytes_per_second": 1 / byte_seconds} if byte_seconds else {}, fitted_seconds)


def _fit_steps(samples: Sequence[CalibrationSample], rates: Machine) -> _Fit:
    """The seconds of attention and passes over memory follow from the machine `rates`."""
    # Attention and passes take at most half of a sample's step.
    other_seconds = dict[str, float]()
    for sample in samples:
        counts = sample.counts
        attended = counts["attention flops"] + rates.half_speed_rows * counts["attention flops a row"]
        seconds = attended / rates.attention_flops_per_second
        seconds += counts["passes"] * LAYER_BYTES / rates.memory_bytes_per_second
        other_seconds[sample.name] = min(seconds, sample.seconds / 2)
    products = [replace(sample, seconds=sample.seconds - other_seconds[sample.name]) for sample in samples]
    seconds_of_one, product_seconds = _fit_line(products, "flops", "micro-batches", "steps")
    figures = dict[str, float]()
    if flop_seconds := seconds_of_one.get("flops"):
        figures["product_flops_per_second"] = 1 / flop_seconds
        figures["micro_batch_seconds"] = seconds_of_one.get("micro-batches", 0.0)
    return _Fit(figures, {name: seconds + other_seconds[name] for name, seconds in product_seconds.items()})


def _fit_host(samples: Sequence[CalibrationSample]) -> _Fit:
    seconds_of_one, fitted_seconds = _fit_line(samples, "layers", "groups", "documents", "steps")
    names = ("layer", "group", "document") if seconds_of_one else ()
    return _Fit({f"{name}_seconds": seconds_of_one.get(f"{name}s", 0.0) for name in names}, fitted_seconds)


def _fit_links(samples: Sequence[CalibrationSample]) -> _Fit:
    links = dict[str, Link]()
    fitted_seconds = dict[str, float]()
    for level in LEVELS:
        wires = dict[str, Wire]()
        for kind in KINDS:
            messages = [sample for sample in samples if (sample.level, sample.kind) == (level, kind)]
            if messages:
                seconds_of_one, message_seconds = _fit_line(messages, "bytes", "messages")
                fitted_seconds |= message_seconds
                longest = max(sample.counts["bytes"] for sample in messages)
                latency = seconds_of_one.get("messages", 0.0)
                # Where the latency hides all bytes, the longest message takes a tenth more.
                speed = 1 / seconds_of_one["bytes"] if "bytes" in seconds_of_one else 10 * longest / latency
                wires[kind] = Wire(latency, speed)
        if len(wires) == len(KINDS):
            links[level] = Link(**wires)
    return _Fit(links, fitted_seconds)


def least_squares(columns: Floats, values: Floats, weights: Floats) -> list[float]:
    """Solve for the x >= 0 with the least sum of squares of (columns @ x − values) / weights; columns (samples, n),
    values and weights (samples,). Exact: the solution is the plain one on the columns that it uses, and n is small
    enough to try every choice of columns.
    """
    n = columns.shape[1]
    weighted_columns = columns / weights[:, None]
    weighted_values = values / weights
    best_squares = float(weighted_values @ weighted_values)
    solution = np.zeros(n)
    for use in map(list, chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1))):
        used_columns = weighted_columns[:, use]
        scale = np.linalg.norm(used_columns, axis=0)
        if not scale.all():
            continue  # a constant that no sample contains
        x = np.linalg.lstsq(used_columns / scale, weighted_values, rcond=None)[0] / scale
        residual = used_columns @ x - weighted_values
        # Fewer columns, which come first, win unless more of them are better beyond rounding.
        if (x >= 0).all() and float(residual @ residual) < best_squares * (1 - 1e-12):
            best_squares = float(residual @ residual)
            solution = np.zeros(n)
            solution[use] = x
    return solution.tolist()


VOCABULARY = 2048
LAYERS = 2
# No round begins after this time.
MOST_SECONDS = 200.0
PASS_NUMBERS = {"cuda": (1 << 22, 1 << 24, 1 << 26, 1 << 28), "cpu": (1 << 14, 1 << 17, 1 << 19, 1 << 21)}
MESSAGE_BYTES = {"cuda": (1 << 16, 1 << 20, 1 << 23, 1 << 26), "cpu": (1 << 12, 1 << 15, 1 << 18, 1 << 20)}
TURNS = {1 << 18: 16, 1 << 22: 4}  # how often messages of at most so many bytes are sent in a row; longer ones once
# On GPUs attention is also timed at a document this many times as long, when their clocks are those of training.
LONG_OVER_LONGEST = 4
# A document has this many rows where only launches are timed.
FEW_ROWS = 8
MANY = 4  # documents or groups of a slot


@dataclass(frozen=True)
class CalibrationSizes:
    """The model whose steps are timed, with LAYERS layers, and the tokens and lengths of documents of a slot."""

    preset: str
    dtype: str
    # A slot has these numbers of tokens in a micro-batch, in documents of `document` tokens.
    tokens: tuple[int, ...]
    document: int
    # Attention is timed at documents of these lengths.
    lengths: tuple[int, ...]


SIZES = {
    "cuda": CalibrationSizes("qwen3-8b", "bfloat16", (2048, 4096, 8192, 16384), 256, (2048, 8192, 16384, 32768)),
    "cpu": CalibrationSizes("qwen3-tiny", "float32", (256, 512, 768, 1024), 32, (128, 256, 512, 1024)),
}


class Measurements(NamedTuple):
    """The samples, and facts of the world that was measured."""

    samples: list[CalibrationSample]
    device: str
    node_size: int
    seconds: float


class Trial(NamedTuple):
    """What is timed: a sample without its seconds, what runs, and how often in a row (short messages often)."""

    sample: CalibrationSample
    run: Callable[[], object]
    turns: int = 1

    def repeat(self) -> None:
        for _ in range(self.turns):
            self.run()


def calibrate_on_rank(rank: int, flags: "CalibrateFlags", ranks: int, backend: str) -> Measurements:
    """Open a world and measure everything; returns the same on every rank."""
    with World(
        Layout(ranks), backend=None if backend == "nccl" else "gloo", timeout=flags.timeout_seconds
    ) as world:
        bench = _CalibrationBench(flags, world)
        return Measurements(bench.measure_samples(), device_name(world.device), world.node_size, bench.seconds)


class _CalibrationBench:
    """Measures one world: makes trials of every part and times them. All ranks call each method together."""

    def __init__(self, flags: "CalibrateFlags", world: World) -> None:
        self.began = time.perf_counter()
        self.flags = flags
        self.world = world
        self.device = world.device.type
        # each rank is a replica: nothing is gathered in a step
        self.replicas = world.open_inner(Layout(world.home.slots, dp_replicate=world.home.slots))
        self.sizes = sizes = SIZES[self.device]
        configuration = preset_config(sizes.preset, vocab_size=VOCABULARY if "tiny" in sizes.preset else None)
        configuration.get_text_config().vocab_size = VOCABULARY  # a published preset brings its own
        model = load_model(config=change_layer_count(configuration, LAYERS), dtype=sizes.dtype)
        self.shape = ModelShape.of(model.config)
        self.dtype: torch.dtype = getattr(torch, sizes.dtype)
        self.model: nn.Module | None = prepare(model, self.replicas)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def measure_samples(self) -> list[CalibrationSample]:
        """Measure everything, and return the samples; the model is dropped once its steps are timed."""
        samples = self._time_trials([*self._step_trials(), *self._host_trials()], "steps of a model")
        # The model's memory is free for what follows.
        self.model = None
        samples += self._time_trials([*self._attention_trials(), *self._memory_trials()], "attention and memory")
        if self.world.home.slots > 1:
            samples += self._time_trials([*self._message_trials()], "messages between slots")
        return samples

    def _time_trials(self, trials: list[Trial], label: str) -> list[CalibrationSample]:
        """The slowest rank's seconds, in the median of rounds. Every round has all trials, so that what disturbs the
        machine for a while disturbs no sample in most rounds."""
        times = list[list[float]]()
        warmup = self.flags.warmup
        repeats = self.flags.repeats
        for i in range(warmup + repeats):
            if i > warmup and self.world.control.flag_on_any_rank(self.seconds > MOST_SECONDS):
                break
            times.append([time_run(trial.repeat, self.world) / trial.turns for trial in trials])
        if self.world.rank == self.world.home.ranks[0]:
            line = f"{self.seconds:5.1f} s  {label}: {len(trials)} measurements, {len(times)} rounds"
            print(line, file=sys.stderr, flush=True)
        times_of_ranks = self.world.control.gather_objects(times[warmup:])  # (ranks, rounds, trials)
        medians = np.median(np.array(times_of_ranks).max(axis=0), axis=0).tolist()
        # errors are relative: no sample may take 0 seconds
        return [
            replace(trial.sample, seconds=max(seconds, 1e-9))
            for trial, seconds in zip(trials, medians, strict=True)
        ]

    def _step_trials(self) -> Iterator[Trial]:
        tokens = self.sizes.tokens
        length = self.sizes.document
        shape = self.shape
        for tokens_of_slot, count in [*((n, 1) for n in tokens), (tokens[0], 2), (tokens[0], 4)]:
            per_slot = tokens_of_slot // length
            rows = tokens_of_slot * count
            attention = shape.layers * self._attention_flops(rows * length)
            sample = CalibrationSample(
                part="step",
                name=f"step: {count} x {tokens_of_slot:,} tokens a slot, documents of {length:,}",
                counts={
                    "steps": 1,
                    "micro-batches": count,
                    "flops": 6.0 * shape.weights * rows,
                    "attention flops": attention,
                    # Seconds grow with rows alone by this count.
                    "attention flops a row": attention / length,
                    # Numbers that norms, gates and sums read and write, LAYER_BYTES for each; half of them are MLPs'.
                    "passes": rows * (shape.layers + shape.dense_layers) / 2 * shape.hidden,
                },
            )
            yield Trial(sample, self._make_step_call(self._plan_step(length, per_slot, count)))

    def _host_trials(self) -> Iterator[Trial]:
        for name, batches, documents, groups in (
            ("a document", 1, 1, 1),
            (f"{MANY} micro-batches", MANY, 1, 1),
            (f"{MANY} documents in a group", 1, MANY, 1),
            (f"{MANY} groups", 1, MANY, MANY),
        ):
            plan = self._plan_step(FEW_ROWS, documents, batches)
            if groups > 1:
                one_of_each = [
                    Group(group.slots, (document,), (length,))
                    for group in plan.micro_batches[0].groups
                    for document, length in zip(group.documents, group.lengths, strict=True)
                ]
                plan = replace(plan, micro_batches=(MicroBatch(tuple(one_of_each)),))
            layers = self.shape.decoder_layers * batches
            counts = {"steps": 1, "layers": layers, "groups": layers * groups, "documents": layers * documents}
            yield Trial(
                CalibrationSample(part="host", name=f"host: {name}", counts=counts), self._make_step_call(plan)
            )

    def _plan_step(self, length: int, per_slot: int, count: int) -> Plan:
        home = self.replicas.home
        plan = plan_fixed(
            [length] * (per_slot * count * home.slots), home, 1, max_tokens_per_slot=per_slot * length
        )
        assert len(plan.micro_batches) == count, (len(plan.micro_batches), count)
        return plan

    def _make_step_call(self, plan: Plan) -> Callable[[], object]:
        self.replicas.prepare(plan)
        random = np.random.default_rng(0)
        documents = [random.integers(0, VOCABULARY, length) for length in plan.lengths]
        model = self.model
        assert model is not None, "steps are measured first"

        def run() -> None:
            with keep_parameters_whole(model):
                run_step(model, plan, documents, self.replicas)
            drop_unsummed_gradients(model)

        return run

    def _attention_trials(self) -> Iterator[Trial]:
        """Two numbers of rows tell a call's own seconds from those of its rows."""
        lengths = self.sizes.lengths
        pieces = [*((n, lengths[-1]) for n in lengths), *((n, lengths[-2]) for n in lengths[:-1])]
        if self.device == "cuda":
            longest = LONG_OVER_LONGEST * lengths[-1]
            pieces.append((longest, longest))
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        size = self.shape.query_width // heads
        for length, rows in pieces:
            count = rows // length
            plan = plan_fixed([length] * (count * self.world.home.slots), self.world.home, 1)
            self.world.prepare(plan)
            shard = bind(plan.micro_batches[0], self.world)
            q, k, v, gradient = (
                torch.randn((shard.local_rows, n, size), device=self.world.device).to(self.dtype)
                for n in (heads, kv_heads, kv_heads, heads)
            )
            inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
            flops = self._attention_flops(count * length**2)
            counts = {"calls": 1, "flops": flops, "flops a row": flops / length}
            name = f"attention: {count * length:,} rows in pieces of {length:,}"
            call = partial(_attend_both_ways, inputs, gradient, shard)
            yield Trial(CalibrationSample(part="attention", name=name, counts=counts), call)

    def _attention_flops(self, squares: float) -> float:
        """Half of the squares are causal pairs. Forward has two products of 2 FLOPs for each feature and pair, backward
        five."""
        return 7 * self.shape.query_width * squares

    def _memory_trials(self) -> Iterator[Trial]:
        """float32 numbers, each of which is read and written."""
        for count in PASS_NUMBERS[self.device]:
            x = torch.zeros(count, device=self.world.device)
            yield Trial(
                CalibrationSample(
                    part="memory",
                    name=f"memory: {8 * count:,} bytes read and written",
                    counts={"calls": 1, "bytes": 8.0 * count},
                ),
                lambda x=x: x.mul_(2.0),
                turns=4,
            )

    def _message_trials(self) -> Iterator[Trial]:
        """Entered by all ranks, which make the groups first. Sizes are the bytes that a slot sends or receives itself;
        of a gather between hosts its share of what arrives at its host. In `point` each slot sends to the next of its
        host, or to the slot at its place in the next host."""
        world = self.world
        size = self.world.node_size
        slots = world.home.slots
        place = world.slot % size
        hosts = [tuple(range(first, min(first + size, slots))) for first in range(0, slots, size)]
        host = hosts[world.slot // size]
        smallest = min(map(len, hosts))
        for degree in {len(host) if slots % size == 0 else 1, slots}:
            world.prepare(plan_fixed([degree] * (slots // degree), world.home, degree))
        find = world.channels.find_channel
        # The key is (level, kind); each maker makes a call of so many bytes.
        makers = dict[tuple[Level, str], Callable[[int], Callable[[], object]]]()
        if size > 1:
            peers = find(host)
            makers["inside", "exchange"] = lambda n: self._make_exchange_call(peers, n // (size - 1), {*host})
            makers["inside", "gather"] = lambda n: self._make_gather_call(peers, n // (size - 1))
            makers["inside", "point"] = lambda n: self._make_shift_call(peers, n)
        if len(hosts) > 1:
            everyone = find(range(slots))
            slots_elsewhere = {*range(slots)} - {*host}
            same_places = [host_slots[place] for host_slots in hosts if len(host_slots) > place]
            ring = find(same_places) if len(same_places) > 1 else None
            most_elsewhere = slots - smallest
            makers["across", "exchange"] = lambda n: self._make_exchange_call(
                everyone, n // most_elsewhere, slots_elsewhere
            )
            makers["across", "gather"] = lambda n: self._make_gather_call(everyone, n * smallest // (slots - 1))
            makers["across", "point"] = lambda n: self._make_shift_call(ring, n)
        for ((level, kind), make_call), n in product(makers.items(), MESSAGE_BYTES[self.device]):
            sample = CalibrationSample(
                part="link",
                name=f"{kind} {level}: {n:,} bytes",
                counts={"messages": 1, "bytes": float(n)},
                level=level,
                kind=kind,
            )
            yield Trial(sample, make_call(n), next((turns for limit, turns in TURNS.items() if n <= limit), 1))

    def _make_exchange_call(self, channel: Channel, block: int, partners: set[int]) -> Callable[[], object]:
        slots = [self.world.home.coordinates(rank).slot for rank in channel.ranks]
        rows = [block if slot in partners - {self.world.slot} else 0 for slot in slots]
        x = self._byte_tensor(sum(rows))
        return lambda: channel.all_to_all_rows(x, rows, rows, "bench calibrate").wait()

    def _make_gather_call(self, channel: Channel, block: int) -> Callable[[], object]:
        x = self._byte_tensor(max(1, block))
        return lambda: channel.all_gather(x, [len(x)] * channel.degree, "bench calibrate").wait()

    def _make_shift_call(self, channel: Channel | None, size: int) -> Callable[[], object]:
        if channel is None or channel.degree == 1:
            return lambda: None
        x, into = self._byte_tensor(size), self._byte_tensor(size)
        return lambda: channel.shift(x, into, "bench calibrate").wait()

    def _byte_tensor(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.world.device)


CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags(BenchFlags):
    """Measure what this machine and its network sustain, and write it to a file: a Machine, which prices any model.

    Runs one process for each GPU of this machine, or torchrun's on any number of hosts, or --world local processes; all
    of them work at the same time. Measured are steps of a model with random weights, what the host takes to launch a
    layer, a group and a document, attention by the length of documents, passes over memory, and messages of each kind
    inside a host and between hosts. Which ranks share a host is what the launcher says. The file is for run.machine of
    a run and --machine of longspan plan; a run on another device, or on hosts of another size, refuses it.
    """

    warmup: int = 1
    """Rounds through all measurements before the timed ones."""
    repeats: int = 5
    """Timed rounds; each takes as long as the slowest rank, and the median counts."""
    out: str = "machine.json"
    """File for the machine."""
    json: bool = False
    """Print machine, measurements and errors as JSON, and nothing else, on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    flags = parse_flags(CalibrateFlags, argv, "longspan bench calibrate")
    ranks, backend = flags.choose_processes(CPU_RANKS)
    flags.check_flags()
    if not Path(flags.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {flags.out}: there is no folder {Path(flags.out).absolute().parent}")
    measured = run_on_ranks(calibrate_on_rank, (flags, ranks, backend), ranks)
    if prints_results():
        calibration = fit_machine(measured, ranks, backend)
        write_text_file(flags.out, json.dumps(calibration.machine.to_json(), indent=1) + "\n")
        about = {"ranks": ranks, "backend": backend, "repeats": flags.repeats}
        command = " ".join(["longspan", "bench", "calibrate", *argv])
        record = make_record(calibration, measured, about | {"command": command})
        print(json.dumps(record, indent=1) if flags.json else calibration_text(record))
        print(f"wrote {flags.out}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def _attend_both_ways(inputs: tuple[Tensor, Tensor, Tensor], gradient: Tensor, shard: SequenceShard) -> None:
    q, k, v = inputs
    torch.autograd.grad(attend(q, k, v, shard), inputs, gradient)


def fit_machine(measured: Measurements, ranks: int, backend: str) -> Calibration:
    """Fit a machine to the samples. Figures that were not measured are those known of this device; for an unknown one
    those of an H200 on GPUs, and orders of magnitude on CPUs.
    """
    known_machine = find_machine_of_device(measured.device)
    base = known_machine or (Machine.known("H200") if backend == "nccl" else Machine.cpus())
    base = replace(
        base,
        device=measured.device,
        node_size=measured.node_size,
        source=f"the model on {measured.device}, as measured",
        world=ranks,
        date=date.today().isoformat(),
    )
    return fit_samples(measured.samples, base, device_is_known=known_machine is not None)


def make_record(calibration: Calibration, measured: Measurements, about: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a calibration: what was timed on what, and measured beside fitted seconds."""
    sizes = SIZES["cuda" if about["backend"] == "nccl" else "cpu"]
    return {
        "bench": "calibrate",
        "model": sizes.preset,
        "layers": LAYERS,
        "dtype": sizes.dtype,
        **about,
        "machine": machine_facts(),
        "versions": versions(),
        "node_size": measured.node_size,
        "seconds": measured.seconds,
        "measured": calibration.machine.to_json(),
        "mean_error": calibration.mean_error,
        "samples": [
            {
                "what": sample.name,
                "part": sample.part,
                "measured_seconds": sample.seconds,
                "fitted_seconds": seconds,
            }
            for sample, seconds in zip(calibration.samples, calibration.fitted_seconds, strict=True)
        ],
    }


def calibration_text(record: dict[str, Any]) -> str:
    """Return a record as it is printed: its samples, the figures of the machine, and which of these are assumed."""
    head = (
        f"{record['model']} ({record['layers']} layers) in {record['dtype']} on {plural(record['ranks'], 'rank')} "
        f"({record['backend']}), hosts of {record['node_size']} as the launcher counts them, "
        f"{machine_text(record['machine'])}"
    )
    names = ("measured_seconds", "fitted_seconds")
    rows = [(row["what"], *(f"{1e3 * row[name]:.3f}" for name in names)) for row in record["samples"]]
    machine = Machine.from_json(record["measured"])
    notes = dict.fromkeys(machine.assumed_parts, "assumed")
    figures = [(name, f"{value:.4g}", notes.get(name, "")) for name, value in machine.float_fields().items()]
    for level in LEVELS:
        for kind, wire in getattr(machine, level).wires().items():
            value = f"{wire.bytes_per_second:.4g} bytes/s, {1e6 * wire.latency:.4g} µs"
            figures.append((f"{level} {kind}", value, notes.get(level, "")))
    error = f"mean error of the fit {100 * record['mean_error']:.1f} %, measured in {record['seconds']:.0f} s"
    tables = text_table(("what", "measured ms", "fitted ms"), rows), text_table(("figure", "value", ""), figures)
    return "\n\n".join([head, *tables, error])
