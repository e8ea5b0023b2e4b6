"""MemoryPlan: what layers keep, the bytes of a run on device and host, and the seconds that this adds to a step.

Which plan is taken `memory_choice.py` decides.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Any

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plain_text import gib_text
from longspan.plan.cost.cost import FORWARD_SHARE, Cost
from longspan.plan.cost.machine import ONE_AT_A_TIME, SHARDING_SHARE, CostSettings, Machine
from longspan.plan.form import CHECKPOINT_POLICIES, CheckpointPolicy, Form, Recomputation
from longspan.plan.memory.layer_table import SlotLoad, slot_loads
from longspan.plan.memory.model_numbers import ModelNumbers, Numbers, adapted_widths, make_stages
from longspan.plan.memory.settings import Bytes, MemoryBudget, MemorySettings
from longspan.plan.memory.stage_bytes import StageBytes
from longspan.plan.plan import Plan
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import feed_forward_weights
from longspan.plan.shape.model_shape import ModelShape

# A slot has at most so many groups that have communicators of their own (comm/process_groups.py).
MOST_GROUPS = 8
_POLICY_TEXTS = {
    "none": "keep all",
    "exchanged": "keep their input, attention's output and what was exchanged",
    "selective": "keep their input and attention's output",
    "full": "keep their input",
    "selective+host": "keep their input and attention's output in host memory",
    "full+host": "keep their input in host memory",
}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Form):
    """What a run needs of the rank that needs most, and what its layers keep.

    >>> plan = plan_fixed([262144], Layout(4), cp=4)
    >>> memory = MemoryPlan.of("Qwen3-8B/config.json", home, plan, MemorySettings(), "selective")  # doctest: +SKIP
    >>> memory.device.total  # doctest: +SKIP

    A form whose `checkpoint_policies` has a word for each layer; `rows` are the most of a slot in one micro-batch.
    `device` is at the moment at which most is held, `host` all that waits there.
    """

    device: Bytes
    host: Bytes
    checkpoint_policies: tuple[CheckpointPolicy, ...] = ()
    rows: int

    @classmethod
    def of(
        cls,
        config: Any,
        home: Layout,
        plan: Plan | Sequence[Plan],
        settings: MemorySettings,
        policies: str | Sequence[str],
        *,
        machine: Machine | None = None,
    ) -> "MemoryPlan":
        """Count the memory of a run of one plan or several: `policies` is a word for all layers, or one for each.

        Words are "none", "exchanged", "selective", "full", "selective+host" and "full+host": what a layer keeps, as at
        `CheckpointPolicy`, and whether that waits on the host.
        `config` is a transformers configuration, object or dict, a config.json or its folder. `machine` decides which
        communication type "auto" is (None: an H200). Raises PlanError for a model or policies that it cannot read.
        """
        return MemoryNeeds.of(config, home, plan, settings, machine=machine).under(policies)

    def fits(self, budget: MemoryBudget) -> bool:
        return self.device.total <= budget.device and self.host.total <= budget.host

    def cost_settings(self, settings: CostSettings) -> CostSettings:
        """Return the settings of a cost under this plan, whose recomputed layers all keep what most of them keep."""
        return replace(settings.with_form(self), streamed_bytes=self.streamed_bytes, paged_bytes=self.paged_bytes)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights, whole and packed, that come from the host for each pass."""
        return self.host.weights + self.host.packed

    @property
    def paged_bytes(self) -> int:
        """Bytes that an update copies from the host (states, weights, gradients); at most as many go back meanwhile."""
        return self.host.states + 2 * self.host.gradients

    def summary_line(self, budget: MemoryBudget | None = None) -> str:
        """Return in one line what layers keep, what else the plan chose, and the bytes that it fills; with a budget, of
        how many bytes of the device.
        """
        used = gib_text(self.device.total)
        if budget:
            used = used.removesuffix(" GiB") + f" of {gib_text(budget.device)}"
        host = f"{gib_text(self.host.total)} of host memory"
        return f"memory: {policies_text(self.checkpoint_policies)}{self.text}; {used} used, and {host}"

    def to_json(self) -> dict[str, Any]:
        device = self.device.to_json()
        host = self.host.to_json()
        return vars(self) | {"device": device, "host": host, "checkpoint_policies": list(self.checkpoint_policies)}


