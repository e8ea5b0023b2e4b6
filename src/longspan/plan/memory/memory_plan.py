"""MemoryPlan: the bytes of a run on device and host; the seconds that it adds to a step; and the choice of the fastest.

The first layers of each stage have one measure and the others a faster one: as few of the first as fit.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, product
from statistics import mean
from typing import Any

from longspan.errors import PlanError, plural
from longspan.layout import Layout
from longspan.plain_text import gib_text
from longspan.plan.cost.cost import FORWARD_SHARE, Cost
from longspan.plan.cost.machine import SHARDING_SHARE, CostSettings, Machine, Recomputation
from longspan.plan.memory.layer_table import SlotLoad, slot_loads
from longspan.plan.memory.settings import (
    CHECKPOINT_POLICIES,
    CHOSEN_SETTINGS,
    Bytes,
    CheckpointPolicy,
    FixedMemory,
    MemoryBudget,
    MemorySettings,
)
from longspan.plan.memory.stage_bytes import ModelNumbers, Numbers, StageBytes, make_stages
from longspan.plan.plan import Plan
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import ModelShape

MOST_GROUPS = 8  # of a slot that have communicators of their own (comm/process_groups.py)
_MEASURE_TEXTS = {
    "none": "keep all",
    "exchanged": "keep their input, attention's output and what was exchanged",
    "selective": "keep their input and attention's output",
    "full": "keep their input",
    "selective+host": "keep their input and attention's output in host memory",
    "full+host": "keep their input in host memory",
}


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs of the rank that needs most, and what its layers keep.

    >>> plan = plan_fixed([262144], Layout(4), cp=4)
    >>> memory = MemoryPlan.of("Qwen3-8B/config.json", home, plan, MemorySettings(), "selective")  # doctest: +SKIP
    >>> memory.device.total  # doctest: +SKIP

    `measures` has a word for each decoder layer, depths of multi-token prediction last; `rows` are the most of a slot
    in one micro-batch. `device` is at the moment at which most is held, `host` all that waits there.
    """

    device: Bytes
    host: Bytes
    measures: tuple[CheckpointPolicy, ...]
    rows: int
    gathered_once: bool = False
    summed_once: bool = False
    offload_optimizer_states: bool = False
    offload_weights: bool = False
    mlp_tile_tokens: int = 0
    segment_layers: int = 0

    @classmethod
    def of(
        cls,
        config: Any,
        home: Layout,
        plan: Plan | Sequence[Plan],
        settings: MemorySettings,
        measures: str | Sequence[str],
        *,
        machine: Machine | None = None,
    ) -> "MemoryPlan":
        """Count the memory of a run of one plan or several: `measures` is a word for all layers, or one for each.

        Words are "none", "exchanged", "selective", "full", "selective+host" and "full+host": what a layer keeps, as at
        `CheckpointPolicy`, and whether that waits on the host.
        `config` is a transformers configuration, object or dict, a config.json or its folder. `machine` decides which
        communication type "auto" is (None: an H200). Raises PlanError for a model or measures that it cannot read.
        """
        return MemoryNeeds.of(config, home, plan, settings, machine=machine).under(measures)

    def fits(self, budget: MemoryBudget) -> bool:
        return self.device.total <= budget.device and self.host.total <= budget.host

    def cost_settings(self, settings: CostSettings) -> CostSettings:
        """Return the settings of a cost under this plan, whose recomputed layers all keep what most of them keep."""
        return replace(
            settings,
            recomputed_layers=len(self.measures) - self.measures.count("none"),
            gathered_once=self.gathered_once,
            summed_once=self.summed_once,
            recomputation=self.recomputation,
            streamed_bytes=self.host.weights,
            paged_bytes=self.paged_bytes,
        )

    @property
    def paged_bytes(self) -> int:
        """Bytes that come from the host for an update, while no more go: states, weights, and gradients."""
        return self.host.states + 2 * self.host.gradients

    @property
    def recomputation(self) -> Recomputation:
        """What most of the recomputed layers keep, on device or host; "none" where none is recomputed."""
        kinds = [word.partition("+")[0] for word in self.measures if word != "none"]
        return max(kinds, key=kinds.count, default="none")  # pyright: ignore[reportReturnType]

    def summary_line(self, budget: MemoryBudget | None = None) -> str:
        """Return what layers keep and what is filled, in one line; the first count says also of how many layers."""
        extras = [once_a_step_text(self.gathered_once, self.summed_once)]
        if self.offload_optimizer_states:
            extras.append(", states on the host")
        if self.offload_weights:
            extras.append(", weights on the host")
        if self.mlp_tile_tokens:
            extras.append(f", MLPs in tiles of {self.mlp_tile_tokens:,} rows")
        layers = min(self.segment_layers, len(self.measures))
        if layers:
            extras.append(f", segments of {plural(layers, 'layer')}")
        used = gib_text(self.device.total)
        if budget:
            used = used.removesuffix(" GiB") + f" of {gib_text(budget.device)}"
        host = f"{gib_text(self.host.total)} of host memory"
        return f"memory: {measures_text(self.measures)}{''.join(extras)}; {used} used, and {host}"

    def to_json(self) -> dict[str, Any]:
        device = self.device.to_json()
        host = self.host.to_json()
        return vars(self) | {"device": device, "host": host, "measures": list(self.measures)}


