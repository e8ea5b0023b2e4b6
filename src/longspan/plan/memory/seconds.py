"""What a plan of memory costs: seconds that recomputation, another gather, and copies to the host add to a micro-batch.

By a machine's prices, for the largest load. They compare choices; a step's time is `Machine.cost`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Any

from longspan.plan.cost.cost import Cost
from longspan.plan.cost.cost_changes import CostSettings, Recomputation
from longspan.plan.cost.machine import SHARDING_SHARE, Machine
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan
from longspan.plan.memory.settings import Measure
from longspan.plan.memory.stage_bytes import StageBytes
from longspan.plan.plan import Plan
from longspan.plan.shape.model_shape import ModelShape

BOTH_WAYS = 102 / 55  # bytes/s of copies there and back at once, over those of one way (an H200's bus, in GB/s)
TILED_SHARE = 0.06  # of a layer's time, which tiles of its MLP add to it (an H200, 128K to 512K rows)
SHOWN_SHARE = 0.1  # of the time of copies to the host that runs beside a layer's work, and is lost all the same


def added_seconds(config: Any, memory: MemoryPlan, needs: MemoryNeeds, machine: Machine) -> float:
    """Return the seconds that the largest micro-batch takes longer than if everything were kept on the device.

    >>> added_seconds("Qwen3-8B/config.json", needs.under("full"), needs, Machine.known("H200"))  # doctest: +SKIP
    """
    return MemoryPrices(config, machine, needs.places[0], max(needs.loads)).seconds(memory)


def step_seconds(
    config: Any, plans: Sequence[Plan], memory: MemoryPlan, needs: MemoryNeeds, machine: Machine, cost: Cost
) -> float:
    """Return the mean seconds of a step over some plans: those by `cost`, and those that its settings leave out.

    >>> step_seconds("Qwen3-8B/config.json", plans, memory, needs, machine, cost)  # doctest: +SKIP

    `needs` are those of the plans, and `cost` is of a rank, made with `MemoryPlan.cost_settings`. What layers add in
    the largest micro-batch, which has `memory.rows` rows a slot, is scaled to the tokens of each step.
    """
    layer_seconds, state_seconds = seconds_beyond_settings(config, memory, needs, machine)
    token_seconds = layer_seconds / (memory.rows * needs.places[0].home.slots)
    return mean(plan.timeline(cost).step_seconds + token_seconds * plan.tokens + state_seconds for plan in plans)


def seconds_beyond_settings(
    config: Any, memory: MemoryPlan, needs: MemoryNeeds, machine: Machine
) -> tuple[float, float]:
    """Return the seconds that `MemoryPlan.cost_settings` leaves out: of the largest micro-batch, and of a step.

    Settings of a cost know one measure for all layers that recompute. The first figure is what the plan's measures take
    longer than that one measure, copies to the host included, or less (negative). The second is what copies of the
    optimizer's states on the host take.
    """
    prices = MemoryPrices(config, machine, needs.places[0], max(needs.loads))
    without_offload = replace(memory, offload_states=False)
    word: Measure = memory.recomputation
    one_measure = tuple("none" if measure == "none" else word for measure in memory.measures)
    layer_seconds = prices.seconds(without_offload)
    priced_seconds = prices.seconds(replace(without_offload, measures=one_measure))
    return layer_seconds - priced_seconds, prices.seconds(memory) - layer_seconds


@dataclass(frozen=True)
class MemoryPrices:
    """Prices of what layers keep, for one load: made once for many plans of memory."""

    config: Any
    machine: Machine
    place: StageBytes
    load: SlotLoad

    def seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds that a plan adds to a micro-batch: those of layers, of gathers, and of states on the host.

        States are copied to the device and back once, in both directions at a time.
        """
        tiled = bool(memory.mlp_tile_rows)
        layers = sum(self._layer_seconds(index, word, tiled=tiled) for index, word in enumerate(memory.measures))
        if memory.segment_layers > 1:  # all but the last layer of a segment run forward once more, attention included
            layers_run_again = sum(word != "none" for word in memory.measures) * (1 - 1 / memory.segment_layers)
            layers += layers_run_again * (self._full_seconds + self._exchange_seconds.get("full", 0.0))
        gather = 0.0 if memory.gathered_once else self._gather_seconds
        states = memory.host.states if memory.offload_states else 0
        state_copies = 2 * states / (BOTH_WAYS * self.machine.host_copy_bytes_per_second)
        return layers + gather + state_copies

    def least_seconds(self, needs: MemoryNeeds, words: Sequence[Measure]) -> float:
        """Return the least seconds that a plan of these needs may add, if each layer keeps one of these measures.

        No plan is below it by rounding either: each sum has the terms of `seconds` in the same order, or smaller ones.
        """
        settings = needs.places[0].settings
        tiled = bool(settings.mlp_tile_rows)
        layers = sum(
            min(self._layer_seconds(index, word, tiled=tiled) for word in words) for index in range(needs.layers)
        )
        return layers + (0.0 if settings.gathered_once else self._gather_seconds)

    def _layer_seconds(self, index: int, word: str, *, tiled: bool = False) -> float:
        """Return the seconds that a layer's measure adds: what is computed and exchanged again, and copies to the host.

        Tiles cost TILED_SHARE of a plain layer's time, lost to smaller products. A tiled MLP runs forward again in
        backward: a layer that keeps all then counts as "selective", and any other layer repeats the MLP anyway.
        """
        kind, _, host = word.partition("+")
        if tiled:
            untiled = self._selective_seconds if kind == "none" else self._layer_seconds(index, word)
            return untiled + TILED_SHARE * self._plain_seconds
        if kind == "none":
            return 0.0
        seconds = self._full_seconds if kind == "full" else self._selective_seconds
        seconds += self._exchange_seconds.get(kind, 0.0)
        return seconds + (self._host_seconds(index, word) if host else 0.0)

    def _seconds_under(self, kind: Recomputation) -> float:
        """Return a slot's seconds for the load in all layers, if all layers recompute by `kind`.

        The load is taken for a slot's part of equally long documents over `degree` slots. There are half as many
        documents as the load has runs, for zigzag gives a slot two runs of a document.
        """
        settings = self.place.settings
        costs = CostSettings(
            recomputation=kind,
            depths=settings.depths,
            frozen=not settings.trains_all,
            float8=settings.float8,
            compiled=settings.compiled if settings.gpu and self.place.home.tp == 1 else "none",
            ep=self.place.home.ep,
        )
        cost: Cost = self.machine.cost(self.config, costs).shared_by(self.place.home.tp)
        degree = max(1, self.degree)
        rows, documents = self.load.rows * degree, max(1, self.load.runs // 2)
        return float(cost.work_seconds(rows, rows * rows / documents)) / degree  # the sum of squared lengths

    @property
    def degree(self) -> int:
        """Slots that share a document: all if the load has rows that are exchanged, travel or are gathered, else 1."""
        load = self.load
        return self.place.home.slots if load.exchanged_rows or load.ring_rows or load.gathered_rows else 1

    @property
    def _layer_count(self) -> int:
        """Decoder layers, with those of depths of prediction."""
        return len(self.place.numbers.kinds)

    @cached_property
    def _plain_seconds(self) -> float:
        """Seconds of a layer that recomputes nothing, forward and backward."""
        return self._seconds_under("none") / self._layer_count

    @cached_property
    def _selective_seconds(self) -> float:
        """Seconds that a layer takes longer if it recomputes all but attention."""
        return max(0.0, self._seconds_under("selective") / self._layer_count - self._plain_seconds)

    @cached_property
    def _full_seconds(self) -> float:
        """Seconds that a layer takes longer if it recomputes all."""
        return max(0.0, self._seconds_under("full") / self._layer_count - self._plain_seconds)

    @cached_property
    def _exchange_seconds(self) -> dict[str, float]:
        """Return, by measure, the seconds of the exchanges that a layer repeats; none where no heads are exchanged.

        Under "selective" these are exchanges of queries, keys and values, under "full" also of the output; under
        "exchanged" a layer repeats none. `seconds_of_number` is for one number of each exchanged row.
        """
        if not self.load.exchanged_rows:
            return {}
        shape = ModelShape.of(self.config, depths=self.place.settings.depths)
        bytes_of_number = self.load.exchanged_rows * self.place.settings.compute_bytes / self.place.home.tp
        # Members that exchange heads are taken to be in one node.
        seconds_of_number = bytes_of_number / self.machine.inside.point.bytes_per_second
        widths = {
            "selective": shape.query_width + 2 * shape.key_width,
            "full": 2 * (shape.query_width + shape.key_width),
        }
        return {kind: seconds_of_number * width for kind, width in widths.items()}

    def _host_seconds(self, index: int, word: str) -> float:
        """Return the seconds that a layer's copies to the host and back add.

        The copy there may hide behind a layer's forward pass, taken for a third of the layer's time, and the copy back
        behind its backward pass. What does not hide counts whole, and of what hides SHOWN_SHARE.
        """
        size = self.place.layer_bytes(index, self.load, word).host  # pyright: ignore[reportArgumentType]
        copy_seconds = size / self.machine.host_copy_bytes_per_second
        forward = self._plain_seconds / 3
        backward = self._plain_seconds - forward
        hidden_seconds = min(copy_seconds, forward) + min(copy_seconds, backward)
        return 2 * copy_seconds - hidden_seconds + SHOWN_SHARE * hidden_seconds

    @cached_property
    def _gather_seconds(self) -> float:
        """Return the seconds of a micro-batch's second gather of weights; 0 where they are unsharded or stay whole.

        A gather takes copies of weights, and the share of the wire's time that does not hide behind other work.
        """
        place, machine = self.place, self.machine
        if place.shards == 1 or place.stays_whole:
            return 0.0
        numbers_of_layers = sum(numbers.whole for numbers in place.numbers.layers)
        received_bytes = numbers_of_layers * place.settings.compute_bytes * (place.shards - 1) / place.shards
        wire_seconds = received_bytes / machine.sharding_bytes_per_second
        return machine.weight_copy_seconds * numbers_of_layers + SHARDING_SHARE * wire_seconds
