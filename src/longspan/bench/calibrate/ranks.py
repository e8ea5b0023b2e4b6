"""What each rank does for `bench calibrate`: the hosts, whole steps, kernels and passes, messages, types of attention.

Steps are those of a model whose parameters are not sharded, so that they contain no messages but the sum of gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longspan.attention import attend
from longspan.bench.calibrate.fit import Sample
from longspan.bench.calibrate.link_trials import CPU_SIZES, GPU_SIZES, LinkTrials, find_hosts
from longspan.bench.calibrate.trial import Clock, Trial
from longspan.bench.layers import change_layer_count
from longspan.comm import World, bind
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.prepared import vocabulary_size
from longspan.model.presets import preset_config
from longspan.model.sharding import drop_unsummed_gradients, keep_parameters_whole
from longspan.plan import AttentionCall, Plan, plan_fixed
from longspan.plan.cost.links import Level
from longspan.plan.shape.model_shape import ModelShape
from longspan.train import run_step
from longspan.train.plans.resolve import device_name

VOCABULARY = 2048  # of a preset, which has no tokenizer to take it from
MOST_SECONDS = 200.0  # after which no round begins
PRODUCT_WIDTHS = {"cuda": (2048, 4096), "cpu": (256, 512)}
PRODUCT_ROWS: dict[str, tuple[int, ...]] = {"cuda": (1024, 4096, 16384), "cpu": (64, 256)}
PASS_NUMBERS = {"cuda": (1 << 22, 1 << 24, 1 << 26, 1 << 28), "cpu": (1 << 14, 1 << 17, 1 << 19, 1 << 21)}
LONG_OVER_LONGEST = 4
BOTH_OVER_FORWARD = 3.5  # products of attention in forward (2) and backward (5), over those in forward


@dataclass(frozen=True)
class CalibrationSettings:
    """What the ranks measure, as `CalibrateFlags` describe it; `layers` 0: all of the preset's."""

    preset: str
    model: str
    layers: int
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


class Measured(NamedTuple):
    """The samples, a line about the hosts, and facts of the world that was measured."""

    samples: list[Sample]
    hosts: str
    device: str
    node_size: int
    seconds: float


def calibrate_ranks(rank: int, settings: CalibrationSettings) -> Measured:
    """Open a world and measure everything; returns the same on every rank."""
    backend = None if settings.backend == "nccl" else "gloo"
    with World(Layout(settings.ranks), backend=backend, timeout=settings.timeout_seconds) as world:
        clock = Clock(world, most_seconds=MOST_SECONDS)
        hosts = find_hosts(world, clock)
        clock.print_line(hosts)
        samples = _Bench(settings, world, clock).measure_samples()
        return Measured(samples, hosts, device_name(world.device), world.node_size, clock.seconds)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model's attention, and the FLOPs of its weights for a token."""

    full_layers: int  # that attend to all earlier rows, not to a window of them
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layers: int
    weight_flops: float

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> "Shape":
        """Read the sizes of a transformers model. Raises ConfigError for one with state-space layers."""
        shape = ModelShape.of(model.config)
        if shape.mixer_layers:
            raise ConfigError(
                "products are measured in the steps of a model without state-space layers, and this one has "
                f"{shape.mixer_layers} of them; leave --preset and --model out"
            )
        full = shape.layers - shape.window_layers - shape.chunk_layers
        size = shape.query_width // shape.heads
        weight_flops = 6.0 * shape.weights  # of a token, forward and backward
        return cls(full, shape.heads, shape.kv_heads, size, dtype, shape.decoder_layers, weight_flops)

    @property
    def call(self) -> AttentionCall:
        """One layer's attention, forward and backward."""
        size = self.dtype.itemsize
        return AttentionCall(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, bytes_per_number=size)

    def flops(self, squares: float) -> float:
        """Count the FLOPs of one layer's attention, forward and backward, by the documents' sum of squared lengths.

        Forward has two products of 2 FLOPs for each feature and each causal pair, which are half of the squares.
        """
        return BOTH_OVER_FORWARD * 2 * self.heads * self.head_dim * squares