def once_a_step_text(gathered: bool, summed: bool) -> str:
    """Return what of weights and gradients is once a step, in words that follow others; "" for nothing."""
    return f", weights gathered{' and gradients summed' * summed} once" * gathered


def measures_text(measures: Sequence[object]) -> str:
    """Return what the layers keep, in words: "12 of 36 layers keep all, 24 keep their input"; `measures` has a word of
    `CheckpointPolicy` for each layer.
    """
    words = [str(word) for word in measures]
    counts = Counter(words)
    parts = [f"{counts[word]} {_MEASURE_TEXTS.get(word, word)}" for word in sorted(counts, key=words.index)]
    return ", ".join(parts).replace(" ", f" of {len(words)} layers ", 1)


@dataclass(frozen=True)
class MemoryModel:
    """A model on a home and a machine, as plans of memory count and price it: what is the same for all plans of steps.
    `config` is as in `MemoryPlan.of`.

    >>> MemoryModel(config, Layout(4), MemorySettings(), Machine()).needs([plan]).layers  # doctest: +SKIP
    """

    config: Any
    home: Layout
    settings: MemorySettings
    machine: Machine

    @cached_property
    def read(self) -> ConfigReader:
        return ConfigReader.read_language_model(self.config)

    @cached_property
    def numbers(self) -> ModelNumbers:
        return ModelNumbers.from_configuration(self.config, self.home, self.settings)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.config, depths=self.settings.depths)

    @cached_property
    def layer_costs(self) -> dict[Recomputation, Cost]:
        """The cost of a slot where all layers keep all ("none"), "selective" or "full"."""
        settings = self.settings
        tp = self.home.tp
        costs = CostSettings(
            depths=settings.depths,
            frozen=not settings.trains_all,
            float8=settings.float8,
            compiled=settings.compiled if settings.gpu and tp == 1 else "none",
            ep=self.home.ep,
        )
        kinds: tuple[Recomputation, ...] = ("none", "selective", "full")
        return {
            kind: self.machine.cost(self.config, replace(costs, recomputation=kind)).shared_by(tp) for kind in kinds
        }

    def needs(self, plans: Sequence[Plan]) -> "MemoryNeeds":
        """Return the bytes of a run of these plans, before it is decided what layers keep."""
        home = self.home
        loads = slot_loads(plans, self.read, self.settings, self.machine, home.tp)
        micro_batches = max((len(plan.micro_batches) for plan in plans), default=1)
        # A group of several slots, but not of all, has a communicator of its own.
        slots = max((plan.slots for plan in plans), default=1)
        groups = {group.slots for plan in plans for group in plan.groups}
        counts = Counter(slot for group in groups if 1 < len(group) < slots for slot in group)
        most_groups = min(max(counts.values(), default=0), MOST_GROUPS)
        places = list[StageBytes]()
        for rank, stage in enumerate(make_stages(self.numbers, home, self.settings)):
            waiting = _count_waiting_micro_batches(home, self.settings, rank, micro_batches)
            place = StageBytes(
                self.read, home, self.settings, self.numbers, stage, waiting, most_groups, micro_batches
            )
            places.append(place)
        return MemoryNeeds(self, tuple(places), loads)


