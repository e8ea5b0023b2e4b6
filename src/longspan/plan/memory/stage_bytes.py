"""What a rank holds at the moments of a step: at the loss, while each layer runs backward, and at the update.

FSDP2 (torch 2.11 to 2.15) holds the weights of the root (embedding and head) whole throughout, in backward those of a
layer and of the one before, which it fetches ahead, and what is sent of the gradients of the layer behind. Over one
slot nothing arrives. In free mode and in pipelines all weights and gradients stay whole. In the first micro-batch of a
step gradients are counted as they come.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from longspan.layout import Layout
from longspan.plan.memory.bytes import Bytes
from longspan.plan.memory.layer_table import LayerTable
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.parameters import ModelNumbers, Numbers, Stage
from longspan.plan.memory.settings import STATE_BUCKET_BYTES, Measure, MemorySettings, places_in_segments
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import LayerKind

CONTEXT_BYTES = 1300 << 20  # of a CUDA context with its kernels (bench/records/memory-measured-H200.json)
COMMUNICATOR_BYTES = 460 << 20  # of NCCL's buffers of a group (bench/records/communicators-4xH200.md)
# Rows that a depth of multi-token prediction keeps around its layer: the embedded tokens, these joined with the hidden
# states (twice as wide), and the layer's output before and after its norm.
OF_A_DEPTH = 5
CHUNK_BYTES = {True: 2 << 30, False: 64 << 20}  # of logits at a time, on a GPU and on a CPU (train/loss.py)
AT_THE_LOSS = 3  # rows between layers: before the last norm and after it, and the gradient; of each depth one more
OF_WIDE_NORM = 2  # so many rows more where no fused kernel runs the last norm, which then goes through float32
# Of a tower's block: tensors as wide as the tower that it keeps (two norms' inputs and outputs, q, k, v, output),
# gradients as wide as half of its MLP in backward, and bytes of a number of rotated queries and keys.
BLOCK_ROWS, BLOCK_GRADIENTS, BLOCK_ROTARY = 8, 3, 8
_Key = tuple[LayerKind, SlotLoad, Measure, bool, int]  # the rows of a tile last


@dataclass(frozen=True)
class LayerBytes:
    """What a layer keeps of a load under a measure, on device and host, and what its passes hold besides."""

    kept: float
    host: float
    forward: float
    backward: float


@dataclass(frozen=True)
class StageBytes:
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

    # ---- what is there all through a step

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

    @cached_property
    def all_numbers(self) -> Numbers:
        """All parameters of this rank's stage, and of an encoder's tower."""
        return sum((self.numbers.layers[i] for i in self.stage.layers), self.root_numbers) + self.numbers.tower

    @cached_property
    def root_numbers(self) -> Numbers:
        """Embedding and head, as far as they are here."""
        return self.numbers.root_numbers(self.stage)

    @cached_property
    def trained_share(self) -> float:
        """Numbers of this rank's part that are trained, before FSDP2 shards them.

        Whether a tower is trained is a setting of its own, so that its trained part replaces its share.
        """
        numbers, tower = self.all_numbers, self.numbers.tower
        return (numbers.share - tower.share if self.settings.trains_all else numbers.adapters) + tower.trained

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states of this rank's shards; trained weights may have a dtype of their own."""
        settings = self.settings
        numbers = self.trained_share * settings.weight_bytes * settings.state_numbers
        return int(numbers / self.shards) if settings.backward else 0

    @cached_property
    def resident_bytes(self) -> Bytes:
        """Shards of weights and states, and on a GPU CUDA's context and NCCL's communicators.

        Communicators are two over all slots, one for every other axis of the home, and those of the plan's groups.
        """
        settings, home, trained = self.settings, self.home, self.trained_share
        weights = (self.all_numbers.share - trained) * settings.parameter_bytes + trained * settings.weight_bytes
        groups = (home.slots > 1) * 2 + (home.tp > 1) + (home.pp > 1) + (home.ep > 1) + (home.dp_replicate > 1)
        return Bytes(
            weights=int(weights / self.shards),
            states=0 if settings.offload_states else self.state_bytes,
            communicators=(CONTEXT_BYTES + COMMUNICATOR_BYTES * (groups + self.groups)) * settings.gpu,
        )

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

    # ---- layers

    def layer_bytes(self, layer: int, load: SlotLoad, measure: Measure) -> LayerBytes:
        """Return what one layer keeps of a load and holds while it runs, counted once for all layers of a kind.

        A layer that recomputes runs forward again before it runs backward, so that it then holds what it did not keep.
        The first layer of a depth of prediction also keeps the tensors around the depth's layers.
        """
        kind, begins_depth = self.numbers.kinds[layer], self.numbers.begins_depth(layer)
        key = kind, load, measure, begins_depth, self.settings.mlp_tile_rows
        if key not in self.layers_so_far:
            word, _, host = measure.partition("+")
            table = LayerTable(self.read, self.settings, load, self.home.tp, self.home.ep, lean=word == "selective")
            mixing, feed = table.split(kind)
            both, gradient = mixing + feed, table.input
            size = both.lasting + both.attention * (word != "full") + both.exchanged * (word == "exchanged")
            size = table.input + (both.saved if word == "none" else size)
            # The MLP runs backward first, while all is saved; its widest moment comes after a third of the gradients of
            # weights. What it saved is gone when attention runs, and all those gradients may be there.
            weights = self.numbers.layers[layer].trained * self.settings.compute_bytes
            widest = max(both.saved + feed.work + weights / 3, mixing.saved + mixing.work + weights)
            peak = table.input + gradient + widest
            forward = gradient + 0.75 * max(mixing.saved, feed.saved)  # less than backward needs: most is freed
            depth_bytes = OF_A_DEPTH * load.rows * self.row_bytes * begins_depth
            sizes = (0.0, size) if host else (size, 0.0)
            self.layers_so_far[key] = LayerBytes(sizes[0] + depth_bytes, sizes[1], forward, max(0.0, peak - size))
        return self.layers_so_far[key]

    def waiting_bytes(self, load: SlotLoad, measures: Sequence[Measure]) -> list[LayerBytes]:
        """Return what each layer of this stage keeps until its segment runs backward.

        Without segments a layer keeps what its measure says. Of a segment only the first layer keeps anything, its
        input, on the host if its measure says so.
        """
        words: list[Measure] = [measures[i] for i in self.stage.layers]
        layers = [self.layer_bytes(i, load, word) for i, word in zip(self.stage.layers, words, strict=True)]
        if self.settings.segment_layers < 2:
            return layers
        places = places_in_segments(words, self.settings.segment_layers)
        for i, (place, word) in enumerate(zip(places, words, strict=True)):
            if place:
                layers[i] = replace(layers[i], kept=0.0, host=0.0)
            elif word != "none":
                input_measure: Measure = "full+host" if "+" in word else "full"
                of_input = self.layer_bytes(self.stage.layers[i], load, input_measure)
                layers[i] = replace(layers[i], kept=of_input.kept, host=of_input.host)
        return layers

    # ---- images

    @cached_property
    def image_bytes(self) -> tuple[float, float, float]:
        """Bytes of images kept while the language model runs, and while encoders run backward; and work of a block.

        Kept are the encoded rows, and what a tower's blocks keep of the patches: 0 where it is frozen, for it has no
        graph then; if recomputed, only while they run backward. A row is `merge`² patches, or all images have one size.
        """
        shape, settings, rows = self.numbers.tower_shape, self.settings, self.settings.encoder_rows
        if shape is None or not rows:
            return 0.0, 0.0, 0.0
        patches = rows * (shape.patch_count(1) if shape.merge else shape.patches / shape.rows)
        layers, number = shape.full_layers + shape.window_layers, settings.compute_bytes
        mlp_width = shape.block_weights / layers / shape.width - 4 * shape.width  # of all products of the MLP
        blocks = (
            patches * layers * (BLOCK_ROWS * shape.width + mlp_width) * number * (settings.encoder_trained == "all")
        )
        work = patches * (BLOCK_GRADIENTS * mlp_width / 2 * number + BLOCK_ROTARY * shape.width)
        encoded = rows * self.row_bytes
        return encoded + blocks * (not settings.encoder_recomputed), encoded + blocks, work

    # ---- the moments of a step

    def moments(self, loads: Sequence[SlotLoad], measures: Sequence[Measure]) -> Iterator[Bytes]:
        """Yield the bytes at the update, and at the moments of a micro-batch of each of these loads.

        Moments of an evaluation (`backward` False) are those of each layer's forward pass and of the loss.

        >>> max(stage.moments(loads, ["full"] * 36), key=lambda moment: moment.total)  # doctest: +SKIP
        """
        base, settings = self.resident_bytes, self.settings
        if settings.backward:
            # An update of states that wait on the host has two buckets of them.
            states = min(self.state_bytes, 2 * STATE_BUCKET_BYTES) if settings.offload_states else self.state_bytes
            yield replace(base, gradients=int(self.gradient_bytes(self.all_numbers)), states=states)
        for load in loads:
            for moment in self._micro_batch_moments(load, tuple(measures)):
                sizes = {name: int(size) for name, size in moment.items()}
                yield replace(base, **sizes)

    def _micro_batch_moments(self, load: SlotLoad, measures: tuple[Measure, ...]) -> Iterator[dict[str, float]]:
        settings, layers = self.settings, self.waiting_bytes(load, measures)
        numbers = [self.numbers.layers[i] for i in self.stage.layers]
        whole, root = [self._whole_bytes(one) for one in numbers], self._whole_bytes(self.root_numbers)
        arrives = self.shards > 1  # weights come from other slots, in a tensor of their own
        all_whole = self.stays_whole or settings.gathered_once or not settings.shard_parameters
        waiting = sum(layer.kept for layer in layers) * settings.backward
        activations = waiting * self.in_flight + self.image_bytes[0] * settings.backward
        row = load.rows * self.row_bytes
        # Gradients of earlier micro-batches: shards, or whole ones to the end of the step.
        all_gradients = self.gradient_bytes(self.all_numbers)
        gradients = all_gradients * load.later * (not self.stays_whole)
        whole_gradients = self.all_numbers.trained * settings.reduce_bytes * (self.stays_whole and settings.backward)
        if not settings.backward:
            yield from (
                {"gathered": root + (sum(whole) if all_whole else 2 * size), "work": layer.forward}
                for layer, size in zip(layers, whole, strict=True)
            )
        if self.stage.predicts:
            gathered = root + arrives * whole[-1] * (not self.stays_whole) + sum(whole) * all_whole
            gathered += whole_gradients * load.later
            tensors = AT_THE_LOSS + settings.depths + OF_WIDE_NORM * (not (settings.gpu and settings.fused_norms))
            at_loss = {"gradients": gradients, "gathered": gathered, "kept": activations, "work": tensors * row}
            yield from (at_loss | {"logits": logits} for logits in self._logit_bytes(load))
        if not settings.backward:
            return
        root += self._root_gradients
        places = places_in_segments([measures[i] for i in self.stage.layers], settings.segment_layers)
        layers_again = [self.layer_bytes(i, load, measures[i]) for i in self.stage.layers]
        sent = 0.0
        for i in reversed(range(len(layers))):
            first = i - places[i]
            activations -= layers[i].kept
            # What the layers of a segment before this one keep since it ran forward again, and what is fetched ahead.
            before = zip(layers_again[first:i], layers[first:i], strict=True)
            again = sum(x.kept + x.host - y.kept - y.host for x, y in before)
            fetched = layers[first - 1 - places[first - 1]].host if first and i == first else 0.0
            activations_here = activations + again + fetched
            if self.stays_whole or not settings.shard_parameters:
                others = root + sum(whole) - whole[i] + whole_gradients
            else:
                others = root + (sum(whole[:i]) if settings.gathered_once else arrives * whole[i - 1] * bool(i))
            of_layer = layers_again[i].kept + layers_again[i].host
            moment = {"gradients": gradients, "gathered": others + whole[i] + sent, "kept": activations_here + of_layer}
            yield moment | {"work": layers_again[i].backward}
            if not self.stays_whole:  # the layer's gradients are summed over slots, and then sent
                yield moment | {
                    "gathered": others + self.summing_bytes(numbers[i]),
                    "kept": activations_here,
                    "work": row,
                }
                sent = numbers[i].trained * settings.reduce_bytes * settings.shard_parameters
                gradients += 0.0 if load.later else self.gradient_bytes(numbers[i])
        yield from self._end_moments(row, gradients, root - self._root_gradients + sum(whole) + whole_gradients)

    def _whole_bytes(self, numbers: Numbers) -> float:
        """Return the bytes of gathered weights, with float8 copies (rows and columns) of layers where they stay."""
        stay = self.stays_whole or not self.settings.shard_parameters
        is_layer = numbers is not self.root_numbers
        return self.gathered_bytes(numbers) + 2.0 * numbers.whole * (self.settings.float8 and stay and is_layer)

    @cached_property
    def _root_gradients(self) -> float:
        """Bytes of the root's gradients before the first layer: of the head, and of an embedding that depths read."""
        trained = self.numbers.head.trained
        if self.settings.depths and not self.numbers.tied:
            trained += self.numbers.embedding.trained
        return trained * self.stage.predicts * self.settings.compute_bytes

    def _end_moments(self, row: float, gradients: float, whole: float) -> Iterator[dict[str, float]]:
        """Yield the moments after all layers: whole gradients are summed, then the root's; encoders run last."""
        settings, root, all_gradients = self.settings, self.root_numbers, self.gradient_bytes(self.all_numbers)
        if self.stays_whole:
            largest = max((self.numbers.layers[i] for i in self.stage.layers), key=lambda n: n.trained)
            sent = largest.trained * settings.reduce_bytes
            yield {"gradients": self.gradient_bytes(largest), "gathered": whole + sent, "work": row}
            sums = self.gathered_bytes(root) + 2 * root.trained * settings.reduce_bytes
            yield {"gradients": all_gradients, "gathered": sums, "work": row}
        else:
            yield {"gradients": gradients, "gathered": self.summing_bytes(root), "work": row}
        if settings.encoder_rows:
            tower, (_, activations, work) = self.numbers.tower, self.image_bytes
            gathered = self.gathered_bytes(tower) * (1 + (self.shards > 1)) + self.summing_bytes(tower)
            yield {"gradients": all_gradients, "gathered": gathered, "kept": activations, "work": work}

    def _logit_bytes(self, load: SlotLoad) -> Iterator[float]:
        """Yield the bytes of two moments of the loss: of a chunk of logits, and of scaling the head's gradient.

        At the first moment there are the logits of one chunk and their gradient (on a CPU a float32 copy too), and the
        chunk's gradient of the head. Several chunks also have the sum of those gradients, in float32 at least. At the
        second moment the head's gradient is scaled into a new tensor, and a float32 sum is then cast. Each depth of
        prediction keeps such a sum, or its one chunk's gradient, as well.
        """
        settings, number = self.settings, self.settings.compute_bytes
        vocabulary = self.read.count("vocab_size") / self.home.tp
        bytes_of_logit = 2 * number + (0 if settings.gpu else max(4, number))
        rows = max(1, round(load.rows * settings.target_share))
        most_rows = settings.loss_chunk_rows or max(1, int(CHUNK_BYTES[settings.gpu] // (vocabulary * bytes_of_logit)))
        chunks = -(-rows // most_rows)
        trained = self.numbers.head.trained if settings.backward else 0.0
        sum_number = max(4, number) if chunks > 1 else number
        depth_sums = settings.depths * trained * sum_number
        chunk_logits = -(-rows // chunks) * vocabulary * bytes_of_logit
        yield depth_sums + chunk_logits + trained * (sum_number * (chunks > 1) + number)
        yield depth_sums + trained * (sum_number * 2 + number * (sum_number != number))

    def host_bytes(self, loads: Sequence[SlotLoad], measures: Sequence[Measure]) -> Bytes:
        """Return the bytes that wait on the host: activations of the load that has most there, and states."""
        activations = max(sum(layer.host for layer in self.waiting_bytes(load, measures)) for load in loads)
        states = self.state_bytes if self.settings.offload_states else 0
        return Bytes(kept=int(activations * self.in_flight) if self.settings.backward else 0, states=states)