def policies_text(policies: Sequence[object]) -> str:
    """Return what the layers keep, in words: "12 of 36 layers keep all, 24 keep their input"; `policies` has a word of
    `CheckpointPolicy` for each layer.
    """
    words = [str(word) for word in policies]
    counts = Counter(words)
    parts = [f"{counts[word]} {_POLICY_TEXTS.get(word, word)}" for word in sorted(counts, key=words.index)]
    # the first space stands behind the first count
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
        return ModelShape.of(self.config, mtp_layers=self.settings.mtp_layers)

    @cached_property
    def layer_costs(self) -> dict[Recomputation, Cost]:
        """The cost of a slot where all layers keep all ("none"), "selective" or "full"."""
        settings = self.settings
        tp = self.home.tp
        costs = CostSettings(
            trains_all=settings.trains_all, adapted_widths=adapted_widths(self.config, settings), ep=self.home.ep
        ).with_form(settings)
        if not settings.gpu or tp > 1:
            costs = replace(costs, compiled="none")
        kinds: tuple[Recomputation, ...] = ("none", "selective", "full")
        return {
            kind: self.machine.cost(self.config, replace(costs, checkpoint_policies=kind)).shared_by(tp)
            for kind in kinds
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
        chunks = self.settings.vpp
        for rank, stage in enumerate(make_stages(self.numbers, home, self.settings)):
            # The most micro-batches that wait for their backward passes; with several chunks each counts for each chunk
            # that it has passed, as that chunk's part of the rank's layers. Under 1F1B a rank runs as many as there are
            # ranks behind it, and one more, before its first backward pass; interleaved, two for each rank behind it,
            # one for each rank in every chunk but the last, and one more.
            waiting = 1.0
            if home.pp > 1:
                behind = home.pp - rank - 1
                warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * home.pp
                waiting = min(warm_up + 1, micro_batches * chunks) / chunks
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
        """Count the needs of a run, with the arguments of `MemoryPlan.of`."""
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

    def policies_of_layers(
        self, first: CheckpointPolicy, count: int, others: CheckpointPolicy
    ) -> tuple[CheckpointPolicy, ...]:
        """Return a policy for each layer: `first` for the first `count` layers of every pipeline stage, `others` for
        the rest.
        """
        words: list[CheckpointPolicy] = [others] * self.layers
        for place in self.places:
            for layer in place.stage.layers[:count]:
                words[layer] = first
        return tuple(words)

    def under(self, policies: str | Sequence[str]) -> MemoryPlan:
        """Return the plan of memory where layers keep what `policies` says: a word for all, or one for each.

        Raises PlanError for a word that is no policy, and for another number of words than layers.
        """
        settings = self.places[0].settings
        known: dict[str, CheckpointPolicy] = {str(word): word for word in CHECKPOINT_POLICIES}
        layer_words = (policies,) * self.layers if isinstance(policies, str) else tuple(policies)
        if unknown := [word for word in layer_words if word not in known]:
            raise PlanError(f"a layer keeps {unknown[0]!r}; use one of {', '.join(CHECKPOINT_POLICIES)}")
        if (count := len(layer_words)) != self.layers:
            raise PlanError(
                f"{count} policies were given for {self.layers} layers, those of mtp included; give one a layer"
            )
        words: tuple[CheckpointPolicy, ...] = tuple(known[word] for word in layer_words)
        plan = MemoryPlan(
            device=max((p.most_bytes(self.loads, words) for p in self.places), key=lambda moment: moment.total),
            host=max(self._host_bytes(words), key=lambda host: host.total),
            rows=max(load.rows for load in self.loads),
        )
        return plan.with_form(replace(settings.form, checkpoint_policies=words))

    def policies_fit(self, policies: Sequence[CheckpointPolicy], budget: MemoryBudget) -> bool:
        """Return whether a plan of these policies fits; counting ends at the first moment that does not."""
        for place in self.places:
            room = budget.device - place.resident_bytes.total
            if any(moment.total > room for moment in place.moments(self.loads, policies)):
                return False
        return all(host.total <= budget.host for host in self._host_bytes(policies))

    def _host_bytes(self, policies: Sequence[CheckpointPolicy]) -> Iterator[Bytes]:
        return (place.host_bytes(self.loads, policies) for place in self.places)


# Tiles of a layer's MLP add this share of the layer's time (an H200, 128K to 512K rows, tiles of 16,384).
TILED_SHARE = 0.06
# For each tile the MLP's weights are read by so many products: forward, again in backward, and for gradients of rows.
READS_OF_TILE = 3
# This share of the time of copies to the host that runs beside a layer's work is lost all the same.
SHOWN_SHARE = 0.1


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
        return self.seconds_on_device(memory, memory.checkpoint_policies) + on_host

    def seconds_beyond_settings(self, memory: MemoryPlan) -> float:
        """Return the seconds that `MemoryPlan.cost_settings` leaves out, which knows no segments and tiles, and one
        policy for all layers that recompute: how much longer the plan takes in the largest micro-batch than under that
        one, copies to the host included; negative where it takes less.
        """
        word: CheckpointPolicy = memory.recomputation
        policies = memory.checkpoint_policies
        one_policy: list[CheckpointPolicy] = ["none" if policy == "none" else word for policy in policies]
        without = replace(memory, segment_layers=0, mlp_tile_tokens=0)
        return self.seconds_on_device(memory, policies) - self.seconds_on_device(without, one_policy)

    def update_seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds of an update's copies, without those that hide behind the next forward pass, where weights
        of layers on the host need the bus too. The root's hide behind nothing.
        """
        seconds = memory.paged_bytes / self.machine.paging_bytes_per_second
        place = self.place
        layers = len(place.stage.layers)
        layer_seconds, _ = self._layer_work
        hiding_seconds = layers * max(0.0, layer_seconds * FORWARD_SHARE - self._layer_copy_seconds(memory))
        root_share = place.root.trained / max(1.0, place.stage.all.trained)
        return max(root_share * seconds, seconds - hiding_seconds)

    def _layer_copy_seconds(self, memory: MemoryPlan) -> float:
        """The mean over the layers of the stage."""
        place = self.place
        root = place.weight_bytes(place.stage.root, on_host=True)
        return (memory.streamed_bytes - root) / len(place.stage.layers) / self.machine.paging_bytes_per_second

    def streaming_seconds(self, memory: MemoryPlan) -> float:
        """Return the seconds of a micro-batch, in the mean over a step's, in which nothing runs but copies of weights
        on the host: those of the embedding and its gradients, what the head's take longer than the last layer, and a
        layer's than its work, in each pass. In all micro-batches but the first, sums of gradients come back and go
        too, one after another. 0 where no weights are on the host.
        """
        if not memory.offload_weights:
            return 0.0
        place = self.place
        opening_bytes = place.weight_bytes(place.opening, on_host=True)
        opening_bytes += place.gradient_bytes(place.root) * place.trained_on_host
        head_seconds = place.weight_bytes(place.loss_head, on_host=True) / self.machine.paging_bytes_per_second
        copy = self._layer_copy_seconds(memory)
        work, _ = self._layer_work
        backward = (1 - FORWARD_SHARE) * work
        shown = max(0.0, copy - FORWARD_SHARE * work) + max(0.0, copy - backward) / place.micro_batches
        later_copy = ONE_AT_A_TIME * copy if place.trained_on_host else copy
        shown += max(0.0, later_copy - backward) * (1 - 1 / place.micro_batches)
        around_layers = opening_bytes / self.machine.paging_bytes_per_second
        around_layers += max(0.0, head_seconds - FORWARD_SHARE * work)
        return len(place.stage.layers) * shown + around_layers

    def seconds_on_device(self, choice: Form, policies: Sequence[CheckpointPolicy]) -> float:
        """Return the seconds of layers and of gathers where layers keep what `policies` say and the rest is as in
        `choice`.
        """
        layers = sum(map(self.layer_prices(choice).__getitem__, policies))
        # all but the last layer of a segment run forward once more, attention included, as untiled layers do
        if choice.segment_layers > 1:
            layers_run_again = sum(word != "none" for word in policies) * (1 - 1 / choice.segment_layers)
            layers += layers_run_again * self._layer_prices(0)["full"]
        return layers + self._sharding_seconds(choice)

    def layer_prices(self, choice: Form) -> dict[str, float]:
        """Return the seconds that each policy adds to a layer."""
        return self._layer_prices(choice.mlp_tile_tokens)

    def least_seconds(self, needs: MemoryNeeds, words: Sequence[CheckpointPolicy]) -> float:
        """Return the least seconds that a plan of these needs may add, if each layer keeps one of these policies."""
        settings = needs.places[0].settings
        # the terms of `seconds` in the same order, or smaller ones: no plan is below it by rounding either
        fastest = min(map(self.layer_prices(settings).__getitem__, words))
        return sum([fastest] * needs.layers) + self._sharding_seconds(settings)

    def most_slow_layers(
        self, needs: MemoryNeeds, slow: CheckpointPolicy, fast: CheckpointPolicy, seconds: float
    ) -> int:
        """Return how many layers of a stage may have the slower of two policies if they may add at most `seconds` to
        the seconds that these layers take under the faster one. It is never too few, and may be one too many.
        """
        layer_seconds = self.layer_prices(needs.places[0].settings)
        more_seconds = layer_seconds[slow] - layer_seconds[fast]
        if more_seconds <= 0.0 or seconds >= more_seconds * needs.layers:
            return needs.layers
        # One more layer is counted, as sums are rounded.
        return int(seconds / more_seconds * (1 + 1e-9)) + 1

    @cached_property
    def _layer_work(self) -> tuple[float, dict[str, float]]:
        """(of a layer that keeps all, what each policy adds by computing and exchanging again: queries, keys and
        values under "selective", the output too under "full"). The load is taken for a slot's part of equally
        long documents, half as many as it has runs (zigzag gives a slot two of each). If its rows are in groups
        of several slots, these are taken to be of all slots."""
        place = self.place
        load = self.load
        settings = place.settings
        is_shared = load.exchanged_rows or load.ring_rows or load.gathered_rows
        degree = place.home.slots if is_shared else 1
        layers = len(place.numbers.kinds)
        rows = load.rows * degree
        documents = max(1, load.runs // 2)

        def layer_seconds(kind: Recomputation) -> float:
            cost = self.model.layer_costs[kind]
            squares = rows * rows / documents
            return float(cost.work_seconds(rows, squares)) / degree / layers

        plain = layer_seconds("none")
        selective, full = (max(0.0, layer_seconds(kind) - plain) for kind in ("selective", "full"))
        shape = self.model.shape
        # Members that exchange heads are taken to be in one node.
        exchanged = load.exchanged_rows * settings.compute_bytes / place.home.tp
        # The seconds are those of a number of each exchanged row.
        number_seconds = exchanged / self.machine.inside.point.bytes_per_second
        again = {"none": 0.0, "exchanged": selective}
        again["selective"] = selective + number_seconds * (shape.query_width + 2 * shape.key_width)
        again["full"] = full + number_seconds * 2 * (shape.query_width + shape.key_width)
        return plain, again

    def _layer_prices(self, tile_rows: int) -> dict[str, float]:
        """Of MLPs in tiles of so many rows, 0: without tiles. Each tile reads the MLP's weights anew, and adds to the
        gradients of trained ones, which it reads and writes."""
        whole, tiled = self._layer_seconds
        if not tile_rows:
            return whole
        times = READS_OF_TILE + 2 * self.place.settings.trains_all
        tiles = max(1.0, self.load.rows / tile_rows)
        seconds = tiles * times * self._mlp_bytes / self.machine.memory_bytes_per_second
        return {word: price + seconds for word, price in tiled.items()}

    @cached_property
    def _mlp_bytes(self) -> float:
        """A rank's weights of an MLP, or of a layer's experts, in the compute type, in the mean over the layers."""
        place = self.place
        kinds = place.numbers.kinds
        of_kinds = {kind: feed_forward_weights(place.read, kind.feeds) for kind in dict.fromkeys(kinds)}
        numbers = mean(of_kinds[kind].all + of_kinds[kind].unvisited for kind in kinds)
        return numbers * place.settings.compute_bytes / (place.home.tp * place.home.ep)

    @cached_property
    def _layer_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Without tiles and with the largest ones. A copy to the host may hide behind the forward pass, a third
        of a layer's time, and the copy back behind the rest; of what hides SHOWN_SHARE counts. A tiled MLP runs
        forward again: a tiled layer that keeps all counts as one under "exchanged"."""
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
        return whole, tiled

    @cached_property
    def _all_layers(self) -> Numbers:
        """All stages together."""
        return sum(self.place.numbers.layers, Numbers())

    def _sharding_seconds(self, choice: Form) -> float:
        """What hides behind other work is left out; what comes once a step counts in equal parts for its
        micro-batches. 0 where weights are unsharded, or always whole."""
        place = self.place
        once = 1 / place.micro_batches
        if not place.settings.shard_parameters or place.always_whole:
            return 0.0
        gathers, sums = (times or once for times in choice.times_each_micro_batch)
        settings = place.settings
        layers = self._all_layers
        gathered = layers.whole + (layers.packed_bytes / settings.compute_bytes - layers.packed)
        summed = layers.trained
        sent = gathers * gathered * settings.compute_bytes + sums * summed * settings.reduce_bytes
        wire_seconds = sent * (place.shard_count - 1) / place.shard_count / self.machine.sharding_bytes_per_second
        copies = self.machine.weight_copy_seconds * (gathers * gathered + sums * summed)
        unpacked = self.machine.unpacking_seconds(layers.packed_bytes, layers.packed * settings.compute_bytes)
        return copies + SHARDING_SHARE * wire_seconds + gathers * unpacked