@dataclass(frozen=True)
class MemoryNeeds:
    """The bytes of a run before it is decided what layers keep: made once, asked for many choices.

    >>> needs.under("selective").device.total  # doctest: +SKIP
    """

    model: MemoryModel
    places: tuple[StageBytes, ...]
    loads: tuple[SlotLoad, ...]

    @classmethod
    def of(
        cls,
        config: Any,
        home: Layout,
        plan: Plan | Sequence[Plan],
        settings: MemorySettings,
        *,
        machine: Machine | None = None,
    ) -> "MemoryNeeds":
        plans = [plan] if isinstance(plan, Plan) else list(plan)
        return MemoryModel(config, home, settings, machine or Machine()).needs(plans)

    @cached_property
    def prices(self) -> "MemoryPrices":
        """Prices of what layers keep of the largest load, on the first pipeline stage."""
        return MemoryPrices(self.model, self.places[0], max(self.loads))

    @property
    def layers(self) -> int:
        return len(self.places[0].numbers.kinds)

    def with_settings(self, settings: MemorySettings) -> "MemoryNeeds":
        """Return these needs under settings that differ in those that a plan of memory chooses."""
        return replace(self, places=tuple(replace(place, settings=settings) for place in self.places))

    def measures_of_layers(
        self, first: CheckpointPolicy, count: int, others: CheckpointPolicy
    ) -> tuple[CheckpointPolicy, ...]:
        words: list[CheckpointPolicy] = [others] * self.layers
        for place in self.places:
            for layer in place.stage.layers[:count]:
                words[layer] = first
        return tuple(words)

    def under(self, measures: str | Sequence[str]) -> MemoryPlan:
        """Return the plan of memory where layers keep what `measures` says: a word for all, or one for each.

        Raises PlanError for a word that is no measure, and for another number of words than layers.
        """
        settings = self.places[0].settings
        known: dict[str, CheckpointPolicy] = {str(word): word for word in CHECKPOINT_POLICIES}
        layer_words = (measures,) * self.layers if isinstance(measures, str) else tuple(measures)
        if unknown := [word for word in layer_words if word not in known]:
            raise PlanError(f"a layer keeps {unknown[0]!r}; use one of {', '.join(CHECKPOINT_POLICIES)}")
        if (count := len(layer_words)) != self.layers:
            raise PlanError(
                f"{count} measures were given for {self.layers} layers, depths included; give one a layer"
            )
        words: tuple[CheckpointPolicy, ...] = tuple(known[word] for word in layer_words)
        return MemoryPlan(
            device=max((p.most_bytes(self.loads, words) for p in self.places), key=lambda moment: moment.total),
            host=max(self._host_bytes(words), key=lambda host: host.total),
            measures=words,
            rows=max(load.rows for load in self.loads),
            **{name: getattr(settings, name) for name in CHOSEN_SETTINGS},
        )

    def fit(self, measures: Sequence[CheckpointPolicy], budget: MemoryBudget) -> bool:
        """Return whether a plan of these measures fits; of those that do not, few moments are counted."""
        for place in self.places:
            room = budget.device - place.resident_bytes.total
            if any(moment.total > room for moment in place.moments(self.loads, measures)):
                return False
        return all(host.total <= budget.host for host in self._host_bytes(measures))

    def _host_bytes(self, measures: Sequence[CheckpointPolicy]) -> Iterator[Bytes]:
        return (place.host_bytes(self.loads, measures) for place in self.places)


