"""What a rank holds at the moments of a step: at the loss, while each layer runs backward, and at the update.

FSDP2 (torch 2.11 to 2.15) holds the weights of the root (a trained embedding among them) whole throughout, those of the
head at the loss, in backward those of a layer and of the one before, which it fetches ahead, and what is sent of the
gradients of the layer behind. Where weights stay gathered, the root has the head too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from longspan.layout import Layout
from longspan.plan.form import CheckpointPolicy
from longspan.plan.memory.layer_table import WIDE, LayerTable, SlotLoad
from longspan.plan.memory.model_numbers import ModelNumbers, Numbers, StageLayers
from longspan.plan.memory.settings import (
    BUNDLE_NUMBERS,
    STATE_BUCKET_BYTES,
    Bytes,
    MemorySettings,
    places_in_layer_segments,
)
from longspan.plan.messages import REPLAYED_NUMBERS, SUMMED_NUMBERS
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import LayerKind

# A CUDA context with its kernels takes these, as measured on an H200.
CONTEXT_BYTES = 1300 << 20
# NCCL's buffers of a group take these, as measured on H200s.
COMMUNICATOR_BYTES = 460 << 20
# Recordings of attention hold so many tensors as large as the queries (comm/cuda_graphs.py).
REPLAYED_TENSORS = 16
# Rows that a depth of multi-token prediction keeps around its layer: the embedded tokens, these joined with the hidden
# states (twice as wide), and the layer's output before and after its norm.
OF_A_DEPTH = 5
# So many bytes of logits are made at a time, on a GPU and on a CPU (train/loss.py).
CHUNK_BYTES = {True: 2 << 30, False: 64 << 20}
AT_THE_LOSS = 3  # rows between layers: before the last norm and after it, and the gradient; of each depth one more
OF_WIDE_NORM = 2  # so many rows more where no fused kernel runs the last norm, which then goes through float32
# Of a tower's block: tensors as wide as the tower that it keeps (two norms' inputs and outputs, q, k, v, output),
# gradients as wide as half of its MLP in backward, and bytes of a number of rotated queries and keys.
BLOCK_ROWS = 8
BLOCK_GRADIENTS = 3
BLOCK_ROTARY = 8
_Key = tuple[SlotLoad, CheckpointPolicy, int]  # the rows of a tile last


class LayerBytes(NamedTuple):
    """What a layer keeps of a load under a policy, on device and host, and what its backward pass holds besides; `norm`
    of what is kept is the norm behind a stack, which no layer runs again.
    """

    kept: float = 0.0
    host: float = 0.0
    backward: float = 0.0
    norm: float = 0.0


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step, as in `Bytes`, of what comes and goes: `StageBytes.resident_bytes` are
    there besides. `reserved` are of memory that the allocator keeps for gradients, and count as communicators.
    """

    gradients: float
    gathered: float
    kept: float = 0.0
    work: float = 0.0
    logits: float = 0.0
    reserved: float = 0.0

    @property
    def total(self) -> int:
        return sum(map(int, self))


