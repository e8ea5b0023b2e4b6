"""The waves of one modality on one rank: encode, deliver rows, bring gradients back."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from longspan.bridge import Bridge
from longspan.comm import SequenceShard, World, bind, to_device
from longspan.comm.moves.row_exchange import RowGradient
from longspan.comm.shard import RowsAt
from longspan.errors import ModelError
from longspan.layout.segments import Integers
from longspan.model.multimodal.multimodal_model import Encoder
from longspan.model.parts import preserve_modes
from longspan.model.sharding import gradients_summed_over_slots, reshard, sum_replicas_at_last
from longspan.plan import Group, MicroBatch
from longspan.plan.items import ItemTable, ModalityPlan, Wave
from longspan.train.reading.read_rows import LocalBatch

Part = Literal["phases", "towers"]  # all before and after the language model's passes; in it the encoders alone


@dataclass(frozen=True)
class EncoderTimes:
    """The encoders' part of a step, the same on every rank.

    `seconds` from the step's beginning until the language model has its rows, and from its end until the encoders have
    their gradients: the mean over ranks, exchanges and waiting included. `tower_seconds` of towers and projectors
    only, of the busiest rank; `balance` is that over the mean of all (1: all equally busy), which under FSDP2 holds
    the waiting for each other's parameters as well. The predicted ones are those of the waves' plan: seconds that
    towers and projectors take, and the busiest slot's work over the mean.
    """

    seconds: float
    tower_seconds: float
    balance: float
    predicted_seconds: float
    predicted_balance: float


class PartClock:
    """Adds up what parts of a step take on this rank; parts may lie inside each other.

    >>> with clock.time_part("towers"):
    ...     rows = encoder(images)
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without times: the host's seconds by part, and on a GPU pairs of events, which then count instead."""
        self._gpu = device.type == "cuda"
        self._spans: dict[Part, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._seconds: dict[Part, float] = defaultdict(float)

    @contextmanager
    def time_part(self, part: Part) -> Iterator[None]:
        """Add the time of the `with` block to a part; a block that raises is not counted."""
        started = time.perf_counter()
        start = self._record_event()
        yield
        self._seconds[part] += time.perf_counter() - started
        if start is not None:
            end = self._record_event()
            assert end is not None
            self._spans[part].append((start, end))

    def seconds(self, part: Part) -> float:
        """Return the seconds that a part took in all; waits until the device has finished it."""
        if not self._gpu:
            return self._seconds[part]
        for _, end in self._spans[part]:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans[part]) / 1e3

    def _record_event(self) -> torch.cuda.Event | None:
        if not self._gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def gather_times(clocks: Sequence[PartClock], world: World, predicted: tuple[float, float]) -> EncoderTimes:
    """Gather the times of all ranks, which enter together: mean seconds, the busiest rank's, and its ratio to the mean.

    `clocks` are this rank's, whose times are added; `predicted` are seconds and balance by the plan.
    """
    phases, towers = (sum(clock.seconds(timed_part) for clock in clocks) for timed_part in ("phases", "towers"))
    ranks = len(world.home.ranks)
    all_phases, all_towers = world.control.sum_over_ranks([phases, towers], "times of encoders")
    (busiest,) = world.control.largest_of([towers], "times of encoders")
    balance = busiest * ranks / all_towers if all_towers else 1.0
    return EncoderTimes(all_phases / ranks, busiest, balance, *predicted)


class RandomState(NamedTuple):
    """States of the host's generator and of a GPU's."""

    host: Tensor
    gpu: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> "RandomState":
        """Read the states as they are now."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)


@contextmanager
def restore_random_state(state: RandomState, device: torch.device) -> Iterator[None]:
    """Set the random generators of the host and the GPU to a state while open; afterwards they are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(state.host)
        if state.gpu is not None:
            torch.cuda.set_rng_state(state.gpu, device)
        yield