def _count_waiting_micro_batches(
    home: Layout, settings: MemorySettings, pipeline_rank: int, micro_batches: int
) -> float:
    """How many micro-batches wait for their backward passes at most, on a rank of the pipeline. With chunks a
    micro-batch counts for each chunk that it has passed, as its part of the rank's layers. Under
    1F1B, interleaved with several chunks, a rank runs as many as there are ranks behind it, and one more, before its
    first backward pass.
    """
    if home.pp == 1:
        return 1.0
    chunks = settings.vpp
    ranks_behind = home.pp - pipeline_rank - 1
    warm_up = ranks_behind if chunks == 1 else 2 * ranks_behind + (chunks - 1) * home.pp
    return min(warm_up + 1, micro_batches * chunks) / chunks


TILED_SHARE = 0.06  # of a layer's time, which tiles of its MLP add to it (an H200, 128K to 512K rows)
SHOWN_SHARE = 0.1  # of the time of copies to the host that runs beside a layer's work, and is lost all the same


@dataclass(frozen=True)
class MemoryPrices:
    """Prices of what layers keep, for one load: made once for many plans of memory."""

    model: MemoryModel
    place: StageBytes
    load: SlotLoad

    @property
    def machine(self) -> Machine:
        return self.model.machine

    def seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds that a plan adds to a micro-batch: of layers, of gathers, of states and weights on the
        host.
        """
        on_host = self.update_seconds(memory) + self.streaming_seconds(memory)
        return self.seconds_on_device(memory, memory.measures) + on_host

    def seconds_beyond_settings(self, memory: MemoryPlan) -> float:
        """Return the seconds that `MemoryPlan.cost_settings` leaves out, which knows one measure for all layers that
        recompute: of the largest micro-batch what the plan's measures take longer than that one, copies to the host
        included, or less (negative).
        """
        word: CheckpointPolicy = memory.recomputation
        one_measure: list[CheckpointPolicy] = ["none" if kept == "none" else word for kept in memory.measures]
        return self.seconds_on_device(memory, memory.measures) - self.seconds_on_device(memory, one_measure)

    def update_seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds of an update's copies, without those that hide behind a forward pass, where weights of
        layers on the host need the bus too.
        """
        seconds = memory.paged_bytes / self.machine.paging_bytes_per_second
        place = self.place
        layers = len(place.stage.layers)
        room = layers * max(0.0, self._layer_work[0] * FORWARD_SHARE - self._layer_copy_seconds(memory))
        root = place.stage.root.trained / max(1.0, place.stage.all.trained)
        return max(root * seconds, seconds - room)

    def _layer_copy_seconds(self, memory: MemoryPlan) -> float:
        place = self.place
        root = place.weight_bytes(place.stage.root, on_host=True)
        return (memory.host.weights - root) / len(place.stage.layers) / self.machine.paging_bytes_per_second

    def streaming_seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds of a micro-batch in which nothing runs but copies of weights on the host: those of the
        root and its gradients, and those of a layer, for each pass, that take longer than a layer's work. Sums of
        gradients come back for all micro-batches but the first.
        """
        place = self.place
        root_numbers = place.stage.root
        root = place.weight_bytes(root_numbers, on_host=True)
        root += place.gradient_bytes(root_numbers) * place.trained_on_host
        copy = self._layer_copy_seconds(memory)
        work, _ = self._layer_work
        backward = (1 - FORWARD_SHARE) * work
        shown = max(0.0, copy - FORWARD_SHARE * work) + max(0.0, copy - backward) / place.micro_batches
        later = 2 * copy if place.trained_on_host else copy
        shown += max(0.0, later - backward) * (1 - 1 / place.micro_batches)
        seconds = len(place.stage.layers) * shown + root / self.machine.paging_bytes_per_second
        return seconds if memory.offload_weights else 0.0

    def seconds_on_device(self, kept: MemoryPlan | MemorySettings, measures: Sequence[CheckpointPolicy]) -> float:
        """Return the seconds of layers and of gathers where layers keep what `measures` say."""
        layers = sum(map(self.layer_prices(kept).__getitem__, measures))
        # all but the last layer of a segment run forward once more, attention included
        if kept.segment_layers > 1:
            layers_run_again = sum(word != "none" for word in measures) * (1 - 1 / kept.segment_layers)
            layers += layers_run_again * self._layer_seconds[False]["full"]
        return layers + self._sharding_seconds(kept)

    def layer_prices(self, kept: MemoryPlan | MemorySettings) -> dict[str, float]:
        """Return the seconds that each measure adds to a layer."""
        return self._layer_seconds[bool(kept.mlp_tile_tokens)]

    def least_seconds(self, needs: MemoryNeeds, words: Sequence[CheckpointPolicy]) -> float:
        """Return the least seconds that a plan of these needs may add, if each layer keeps one of these measures."""
        settings = needs.places[0].settings
        # the terms of `seconds` in the same order, or smaller ones: no plan is below it by rounding either
        fastest = min(map(self.layer_prices(settings).__getitem__, words))
        return sum([fastest] * needs.layers) + self._sharding_seconds(settings)

    @cached_property
    def _layer_work(self) -> tuple[float, dict[str, float]]:
        """Seconds of a layer that keeps all, and those that a measure computes and exchanges again: queries, keys and
        values under "selective", the output too under "full". The load is a slot's part of equally long documents, half
        as many as it has runs (zigzag gives a slot two of each).
        """
        place = self.place
        load = self.load
        settings = self.place.settings
        moves = load.exchanged_rows or load.ring_rows or load.gathered_rows
        degree = place.home.slots if moves else 1
        layers = len(place.numbers.kinds)
        rows = load.rows * degree
        documents = max(1, load.runs // 2)

        def layer_seconds(kind: Recomputation) -> float:
            cost = self.model.layer_costs[kind]
            # the squares' sum last
            return float(cost.work_seconds(rows, rows * rows / documents)) / degree / layers

        plain = layer_seconds("none")
        selective, full = (max(0.0, layer_seconds(kind) - plain) for kind in ("selective", "full"))
        shape = self.model.shape
        # Members that exchange heads are taken to be in one node.
        exchanged = load.exchanged_rows * settings.compute_bytes / place.home.tp
        number_seconds = exchanged / self.machine.inside.point.bytes_per_second  # of a number of each exchanged row
        again = {"none": 0.0, "exchanged": selective}
        again["selective"] = selective + number_seconds * (shape.query_width + 2 * shape.key_width)
        again["full"] = full + number_seconds * 2 * (shape.query_width + shape.key_width)
        return plain, again

    @cached_property
    def _layer_seconds(self) -> dict[bool, dict[str, float]]:
        """Seconds that a measure adds to a layer, without tiles (False) and with them (True). A copy to the host may
        hide behind the forward pass, a third of a layer's time, and the copy back behind the rest; of what hides
        SHOWN_SHARE counts. A tiled MLP runs forward again, so that a layer that keeps all counts as one that
        recomputes.
        """
        place = self.place
        plain, again = self._layer_work
        whole = dict[str, float]()
        tiled = dict[str, float]()
        for word in CHECKPOINT_POLICIES:
            copy = (
                mean(layer.host for layer in place.layer_bytes(self.load, word))
                / self.machine.host_copy_bytes_per_second
            )
            hidden = min(copy, plain / 3) + min(copy, plain - plain / 3)
            whole[word] = again[word.partition("+")[0]] + 2 * copy - (1 - SHOWN_SHARE) * hidden
            tiled[word] = (again["exchanged"] if word == "none" else whole[word]) + TILED_SHARE * plain
        return {False: whole, True: tiled}

    @cached_property
    def _all_layers(self) -> Numbers:
        return sum(self.place.numbers.layers, Numbers())

    def _sharding_seconds(self, kept: MemoryPlan | MemorySettings) -> float:
        """Seconds of a micro-batch's gathers of weights and sum of gradients, as far as they do not hide behind other
        work; what comes once a step counts in equal parts for its micro-batches. 0 where they are unsharded, or always
        whole.
        """
        place = self.place
        once = 1 / place.micro_batches
        if not place.settings.shard_parameters or place.always_whole:
            return 0.0
        gathers = once if kept.gathered_once else 2.0
        sums = once if kept.summed_once else 1.0
        settings = place.settings
        layers = self._all_layers
        gathered = layers.whole + (layers.packed_bytes / settings.compute_bytes - layers.packed)
        summed = layers.trained
        sent = gathers * gathered * settings.compute_bytes + sums * summed * settings.reduce_bytes
        wire_seconds = sent * (place.shards - 1) / place.shards / self.machine.sharding_bytes_per_second
        copies = self.machine.weight_copy_seconds * (gathers * gathered + sums * summed)
        unpacked = self.machine.unpacking_seconds(layers.packed_bytes, layers.packed * settings.compute_bytes)
        return copies + SHARDING_SHARE * wire_seconds + gathers * unpacked


# rows of a tile where the plan runs MLPs in tiles: products of so many are as fast as those of all
TILE_ROWS = 16384
SMALL_TILE_ROWS = 8192  # in segments, which come where little else fits
SEGMENT_LAYERS = 4  # layers of a segment that the plan chooses, where nothing else fits


def choose_memory(
    config: Any,
    home: Layout,
    plan: Plan | Sequence[Plan],
    settings: MemorySettings,
    budget: MemoryBudget,
    machine: Machine | None = None,
    *,
    fixed: FixedMemory | None = None,
) -> MemoryPlan:
    """Choose the fastest plan of memory that fits a budget; `plan` is a plan, or all plans of a run.

    >>> memory = choose_memory("Qwen3-8B/config.json", home, plan, MemorySettings(), budget)  # doctest: +SKIP

    Plans of memory are compared by the seconds that they add to the largest load, on the first pipeline stage; of equal
    ones the first choice wins. Segments, groups of layers that run forward once more in backward, and weights on the
    host are tried only where no plan without them fits, and both together where neither does. Raises PlanError, with
    the bytes, where no choice fits, and for weights that are to wait on the host and cannot.
    """
    needs = MemoryNeeds.of(config, home, plan, settings, machine=machine)
    return choose_fastest_memory(needs, budget, fixed or FixedMemory())


def choose_fastest_memory(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> MemoryPlan:
    home = needs.places[0].home
    settings = needs.places[0].settings
    if fixed.offload_weights and (reason := needs.places[0].reason_for_weights_on_device):
        raise PlanError(f"train.offload_weights is true, and {reason}; leave it out")
    prices = needs.prices
    # An eighth more: with few layers another choice may need about 1 % less than the leanest.
    roomier = MemoryBudget(device=budget.device * 9 // 8, host=budget.host * 9 // 8)
    for level in _fixed_by_level(needs, fixed):
        # far fewer to count than all choices
        possible = [keys for keys in level if any_choice_fits(needs, roomier, keys)]
        choices = [choice for keys in possible for choice in memory_choices(needs, keys)]
        bounds = sorted((prices.least_seconds(choice, pair), i) for i, (choice, *pair) in enumerate(choices))
        fastest = None
        best = (math.inf, len(choices))  # seconds, and the number of the choice
        for bound in bounds:
            if bound > best:
                break
            choice = choices[bound[1]]
            memory = fit_with_fewest_slow_layers(*choice, budget)
            if memory is not None and (candidate := (prices.seconds(memory), bound[1])) < best:
                fastest = memory
                best = candidate
        if fastest is not None:
            return fastest
    leanest = min(
        leanest_plans(needs, fixed),
        key=lambda memory: max(0, memory.device.total - budget.device) + max(0, memory.host.total - budget.host),
    )
    keys = ", ".join(f"{name} = {value!r}" for name, value in vars(fixed).items() if value is not None)
    device = leanest.device.total
    host = leanest.host.total
    packed = "" if settings.trains_all or leanest.device.packed else ', model.frozen = "nf4"'
    halved = leanest.offload_weights and host > budget.host and settings.parameter_bytes > 2
    smaller = ', model.dtype = "bfloat16" (half as many bytes on the host)' if halved else ""
    raise PlanError(
        f"the run does not fit {f'with {keys}' if keys else 'under any measure'}: with a slot of {leanest.rows:,} rows "
        f"a rank needs at least {gib_text(device)} ({device:,} bytes) of a GPU that may fill "
        f"{gib_text(budget.device)} ({budget.device:,}), and {gib_text(host)} ({host:,}) of its host's "
        f"{gib_text(budget.host)} ({budget.host:,}); use more than {len(home.ranks)} ranks, fewer rows a slot "
        f"(context.max_tokens_per_slot){packed}{smaller}, or a higher parallel.tp"
    )


def _fixed_by_level(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[list[FixedMemory]]:
    """Yield the keys without segments and weights on the host, then with one of them, then with both."""
    segments = _segment_sizes_to_try(fixed)
    weights = _weight_places_to_try(needs, fixed)
    for level in range(len(segments) + len(weights) - 1):
        yield [
            replace(fixed, segment_layers=size, offload_weights=on_host)
            for size in segments
            for on_host in weights
            if segments.index(size) + weights.index(on_host) == level
        ]


def _segment_sizes_to_try(fixed: FixedMemory) -> list[int]:
    if fixed.segment_layers is not None:
        return [fixed.segment_layers]
    return [0, SEGMENT_LAYERS] if fixed.measure != "none" else [0]


def _weight_places_to_try(needs: MemoryNeeds, fixed: FixedMemory) -> list[bool]:
    """Whether weights may be on the host (True); trained ones take the optimizer's states along."""
    place = needs.places[0]
    if fixed.offload_weights is not None:
        return [fixed.offload_weights]
    stay = place.reason_for_weights_on_device or not place.settings.gpu
    states_stay = place.settings.trains_all and fixed.offload_optimizer_states is False
    return [False] if stay or states_stay or fixed.gathered_once else [False, True]


