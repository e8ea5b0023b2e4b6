"""MemoryPlan: the bytes of a run on device and host, of the rank that needs most, with what each layer keeps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.errors import PlanError, plural
from longspan.layout import Layout
from longspan.plan.cost.machine import CostSettings, Machine, Recomputation
from longspan.plan.memory.bytes import Bytes, gib_text
from longspan.plan.memory.layer_table import SlotLoad, slot_loads
from longspan.plan.memory.parameters import ModelNumbers, make_stages
from longspan.plan.memory.settings import MEASURES, Measure, MemoryBudget, MemorySettings
from longspan.plan.memory.stage_bytes import StageBytes
from longspan.plan.plan import Plan
from longspan.plan.shape.config_reader import ConfigReader

MOST_GROUPS = 8  # of a slot that have communicators of their own (comm/groups/)
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

    >>> plan = plan_fixed([262144], home, cp=4)
    >>> memory = MemoryPlan.of("Qwen3-8B/config.json", home, plan, MemorySettings(), "selective")  # doctest: +SKIP
    >>> memory.device.total  # doctest: +SKIP

    `measures` has a word for each decoder layer, depths of multi-token prediction last; `rows` are the most of a slot
    in one micro-batch. `device` is at the moment at which most is held, `host` all that waits there.
    """

    device: Bytes
    host: Bytes
    measures: tuple[Measure, ...]
    rows: int
    gathered_once: bool = False
    offload_states: bool = False
    mlp_tile_rows: int = 0
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
        `Measure`, and whether that waits on the host.
        `config` is a transformers configuration, object or dict, a config.json or its folder. `machine` decides which
        communication type "auto" is (None: an H200). Raises PlanError for a model or measures that it cannot read.
        """
        return MemoryNeeds.of(config, home, plan, settings, machine=machine).under(measures)

    def fits(self, budget: MemoryBudget) -> bool:
        """Whether the plan fits a budget of bytes."""
        return self.device.total <= budget.device and self.host.total <= budget.host

    def cost_settings(self, settings: CostSettings) -> CostSettings:
        """Return the settings of a cost under this plan, whose recomputed layers all keep what most of them keep."""
        recomputed, once = len(self.measures) - self.measures.count("none"), self.gathered_once
        return replace(settings, recomputed_layers=recomputed, gathered_once=once, recomputation=self.recomputation)

    @property
    def recomputation(self) -> Recomputation:
        """What most of the recomputed layers keep, on device or host; "none" where none is recomputed."""
        kinds = [word.partition("+")[0] for word in self.measures if word != "none"]
        return max(kinds, key=kinds.count, default="none")  # pyright: ignore[reportReturnType]

    def summary_line(self, budget: MemoryBudget | None = None) -> str:
        """Return what layers keep and what is filled, in one line; the first count says also of how many layers."""
        limit = f" of {gib_text(budget.device)}" if budget else ""
        extras = [", weights gathered once"] * self.gathered_once + [", states on the host"] * self.offload_states
        extras += [f", MLPs in tiles of {self.mlp_tile_rows:,} rows"] * bool(self.mlp_tile_rows)
        layers = min(self.segment_layers, len(self.measures))
        extras += [f", segments of {plural(layers, 'layer')}"] * bool(layers)
        used = gib_text(self.device.total).removesuffix(" GiB" * bool(budget)) + limit
        host = f"{gib_text(self.host.total)} of host memory"
        return f"memory: {measures_text(self.measures)}{''.join(extras)}; {used} used, and {host}"

    def to_json(self) -> dict[str, Any]:
        """Return all values, bytes as integers."""
        device, host = self.device.to_json(), self.host.to_json()
        return vars(self) | {"device": device, "host": host, "measures": list(self.measures)}


def measures_text(measures: Sequence[object]) -> str:
    """Return what the layers keep, in words: "12 of 36 layers keep all, 24 keep their input".

    `measures` has a word of `Measure` for each layer; only the first part names the number of all layers.
    """
    words = [str(word) for word in measures]
    counts = Counter(words)
    parts = [f"{counts[word]} {_MEASURE_TEXTS.get(word, word)}" for word in sorted(counts, key=words.index)]
    return ", ".join(parts).replace(" ", f" of {len(words)} layers ", 1)


@dataclass(frozen=True)
class MemoryNeeds:
    """The bytes of a run before it is decided what layers keep: made once, asked for many choices.

    >>> needs.under("selective").device.total  # doctest: +SKIP
    """

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
        """Count the needs of a run of one plan or several, as `MemoryPlan.of` takes them."""
        plans, read = [plan] if isinstance(plan, Plan) else list(plan), ConfigReader.of(config)
        loads = slot_loads(plans, read, settings, machine or Machine(), home.tp)
        micro_batches = max((len(plan.micro_batches) for plan in plans), default=1)
        numbers = ModelNumbers.of(config, home, settings)
        # A group of several slots, but not of all, has a communicator of its own.
        slots = max((plan.slots for plan in plans), default=1)
        groups = {group.slots for plan in plans for batch in plan.micro_batches for group in batch.groups}
        counts = Counter(slot for group in groups if 1 < len(group) < slots for slot in group)
        most_groups = min(max(counts.values(), default=0), MOST_GROUPS)
        waiting = (_count_waiting_micro_batches(home, settings, rank, micro_batches) for rank in range(home.pp))
        stages = zip(make_stages(numbers, home, settings), waiting, strict=True)
        places = (StageBytes(read, home, settings, numbers, stage, count, most_groups) for stage, count in stages)
        return cls(tuple(places), loads)

    @property
    def layers(self) -> int:
        """Decoder layers, depths included."""
        return len(self.places[0].numbers.kinds)

    def with_settings(self, **changes: Any) -> "MemoryNeeds":
        """Return the needs of the same run under changed settings."""
        settings = replace(self.places[0].settings, **changes)
        return replace(self, places=tuple(replace(place, settings=settings) for place in self.places))

    def measures_of_layers(self, first: str, count: int, others: str) -> tuple[str, ...]:
        """Return a word for each layer: `first` for the first `count` of each rank, `others` for the rest."""
        words = [others] * self.layers
        for place in self.places:
            for layer in place.stage.layers[:count]:
                words[layer] = first
        return tuple(words)

    def under(self, measures: str | Sequence[str]) -> MemoryPlan:
        """Return the plan of memory where layers keep what `measures` says: a word for all, or one for each.

        Raises PlanError for a word that is no measure, and for another number of words than layers.
        """
        settings = self.places[0].settings
        known: dict[str, Measure] = {str(word): word for word in MEASURES}
        layer_words = (measures,) * self.layers if isinstance(measures, str) else tuple(measures)
        if unknown := [word for word in layer_words if word not in known]:
            raise PlanError(f"a layer keeps {unknown[0]!r}; use one of {', '.join(MEASURES)}")
        if (count := len(layer_words)) != self.layers:
            raise PlanError(f"{count} measures were given for {self.layers} layers, depths included; give one a layer")
        words: tuple[Measure, ...] = tuple(known[word] for word in layer_words)
        moments = (moment for place in self.places for moment in place.moments(self.loads, words))
        hosts = (place.host_bytes(self.loads, words) for place in self.places)
        return MemoryPlan(
            device=max(moments, key=lambda moment: moment.total),
            host=max(hosts, key=lambda host: host.total),
            measures=words,
            rows=max(load.rows for load in self.loads),
            gathered_once=settings.gathered_once,
            offload_states=settings.offload_states,
            mlp_tile_rows=settings.mlp_tile_rows,
            segment_layers=settings.segment_layers,
        )


def _count_waiting_micro_batches(
    home: Layout, settings: MemorySettings, pipeline_rank: int, micro_batches: int
) -> float:
    """Count how many micro-batches wait for their backward passes at most, on a rank of the pipeline.

    With chunks (virtual stages) a micro-batch counts for each chunk that it has passed, as its part of the rank's
    layers. GPipe runs all forward passes first. Under 1F1B, interleaved with several chunks, a rank runs as many as
    there are ranks behind it, and one more, before its first backward pass.
    """
    if home.pp == 1:
        return 1.0
    if settings.schedule == "gpipe":
        return float(micro_batches)
    chunks, ranks_behind = settings.vpp, home.pp - pipeline_rank - 1
    warm_up = ranks_behind if chunks == 1 else 2 * ranks_behind + (chunks - 1) * home.pp
    return min(warm_up + 1, micro_batches * chunks) / chunks
