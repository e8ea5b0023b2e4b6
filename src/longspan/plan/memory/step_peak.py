"""What a rank holds all through a step: its shards of weights and states; and what each layer keeps of a slot's rows.

`moments.py` goes through a step on top of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from longspan.layout import Layout
from longspan.plan.memory.bytes import Bytes
from longspan.plan.memory.layer_tapes import EXCHANGED, KEPT_OF_ATTENTION, LayerTapes
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.parameters import ModelNumbers, Numbers, Stage
from longspan.plan.memory.settings import STATE_BUCKET_BYTES, Measure, MemorySettings, places_in_segments
from longspan.plan.memory.tape import Peaks, Tape
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import LayerKind

CONTEXT_BYTES = 1300 << 20  # of a CUDA context with its kernels (bench/records/memory-measured-H200.json)
COMMUNICATOR_BYTES = 460 << 20  # of NCCL's buffers of a group (bench/records/communicators-4xH200.md)
_OF_A_DEPTH = (
    # Tensors of rows that a depth of multi-token prediction keeps around its layer: the embedded tokens, these joined
    # with the hidden states (twice as wide), and the layer's output before and after its norm.
    5
)
_Key = tuple[LayerKind, SlotLoad, Measure, bool, int]  # the rows of a tile last


@dataclass(frozen=True)
class LayerBytes:
    """What a layer keeps of a load under a measure, on device and host, and what its passes hold besides."""

    kept: float
    host: float
    peaks: Peaks


@dataclass(frozen=True)
class StepPeak:
    """A rank of a home at one pipeline position: what it holds, for any load and measures.

    At most `in_flight` micro-batches have run forward and wait for backward; a slot is in `groups` groups that have
    communicators of their own. `layers_so_far` remembers what `layer_bytes` counted.
    """

    read: ConfigReader
    home: Layout
    settings: MemorySettings
    numbers: ModelNumbers
    stage: Stage
    in_flight: float = 1.0
    groups: int = 0
    layers_so_far: dict[_Key, LayerBytes] = field(default_factory=dict[_Key, LayerBytes], compare=False, repr=False)

    @property
    def shards(self) -> int:
        """Slots over which FSDP2 shards a weight."""
        return self.home.slots // self.home.dp_replicate if self.settings.shard_parameters else 1

    @property
    def stays_whole(self) -> bool:
        """Whether FSDP2's weights and gradients are whole through all micro-batches of a step."""
        return self.settings.shard_parameters and (self.settings.free or self.home.pp > 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row between layers."""
        return self.read.count("hidden_size") * self.settings.compute_bytes

    def layer_bytes(self, layer: int, load: SlotLoad, measure: Measure) -> LayerBytes:
        """Return what one layer keeps of a load and holds while it runs, counted once for all layers of a kind.

        Under "selective" attention is `lean`: it saves rows from before an exchange. The first layer of a depth of
        prediction also keeps the tensors around the depth's layers.
        """
        kind, begins_depth = self.numbers.kinds[layer], self.numbers.begins_depth(layer)
        key = kind, load, measure, begins_depth, self.settings.mlp_tile_rows
        if key not in self.layers_so_far:
            tapes = LayerTapes(self.read, self.settings, self.home.tp, self.home.ep)
            bytes_of_layer = _tape_bytes(tapes.make_tape(kind, load, lean=measure.startswith("selective")), measure)
            depth_bytes = _OF_A_DEPTH * load.rows * self.row_bytes * begins_depth
            self.layers_so_far[key] = replace(bytes_of_layer, kept=bytes_of_layer.kept + depth_bytes)
        return self.layers_so_far[key]

    @cached_property
    def all_numbers(self) -> Numbers:
        """All parameters of this rank's stage, and of an encoder's tower."""
        return sum((self.numbers.layers[i] for i in self.stage.layers), self.root_numbers) + self.numbers.tower

    @cached_property
    def root_numbers(self) -> Numbers:
        """Embedding and head, as far as they are here."""
        return self.numbers.root_numbers(self.stage)

    @cached_property
    def resident_bytes(self) -> Bytes:
        """Return the bytes of this rank's shards of weights and states, and of what every GPU has.

        Trained weights may be of another dtype than frozen ones. Whether a tower is trained is a setting of its own, so
        that `trained` has the tower's trained part in place of its share.
        """
        settings, all_numbers, tower = self.settings, self.all_numbers, self.numbers.tower
        trained = all_numbers.share if settings.trains_all else all_numbers.adapters
        trained += tower.trained - tower.share if settings.trains_all else tower.trained
        weights = (all_numbers.share - trained) * settings.parameter_bytes + trained * settings.weight_bytes
        return Bytes(
            weights=int(weights / self.shards),
            states=0 if settings.offload_states else self._optimizer_state_bytes(),
            communicators=self._communicator_bytes(),
        )

    def _optimizer_state_bytes(self) -> int:
        """Return the bytes of the optimizer's states of this rank's shards.

        Whether a tower is trained is a setting of its own, so that its trained part replaces its share.
        """
        settings, numbers, tower = self.settings, self.all_numbers, self.numbers.tower
        if not settings.backward:
            return 0
        trained = (numbers.share - tower.share if settings.trains_all else numbers.adapters) + tower.trained
        return int(trained * settings.weight_bytes * settings.state_numbers / self.shards)

    @property
    def update_state_bytes(self) -> int:
        """Bytes of states on the device during an update: all, or of states on the host the two buckets in transit."""
        all_states = self._optimizer_state_bytes()
        return min(all_states, 2 * STATE_BUCKET_BYTES) if self.settings.offload_states else all_states

    def _communicator_bytes(self) -> int:
        """Return the bytes of CUDA's context and of NCCL's communicators; on a CPU there are none.

        Communicators are two over all slots, one for every other axis of the home, and those of the plan's groups.
        """
        if not self.settings.gpu:
            return 0
        home = self.home
        groups = (home.slots > 1) * 2 + (home.tp > 1) + (home.pp > 1) + (home.ep > 1) + (home.dp_replicate > 1)
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * (groups + self.groups)

    def gradient_bytes(self, numbers: Numbers) -> float:
        """Return the bytes of this rank's shard of the gradients of these parameters.

        The same fraction of `share` is trained as of `whole`. With HSDP gradients have the dtype of sums: replicas are
        added after the sum over shards.
        """
        if not numbers.trained or not self.settings.backward:
            return 0.0
        size = self.settings.weight_bytes
        if self.home.dp_replicate > 1:
            size = max(size, self.settings.reduce_bytes)
        return numbers.trained / numbers.whole * numbers.share * size / self.shards

    def gathered_bytes(self, numbers: Numbers) -> float:
        """Return the bytes of these parameters whole in the compute dtype, as FSDP2 gathers them; 0 without FSDP2."""
        return numbers.whole * self.settings.compute_bytes if self.settings.shard_parameters else 0.0

    def float8_bytes(self, numbers: Numbers) -> float:
        """Return the bytes of a layer's weights in float8, rows and columns, where they stay for several passes."""
        stay = self.stays_whole or not self.settings.shard_parameters
        return 2.0 * numbers.whole if self.settings.float8 and stay else 0.0

    def summing_bytes(self, numbers: Numbers) -> float:
        """Return the most bytes of a layer's gradients while FSDP2 sums them over slots.

        First there are the gradients and their copy in the dtype of sums, which is sent; then that copy, and a shard of
        the sum. On one slot the shard is the whole sum, and FSDP2 also divides the copy by 1 into a third tensor.
        Without FSDP2 there are the gradients alone.
        """
        gradients = numbers.trained * self.settings.compute_bytes
        if not self.settings.shard_parameters:
            return gradients
        sent = numbers.trained * self.settings.reduce_bytes
        return max(gradients + sent, sent * (3 if self.shards == 1 else 1 + 1 / self.shards))

    def _host_bytes(self, layer: int, load: SlotLoad, measure: Measure) -> float:
        """Return what waits on the host of a layer that begins a segment, or of any layer without segments.

        Of a segment only the input waits, as of a layer under "full+host", whatever the measure keeps.
        """
        keeps_input = self.settings.segment_layers > 1 and measure.endswith("+host")
        return self.layer_bytes(layer, load, "full+host" if keeps_input else measure).host

    def host_bytes(self, loads: Sequence[SlotLoad], measures: Sequence[Measure]) -> Bytes:
        """Return the bytes that wait on the host: activations of the load that has most there, and states.

        Only the first layer of a segment has any; without segments each layer counts as a segment of its own.
        """
        places = places_in_segments([measures[i] for i in self.stage.layers], self.settings.segment_layers)
        first_layers = [i for i, place in zip(self.stage.layers, places, strict=True) if place == 0]
        activations = max(sum(self._host_bytes(i, load, measures[i]) for i in first_layers) for load in loads)
        states = self._optimizer_state_bytes() if self.settings.offload_states else 0
        return Bytes(kept=int(activations * self.in_flight) if self.settings.backward else 0, states=states)


def _tape_bytes(tape: Tape, measure: Measure) -> LayerBytes:
    """Return what a layer keeps under a measure, on the device or on the host, and the peaks of its passes above that.

    Under "none" nothing runs again in backward, and the tape's peak includes what was saved, which is taken off here.
    """
    kind, _, host = measure.partition("+")
    size = bytes_kept(tape, kind)
    if kind == "none":
        peaks = tape.peaks(held=("x",), again=False)
        return LayerBytes(size, 0.0, Peaks(peaks.forward, peaks.backward - tape.bytes_saved(("x",))))
    peaks = tape.peaks(held=_names_to_keep(tape, kind))
    return LayerBytes(0.0, size, peaks) if host else LayerBytes(size, 0.0, peaks)


def bytes_kept(tape: Tape, kind: str) -> float:
    """Return the bytes that a layer keeps under "none", "exchanged", "selective" or "full", on device or host."""
    if kind == "none":
        return tape.bytes_saved(("x",)) + tape.sizes["x"]  # the input is kept even if no operation saves it
    return sum(tape.sizes[name] for name in _names_to_keep(tape, kind))


def _names_to_keep(tape: Tape, kind: str) -> set[str]:
    """Return the names of the tensors that a layer keeps under "exchanged", "selective" or "full"."""
    names = {"x", *tape.lasting}
    if kind != "full":
        names.update(KEPT_OF_ATTENTION)
    if kind == "exchanged":
        names.update(EXCHANGED)
    return names & set(tape.sizes)  # a layer without attention, or without an exchange, has fewer