def memory_choices(
    needs: MemoryNeeds, fixed: FixedMemory
) -> Iterator[tuple[MemoryNeeds, CheckpointPolicy, CheckpointPolicy]]:
    """Yield the choices in order: the needs under each setting, with each pair of a slower measure and a faster.
    "exchanged" equals "selective" where no load exchanges heads, and is left out.
    """
    exchanges = any(load.exchanged_rows for load in needs.loads)
    words: list[CheckpointPolicy] = [word for word in fixed.measures if exchanges or word != "exchanged"]
    for settings in _settings_to_try(needs, fixed):
        changed = needs.with_settings(settings)
        for fast, slow in combinations_with_replacement(words, 2):
            yield changed, slow, fast


def _settings_to_try(needs: MemoryNeeds, fixed: FixedMemory) -> list[MemorySettings]:
    """List the settings with each value of what is not fixed: the fastest first, and only where it changes anything."""
    place = needs.places[0]
    settings = place.settings
    tiles_open = fixed.mlp_tile_tokens is None
    tiles = [fixed.mlp_tile_tokens or 0]
    if tiles_open and max(load.rows for load in needs.loads) > TILE_ROWS and place.read.family.experts_interface:
        tiles = [0, TILE_ROWS, SMALL_TILE_ROWS]
    states: list[bool] = [False, True][: 1 + (settings.gpu and settings.state_numbers > 0)]
    if fixed.offload_optimizer_states is not None:
        states = [fixed.offload_optimizer_states]
    on_host = [
        (states_move, weights_move)
        for weights_move in _weight_places_to_try(needs, fixed)
        for states_move in ([settings.state_numbers > 0] if weights_move and settings.trains_all else states)
    ]
    sharding = [(False, False)]  # gathered once, and summed once, as one micro-batch is
    if settings.shard_parameters and not place.always_whole:
        sharding = [(True, True), (True, False), (False, False)][place.micro_batches == 1 :]
    by_hand = fixed.gathered_once, fixed.summed_once
    sharding = [tuple(a if b is None else b for a, b in zip(once, by_hand, strict=True)) for once in sharding]
    sharding = dict.fromkeys(once for once in sharding if once[0] or not once[1])  # sums once keep weights too
    return [
        replace(
            settings,
            segment_layers=segments,
            mlp_tile_tokens=tile_rows,
            offload_optimizer_states=states_move,
            offload_weights=weights_move,
            gathered_once=gathered_once,
            summed_once=summed_once,
        )
        for segments, tile_rows, (states_move, weights_move), (gathered_once, summed_once) in product(
            _segment_sizes_to_try(fixed), tiles, on_host, sharding
        )
        if not (weights_move and gathered_once)
        and (segments or not tiles_open or tile_rows != SMALL_TILE_ROWS)  # small tiles come with segments
    ]