class _Bench:
    """The trials of a world, by what they time, and the model whose steps are timed first."""

    def __init__(self, settings: CalibrationSettings, world: World, clock: Clock) -> None:
        """Load the model whose steps are timed, and prepare it unsharded."""
        self.settings, self.world, self.clock = settings, world, clock
        # each rank is a replica: nothing is gathered in a step
        self.replicas = world.open_inner(Layout(settings.ranks, dp_replicate=settings.ranks))
        model = _load_timed_model(settings)
        self.shape = Shape.of(model, getattr(torch, settings.dtype))
        self.vocabulary = vocabulary_size(model) or 1  # without an embedding, only token id 0
        self.model: nn.Module | None = prepare(model, self.replicas)

    def measure_samples(self) -> list[Sample]:
        """Time everything that a machine has a figure for, part after part."""
        samples = self._time_trials(self._model_trials(), "steps of a model")
        self.model = None  # its memory is free for what follows
        samples += self._time_trials(self._device_trials(), "products, attention and memory")
        if self.world.home.slots > 1:
            sizes = GPU_SIZES if self.world.device.type == "cuda" else CPU_SIZES
            samples += self._time_trials(LinkTrials(self.world, sizes).list_trials(), "messages between slots")
            samples += self._time_trials(self._type_trials(), "types of attention")
        return samples

    def _time_trials(self, trials: Iterator[Trial] | list[Trial], label: str) -> list[Sample]:
        """Time trials as often as the settings say; `label` names them in lines of progress."""
        settings = self.settings
        return self.clock.time_trials(list(trials), warmup=settings.warmup, repeats=settings.repeats, label=label)

    def _model_trials(self) -> Iterator[Trial]:
        """Yield steps of the model over rising numbers of tokens and of micro-batches, and a short forward pass."""
        tokens, counts = self.settings.tokens, self.settings.micro_batches
        sizes = [*((count, 1) for count in tokens), *((tokens[0], count) for count in counts if count > 1)]
        for i, (rows, count) in enumerate(sizes):
            yield self._step_trial(rows, count, fitted=_is_fitted(i))
        yield self._launch_trial()

    def _device_trials(self) -> Iterator[Trial]:
        """Yield what one device does: products of matrices, attention over documents, and passes over memory.

        Attention is over as many rows as the longest document has, cut into documents of each length; then over as many
        as the second longest has, cut into documents of each length but the longest. Two numbers of rows tell a call's
        own seconds from those of its rows. On GPUs one document of LONG_OVER_LONGEST times the longest length follows:
        it takes most of a second, after which their clocks are lower than in short calls.
        """
        device, lengths = self.world.device.type, self.settings.lengths
        for width in PRODUCT_WIDTHS[device]:
            yield from (self._product_trial(rows, width) for rows in PRODUCT_ROWS[device])
        pieces = [*((n, lengths[-1]) for n in lengths), *((n, lengths[-2]) for n in lengths[:-1])]
        for i, (length, rows) in enumerate(pieces):
            yield self._attention_trial(length, rows // length, fitted=_is_fitted(i))
        if device == "cuda":
            yield self._attention_trial(LONG_OVER_LONGEST * lengths[-1], 1, fitted=True)
        for i, count in enumerate(PASS_NUMBERS[device]):
            yield self._memory_trial(count, fitted=_is_fitted(i))

    def _type_trials(self) -> Iterator[Trial]:
        """Yield each type of attention of a document over a host's slots and over all; every second length is held out.

        A degree that does not divide the slots is left out, as not all of them would take part.
        """
        slots, node_size = self.world.home.slots, self.world.node_size
        degrees: dict[Level, int] = {"inside": min(slots, node_size), "across": slots}
        for level, degree in degrees.items():
            if degree > 1 and slots % degree == 0 and (level == "inside" or slots > node_size):
                for i, length in enumerate(self.settings.lengths):
                    yield from self._group_type_trials(level, degree, length * degree, fitted=i % 2 == 0)

    def _step_trial(self, tokens: int, count: int, *, fitted: bool) -> Trial:
        """Return the trial of a step of `count` micro-batches, each of short documents of about `tokens` a slot.

        Attention of layers with windows is not counted: its seconds lower the rate of products that is fitted.
        """
        length = min(self.settings.document, tokens)
        per_slot = tokens // length
        rows = per_slot * length * count
        plan = self._plan_step(length, per_slot, count)
        flops = self.shape.full_layers * self.shape.flops(rows * length)
        sample = Sample(
            part="step",
            name=f"step: {count} x {per_slot * length:,} tokens a slot, documents of {length:,}",
            steps=1,
            micro_batches=count,
            weight_flops=self.shape.weight_flops * rows,
            attention_flops=flops,
            attention_flops_per_row=flops / length,
            fitted=fitted,
        )
        return Trial(sample, self._step_call(plan))

    def _launch_trial(self) -> Trial:
        """Return the trial of a forward pass over so few rows that the host decides its time."""
        length = min(self.settings.document, self.settings.tokens[0])
        sample = Sample(part="launch", name=f"forward: {length:,} tokens a slot", layers=self.shape.layers)
        return Trial(sample, self._step_call(self._plan_step(length, 1, 1), backward=False))

    def _plan_step(self, length: int, per_slot: int, count: int) -> Plan:
        """Plan `count` micro-batches with `per_slot` documents of this length on every slot."""
        home = self.replicas.home
        plan = plan_fixed([length] * (per_slot * count * home.slots), home, 1, max_tokens_per_slot=per_slot * length)
        assert len(plan.micro_batches) == count, (len(plan.micro_batches), count)
        return plan

    def _step_call(self, plan: Plan, *, backward: bool = True) -> Callable[[], object]:
        """Return a call that runs a step of this plan over random tokens, without the sum of gradients over ranks.

        That sum is a message, which has its own trials: between hosts it would take most of the step.
        """
        self.replicas.prepare(plan)
        random = np.random.default_rng(0)
        documents = [random.integers(0, self.vocabulary, length) for length in plan.lengths]
        model = self.model
        assert model is not None, "steps are measured first"

        def run() -> None:
            with keep_parameters_whole(model):
                run_step(model, plan, documents, self.replicas, backward=backward)
            drop_unsummed_gradients(model)

        return run

    def _product_trial(self, rows: int, width: int) -> Trial:
        """Return the trial of a product of `rows` rows with a square matrix of weights."""
        x, weights = (torch.randn(n, width, device=self.world.device).to(self.shape.dtype) for n in (rows, width))
        flops = 2.0 * rows * width * width
        sample = Sample(part="product", name=f"product: {rows:,} rows, width {width:,}", weight_flops=flops)
        return Trial(sample, lambda: x @ weights, turns=4)

    def _memory_trial(self, count: int, *, fitted: bool) -> Trial:
        """Return the trial of a pass that reads and writes `count` numbers in float32."""
        x = torch.zeros(count, device=self.world.device)
        into = torch.empty_like(x)
        name = f"memory: {8 * count:,} bytes read and written"
        sample = Sample(part="memory", name=name, calls=1, bytes=8.0 * count, fitted=fitted)
        return Trial(sample, lambda: torch.mul(x, 2.0, out=into), turns=4)

    def _attention_trial(self, length: int, count: int, *, fitted: bool) -> Trial:
        """Return the trial of attention, forward and backward, over `count` documents of this length on each slot."""
        plan = plan_fixed([length] * (count * self.world.home.slots), self.world.home, 1)
        flops = self.shape.flops(count * length**2)
        sample = Sample(
            part="attention",
            name=f"attention: {count * length:,} rows in pieces of {length:,}",
            attention_flops=flops,
            attention_flops_per_row=flops / length,
            calls=1,
            fitted=fitted,
        )
        return Trial(sample, self._attend_call(plan))

    def _group_type_trials(self, level: Level, degree: int, length: int, *, fitted: bool) -> Iterator[Trial]:
        """Yield trials of attention over groups of `degree` slots, a document of `length` tokens each, by type.

        Left out are types that the heads do not allow, and a2a+p2p if one of its levels is 1: that is a2a or p2p.
        """
        plan = plan_fixed([length] * (self.world.home.slots // degree), self.world.home, degree)
        group = plan.micro_batches[0].groups[0]
        prices = self.world.machine.attention_seconds(group, self.shape.call, node_size=self.world.node_size)
        for kind, price in sorted(prices.items()):
            if price.impossible or (kind == "a2a+p2p" and min(price.sizes) == 1):
                continue
            name = f"{price.name} {level}: a document of {length:,} over {degree} slots"
            sizes = price.sizes if kind == "a2a+p2p" else None
            sample = Sample(
                part="type",
                name=name,
                level=level,
                group=replace(group, hierarchical_context_parallel_sizes=sizes),
                call=self.shape.call,
                cp_comm_type=kind,
                fitted=fitted,
            )
            yield Trial(sample, self._attend_call(plan, kind, sizes))

    def _attend_call(self, plan: Plan, kind: str = "p2p", sizes: Sequence[int] | None = None) -> Callable[[], object]:
        """Return a call that computes attention of the plan's first micro-batch, forward and backward."""
        self.world.prepare(plan)
        shard = bind(plan.micro_batches[0], self.world)
        heads = self.shape.heads, self.shape.kv_heads, self.shape.kv_heads
        q, k, v = (self._draw_rows(shard.local_rows, count) for count in heads)
        gradient = self._draw_rows(shard.local_rows, self.shape.heads).detach()
        arguments: dict[str, Any] = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": sizes}
        return lambda: torch.autograd.grad(attend(q, k, v, shard, **arguments), (q, k, v), gradient)

    def _draw_rows(self, rows: int, heads: int) -> Tensor:
        """Draw random queries, keys or values (rows, heads, head size) that take a gradient."""
        size = (rows, heads, self.shape.head_dim)
        return torch.randn(size, device=self.world.device).to(self.shape.dtype).requires_grad_()


def _is_fitted(index: int) -> bool:
    """Return whether the entry of a list at `index` is fitted: every third one, from the third on, is held out."""
    return index % 3 != 2


def _load_timed_model(settings: CalibrationSettings) -> Any:
    """Load the model that is timed: from a folder, or random weights of a preset at the vocabulary of the bench."""
    if settings.model:
        return load_model(settings.model, dtype=settings.dtype)
    # Tiny presets are made for a vocabulary; published ones bring their own, which is replaced.
    configuration = preset_config(settings.preset, vocab_size=VOCABULARY if "tiny" in settings.preset else None)
    configuration.get_text_config().vocab_size = VOCABULARY
    if settings.layers:
        configuration = change_layer_count(configuration, settings.layers)
    return load_model(config=configuration, dtype=settings.dtype)
