"""When a rank holds most in a step: its shards, what FSDP2 gathers and sums, what layers keep, and the layer at work.

FSDP2 (torch 2.11 to 2.13) in a forward pass holds a layer's weights twice, as they arrived and laid out, the root's
(embedding and head) throughout; in backward the layer's and those of the one before, which are fetched ahead, the gradients
of the layer, and the float32 sums of the layer behind until this one's are sent. Over one slot nothing arrives from others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from longspan.layout import Layout
from longspan.plan.cost.config_reader import ConfigReader
from longspan.plan.cost.layers import LayerKind
from longspan.plan.memory.bytes import Bytes
from longspan.plan.memory.layer_tapes import EXCHANGED, KEPT_OF_ATTENTION, LayerTapes
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.parameters import ModelNumbers, Numbers, Stage
from longspan.plan.memory.settings import Measure, MemorySettings
from longspan.plan.memory.tape import Peaks, Tape

CONTEXT_BYTES = 1300 << 20  # of a CUDA context with its kernels (bench/records/memory-measured.json)
COMMUNICATOR_BYTES = 460 << 20  # of NCCL's buffers of a group (bench/records/communicators-4xH200.md)
_LOGIT_BYTES = {True: 2 << 30, False: 64 << 20}  # of a chunk (train/loss.py)


@dataclass(frozen=True)
class LayerBytes:
    """What a layer keeps of a load under a measure, on device and host, and what its passes hold besides."""

    kept: float
    host: float
    peaks: Peaks


@dataclass(frozen=True)
class StepPeak:
    """The bytes of a rank of a home at one pipeline position, for any load and measures.

    `in_flight` micro-batches have run forward and not backward at once.
    """

    read: ConfigReader
    home: Layout
    settings: MemorySettings
    numbers: ModelNumbers
    stage: Stage
    in_flight: float = 1.0
    layers_so_far: dict[tuple[LayerKind, SlotLoad, Measure], LayerBytes] = field(
        default_factory=dict[tuple[LayerKind, SlotLoad, Measure], LayerBytes], compare=False, repr=False
    )

    @property
    def shards(self) -> int:
        """Slots over which FSDP2 shards a weight."""
        return self.home.slots // self.home.dp_replicate if self.settings.shard_parameters else 1

    @property
    def stays_gathered(self) -> bool:
        """Whether weights stay whole from a layer's forward to its backward pass, or longer."""
        return self.settings.gathered_once or self.stays_whole

    @property
    def stays_whole(self) -> bool:
        """Whether weights and gradients are whole through all micro-batches of a step."""
        return self.settings.free or self.home.pp > 1

    def layer_bytes(self, layer: int, load: SlotLoad, measure: Measure) -> LayerBytes:
        """What one layer keeps and holds."""
        key = self.numbers.kinds[layer], replace(load, later=False), measure
        if key not in self.layers_so_far:
            tape = LayerTapes(self.read, self.settings, self.home.tp, self.home.ep).tape(key[0], key[1])
            self.layers_so_far[key] = _bytes_under(tape, measure)
        return self.layers_so_far[key]

    def resident(self) -> Bytes:
        """This rank's shards of weights and states, and what every GPU has."""
        settings = self.settings
        every = self._all()
        frozen = (every.share - every.adapters) if not settings.trains_all else 0.0
        trained = every.share if settings.trains_all else every.adapters
        own = settings.parameter_bytes if settings.trains_all else settings.adapter_bytes
        weights = (frozen * settings.parameter_bytes + trained * own) / self.shards
        tower = self.numbers.tower
        weights += tower.share * settings.parameter_bytes / self.shards
        states = (trained + tower.trained) * own * settings.state_numbers / self.shards
        on_device = states if settings.backward and not settings.offload_states else 0.0
        return Bytes(weights=int(weights), states=int(on_device), communicators=self._communicators())

    def host_states(self) -> int:
        """Bytes of the optimizer's states where they wait on the host."""
        if not (self.settings.offload_states and self.settings.backward):
            return 0
        return replace(self, settings=replace(self.settings, offload_states=False)).resident().states

    def _all(self) -> Numbers:
        return sum((self.numbers.layers[i] for i in self.stage.layers), self.numbers.root(self.stage))

    def _communicators(self) -> int:
        if not self.settings.gpu:
            return 0
        home = self.home
        groups = (home.slots > 1) * 2 + (home.tp > 1) + (home.pp > 1) + (home.ep > 1) + (home.dp_replicate > 1)
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * groups

    def gradient_bytes(self, numbers: Numbers) -> float:
        """Bytes of this rank's shard of the gradients of these parameters."""
        settings = self.settings
        own = settings.parameter_bytes if settings.trains_all else settings.adapter_bytes
        if self.home.dp_replicate > 1:
            own = max(own, settings.reduce_bytes)  # sums over a copy's shards, until copies are added
        return numbers.trained / (numbers.whole or 1.0) * numbers.share * own / self.shards if numbers.trained else 0.0

    def moments(self, loads: Sequence[SlotLoad], measures: Sequence[Measure]) -> Iterator[Bytes]:
        """What is held at the moments of a step that may need most."""
        base, every = self.resident(), self._all()
        gradients = self.gradient_bytes(every) + self.gradient_bytes(self.numbers.tower)
        if self.settings.backward:
            yield replace(base, gradients=int(gradients))
        for load in loads:
            yield from self._moments_of(base, load, measures, gradients)

    def _whole(self, numbers: Numbers) -> float:
        return numbers.whole * self.settings.compute_bytes if self.settings.shard_parameters else 0.0

    def _moments_of(
        self, base: Bytes, load: SlotLoad, measures: Sequence[Measure], gradients: float
    ) -> Iterator[Bytes]:
        settings, layers = self.settings, self.stage.layers
        numbers = [self.numbers.layers[i] for i in layers]
        each = [self.layer_bytes(i, load, measures[i]) for i in layers]
        root = self.numbers.root(self.stage)
        arrived = 1 if self.shards > 1 else 0
        sums = settings.reduce_bytes if settings.shard_parameters else 0
        summed = gradients if load.later else 0.0
        whole_gradients = 0.0
        if self.stays_whole:
            whole_gradients = sum(n.trained for n in numbers) * sums + root.trained * sums
        kept = (self.in_flight - 1) * sum(layer.kept for layer in each) if settings.backward else 0.0
        all_whole = sum(self._whole(n) for n in numbers)
        for i, layer in enumerate(each):
            whole = self._whole(numbers[i])
            gathered = self._whole(root) + arrived * whole
            gathered += (
                all_whole
                if self.stays_whole
                else sum(map(self._whole, numbers[: i + 1]))
                if self.stays_gathered
                else whole
            )
            passing = each[i - 1].host if i else 0.0
            yield replace(
                base,
                gradients=int(summed),
                gathered=int(gathered + (whole_gradients if load.later else 0.0)),
                kept=int(kept + (passing if settings.backward else 0.0)),
                work=int(layer.peaks.forward),
            )
            kept += layer.kept if settings.backward else 0.0
        if not settings.backward:
            yield replace(base, gathered=int(self._whole(root)), logits=int(self._loss_bytes(load)[0]))
            return
        hidden = load.rows * self.read.count("hidden_size") * settings.compute_bytes
        of_root = self._whole(root) + (all_whole if self.stays_gathered else arrived * self._whole(numbers[-1]))
        of_root += whole_gradients if load.later else 0.0
        if self.stage.predicts:
            for logits in self._loss_bytes(load):
                yield replace(
                    base,
                    gradients=int(summed),
                    gathered=int(of_root),
                    kept=int(kept),
                    work=int(3 * hidden),
                    logits=int(logits),
                )
        head = self.numbers.head.trained * settings.compute_bytes * self.stage.predicts
        behind = 0.0  # float32 sums of the layer behind
        for i in reversed(range(len(each))):
            layer = each[i]
            kept -= layer.kept
            before = self._whole(numbers[i - 1]) * arrived if i else 0.0
            others = self._whole(root) + head
            if self.stays_whole:
                others += all_whole - self._whole(numbers[i]) + whole_gradients
            elif self.stays_gathered:
                others += sum(map(self._whole, numbers[:i]))
            else:
                others += before
            ahead = each[i - 1].host if i else 0.0
            yield replace(
                base,
                gradients=int(summed),
                gathered=int(others + self._whole(numbers[i]) + behind),
                kept=int(kept + layer.kept + layer.host + ahead),
                work=int(layer.peaks.backward),
            )
            behind = numbers[i].trained * sums if not self.stays_whole else 0.0
            yield replace(
                base,
                gradients=int(summed),
                gathered=int(others + self._summing(numbers[i])),
                kept=int(kept + ahead),
                work=int(hidden),
            )
            if not load.later:
                summed += self.gradient_bytes(numbers[i])
        yield replace(
            base,
            gradients=int(summed),
            gathered=int(self._summing(root) + whole_gradients + (all_whole if self.stays_whole else 0.0)),
            work=int(hidden),
        )

    def _summing(self, numbers: Numbers) -> float:
        """Gradients of a layer while they are summed over slots: as they were, laid out to be sent, and the result.

        Over one slot FSDP2 divides what would be sent by 1 first, into another tensor.
        """
        settings = self.settings
        own = numbers.trained * settings.compute_bytes
        if not settings.shard_parameters:
            return own
        sent = numbers.trained * settings.reduce_bytes
        return max(own + sent, sent * (3 if self.shards == 1 else 1 + 1 / self.shards))

    def _loss_bytes(self, load: SlotLoad) -> tuple[float, ...]:
        """Of a chunk of logits with sums of the head's gradient, and of these when backward scales them."""
        settings = self.settings
        vocabulary, number = self.read.count("vocab_size"), settings.compute_bytes
        of_logit = 2 * number + (0 if settings.gpu else max(4, number))
        rows = max(1, round(load.rows * settings.target_share))
        most = settings.loss_chunk_rows or max(1, _LOGIT_BYTES[settings.gpu] // (vocabulary * of_logit))
        chunks = -(-rows // most)
        logits = -(-rows // chunks) * vocabulary * of_logit
        trained = self.numbers.head.trained if settings.backward else 0.0
        wide = max(4, number) if chunks > 1 else number
        scaled = trained * (wide * 2 + number * (wide != number))
        return logits + trained * (wide * (chunks > 1) + number), scaled

    def host_bytes(self, loads: Sequence[SlotLoad], measures: Sequence[Measure]) -> Bytes:
        """What waits on the host: activations of the largest load, and states."""
        kept = max(sum(self.layer_bytes(i, load, measures[i]).host for i in self.stage.layers) for load in loads)
        return Bytes(kept=int(kept), states=self.host_states())


def _bytes_under(tape: Tape, measure: Measure) -> LayerBytes:
    """What a layer keeps under a measure, and its peaks above that."""
    what, _, host = measure.partition("+")
    if what == "none":
        beside, peaks = tape.saved_bytes(("x",)), tape.peaks(held=("x",), again=False)
        return LayerBytes(beside + tape.sizes["x"], 0.0, Peaks(peaks.forward, peaks.backward - beside))
    names = (
        "x",
        *tape.lasting,
        *(KEPT_OF_ATTENTION if what != "full" else ()),
        *(EXCHANGED if what == "exchanged" else ()),
    )
    held = set(names) & set(tape.sizes)
    kept, peaks = sum(tape.sizes[name] for name in held), tape.peaks(held=held)
    return LayerBytes(0.0, kept, peaks) if host else LayerBytes(kept, 0.0, peaks)