def _leanest_choices(
    needs: MemoryNeeds, fixed: FixedMemory
) -> list[tuple[MemoryNeeds, CheckpointPolicy, CheckpointPolicy]]:
    """List the choices, as `memory_choices` gives them, beside which any other needs more memory, but in a model of few
    layers, where another one may need about 1 % less.
    """
    # on the host, or not
    leanest = {fixed.measures[-1], *[word for word in fixed.measures if "+" not in word][-1:]}
    words = [word for word in fixed.measures if word in leanest]
    once = {"gathered_once": bool(fixed.gathered_once), "summed_once": bool(fixed.summed_once)}
    settings = _settings_to_try(needs, replace(fixed, **once))
    tile_rows = {one.segment_layers: one.mlp_tile_tokens for one in settings}  # the last, which are fewest
    return [
        (changed, slow, fast)
        for changed in (
            needs.with_settings(one) for one in settings if one.mlp_tile_tokens == tile_rows[one.segment_layers]
        )
        for fast, slow in combinations_with_replacement(words, 2)
    ]


def any_choice_fits(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> bool:
    return any(
        fit_with_fewest_slow_layers(*choice, budget) is not None for choice in _leanest_choices(needs, fixed)
    )


def leanest_plans(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryPlan]:
    """Yield the plans in which layers keep as little as the fixed keys allow, the least of a GPU first."""
    for choice, slow, fast in reversed(_leanest_choices(needs, fixed)):
        if slow == fast:
            yield choice.under(slow)


def fit_with_fewest_slow_layers(
    needs: MemoryNeeds, slow: CheckpointPolicy, fast: CheckpointPolicy, budget: MemoryBudget
) -> MemoryPlan | None:
    """Return the plan that fits with the fewest layers of the slower measure; None where none fits device and host.
    More such layers take less of the device, and of the host too unless only the slower measure keeps tensors there;
    then the fewest that fit the device take least of the host. So halving finds the fewest.
    """
    high = max(len(place.stage.layers) for place in needs.places)
    low = high if slow == fast else 1
    host_rises = "+" in slow and "+" not in fast
    search_budget = replace(budget, host=sys.maxsize) if host_rises else budget

    def fits(count: int) -> bool:
        return needs.fit(needs.measures_of_layers(slow, count, fast), search_budget)

    if not fits(high):
        return None
    while low < high:
        count = (low + high) // 2
        low, high = (low, count) if fits(count) else (count + 1, high)
    memory = needs.under(needs.measures_of_layers(slow, low, fast))
    return memory if memory.fits(budget) else None
