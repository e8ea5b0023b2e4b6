"""The moments of a step at which a rank may hold most: layer by layer forward, the loss, backward, and the end.

FSDP2 (torch 2.11 to 2.15) holds in a forward pass a layer's weights twice, as they arrived and laid out, and those of
the root (embedding and head) throughout. In backward it holds the layer's and those of the one before, which it fetches
ahead, the layer's gradients, and what is sent of the layer behind until this one's is. Over one slot nothing arrives.
In free mode and in pipelines all weights are whole throughout, and gradients are added up whole, in the dtype of sums.

Gradients are counted as they come: in the first micro-batch of a step none are there when the loss is made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from longspan.plan.memory.bytes import Bytes
from longspan.plan.memory.encoder_bytes import EncoderBytes
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.settings import Measure, places_in_segments
from longspan.plan.memory.step_peak import LayerBytes, StepPeak

_CHUNK_BYTES = {True: 2 << 30, False: 64 << 20}  # of logits at a time (train/loss.py)
_AT_THE_LOSS = 3  # rows between layers: before the last norm and after it, and the gradient; of each depth one more
_OF_WIDE_NORM = 2  # so many rows more where no fused kernel runs the last norm, which then goes through float32


def step_moments(peak: StepPeak, loads: Sequence[SlotLoad], measures: Sequence[Measure]) -> Iterator[Bytes]:
    """Yield the bytes at the optimizer's update, and at every moment of a micro-batch of each of these loads.

    An evaluation (`backward` False) has no update.

    >>> max(step_moments(peak, loads, ["full"] * 36), key=lambda moment: moment.total)  # doctest: +SKIP
    """
    base = peak.resident_bytes
    if peak.settings.backward:
        yield replace(base, gradients=int(peak.gradient_bytes(peak.all_numbers)), states=peak.update_state_bytes)
    for load in loads:
        yield from MicroBatchMoments(peak, load, tuple(measures)).moments()


@dataclass(frozen=True)
class MicroBatchMoments:
    """The moments of one micro-batch with this load, on one rank whose layers keep these measures."""

    peak: StepPeak
    load: SlotLoad
    measures: tuple[Measure, ...]

    def moments(self) -> Iterator[Bytes]:
        """Yield the bytes of every moment, in the order of a step; without a backward pass only forward and loss."""
        yield from self._forward_moments()
        yield from self._loss_moments()
        if self.peak.settings.backward:
            yield from self._backward_moments()
            yield from self._end_moments()

    @cached_property
    def _layer_bytes(self) -> list[LayerBytes]:
        """What each layer of this stage keeps and holds if it is in no segment."""
        return [self.peak.layer_bytes(i, self.load, self.measures[i]) for i in self.peak.stage.layers]

    @cached_property
    def _waiting_bytes(self) -> list[LayerBytes]:
        """Return what each layer keeps from forward until its segment runs backward.

        Without segments a layer keeps what its measure says. Of a segment only the first layer keeps anything, its
        input, on the host if its measure says so; the other layers keep nothing. The peaks are those of each layer's
        own measure.
        """
        peak, words = self.peak, [self.measures[i] for i in self.peak.stage.layers]
        if peak.settings.segment_layers < 2:
            return self._layer_bytes
        waiting = list[LayerBytes]()
        for i, place in enumerate(self._places):
            layer = self._layer_bytes[i]
            if words[i] == "none":  # in no segment
                waiting.append(layer)
            elif place == 0:
                word: Measure = "full+host" if words[i].endswith("+host") else "full"
                of_input = peak.layer_bytes(peak.stage.layers[i], self.load, word)
                waiting.append(replace(of_input, peaks=layer.peaks))
            else:
                waiting.append(replace(layer, kept=0.0, host=0.0))
        return waiting

    @cached_property
    def _places(self) -> list[int]:
        """The number of each layer within its segment, from 0."""
        words = [self.measures[i] for i in self.peak.stage.layers]
        return places_in_segments(words, self.peak.settings.segment_layers)

    def _segment_bytes(self, i: int) -> float:
        """Return what the layers before layer i in its segment keep while layer i runs backward, without what waited.

        The segment has run forward again, so each of these layers keeps as much as a layer without a segment, less the
        bytes of `_waiting_bytes`, which the caller counts. What a layer keeps on the host counts here as bytes on the
        device.
        """
        layers_before = self._places[i] if self.peak.settings.segment_layers > 1 else 0
        kept_bytes = sum(layer.kept + layer.host for layer in self._layer_bytes[i - layers_before : i])
        waited_bytes = sum(layer.kept + layer.host for layer in self._waiting_bytes[i - layers_before : i])
        return kept_bytes - waited_bytes

    def _count_fetched_bytes(self, i: int) -> float:
        """Return what is on the device again, while layer i runs backward, of what waits on the host for a later layer.

        It is that of the layer before, or with segments that of the first layer of the segment before, while the first
        layer of a segment runs backward.
        """
        if i == 0 or self._places[i]:
            return 0.0
        return self._waiting_bytes[i - 1 - self._places[i - 1]].host

    @cached_property
    def _whole_weights(self) -> list[float]:
        """Bytes of each layer's gathered weights, and of their float8 copies where these stay."""
        layers = [self.peak.numbers.layers[i] for i in self.peak.stage.layers]
        return [self.peak.gathered_bytes(numbers) + self.peak.float8_bytes(numbers) for numbers in layers]

    @cached_property
    def _root_weights(self) -> float:
        """Bytes of the gathered weights of embedding and head."""
        return self.peak.gathered_bytes(self.peak.root_numbers)

    @cached_property
    def _arrival_factor(self) -> int:
        """1 where weights arrive from other slots, in a tensor of their own."""
        return int(self.peak.shards > 1)

    @cached_property
    def _earlier_gradients(self) -> float:
        """Bytes of this rank's shards of gradients that earlier micro-batches left; 0 where gradients stay whole."""
        all_gradients = self.peak.gradient_bytes(self.peak.all_numbers)
        return all_gradients if self.load.later and not self.peak.stays_whole else 0.0

    @cached_property
    def _whole_gradients(self) -> float:
        """Return the bytes of whole gradients, to which micro-batches add until a step ends and sums them over slots.

        0 where weights do not stay whole: then each layer's gradients are summed over slots in every backward pass.
        """
        peak = self.peak
        if not peak.stays_whole or not peak.settings.backward:
            return 0.0
        return peak.all_numbers.trained * peak.settings.reduce_bytes

    @cached_property
    def _other_activations(self) -> float:
        """Return the bytes of activations that are kept of other micro-batches in flight, and of images."""
        if not self.peak.settings.backward:
            return 0.0
        images = EncoderBytes(self.peak)
        return (self.peak.in_flight - 1) * sum(layer.kept for layer in self._waiting_bytes) + images.bytes_kept

    def _make_moment(
        self, *, gradients: float, gathered: float, kept: float, work: float, logits: float = 0.0
    ) -> Bytes:
        """Return the bytes of a moment: these, and the shards, states and communicators held all through the step."""
        base = self.peak.resident_bytes
        return Bytes(
            weights=base.weights,
            gradients=int(gradients),
            states=base.states,
            gathered=int(gathered),
            kept=int(kept),
            work=int(work),
            logits=int(logits),
            communicators=base.communicators,
        )

    def _whole_forward_bytes(self, i: int) -> float:
        """Return the bytes of whole weights while layer i runs forward.

        Whole are the root's weights, the layer's (with `gathered_once` also those of the layers before), and the
        layer's once more where weights arrive from other slots. In free mode and in pipelines the weights of all layers
        are whole. Unsharded weights count as resident, so that here only their float8 copies do.
        """
        if self.peak.stays_whole or not self.peak.settings.shard_parameters:
            return self._root_weights + sum(self._whole_weights)
        laid_out = sum(self._whole_weights[: i + 1]) if self.peak.settings.gathered_once else self._whole_weights[i]
        return self._root_weights + laid_out + self._arrival_factor * self._whole_weights[i]

    def _forward_moments(self) -> Iterator[Bytes]:
        """Yield the moments of the forward pass, layer by layer.

        While a layer runs, what the layer before it keeps on the host may still be on the device, on its way. Only a
        `later` micro-batch finds gradients of earlier ones.
        """
        whole_gradients = self._whole_gradients if self.load.later else 0.0
        activations = self._other_activations
        for i, layer in enumerate(self._waiting_bytes):
            leaving_bytes = self._waiting_bytes[i - 1].host if i else 0.0
            whole_bytes = self._whole_forward_bytes(i) + whole_gradients
            yield self._make_moment(
                gradients=self._earlier_gradients,
                gathered=whole_bytes,
                kept=activations + leaving_bytes,
                work=layer.peaks.forward,
            )
            activations += layer.kept if self.peak.settings.backward else 0.0

    def _loss_moments(self) -> Iterator[Bytes]:
        """Yield the moments of the loss and of its logits; none if the stage predicts nothing.

        At the loss the root's weights are whole, the last layer's may still lie there as they arrived, and all
        activations are kept. Every layer's weights are whole with `gathered_once`, in free mode and in pipelines.
        """
        peak, settings = self.peak, self.peak.settings
        if not peak.stage.predicts:
            return
        whole_bytes = self._root_weights + self._arrival_factor * self._whole_weights[-1] * (not peak.stays_whole)
        if peak.stays_whole or settings.gathered_once or not settings.shard_parameters:
            whole_bytes += sum(self._whole_weights)
        whole_bytes += self._whole_gradients if self.load.later else 0.0
        activations = (
            self._other_activations + sum(layer.kept for layer in self._waiting_bytes) if settings.backward else 0.0
        )
        row_tensors = _AT_THE_LOSS + settings.depths + _OF_WIDE_NORM * (not (settings.gpu and settings.fused_norms))
        rows = row_tensors * self.load.rows * peak.row_bytes
        for logits in self._logit_bytes():
            yield self._make_moment(
                gradients=self._earlier_gradients, gathered=whole_bytes, kept=activations, work=rows, logits=logits
            )

    def _logit_bytes(self) -> Iterator[float]:
        """Yield the bytes of two moments of the loss: of a chunk of logits, and of scaling the head's gradient.

        At the first moment there are the logits of one chunk and their gradient (on a CPU a float32 copy too), and the
        chunk's gradient of the head. Several chunks also have the sum of those gradients, in float32 at least. At the
        second moment the head's gradient is scaled into a new tensor, and a float32 sum is then cast. Each depth of
        prediction keeps such a sum, or its one chunk's gradient, as well.
        """
        settings, number = self.peak.settings, self.peak.settings.compute_bytes
        vocabulary = self.peak.read.count("vocab_size") / self.peak.home.tp
        bytes_of_logit = 2 * number + (0 if settings.gpu else max(4, number))
        rows = max(1, round(self.load.rows * settings.target_share))
        most_rows = settings.loss_chunk_rows or max(1, int(_CHUNK_BYTES[settings.gpu] // (vocabulary * bytes_of_logit)))
        chunks = -(-rows // most_rows)
        trained = self.peak.numbers.head.trained if settings.backward else 0.0
        sum_number = max(4, number) if chunks > 1 else number
        depth_sums = settings.depths * trained * sum_number
        chunk_logits = -(-rows // chunks) * vocabulary * bytes_of_logit
        yield depth_sums + chunk_logits + trained * (sum_number * (chunks > 1) + number)
        yield depth_sums + trained * (sum_number * 2 + number * (sum_number != number))

    def _backward_moments(self) -> Iterator[Bytes]:
        """Yield the moments of the backward pass from the last layer to the first: two a layer.

        At the first moment a layer runs backward, and the gradients of the layer that ran before are still being sent
        (`sent_bytes`). At the second the layer's gradients are there whole, to be summed over slots, and what the layer
        kept is freed. At either moment what is needed next of the host is there (`_count_fetched_bytes`). In a `later`
        micro-batch the shards of all gradients are there from its start. Where weights stay whole there is no second
        moment: gradients are summed at the end of the step (`_end_moments`).
        """
        peak, stage = self.peak, self.peak.stage
        activations = self._other_activations + sum(layer.kept for layer in self._waiting_bytes)
        summed = self._earlier_gradients
        sent_bytes = 0.0
        for i in reversed(range(len(self._layer_bytes))):
            layer, numbers = self._layer_bytes[i], peak.numbers.layers[stage.layers[i]]
            activations -= self._waiting_bytes[i].kept
            of_segment = self._segment_bytes(i)
            fetched_bytes = self._count_fetched_bytes(i)
            other_weights = self._other_weights_backward(i)
            bytes_of_layer = layer.kept + layer.host  # what waited on the host is on the device again
            yield self._make_moment(
                gradients=summed,
                gathered=other_weights + self._whole_weights[i] + sent_bytes,
                kept=activations + bytes_of_layer + fetched_bytes + of_segment,
                work=layer.peaks.backward,
            )
            if peak.stays_whole:
                continue
            yield self._make_moment(
                gradients=summed,
                gathered=other_weights + peak.summing_bytes(numbers),
                kept=activations + fetched_bytes + of_segment,
                work=self.load.rows * peak.row_bytes,
            )
            sent_bytes = numbers.trained * peak.settings.reduce_bytes if peak.settings.shard_parameters else 0.0
            summed += 0.0 if self.load.later else peak.gradient_bytes(numbers)

    def _other_weights_backward(self, i: int) -> float:
        """Return the bytes of whole weights and gradients in the backward pass of layer i, without the layer's own.

        Whole are the weights of the root, its gradients so far, and the weights of layer i - 1, which are fetched
        ahead. With `gathered_once` the weights of all layers before layer i are whole, in free mode and in pipelines
        those of all other layers.
        """
        peak = self.peak
        root_numbers = peak.numbers.head.trained * peak.stage.predicts
        if peak.settings.depths and not peak.numbers.tied:  # depths read the embedding: it has a gradient by now
            root_numbers += peak.numbers.embedding.trained * peak.stage.predicts
        root_bytes = self._root_weights + root_numbers * peak.settings.compute_bytes
        if peak.stays_whole or not peak.settings.shard_parameters:
            return root_bytes + sum(self._whole_weights) - self._whole_weights[i] + self._whole_gradients
        if peak.settings.gathered_once:
            return root_bytes + sum(self._whole_weights[:i])
        return root_bytes + (self._arrival_factor * self._whole_weights[i - 1] if i else 0.0)

    def _end_moments(self) -> Iterator[Bytes]:
        """Yield the moments after all layers: the root's gradients are summed, then encoders run backward.

        Where weights stay whole, the gradients of all layers are summed here first, one layer after another, of which
        the largest needs most.
        """
        peak, root = self.peak, self.peak.root_numbers
        all_gradients = peak.gradient_bytes(peak.all_numbers)
        rows = self.load.rows * peak.row_bytes
        if peak.stays_whole:  # layer by layer, then the root
            largest = max((peak.numbers.layers[i] for i in peak.stage.layers), key=lambda n: n.trained)
            sent_bytes, root_bytes = (numbers.trained * peak.settings.reduce_bytes for numbers in (largest, root))
            whole_bytes = self._root_weights + sum(self._whole_weights) + self._whole_gradients + sent_bytes
            yield self._make_moment(gradients=peak.gradient_bytes(largest), gathered=whole_bytes, kept=0.0, work=rows)
            gathered_bytes = self._root_weights + 2 * root_bytes  # 2: the root's gradients, and the copy that is sent
            yield self._make_moment(gradients=all_gradients, gathered=gathered_bytes, kept=0.0, work=rows)
        else:
            # A first micro-batch has the shards of the layers' gradients by now, a later one those of the root too.
            summed = self._earlier_gradients if self.load.later else all_gradients - peak.gradient_bytes(root)
            yield self._make_moment(gradients=summed, gathered=peak.summing_bytes(root), kept=0.0, work=rows)
        images = EncoderBytes(peak)
        if images.rows:
            yield self._make_moment(
                gradients=all_gradients, gathered=images.whole_bytes, kept=images.backward_bytes, work=images.block_work
            )
