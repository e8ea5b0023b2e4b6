"""What each rank does for `bench calibrate`: whole steps, attention by itself, and rings, timed on all ranks."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longspan.attention import attend
from longspan.bench.calibrate.fit import Sample
from longspan.comm import RingBlocks, SequenceShard, World, bind
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.prepared import vocabulary_size
from longspan.plan import Plan, plan_fixed
from longspan.train import run_step

_PRESET_VOCABULARY = 2048  # of a preset, which has no tokenizer to take it from


@dataclass(frozen=True)
class CalibrationSettings:
    """What to measure."""

    preset: str
    model: str
    dtype: str
    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    document: int
    micro_batches: tuple[int, ...]
    warmup: int
    repeats: int
    ranks: int
    backend: str
    timeout_seconds: float


@dataclass(frozen=True)
class Shape:
    """Sizes of the model's attention."""

    layers: int
    full_layers: int  # that attend to all earlier rows, not to a window of them
    heads: int
    key_value_heads: int
    head_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> "Shape":
        """Those of a transformers model."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        full = sum(kind == "full_attention" for kind in kinds)
        shared = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, full, heads, shared, size, dtype)

    @property
    def block_bytes(self) -> int:
        """Of a row's keys and values in one layer."""
        return 2 * self.key_value_heads * self.head_size * self.dtype.itemsize

    @property
    def ring_bytes(self) -> float:
        """Of a row around the rings of all layers: keys and values forward and backward, and their gradients' sums."""
        width = max(self.dtype.itemsize, torch.float32.itemsize)
        return float(self.layers * (2 * self.block_bytes + self.block_bytes // self.dtype.itemsize * width))

    @property
    def exchange_bytes(self) -> float:
        """Of a row's queries, keys, values and outputs in all-to-alls of all layers, forward and backward."""
        return float(self.layers * 2 * (2 * self.heads * self.head_size * self.dtype.itemsize + self.block_bytes))


class Trial(NamedTuple):
    """What is timed: a sample without its seconds, what runs, and by how much its time counts."""

    sample: Sample
    run: Callable[[], object]
    times: int = 1


def calibrate_ranks(rank: int, settings: CalibrationSettings) -> tuple[list[Sample], float, float]:
    """Open a world and measure everything: the samples, and the model's bytes per row on a ring and in all-to-alls."""
    backend = None if settings.backend == "nccl" else "gloo"
    with World(Layout(settings.ranks), backend=backend, timeout=settings.timeout_seconds) as world:
        bench = _Bench(settings, world)
        return bench.samples(), bench.shape.ring_bytes, bench.shape.exchange_bytes


class _Bench:
    """A model under a home, and what is timed on it."""

    def __init__(self, settings: CalibrationSettings, world: World) -> None:
        self.settings, self.world = settings, world
        vocabulary = None if settings.model else _PRESET_VOCABULARY
        path, preset = (settings.model, None) if settings.model else (None, settings.preset)
        model = load_model(path, preset, dtype=settings.dtype, vocab_size=vocabulary)
        self.shape = Shape.of(model, getattr(torch, settings.dtype))
        self.vocabulary = vocabulary_size(model) or 1  # without an embedding, only token id 0
        self.model: nn.Module = prepare(model, world)

    def samples(self) -> list[Sample]:
        """Everything, measured in rounds, so that what disturbs the machine for a while disturbs no sample always."""
        trials, rounds = list(self._trials()), self.settings.warmup + self.settings.repeats
        times: list[list[float]] = []
        for i in range(rounds):
            times.append([self._measure(trial.run) for trial in trials])
            if self.world.rank == 0 and sys.stderr.isatty():
                print(f"round {i + 1} of {rounds}", file=sys.stderr)
        of_ranks = self.world.control.gather_objects(times[self.settings.warmup :])  # (ranks, rounds, trials)
        seconds = np.array(of_ranks).max(axis=0).min(axis=0)  # of the slowest rank in the fastest round
        return [replace(t.sample, seconds=t.times * float(s)) for t, s in zip(trials, seconds, strict=True)]

    def _trials(self) -> Iterator[Trial]:
        settings, slots = self.settings, self.world.home.slots
        for tokens in settings.tokens:
            yield self._steps(tokens, 1)
        for count in settings.micro_batches[1:]:
            yield self._steps(settings.tokens[0], count)
        for length in settings.lengths:
            yield self._attention(length, 1)
        degrees = [d for d in range(2, slots + 1) if slots % d == 0 and (d in (2, slots) or d & (d - 1) == 0)]
        if degrees:
            for rows in (1, *settings.lengths, 4 * settings.lengths[-1]):
                yield self._wire(rows)
        for degree in degrees:
            for length in settings.lengths:
                yield self._attention(max(length, degree), degree)
        for degree in (1, *degrees):
            yield self._check_step(max(settings.lengths[-1], degree), degree)

    def _steps(self, tokens: int, count: int) -> Trial:
        """Steps of `count` micro-batches in which every slot has short documents of so many tokens together."""
        length = min(self.settings.document, tokens)
        per_slot = tokens // length
        lengths = [length] * (per_slot * count * self.world.home.slots)
        plan = plan_fixed(lengths, self.world.home, 1, max_tokens_per_slot=per_slot * length)
        assert len(plan.micro_batches) == count, (len(plan.micro_batches), count)
        rows = per_slot * length * count
        sample = Sample(
            name=f"step: {count} x {per_slot * length:,} tokens a slot, documents of {length:,}",
            steps=1,
            micro_batches=count,
            tokens=rows,
            squares=rows * length,
        )
        return Trial(sample, self._step(plan))

    def _check_step(self, length: int, degree: int) -> Trial:
        """Time a step with one document per group of `degree` slots. No constant is fitted to it: it checks the fit."""
        plan = plan_fixed([length] * (self.world.home.slots // degree), self.world.home, degree)
        turn = (degree - 1) / degree
        sample = Sample(
            name=f"step: a document of {length:,} for {degree} slots",
            steps=1,
            micro_batches=1,
            tokens=length / degree,
            squares=length**2 / degree,
            ring_steps=degree - 1,
            ring_bytes=self.shape.ring_bytes * length * turn,
            fitted=False,
        )
        return Trial(sample, self._step(plan))

    def _step(self, plan: Plan) -> Callable[[], object]:
        self.world.prepare(plan)
        random = np.random.default_rng(0)
        documents = [random.integers(0, self.vocabulary, length) for length in plan.lengths]
        return lambda: run_step(self.model, plan, documents, self.world)

    def _attention(self, length: int, degree: int) -> Trial:
        """Attention of one document for every group of so many slots, forward and backward, times the layers."""
        plan = plan_fixed([length] * (self.world.home.slots // degree), self.world.home, degree)
        self.world.prepare(plan)
        shard = bind(plan.micro_batches[0], self.world)
        layers, turn = self.shape.full_layers, (degree - 1) / degree
        sample = Sample(
            name=f"attention: a document of {length:,} for {degree} slots"
            if degree > 1
            else f"attention: {length:,} rows",
            squares=length**2 / degree,
            calls=1,
            ring_steps=degree - 1,
            ring_bytes=self.shape.ring_bytes * length * turn * layers / self.shape.layers,
        )
        return Trial(sample, self._attend(shard), layers)

    def _attend(self, shard: SequenceShard) -> Callable[[], object]:
        q, k, v = (self._rows(shard.local_rows, heads) for heads in self._heads())
        gradient = self._rows(shard.local_rows, self.shape.heads).detach()
        return lambda: torch.autograd.grad(attend(q, k, v, shard), (q, k, v), gradient)

    def _wire(self, rows: int) -> Trial:
        """Blocks of keys and values around all slots, without attention."""
        channel = self.world.channels.find_channel(range(self.world.home.slots))
        block = tuple(self._rows(rows, self.shape.key_value_heads).detach() for _ in "kv")
        counts = (rows,) * channel.degree

        def turn() -> None:
            for _ in RingBlocks(channel, block, counts, "bench calibrate"):
                pass

        sample = Sample(
            name=f"wire: blocks of {rows:,} rows around {channel.degree} slots",
            wire_steps=channel.degree - 1,
            wire_bytes=(channel.degree - 1) * rows * self.shape.block_bytes,
        )
        return Trial(sample, turn)

    def _heads(self) -> Sequence[int]:
        return self.shape.heads, self.shape.key_value_heads, self.shape.key_value_heads

    def _rows(self, rows: int, heads: int) -> Tensor:
        size = (rows, heads, self.shape.head_size)
        return torch.randn(size, device=self.world.device).to(self.shape.dtype).requires_grad_()

    def _measure(self, run: Callable[[], object]) -> float:
        """Seconds on this rank; all ranks begin together."""
        self.world.control.barrier()
        self._finish()
        began = time.perf_counter()
        run()
        self._finish()
        return time.perf_counter() - began

    def _finish(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
