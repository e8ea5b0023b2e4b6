"""What a plan of memory costs: seconds that recomputation, another gather and copies to the host add to a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Any

from longspan.plan.cost.cost import Cost
from longspan.plan.cost.machine import SHARDING_SHARE, CostSettings, Machine, Recomputation
from longspan.plan.memory.layer_table import SlotLoad
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan
from longspan.plan.memory.settings import MEASURES, Measure
from longspan.plan.memory.stage_bytes import StageBytes
from longspan.plan.plan import Plan
from longspan.plan.shape.model_shape import ModelShape

BOTH_WAYS = 102 / 55  # bytes/s of copies there and back at once, over those of one way (an H200's bus, in GB/s)
TILED_SHARE = 0.06  # of a layer's time, which tiles of its MLP add to it (an H200, 128K to 512K rows)
SHOWN_SHARE = 0.1  # of the time of copies to the host that runs beside a layer's work, and is lost all the same


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
    longer than that one, copies to the host included, or less (negative); the second is for states on the host.
    """
    prices = MemoryPrices(config, machine, needs.places[0], max(needs.loads))
    word: Measure = memory.recomputation
    one_measure = tuple("none" if measure == "none" else word for measure in memory.measures)
    layer_seconds = prices.seconds(replace(memory, offload_states=False))
    priced_seconds = prices.seconds(replace(memory, offload_states=False, measures=one_measure))
    return layer_seconds - priced_seconds, prices.seconds(memory) - layer_seconds


@dataclass(frozen=True)
class MemoryPrices:
    """Prices of what layers keep, for one load: made once for many plans of memory."""

    config: Any
    machine: Machine
    place: StageBytes
    load: SlotLoad

    def seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds that a plan adds to a micro-batch: of layers, of gathers, and of states on the host."""
        prices = self._layer_seconds[bool(memory.mlp_tile_rows)]
        layers = sum(prices[word] for word in memory.measures)
        if memory.segment_layers > 1:  # all but the last layer of a segment run forward once more, attention included
            layers_run_again = sum(word != "none" for word in memory.measures) * (1 - 1 / memory.segment_layers)
            layers += layers_run_again * self._layer_seconds[False]["full"]
        states = memory.host.states if memory.offload_states else 0
        state_copies = 2 * states / (BOTH_WAYS * self.machine.host_copy_bytes_per_second)
        return layers + self._gather_seconds * (not memory.gathered_once) + state_copies

    def least_seconds(self, needs: MemoryNeeds, words: Sequence[Measure]) -> float:
        """Return the least seconds that a plan of these needs may add, if each layer keeps one of these measures."""
        settings = needs.places[0].settings
        prices = self._layer_seconds[bool(settings.mlp_tile_rows)]
        # the terms of `seconds` in the same order, or smaller ones: no plan is below it by rounding either
        layers = sum(min(prices[word] for word in words) for _ in range(needs.layers))
        return layers + self._gather_seconds * (not settings.gathered_once)

    @cached_property
    def _layer_seconds(self) -> dict[bool, dict[str, float]]:
        """Seconds that a measure adds to a layer, without tiles (False) and with them (True).

        They are those of what is computed and exchanged again: queries, keys and values under "selective", the output
        too under "full". The load is a slot's part of equally long documents, half as many as it has runs (zigzag gives
        a slot two of each). A copy to the host may hide behind the forward pass, a third of a layer's time, and the
        copy back behind the rest; of what hides SHOWN_SHARE counts. A tiled MLP runs forward again, so that a layer
        that keeps all counts as one that recomputes.
        """
        place, load, settings = self.place, self.load, self.place.settings
        moves = load.exchanged_rows or load.ring_rows or load.gathered_rows
        degree, layers = place.home.slots if moves else 1, len(place.numbers.kinds)
        rows, documents = load.rows * degree, max(1, load.runs // 2)
        costs = CostSettings(
            depths=settings.depths,
            frozen=not settings.trains_all,
            float8=settings.float8,
            compiled=settings.compiled if settings.gpu and place.home.tp == 1 else "none",
            ep=place.home.ep,
        )

        def layer_seconds(kind: Recomputation) -> float:
            cost = self.machine.cost(self.config, replace(costs, recomputation=kind)).shared_by(place.home.tp)
            return float(cost.work_seconds(rows, rows * rows / documents)) / degree / layers  # the squares' sum last

        plain = layer_seconds("none")
        selective, full = (max(0.0, layer_seconds(kind) - plain) for kind in ("selective", "full"))
        shape = ModelShape.of(self.config, depths=settings.depths)
        # Members that exchange heads are taken to be in one node.
        exchanged = load.exchanged_rows * settings.compute_bytes / place.home.tp
        number_seconds = exchanged / self.machine.inside.point.bytes_per_second  # of a number of each exchanged row
        again = {"none": 0.0, "exchanged": selective}
        again["selective"] = selective + number_seconds * (shape.query_width + 2 * shape.key_width)
        again["full"] = full + number_seconds * 2 * (shape.query_width + shape.key_width)
        whole, tiled = dict[str, float](), dict[str, float]()
        for word in MEASURES:
            kind, _, host = word.partition("+")
            size = mean(place.layer_bytes(layer, load, word).host for layer in place.stage.layers) if host else 0.0
            copy = size / self.machine.host_copy_bytes_per_second
            hidden = min(copy, plain / 3) + min(copy, plain - plain / 3)
            whole[word] = again[kind] + 2 * copy - (1 - SHOWN_SHARE) * hidden
            tiled[word] = (selective if word == "none" else whole[word]) + TILED_SHARE * plain
        return {False: whole, True: tiled}

    @cached_property
    def _gather_seconds(self) -> float:
        """Seconds of a micro-batch's second gather of weights; 0 where they are unsharded or stay whole.

        A gather takes copies of weights, and the share of the wire's time that does not hide behind other work.
        """
        place, machine = self.place, self.machine
        if place.shards == 1 or place.stays_whole:
            return 0.0
        numbers_of_layers = sum(numbers.whole for numbers in place.numbers.layers)
        received_bytes = numbers_of_layers * place.settings.compute_bytes * (place.shards - 1) / place.shards
        wire_seconds = received_bytes / machine.sharding_bytes_per_second
        return machine.weight_copy_seconds * numbers_of_layers + SHARDING_SHARE * wire_seconds
