"""What a plan of memory costs: seconds that recomputation, another gather, and copies to the host add to a micro-batch."""

from typing import Any

from longspan.plan.cost.cost_changes import Recomputation
from longspan.plan.cost.machine import CostSettings, Machine
from longspan.plan.cost.model_shape import ModelShape
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan

HIDDEN_SHARE = 0.9  # of copies to the host and back beside a layer's work, where they are shorter than it


def added_seconds(config: Any, memory: MemoryPlan, needs: MemoryNeeds, machine: Machine) -> float:
    """Seconds that the largest micro-batch takes longer than if all were kept on the device, by a machine's prices.

    Recomputation by `Machine.cost` of the rows of one document; heads that are exchanged again; copies to and from the host
    beyond what a layer's work hides; the second gather of weights; states that are copied for the update.
    """
    place, load = needs.places[0], max(needs.loads)
    settings, rows = place.settings, load.rows
    layers = len(memory.measures)
    frozen = not settings.trains_all
    plain = machine.cost(config, CostSettings(depths=settings.depths, frozen=frozen)).shared_by(place.home.tp)
    seconds = 0.0
    for kind in ("selective", "full"):
        count = sum(_recomputes(word) == kind for word in memory.measures)
        if count:
            again = machine.cost(
                config,
                CostSettings(recomputation=kind, recomputed_layers=count, depths=settings.depths, frozen=frozen),
            ).shared_by(place.home.tp)
            seconds += float(again.work_seconds(rows, rows * rows) - plain.work_seconds(rows, rows * rows))
    leans = sum(word.startswith("selective") for word in memory.measures)
    if load.exchanged_rows and leans:
        shape = ModelShape.of(config, depths=settings.depths)
        moved = load.exchanged_rows * (shape.query_width + 2 * shape.key_width) * settings.compute_bytes
        seconds += leans * moved / machine.inside.point.bytes_per_second
    seconds += _host_seconds(memory, needs, machine, float(plain.work_seconds(rows, rows * rows)) / layers)
    if not memory.gathered_once and place.shards > 1 and place.home.pp == 1 and settings.shard_parameters:
        every = sum(numbers.whole for numbers in place.numbers.layers)
        wire = every * settings.compute_bytes * (place.shards - 1) / place.shards / machine.sharding_bytes_per_second
        seconds += machine.weight_copy_seconds * every + machine.sharding_share * wire
    if memory.offload_states:
        seconds += 2 * memory.host.states / machine.host_copy_bytes_per_second
    return seconds


def _recomputes(word: str) -> Recomputation:
    what = word.partition("+")[0]
    return "none" if what == "none" else "full" if what == "full" else "selective"


def _host_seconds(memory: MemoryPlan, needs: MemoryNeeds, machine: Machine, layer_seconds: float) -> float:
    """Copies there and back that layers' work does not hide, with a share of those that it does."""
    place, load = needs.places[0], max(needs.loads)
    seconds = 0.0
    for index, word in enumerate(memory.measures):
        size = place.layer_bytes(index, load, word).host
        if size:
            copied = size / machine.host_copy_bytes_per_second
            shown = max(0.0, copied - layer_seconds / 3) + max(0.0, copied - layer_seconds)
            seconds += shown + 2 * (1 - HIDDEN_SHARE) * min(copied, layer_seconds / 3)
    return seconds