@dataclass(frozen=True)
class StageBytes:
    """A rank of a home at one pipeline position: what it holds, for any load and policies. At most `in_flight` of a
    step's `micro_batches` wait for backward; a slot is in `groups` groups that have communicators of their own.
    `layers_so_far` remembers what `layer_bytes` counted.
    """

    read: ConfigReader
    home: Layout
    settings: MemorySettings
    numbers: ModelNumbers
    stage: StageLayers
    in_flight: float = 1.0
    groups: int = 0
    micro_batches: int = 1
    layers_so_far: dict[_Key, tuple[LayerBytes, ...]] = field(
        default_factory=dict[_Key, tuple[LayerBytes, ...]], compare=False, repr=False
    )

    @cached_property
    def _teacher(self) -> Any:
        """The TeacherBytes; None without a teacher."""
        teacher = self.settings.teacher
        return None if teacher is None else teacher.on(self.home, self.settings)

    @cached_property
    def shard_count(self) -> int:
        """How many slots FSDP2 shards a weight over."""
        if self.settings.shard_parameters:
            return self.home.slots // self.home.dp_replicate
        return 1

    @property
    def always_whole(self) -> bool:
        """Whether FSDP2's weights and gradients are whole through all micro-batches of a step, whatever is chosen."""
        return self.settings.shard_parameters and (self.settings.free or self.home.pp > 1)

    @property
    def keeps_gradients_unsharded(self) -> bool:
        """Whether FSDP2's weights and gradients are whole through all micro-batches of a step, by choice or always. The
        choice does not count in a step of one micro-batch, whose gradients are summed layer by layer in any case.
        """
        settings = self.settings
        by_choice = settings.shard_parameters and self.micro_batches > 1 and not settings.sync_each_batch
        return self.always_whole or by_choice

    @property
    def keeps_weights_unsharded(self) -> bool:
        """Whether FSDP2's weights, but not its gradients, are whole between micro-batches."""
        return (
            self.micro_batches > 1
            and not self.settings.reshard_after_forward
            and not self.keeps_gradients_unsharded
        )

    @cached_property
    def loss_head(self) -> Numbers:
        """What is gathered for the loss alone: the head, unless it is one with a trained embedding; nothing where
        weights stay gathered (model/sharding.py).
        """
        settings = self.settings
        stays = not settings.shard_parameters or self.always_whole or not settings.reshard_after_forward
        head = self.numbers.head
        return Numbers() if stays or (self.numbers.tied and head.trained) else head

    @cached_property
    def root(self) -> Numbers:
        """What is whole from the first layer forward to the first one backward, beside layers."""
        head = self.numbers.head
        if self.loss_head != head:
            return self.stage.root
        return self.numbers.end + head if head.trained else self.numbers.end

    @property
    def opening(self) -> Numbers:
        """What a forward pass gathers before its first layer."""
        return self.numbers.end + self.numbers.head if self.loss_head == self.numbers.head else self.stage.root

    @property
    def hidden_row_bytes(self) -> int:
        """Bytes of one row as wide as the model, in the compute dtype."""
        return self.numbers.hidden_size * self.settings.compute_bytes

    @property
    def row_bytes_between_layers(self) -> int:
        """Bytes of all streams of one row, in the compute dtype."""
        streams = self.numbers.streams
        return self.hidden_row_bytes * (streams.count if streams else 1)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of this rank's shard of the optimizer's states, wherever they are."""
        settings = self.settings
        states = self.stage.all.trained_share * settings.state_numbers
        if settings.muon:
            states += self.stage.root.trained_share
        return int(states * settings.weight_bytes / self.shard_count)

    @property
    def state_bytes_on_device(self) -> int:
        """Bytes of the optimizer's states that are on the device: all, or, where they wait on the host, those of an
        update's two buckets, in memory that its stream keeps. Buckets also have the weights and gradients of trained
        weights on the host.
        """
        if not self.states_on_host:
            return self.state_bytes
        numbers = self.stage.all
        weights_and_gradients = self.weight_bytes(numbers, on_host=True) + self.gradient_bytes(numbers)
        return min(self.state_bytes + int(weights_and_gradients * self.trained_on_host), 2 * STATE_BUCKET_BYTES)

    @cached_property
    def reason_for_weights_on_device(self) -> str:
        """Why weights cannot wait on the host, in words that follow "and"; "" where they can."""
        settings = self.settings
        home = self.home
        reasons = {
            f"parallel.pp is {home.pp}, whose stages keep their weights": home.pp > 1,
            'context.mode is "free", which gathers all weights at once': settings.free,
            f"parallel.dp_replicate is {home.dp_replicate}, which sums over copies": home.dp_replicate > 1,
            "parallel.reshard_after_forward is false, which keeps weights gathered": not settings.reshard_after_forward,
            "FSDP2 does not shard the weights (shard_parameters)": not settings.shard_parameters,
            "an image encoder has a home of its own": self.numbers.tower_shape is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def trained_on_host(self) -> bool:
        """Whether trained weights wait on the host, with their gradients and states: all but adapters."""
        return self.settings.trained_on_host(trains_all=self.settings.trains_all)

    @property
    def states_on_host(self) -> bool:
        """Whether the optimizer's states wait on the host, by themselves or with trained weights."""
        return self.settings.states_on_host(trains_all=self.settings.trains_all)

    def packed_bytes(self, numbers: Numbers, *, on_host: bool) -> float:
        """Return the bytes of this rank's shards of these packed weights on the host, or of those on the device."""
        return numbers.packed_share_bytes / self.shard_count if self.settings.offload_weights == on_host else 0.0

    def weight_bytes(self, numbers: Numbers, *, on_host: bool) -> float:
        """Return the bytes of this rank's shards of these whole weights on the host, or of those on the device."""
        settings = self.settings
        frozen_bytes = (numbers.share - numbers.packed_share - numbers.trained_share) * settings.parameter_bytes
        trained_bytes = numbers.trained_share * settings.weight_bytes
        frozen_here = settings.offload_weights == on_host
        trained_here = self.trained_on_host == on_host
        return (
            (frozen_bytes if frozen_here else 0.0) + (trained_bytes if trained_here else 0.0)
        ) / self.shard_count

    @property
    def gradients_stay_taken(self) -> bool:
        """Whether gradients are in memory of FSDP2's stream, which the allocator keeps for it from step to step: where
        sums over slots are cast into them (model/sharding.py).
        """
        settings = self.settings
        sums_are_cast = settings.weight_bytes < settings.reduce_bytes
        return (
            sums_are_cast
            and settings.gpu
            and settings.shard_parameters
            and self.shard_count > 1
            and not self.trained_on_host
        )

    @cached_property
    def staging_bytes(self) -> float:
        """Bytes of the buffers between host and device: two of the largest layer's weights, which come from there, and
        two of its gradients, which go there; of later micro-batches a third, in which earlier sums come.
        """
        layers = [self.numbers.layers[i] for i in self.stage.layers]
        weights = max(
            self.weight_bytes(layer, on_host=True) + self.packed_bytes(layer, on_host=True) for layer in layers
        )
        gradients = max(map(self.gradient_bytes, layers)) if self.trained_on_host else 0.0
        return 2 * weights + (2 + (self.micro_batches > 1)) * gradients

    @cached_property
    def resident_bytes(self) -> Bytes:
        """Shards of weights and states, and on a GPU CUDA's context and NCCL's communicators."""
        settings = self.settings
        home = self.home
        numbers = self.stage.all
        # two over all slots, one for every other axis of the home, and those of the plan's groups
        groups = (home.slots > 1) * 2 + (home.tp > 1) + (home.pp > 1) + (home.ep > 1) + (home.dp_replicate > 1)
        of_teacher, packed_of_teacher = (0, 0) if self._teacher is None else self._teacher.weights(on_host=False)
        return Bytes(
            weights=int(self.weight_bytes(numbers, on_host=False)) + of_teacher,
            packed=int(self.packed_bytes(numbers, on_host=False)) + packed_of_teacher,
            states=self.state_bytes_on_device,
            communicators=(CONTEXT_BYTES + COMMUNICATOR_BYTES * (groups + self.groups)) * settings.gpu,
        )

    def gradient_bytes(self, numbers: Numbers) -> float:
        """Return the bytes of this rank's shard of the gradients of these parameters."""
        # With HSDP gradients have the dtype of sums: replicas are added after the sum over shards.
        size = self.settings.weight_bytes if self.home.dp_replicate == 1 else self.settings.reduce_bytes
        return numbers.trained_share * size / self.shard_count

    def summing_bytes(self, numbers: Numbers) -> float:
        """Return the most bytes of a layer's gradients while FSDP2 sums them over slots; without FSDP2 those of the
        gradients alone. First there are the gradients and their copy in the dtype of sums, which is sent; then that
        copy, and a shard of the sum. On one slot three such tensors are counted, as FSDP2 by itself makes: `prepare`
        leaves two of them out (`leave_out_copies_of_one_rank`), which no peak on a GPU has shown yet.
        """
        gradients = numbers.trained * self.settings.compute_bytes
        if not self.settings.shard_parameters:
            return gradients
        sent = numbers.trained * self.settings.reduce_bytes
        copies_at_sum = 3 if self.shard_count == 1 else 1 + 1 / self.shard_count
        return max(gradients + sent, sent * copies_at_sum)

    def layer_bytes(self, load: SlotLoad, policy: CheckpointPolicy) -> tuple[LayerBytes, ...]:
        """Return what each layer of this stage keeps of a load and holds while it runs, if all have this policy;
        counted once for each load, policy and size of tiles. A layer that recomputes holds what it did not keep when
        it runs backward. The first layer of a depth of prediction also keeps the tensors around the depth's layers.
        """
        key = load, policy, self.settings.mlp_tile_tokens
        if key in self.layers_so_far:
            return self.layers_so_far[key]
        numbers = self.numbers
        word, _, host = policy.partition("+")
        table = LayerTable(self.read, self.settings, load, self.home.tp, self.home.ep, lean=word == "selective")
        of_kinds = dict[tuple[LayerKind, bool], LayerBytes]()
        layers = list[LayerBytes]()
        for layer in self.stage.layers:
            # The index counts the layers of all depths; below 0 it is outside depths.
            depth_index = layer - numbers.decoder_layers
            begins_depth = depth_index >= 0 and depth_index % numbers.depth_layers == 0
            key_of_layer = numbers.kinds[layer], begins_depth
            if key_of_layer not in of_kinds:
                mixing, feed = table.mixing_and_mlp_parts(numbers.kinds[layer])
                both = mixing + feed
                kept = both.lasting + both.attention * (word != "full") + both.exchanged * (word == "exchanged")
                size = table.input_bytes + (both.saved if word == "none" else kept)
                # The MLP runs backward first, while all is saved; its widest moment comes after a third of the
                # gradients of weights. What it saved is gone when attention runs, and all those gradients may be there.
                weights = numbers.layers[layer].trained * self.settings.compute_bytes
                # Those of a run before are there throughout.
                kind = numbers.kinds[layer]
                first_weights = weights if kind.kept_runs > 1 else weights / 3
                widest = max(both.saved + feed.work + first_weights, mixing.saved + mixing.work + weights)
                # Backward holds a layer's input, and a gradient as wide.
                backward = max(0.0, 2 * table.input_bytes + widest - size)
                # Each run with gradients keeps as much.
                size *= kind.kept_runs
                # Torch's operations run the norm behind a stack.
                norm = load.rows * (numbers.hidden_size + 1) * WIDE * kind.kept_runs * kind.ends_stack
                on_device = size * (not host) + norm + OF_A_DEPTH * load.rows * self.hidden_row_bytes * begins_depth
                of_kinds[key_of_layer] = LayerBytes(on_device, size if host else 0.0, backward, norm)
            layers.append(of_kinds[key_of_layer])
        self.layers_so_far[key] = tuple(layers)
        return self.layers_so_far[key]

    def waiting_bytes(self, load: SlotLoad, policies: Sequence[CheckpointPolicy]) -> list[LayerBytes]:
        """Return what each layer of this stage keeps from its forward pass until it, or its segment, runs backward. The
        first layer of a segment keeps its input, on the host if its policy says so, and the others keep nothing.
        """
        words: list[CheckpointPolicy] = [policies[i] for i in self.stage.layers]
        if self.settings.segment_layers <= 1:
            return self._bytes_under(load, words)
        inputs: dict[CheckpointPolicy, CheckpointPolicy] = {"selective+host": "full+host", "full+host": "full+host"}
        kept = self._bytes_under(load, [word if word == "none" else inputs.get(word, "full") for word in words])
        places = places_in_layer_segments(words, self.settings.segment_layers)
        return [
            LayerBytes(layer.norm, norm=layer.norm) if place else layer
            for place, layer in zip(places, kept, strict=True)
        ]

    def _bytes_under(self, load: SlotLoad, words: Sequence[CheckpointPolicy]) -> list[LayerBytes]:
        tables = {word: self.layer_bytes(load, word) for word in dict.fromkeys(words)}
        return [tables[word][place] for place, word in enumerate(words)]

    @cached_property
    def image_bytes(self) -> tuple[float, float, float]:
        """Three numbers of bytes: what is kept of images while the language model runs, what while encoders run
        backward, and what the backward pass of a tower's block holds besides; 0 without a tower. Kept are the encoded
        rows, and what a tower's blocks that are trained keep of the patches (if recomputed, only while they run
        backward).
        """
        shape = self.numbers.tower_shape
        settings = self.settings
        rows = settings.encoder_rows
        if shape is None:
            return 0.0, 0.0, 0.0
        # a row is made of merge² patches, or all images have one size
        patches = rows * (shape.patch_count(1) if shape.merge else shape.patches / shape.rows)
        layers = shape.full_layers + shape.window_layers
        number = settings.compute_bytes  # bytes of a number, as in all methods here
        # The width is that of all products of the MLP.
        mlp_width = shape.block_weights / layers / shape.width - 4 * shape.width
        blocks = patches * layers * (BLOCK_ROWS * shape.width + mlp_width) * number
        blocks *= settings.encoder_trained == "all"
        work = patches * (BLOCK_GRADIENTS * mlp_width / 2 * number + BLOCK_ROTARY * shape.width)
        encoded = rows * self.hidden_row_bytes
        return encoded + blocks * (not settings.encoder_recomputed), encoded + blocks, work

    @cached_property
    def _layer_weights(self) -> tuple[list[float], ...]:
        """A number of bytes for each layer of this stage: its whole weights in the compute type; these as other
        slots send them, packed ones as bytes; its packed weights alone; the most of its gradients while they are
        summed over slots; a slot's shard of the sums."""
        settings = self.settings
        sharded = settings.shard_parameters
        number = settings.compute_bytes * sharded
        # float8 copies of layers (rows and columns) stay where the weights do
        stay = self.keeps_gradients_unsharded or not sharded or self.keeps_weights_unsharded
        float8 = 2.0 * bool(settings.float8 and stay)
        layers = [self.numbers.layers[i] for i in self.stage.layers]
        whole = [layer.whole * (number + float8) for layer in layers]
        packed = [layer.packed_bytes * sharded for layer in layers]
        sent = [
            weights - layer.packed * number + packed_bytes
            for layer, weights, packed_bytes in zip(layers, whole, packed, strict=True)
        ]
        return whole, sent, packed, [*map(self.summing_bytes, layers)], [*map(self.gradient_bytes, layers)]

    def most_bytes(self, loads: Sequence[SlotLoad], policies: Sequence[CheckpointPolicy]) -> Bytes:
        """Return the bytes at the moment at which most is held."""
        return self._bytes_at(max(self.moments(loads, policies), key=lambda moment: moment.total))

    def bytes_at_moments(self, loads: Sequence[SlotLoad], policies: Sequence[CheckpointPolicy]) -> Iterator[Bytes]:
        """Yield the bytes at the update, and at the moments of a micro-batch of each of these loads."""
        return map(self._bytes_at, self.moments(loads, policies))

    def _bytes_at(self, moment: Moment) -> Bytes:
        """Each is rounded down."""
        sizes = {name: int(size) for name, size in moment._asdict().items()}
        resident = self.resident_bytes
        return replace(resident, communicators=resident.communicators + sizes.pop("reserved"), **sizes)

    def moments(self, loads: Sequence[SlotLoad], policies: Sequence[CheckpointPolicy]) -> Iterator[Moment]:
        """Yield what is held besides `resident_bytes`: first at the update, then at the moments of a micro-batch of
        each of these loads.
        """
        settings = self.settings
        # Sixteen copies of a bundle in bfloat16: of three bundles under way, and the products of one.
        gathered = 32 * BUNDLE_NUMBERS if settings.muon else 0
        all_gradients = int(self.gradient_bytes(self.stage.all)) * (not self.trained_on_host)
        yield Moment(gradients=all_gradients, gathered=gathered)
        for load in loads:
            yield from self._moments_of_micro_batch(load, policies)

    def _moments_of_micro_batch(self, load: SlotLoad, policies: Sequence[CheckpointPolicy]) -> Iterator[Moment]:
        """Yield what is held in a teacher's pass; at the loss; at each layer i, the last first, as it runs backward and
        as its gradients are summed; at the last sums; and as encoders run backward. At layer i it is

        gradients = Σ_(j>i) shard_j, or Σ shard_j in a later micro-batch; none where whole ones stay
        gathered  = root + W_i + V_(i−1), which is fetched ahead, + the gradients of i + 1, which are sent;
                    root + Σ_j W_j + all gradients where these stay whole; + buffers of copies from and to the host
        kept      = in_flight · Σ_j kept_j − Σ_(j≥i) kept_j + what layer i, and its segment before it, hold of forward
        work      = what the backward pass of i holds, or the packed bytes that W_i is made of; while its gradients are
                    summed one tensor of rows

        W_j is the bytes of a layer's whole weights in the compute type, with float8 copies where they stay, and V_j
        the same as they travel, packed weights as bytes.
        """
        settings = self.settings
        stage = self.stage
        sharded = settings.shard_parameters
        most_reserved = int(self.gradient_bytes(stage.all)) if self.gradients_stay_taken else 0
        # recordings of attention hold tensors through all moments
        query = load.rows * self.numbers.query_width // self.home.tp
        replays = query * settings.compute_bytes * (settings.gpu and query <= REPLAYED_NUMBERS) * REPLAYED_TENSORS

        def moment(gradients: float, gathered: float, kept: float, work: float, logits: float = 0.0) -> Moment:
            """Return a moment with what recordings hold, and with memory reserved for gradients that are not there."""
            reserved = max(0.0, most_reserved - gradients)
            return Moment(gradients, gathered, kept, work + replays, logits, reserved)

        keeps_gradients_unsharded = self.keeps_gradients_unsharded
        keeps_weights_unsharded = self.keeps_weights_unsharded
        # All weights and gradients are whole.
        in_place = keeps_gradients_unsharded or not sharded
        waiting = self.waiting_bytes(load, policies)
        number = settings.compute_bytes * sharded
        whole, sent_whole, packed, summing, shards = self._layer_weights
        all_whole = sum(whole)
        root = self.root
        loss_head = self.loss_head
        # The embedding's and the root's weights on the host come for the next pass beside the first layer, with earlier
        # sums of gradients.
        root_ahead = self.weight_bytes(self.opening, on_host=True) * (self.micro_batches > 1)
        root_ahead += self.gradient_bytes(root) * load.later * self.trained_on_host
        teacher = self._teacher
        gathered = root.whole * number + self.staging_bytes
        gathered += 0.0 if teacher is None else teacher.always_gathered
        row = load.rows * self.row_bytes_between_layers
        activations = sum(layer.kept for layer in waiting) * self.in_flight + self.image_bytes[0]
        runs = [self.numbers.kinds[layer].kept_runs for layer in stage.layers]
        kept_by_earlier_runs = sum(layer.kept * (1 - 1 / n) for layer, n in zip(waiting, runs, strict=True))
        # Gradients of earlier micro-batches: shards, or whole ones to the end of the step.
        all_gradients = self.gradient_bytes(stage.all) * (not self.trained_on_host)
        gradients = all_gradients * load.later * (not keeps_gradients_unsharded)
        whole_gradients = stage.all.trained * settings.reduce_bytes * keeps_gradients_unsharded
        adds_gradients = not load.later and not self.trained_on_host
        arrives = self.shard_count > 1  # weights come from other slots, in a tensor of their own
        if teacher is not None:  # its pass comes first
            whole_now = all_whole * (in_place or (keeps_weights_unsharded and load.later))
            whole_now += whole_gradients * load.later
            gathered_before = gathered - root.whole * number + whole_now + teacher.gathered_in_pass
            yield moment(gradients, gathered_before, 0.0, teacher.work(load))
        # 1. The loss, forward and backward: the last layer's weights are fetched ahead for backward.
        ahead = arrives * sent_whole[-1] * (not keeps_gradients_unsharded)
        # On one rank what is sent is the sum itself.
        sent = loss_head.trained * settings.reduce_bytes * arrives
        if stage.predicts:
            layer_weights = all_whole * (in_place or not settings.reshard_after_forward)
            tensors = AT_THE_LOSS + settings.mtp_layers + OF_WIDE_NORM * (not settings.gpu)
            at_loss = tensors * load.rows * self.hidden_row_bytes + self._end_bytes(load)
            gathered_at_loss = gathered + layer_weights + whole_gradients * load.later
            logits, scaled = self._logit_bytes(load)
            # A head from the host is there twice before there are logits.
            logits = max(logits, self.weight_bytes(loss_head, on_host=True))
            of_head = loss_head.whole * number + ahead * (not loss_head.whole)
            of_teacher = 0.0
            if teacher is not None:
                of_head += teacher.gathered_head
                of_teacher = teacher.rows(load)
            yield moment(gradients, gathered_at_loss + of_head, activations, at_loss + of_teacher, logits)
            yield moment(gradients, gathered_at_loss + ahead, activations, at_loss, scaled)
            if loss_head.trained:
                both = loss_head.trained * (settings.compute_bytes + settings.reduce_bytes)
                sums = gathered_at_loss + ahead + (self.summing_bytes(loss_head) if arrives else both)
                yield moment(gradients, sums, activations, tensors * load.rows * self.hidden_row_bytes)
        # 2. The layers, the last first: each runs backward, and then its gradients are summed.
        # Gradients of a head in the root, and of an embedding that depths read, wait from here on.
        heads = ((not loss_head.trained) + (settings.mtp_layers > 0 and not self.numbers.tied)) * stage.predicts
        waits = gathered + heads * self.numbers.head.trained * settings.compute_bytes
        gradients += self.gradient_bytes(loss_head) * adds_gradients
        words: list[CheckpointPolicy] = [policies[i] for i in stage.layers]
        running = self._bytes_under(load, words)
        places = places_in_layer_segments(words, settings.segment_layers)
        for i in reversed(range(len(waiting))):
            first = i - places[i]
            activations -= waiting[i].kept
            # What the layers of a segment before this one keep since it ran forward again, beyond what they kept while
            # they waited; and as the segment's first layer runs, the input of the segment before, back from the host.
            before = zip(running[first:i], waiting[first:i], strict=True)
            kept_by_others = activations + sum(run.kept + run.host - wait.kept - wait.host for run, wait in before)
            kept_by_others += waiting[first - 1 - places[first - 1]].host if first and i == first else 0.0
            if in_place:
                other_weights = waits + all_whole - whole[i] + whole_gradients
            else:
                other_weights = waits
                if not settings.reshard_after_forward:
                    other_weights += sum(whole[:i])
                elif arrives and i:
                    other_weights += sent_whole[i - 1]
                if keeps_weights_unsharded:
                    other_weights += sum(whole[i + 1 :])
            other_weights += root_ahead * (i == 0)
            work = max(running[i].backward, packed[i])
            kept = kept_by_others + running[i].kept + running[i].host
            if i == 0:  # layers that run again have the gradients of all beside what their earlier runs keep
                kept = max(kept, kept_by_earlier_runs)
            yield moment(gradients, other_weights + whole[i] + sent, kept, work)
            if not keeps_gradients_unsharded:  # the layer's gradients are summed over slots, and then sent
                yield moment(gradients, other_weights + summing[i], kept_by_others, row)
                sent = self.numbers.layers[stage.layers[i]].trained * settings.reduce_bytes * sharded
                gradients += shards[i] * adds_gradients
        # 3. After all layers whole gradients are summed, or those of the root.
        sums = self.summing_bytes(root) + all_whole * keeps_weights_unsharded + root_ahead
        if keeps_gradients_unsharded:
            largest = max((self.numbers.layers[i] for i in stage.layers), key=lambda one: one.trained)
            sums = gathered + all_whole + whole_gradients + largest.trained * settings.reduce_bytes
            gradients = self.gradient_bytes(largest)
        if not sharded and self.home.slots > 1:
            # Without FSDP2 they are summed in flat buffers: as they are sent, gathered and joined, and a slot's part.
            numbers_at_once = max(self.numbers.head.trained, min(stage.all.trained, SUMMED_NUMBERS))
            sums += numbers_at_once * settings.reduce_bytes * (3 + 1 / self.home.slots)
        yield moment(gradients, sums, 0.0, row)
        # 4. Encoders run backward last.
        if self.numbers.tower_shape:
            tower = self.numbers.tower
            _, kept_of_images, work = self.image_bytes
            tower_weights = tower.whole * number * (1 + arrives) + self.summing_bytes(tower)
            yield moment(all_gradients, tower_weights, kept_of_images, work)

    def _end_bytes(self, load: SlotLoad) -> float:
        """The streams of the last layer, and what the connection behind them keeps."""
        streams = self.numbers.streams
        if not streams or not streams.end_products:
            return 0.0
        table = LayerTable(self.read, self.settings, load, self.home.tp, self.home.ep)
        return table.connection_part(streams, first=False, behind=True).saved

    def _logit_bytes(self, load: SlotLoad) -> tuple[float, float]:
        """At the loss forward and backward. First there are the logits of one chunk and their gradient (on a CPU a
        float32 copy too), and the chunk's gradient of the head, with a sum in float32 at least if there are several.
        Then the head's gradient is scaled into a new tensor, and a float32 sum is cast. Each depth of prediction keeps
        such a sum as well."""
        settings = self.settings
        number = settings.compute_bytes
        vocabulary = self.numbers.vocabulary / self.home.tp
        bytes_of_row = vocabulary * (2 * number + (0 if settings.gpu else max(4, number)))
        most_bytes = CHUNK_BYTES[settings.gpu]
        if self._teacher is not None:  # logits of both, and two gradients of the model's (train/loss.py)
            columns = self._teacher.vocabulary / self.home.tp
            bytes_of_row = (3 * vocabulary + columns) * number
            bytes_of_row += 0 if settings.gpu else (vocabulary + columns) * max(4, number)
            most_bytes //= 2
        most_rows = settings.loss_chunk_rows or max(1, int(most_bytes // bytes_of_row))
        chunks = -(-load.rows // most_rows)
        logits = -(-load.rows // chunks) * bytes_of_row
        # bytes of a number of the head's gradient: in the sum, beside a chunk's logits, and while it is scaled
        sum_bytes = max(4, number) if chunks > 1 else number
        beside_logits = sum_bytes * (chunks > 1) + number
        scaling = 2 * sum_bytes + number * (sum_bytes != number)
        trained = self.numbers.head.trained
        of_depths = trained * sum_bytes * settings.mtp_layers
        return of_depths + logits + trained * beside_logits, of_depths + trained * scaling

    def host_bytes(self, loads: Sequence[SlotLoad], policies: Sequence[CheckpointPolicy]) -> Bytes:
        """Return the bytes that wait on the host: activations of the load that has most there, weights and states."""
        activations = max(sum(layer.host for layer in self.waiting_bytes(load, policies)) for load in loads)
        numbers = self.stage.all
        of_teacher, packed_of_teacher = (0, 0) if self._teacher is None else self._teacher.weights(on_host=True)
        return Bytes(
            weights=int(self.weight_bytes(numbers, on_host=True)) + of_teacher,
            packed=int(self.packed_bytes(numbers, on_host=True)) + packed_of_teacher,
            gradients=int(self.gradient_bytes(numbers)) if self.trained_on_host else 0,
            kept=int(activations * self.in_flight),
            states=self.state_bytes if self.states_on_host else 0,
        )