class _LocalWave:
    """One wave on this rank: what it encodes, its exchange, and the rows that it delivers to each micro-batch."""

    def __init__(
        self, wave: Wave, plan: ModalityPlan, encoder: Encoder, world: World, *, gradient: RowGradient
    ) -> None:
        """A slot without items of this wave still runs the wave's smallest one, as all ranks of an encoder must enter
        its collectives; `has_items` is False, and nothing of the output is used.
        """
        self.bridge = Bridge(wave.have, wave.need, world, gradient=gradient)
        slot = encoder.world.slot
        self.has_items = bool(wave.micro_batch.groups_of(slot))
        self.micro_batch = wave.micro_batch if self.has_items else _smallest_item(wave.micro_batch, slot)
        self.shard: SequenceShard | None = None  # for an encoder whose slots share items; bound in the step
        groups = [group for _, group in self.micro_batch.groups_of(slot)]
        self.items = tuple(int(plan.rows.items[item]) for group in groups for item in group.documents)
        self.rows = sum(group.shares.counts[group.slots.index(slot)] for group in groups)
        self.inputs: list[Any] = []
        self.output: Tensor | None = None
        self.random_state: RandomState | None = None
        self.deliveries: list[tuple[Tensor, Tensor | None]] = []  # leaves, and which of their rows are of this wave


def _smallest_item(wave: MicroBatch, slot: int) -> MicroBatch:
    rows, item = min(
        (rows, item) for group in wave.groups for item, rows in zip(group.documents, group.lengths, strict=True)
    )
    return MicroBatch((Group((slot,), (item,), (rows,), partition="contiguous"),))


