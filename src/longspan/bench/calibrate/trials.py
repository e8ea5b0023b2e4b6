"""What each rank times for `bench calibrate`: steps, the host's launches, attention, memory, messages.

Steps are those of a model whose parameters are not sharded, so that they contain no messages. Hosts are those of the
launcher, and all are timed at once.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longspan.attention import attend
from longspan.bench.calibrate.fit import Sample
from longspan.bench.layers import change_layer_count
from longspan.bench.timing import time_run
from longspan.comm import SequenceShard, World, bind
from longspan.comm.channel import Channel
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.presets import preset_config
from longspan.model.sharding import drop_unsummed_gradients, keep_parameters_whole
from longspan.plan import Plan, plan_fixed
from longspan.plan.cost.links import Level
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.shape.model_shape import ModelShape
from longspan.train import run_step
from longspan.train.plans.resolve import device_name

VOCABULARY, LAYERS = 2048, 2
MOST_SECONDS = 200.0  # after which no round begins
PASS_NUMBERS = {"cuda": (1 << 22, 1 << 24, 1 << 26, 1 << 28), "cpu": (1 << 14, 1 << 17, 1 << 19, 1 << 21)}
MESSAGE_BYTES = {"cuda": (1 << 16, 1 << 20, 1 << 23, 1 << 26), "cpu": (1 << 12, 1 << 15, 1 << 18, 1 << 20)}
TURNS = {1 << 18: 16, 1 << 22: 4}  # how often messages of at most so many bytes are sent in a row; longer ones once
LONG_OVER_LONGEST = 4  # of attention's longest document on GPUs, after which their clocks are those of training
FEW_ROWS, MANY = 8, 4  # rows of a document whose launches are timed, and documents or groups of a slot


@dataclass(frozen=True)
class Sizes:
    """The model whose steps are timed, with LAYERS layers, and the tokens and lengths of documents of a slot."""

    preset: str
    dtype: str
    tokens: tuple[int, ...]  # of a slot in a micro-batch, in documents of `document` tokens
    document: int
    lengths: tuple[int, ...]  # of documents, at which attention is timed


SIZES = {
    "cuda": Sizes("qwen3-8b", "bfloat16", (2048, 4096, 8192, 16384), 256, (2048, 8192, 16384, 32768)),
    "cpu": Sizes("qwen3-tiny", "float32", (256, 512, 768, 1024), 32, (128, 256, 512, 1024)),
}


@dataclass(frozen=True)
class CalibrationSettings:
    """How often the ranks measure, and their world."""

    warmup: int
    repeats: int
    ranks: int
    backend: str
    timeout_seconds: float

    @property
    def sizes(self) -> Sizes:
        """Return what is timed on these devices."""
        return SIZES["cuda" if self.backend == "nccl" else "cpu"]


class Measured(NamedTuple):
    """The samples, and facts of the world that was measured."""

    samples: list[Sample]
    device: str
    node_size: int
    seconds: float


class Trial(NamedTuple):
    """What is timed: a sample without its seconds, what runs, and how often in a row (short messages often)."""

    sample: Sample
    run: Callable[[], object]
    turns: int = 1

    def repeat(self) -> None:
        """Run as often as it is timed in a row."""
        for _ in range(self.turns):
            self.run()


def calibrate_ranks(rank: int, settings: CalibrationSettings) -> Measured:
    """Open a world and measure everything; returns the same on every rank."""
    backend = None if settings.backend == "nccl" else "gloo"
    with World(Layout(settings.ranks), backend=backend, timeout=settings.timeout_seconds) as world:
        bench = _Bench(settings, world)
        return Measured(bench.measure_samples(), device_name(world.device), world.node_size, bench.seconds)


class _Bench:
    """The trials of a world, by what they time, and the model whose steps are timed first."""

    def __init__(self, settings: CalibrationSettings, world: World) -> None:
        self.began = time.perf_counter()
        self.settings, self.world, self.device = settings, world, world.device.type
        # each rank is a replica: nothing is gathered in a step
        self.replicas = world.open_inner(Layout(settings.ranks, dp_replicate=settings.ranks))
        self.sizes = sizes = settings.sizes
        configuration = preset_config(sizes.preset, vocab_size=VOCABULARY if "tiny" in sizes.preset else None)
        configuration.get_text_config().vocab_size = VOCABULARY  # a published preset brings its own
        model = load_model(config=change_layer_count(configuration, LAYERS), dtype=sizes.dtype)
        self.shape = ModelShape.of(model.config)
        self.dtype: torch.dtype = getattr(torch, sizes.dtype)
        self.model: nn.Module | None = prepare(model, self.replicas)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def measure_samples(self) -> list[Sample]:
        samples = self._time_trials([*self._step_trials(), *self._host_trials()], "steps of a model")
        self.model = None  # its memory is free for what follows
        samples += self._time_trials([*self._attention_trials(), *self._memory_trials()], "attention and memory")
        if self.world.home.slots > 1:
            samples += self._time_trials([*self._message_trials()], "messages between slots")
        return samples

    def _time_trials(self, trials: list[Trial], label: str) -> list[Sample]:
        """Return the samples of trials, with the slowest rank's seconds in the median of rounds.

        Every round has all trials, so that what disturbs the machine for a while disturbs no sample in most rounds.
        """
        times: list[list[float]] = []
        warmup, repeats = self.settings.warmup, self.settings.repeats
        for i in range(warmup + repeats):
            if i > warmup and self.world.control.any_rank(self.seconds > MOST_SECONDS):
                break
            times.append([time_run(trial.repeat, self.world) / trial.turns for trial in trials])
        if self.world.rank == self.world.home.ranks[0]:
            line = f"{self.seconds:5.1f} s  {label}: {len(trials)} measurements, {len(times)} rounds"
            print(line, file=sys.stderr, flush=True)
        of_ranks = self.world.control.gather_objects(times[warmup:])  # (ranks, rounds, trials)
        seconds = np.median(np.array(of_ranks).max(axis=0), axis=0).tolist()
        return [replace(t.sample, seconds=max(s, 1e-9)) for t, s in zip(trials, seconds, strict=True)]

    def _step_trials(self) -> Iterator[Trial]:
        """Yield steps of the model over rising numbers of tokens and of micro-batches, of short documents."""
        tokens, length, shape = self.sizes.tokens, self.sizes.document, self.shape
        for some, count in [*((n, 1) for n in tokens), (tokens[0], 2), (tokens[0], 4)]:
            per_slot, rows = some // length, some * count
            attention = shape.layers * self._flops(rows * length)
            sample = Sample(
                part="step",
                name=f"step: {count} x {some:,} tokens a slot, documents of {length:,}",
                counts={
                    "steps": 1,
                    "micro-batches": count,
                    "flops": 6.0 * shape.weights * rows,
                    "attention flops": attention,
                    "attention flops a row": attention / length,
                    "passes": rows * (shape.layers + shape.dense_layers) / 2 * shape.hidden,
                },
            )
            yield Trial(sample, self._step_call(self._plan_step(length, per_slot, count)))

    def _host_trials(self) -> Iterator[Trial]:
        """Yield steps of so few rows that the host decides their time: of micro-batches, documents and groups."""
        for name, batches, documents, groups in (
            ("a document", 1, 1, 1),
            (f"{MANY} micro-batches", MANY, 1, 1),
            (f"{MANY} documents in a group", 1, MANY, 1),
            (f"{MANY} groups", 1, MANY, MANY),
        ):
            plan = self._plan_step(FEW_ROWS, documents, batches)
            if groups > 1:
                whole = plan.micro_batches[0].groups
                split = [Group(g.slots, (d,), (n,)) for g in whole for d, n in zip(g.documents, g.lengths, strict=True)]
                plan = replace(plan, micro_batches=(MicroBatch(tuple(split)),))
            layers = self.shape.decoder_layers * batches
            counts = {"steps": 1, "layers": layers, "groups": layers * groups, "documents": layers * documents}
            yield Trial(Sample(part="host", name=f"host: {name}", counts=counts), self._step_call(plan))

    def _plan_step(self, length: int, per_slot: int, count: int) -> Plan:
        home = self.replicas.home
        plan = plan_fixed([length] * (per_slot * count * home.slots), home, 1, max_tokens_per_slot=per_slot * length)
        assert len(plan.micro_batches) == count, (len(plan.micro_batches), count)
        return plan

    def _step_call(self, plan: Plan) -> Callable[[], object]:
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
        """Yield attention over as many rows as the longest document has, and the second longest, cut into documents.

        Two numbers of rows tell a call's own seconds from those of its rows.
        """
        lengths = self.sizes.lengths
        pieces = [*((n, lengths[-1]) for n in lengths), *((n, lengths[-2]) for n in lengths[:-1])]
        pieces += [(LONG_OVER_LONGEST * lengths[-1],) * 2] * (self.device == "cuda")
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
            flops = self._flops(count * length**2)
            counts = {"calls": 1, "flops": flops, "flops a row": flops / length}
            name = f"attention: {count * length:,} rows in pieces of {length:,}"
            call = partial(_attend_both_ways, inputs, gradient, shard)
            yield Trial(Sample(part="attention", name=name, counts=counts), call)

    def _flops(self, squares: float) -> float:
        """Count the FLOPs of one layer's attention by the sum of squared lengths, half of which are causal pairs.

        Forward has two products of 2 FLOPs for each feature and pair, backward five.
        """
        return 7 * self.shape.query_width * squares

    def _memory_trials(self) -> Iterator[Trial]:
        for count in PASS_NUMBERS[self.device]:
            x = torch.zeros(count, device=self.world.device)
            name, counts = f"memory: {8 * count:,} bytes read and written", {"calls": 1, "bytes": 8.0 * count}
            yield Trial(Sample(part="memory", name=name, counts=counts), lambda x=x: x.mul_(2.0), turns=4)

    def _message_trials(self) -> Iterator[Trial]:
        """Yield exchanges, gathers and messages from slot to slot: between the slots of a host, and between hosts.

        Sizes are the bytes that a slot sends or receives itself; of a gather between hosts its share of what arrives at
        its host. In `point` each slot sends to the next of its host, or to the slot at its place in the next host.
        """
        world, size = self.world, self.world.node_size
        slots, place = world.home.slots, world.slot % size
        hosts = [tuple(range(first, min(first + size, slots))) for first in range(0, slots, size)]
        host, smallest = hosts[world.slot // size], min(map(len, hosts))
        for degree in {len(host) if slots % size == 0 else 1, slots}:
            world.prepare(plan_fixed([degree] * (slots // degree), world.home, degree))
        find = world.channels.find_channel
        if size > 1:
            neighbours = find(host)
            yield from self._sizes("inside", "exchange", lambda n: self._exchange(neighbours, n // (size - 1), {*host}))
            yield from self._sizes("inside", "gather", lambda n: self._gather(neighbours, n // (size - 1)))
            yield from self._sizes("inside", "point", lambda n: self._shift(neighbours, n))
        if len(hosts) > 1:
            everyone, others = find(range(slots)), {*range(slots)} - {*host}
            in_place = [h[place] for h in hosts if len(h) > place]
            ring = find(in_place) if len(in_place) > 1 else None
            far = slots - smallest
            yield from self._sizes("across", "exchange", lambda n: self._exchange(everyone, n // far, others))
            yield from self._sizes("across", "gather", lambda n: self._gather(everyone, n * smallest // (slots - 1)))
            yield from self._sizes("across", "point", lambda n: self._shift(ring, n))

    def _sizes(self, level: Level, kind: str, make: Callable[[int], Callable[[], object]]) -> Iterator[Trial]:
        for size in MESSAGE_BYTES[self.device]:
            turns = next((count for limit, count in TURNS.items() if size <= limit), 1)
            name, counts = f"{kind} {level}: {size:,} bytes", {"messages": 1, "bytes": float(size)}
            yield Trial(Sample(part="link", name=name, counts=counts, level=level, kind=kind), make(size), turns)

    def _exchange(self, channel: Channel, block: int, partners: set[int]) -> Callable[[], object]:
        """Return a call that sends `block` bytes to each partner but this slot; other members send none."""
        slots = [self.world.home.coordinates(rank).slot for rank in channel.ranks]
        rows = [block if slot in partners - {self.world.slot} else 0 for slot in slots]
        x = self._bytes(sum(rows))
        return lambda: channel.all_to_all_rows(x, rows, rows, "bench calibrate").wait()

    def _gather(self, channel: Channel, block: int) -> Callable[[], object]:
        x = self._bytes(max(1, block))
        return lambda: channel.all_gather(x, [len(x)] * channel.degree, "bench calibrate").wait()

    def _shift(self, channel: Channel | None, size: int) -> Callable[[], object]:
        if channel is None or channel.degree == 1:
            return lambda: None
        x, into = self._bytes(size), self._bytes(size)
        return lambda: channel.shift(x, into, "bench calibrate").wait()

    def _bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.world.device)


def _attend_both_ways(inputs: tuple[Tensor, Tensor, Tensor], gradient: Tensor, shard: SequenceShard) -> None:
    q, k, v = inputs
    torch.autograd.grad(attend(q, k, v, shard), inputs, gradient)