class ModalityPass:
    """The waves of one modality on this rank."""

    def __init__(
        self, encoder: Encoder, world: World, plan: ModalityPlan, items: ItemTable, *, width: int, backward: bool
    ) -> None:
        """Prepare the waves of a plan of these items; `width` is the size of the language model's hidden states."""
        self.encoder: Encoder = encoder
        self.world: World = world
        self.plan: ModalityPlan = plan
        self.items: ItemTable = items
        self.width: int = width
        self.trains: bool = backward and not encoder.frozen  # whether gradients come back to the encoder
        self.training: bool = backward  # the mode of its modules
        self.clock: PartClock = PartClock(world.device)
        same_on_tp = world.home.tp > 1 and not plan.split_over_tp  # a slot's tp ranks use, and so differentiate, alike
        gradient: RowGradient = "none" if not self.trains else "partial_over_slots" if same_on_tp else "partial"
        self.waves: list[_LocalWave] = [
            _LocalWave(wave, plan, encoder, world, gradient=gradient) for wave in plan.waves
        ]

    @property
    def items_here(self) -> list[int]:
        """The items that this rank encodes, as documents number them."""
        return [self.items.numbers[item] for wave in self.waves for item in wave.items]

    def read_items(self, documents: Any) -> None:
        """Read the inputs of this rank's items, and bind the waves of an encoder whose slots share items."""
        for wave in self.waves:
            if self.encoder.max_cp > 1:
                wave.shard = bind(wave.micro_batch, self.encoder.world)
            wave.inputs = [self._read_item(documents, item) for item in wave.items]

    def _read_item(self, documents: Any, item: int) -> Any:
        with _add_note(lambda: f"reading {self.items.item_text(item)}"):
            return documents.read(self.items.numbers[item])

    def nonfinite_inputs(self) -> list[str]:
        """Return the items whose inputs, as read here, hold tensors that are not finite."""
        inputs = {item: value for wave in self.waves for item, value in zip(wave.items, wave.inputs, strict=True)}
        return [
            self.items.item_text(item)
            for item, value in sorted(inputs.items(), key=lambda entry: entry[0])
            if not all(map(_is_finite, find_tensors(value)))
        ]

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Return a context in which the encoder's modules are in their modes for the step.

        At its end the encoder's gradients are summed over its slots, and no parameter stays gathered.
        """
        module = self.encoder.module
        with preserve_modes(module), ExitStack() as stack:
            # A frozen encoder, and parts of one that is in training mode, keep their modes in a training step.
            if not self.training or (self.trains and not module.training):
                module.train(self.training)
            if self.trains:
                stack.enter_context(gradients_summed_over_slots(module, self.encoder.world))
            has_ended = False
            try:
                yield
                has_ended = True
            finally:
                # Only a backward pass frees gathered parameters, which would be stale in the next step.
                if not (self.trains and has_ended):
                    reshard(module)
                for wave in self.waves:
                    wave.output, wave.deliveries = None, []

    def encode_waves(self) -> ModelError | None:
        """Run the encoder over all waves; returns the error of a wave that made other rows than its items take."""
        error: ModelError | None = None
        for wave in self.waves:  # all of them, whatever one made: other ranks may wait in the collectives of an encoder
            if self.encoder.recompute and self.trains:  # backward runs the wave again, with the same dropout
                wave.random_state = RandomState.of(self.world.device)
            with torch.set_grad_enabled(self.trains and not self.encoder.recompute):
                output = self._call_encoder(wave)
            error = error or self._rows_error(wave, output)
            # A wave that only enters the collectives delivers no row; its graph enters the collectives of backward.
            wave.output = None if error else output if wave.has_items else output[:0]
        return error

    def _call_encoder(self, wave: _LocalWave) -> Tensor:
        """Only an encoder whose slots share items takes a shard."""
        note = _add_note(lambda: f"encoding {self._item_names(wave)} on rank {self.world.rank}")
        with note, self.clock.time_part("towers"):
            return self.encoder.module(wave.inputs, **({} if wave.shard is None else {"shard": wave.shard}))

    def _item_names(self, wave: _LocalWave) -> str:
        return ", ".join(map(self.items.item_text, wave.items[:3])) + (", …" if len(wave.items) > 3 else "")

    def _rows_error(self, wave: _LocalWave, output: Any) -> ModelError | None:
        """Return the error of an encoder that returned other rows than the wave's items take; None if it is right."""
        names = self._item_names(wave)
        if not isinstance(output, Tensor) or output.ndim != 2:
            returned = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            return ModelError(f"the encoder returned {returned} for {names}; it returns rows (n, width)")
        if output.shape[0] != wave.rows:
            return ModelError(
                f"the encoder returned {output.shape[0]} rows for {names}, whose placeholders take {wave.rows} "
                f"positions here (rank {self.world.rank}); spans of an item and the rows of its encoder must agree"
            )
        deep = self.encoder.deep_layers
        if output.shape[1] != self.width * (1 + deep):
            parts = f", and {deep} parts more are added in layers" if deep else ""
            return ModelError(
                f"the encoder makes rows of width {output.shape[1]} for {names}, the language model embeds tokens in "
                f"{self.width}{parts}; end the encoder with a projector to {self.width * (1 + deep)}"
            )
        return None

    def deliver_rows(self, micro_batches: Sequence[MicroBatch], batches: Sequence[LocalBatch]) -> None:
        """Exchange the rows of every wave, and give each shard of these micro-batches the rows at its placeholders.

        A micro-batch takes its rows from those of the waves, in order, as one leaf of the graph, whose gradient goes
        back to the encoders later. The first part of a row replaces an embedding, at each depth of prediction (`ahead`
        0 is the model itself); its further parts are added to outputs of decoder layers, in the model only. The outputs
        are dropped if the encoder runs again for backward, or is not trained.
        """
        arrived: list[Tensor] = []
        for wave in self.waves:
            assert wave.output is not None
            with torch.no_grad():
                arrived.append(wave.bridge(wave.output.detach()))
            if self.encoder.recompute or not self.trains:
                wave.output = None
        starts = [0] * len(self.waves)
        by_micro_batch = {id(batch.shard.micro_batch): batch.shard for batch in batches}
        for index, micro_batch in enumerate(micro_batches):
            needed_rows = self.plan.item_rows_at(self.world.rank, index)
            rows = np.concatenate([item_rows.row for item_rows in needed_rows])
            if not len(rows):
                continue
            shard = by_micro_batch[id(micro_batch)]
            leaf = self._collect_rows(self.plan.wave_of_row[rows], arrived, starts).requires_grad_(self.trains)
            with torch.set_grad_enabled(self.trains):
                rows_by_depth = leaf.split([len(item_rows.row) for item_rows in needed_rows])
            spliced, added = dict[int, RowsAt](), dict[int, RowsAt]()
            for ahead, (item_rows, part_rows) in enumerate(zip(needed_rows, rows_by_depth, strict=True)):
                places = to_device(item_rows.local, shard.device)
                embedding_rows, *layer_rows = self._rows_by_layer(part_rows)
                spliced[ahead] = ((places, embedding_rows),)
                if not ahead:
                    added = {layer: ((places, rows_of_layer),) for layer, rows_of_layer in enumerate(layer_rows)}
            shard.derived.add_items(leaf, spliced, added)

    def _rows_by_layer(self, rows: Tensor) -> Sequence[Tensor]:
        with torch.set_grad_enabled(self.trains):
            return rows.split(self.width, -1) if self.encoder.deep_layers else (rows,)

    def _collect_rows(self, wave_of_row: Integers, arrived: Sequence[Tensor], starts: list[int]) -> Tensor:
        """Collect the rows of one micro-batch from those that arrived in each wave, as a leaf of autograd.

        In what arrived of wave i, the micro-batch's rows begin at `starts[i]`, which is moved past them. The wave keeps
        the leaf and the indices of its rows in it (None: all of the leaf is this wave's), to read their gradients from.
        """
        waves = sorted(set(wave_of_row.tolist()))
        if len(waves) == 1:
            (index,) = waves
            leaf = arrived[index][starts[index] : starts[index] + len(wave_of_row)].detach()
            places: list[Tensor | None] = [None]
        else:
            leaf = arrived[0].new_empty((len(wave_of_row), *arrived[0].shape[1:]))
            places = [to_device((wave_of_row == index).nonzero()[0], leaf.device) for index in waves]
        for index, place in zip(waves, places, strict=True):
            rows = len(wave_of_row) if place is None else len(place)
            if place is not None:
                leaf[place] = arrived[index][starts[index] : starts[index] + rows]
            starts[index] += rows
            self.waves[index].deliveries.append((leaf, place))
        return leaf

    def backward(self) -> None:
        """Bring the gradients of every wave back, the last first, and run the encoder's backward pass."""
        if not self.trains or not self.waves:
            return
        with sum_replicas_at_last(self.encoder.module) as sum_replicas:
            for wave in reversed(self.waves):
                if wave is self.waves[0]:  # the last to run
                    sum_replicas()
                output = self._encode_wave_again(wave) if self.encoder.recompute else wave.output
                assert output is not None
                gradient = wave.bridge.back(_row_gradient(wave, output))
                with self.clock.time_part("towers"):
                    torch.autograd.backward(output, gradient)
                wave.output, wave.deliveries = None, []

    def _encode_wave_again(self, wave: _LocalWave) -> Tensor:
        """Run a wave forward again, with the random state of the first time, and return its rows."""
        assert wave.random_state is not None
        with restore_random_state(wave.random_state, self.world.device), torch.enable_grad():
            output = self._call_encoder(wave)
        return output if wave.has_items else output[:0]


@contextmanager
def _add_note(purpose: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(purpose())
        raise


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, dicts and dataclasses (`ImageInput`), however deep."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from find_tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _row_gradient(wave: _LocalWave, output: Tensor) -> Tensor:
    """Places None are all rows of a leaf. A leaf that no loss of its micro-batch reached has gradient 0."""
    parts = [output.new_zeros((0, *output.shape[1:]))]
    for leaf, places in wave.deliveries:
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        parts.append(gradient if places is None else gradient[places])
    return torch.cat(parts)
