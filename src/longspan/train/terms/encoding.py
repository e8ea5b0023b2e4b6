"""Waves of items through encoders: their rows brought to the owners of their places, and gradients brought back.

Before the language model runs, every wave is encoded, on all ranks, and its rows go straight to the ranks that own
their positions; each micro-batch there has one leaf, which takes the places of its placeholders. After it, each wave's
gradients go back and the encoder runs one backward pass for the wave. All ranks enter all waves in one order: a rank
without items of a wave encodes its smallest one, whose rows go nowhere, for the collectives inside an encoder.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from longspan.bridge import Bridge
from longspan.bridge.bridge import RowGradient
from longspan.comm import SequenceShard, World, bind, raise_first_error, to_device
from longspan.comm.shard import RowsAt
from longspan.errors import ModelError
from longspan.layout.segments import Integers
from longspan.model.fsdp_params import reshard
from longspan.model.layers import preserve_modes
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules
from longspan.model.sharding import defer_until_last_pass, sum_gradients_over_slots
from longspan.plan import Group, MicroBatch, Plan
from longspan.plan.items.encoding_plan import EncoderPlanning, ItemTable, ModalityPlan, NeededBy, Wave, plan_items
from longspan.plan.items.item_table import ItemRows
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.terms.slot_pace import DeviceClock


@dataclass(frozen=True)
class EncoderTimes:
    """The encoders' part of a step, the same on every rank: seconds before and after the language model, the mean over
    ranks, with exchanges and waiting; and what the waves' plan predicts."""

    seconds: float
    predicted_seconds: float


class _LocalWave:
    """One wave on this rank: what it encodes, its exchange, and the rows that it delivers to each micro-batch.

    `items` are those that this rank's slot encodes, by their number in the plan, `rows` how many rows they make here.
    The passes of a step fill the rest: `inputs`, `output`, `deliveries`.
    """

    def __init__(
        self, wave: Wave, plan: ModalityPlan, encoder: Encoder, world: World, *, gradient: RowGradient
    ) -> None:
        """A slot without items of this wave still runs the wave's smallest one, as all ranks of an encoder must enter
        its collectives; `has_items` is False, and nothing of the output is used.
        """
        self.bridge = Bridge(wave.have, wave.need, world, gradient=gradient)
        slot = encoder.world.slot
        self.has_items = bool(wave.micro_batch.groups_of(slot))
        self.micro_batch = wave.micro_batch
        if not self.has_items:
            groups = wave.micro_batch.groups
            pairs = (pair for group in groups for pair in zip(group.lengths, group.documents, strict=True))
            rows, item = min(pairs)
            self.micro_batch = MicroBatch((Group((slot,), (item,), (rows,), partition="contiguous"),))
        # An encoder whose slots share items gets a shard, bound in the step.
        self.shard: SequenceShard | None = None
        groups = [group for _, group in self.micro_batch.groups_of(slot)]
        self.items = tuple(int(plan.rows.items[item]) for group in groups for item in group.documents)
        self.rows = sum(group.shares.counts[group.slots.index(slot)] for group in groups)
        self.inputs: list[Any] = []
        self.output: Tensor | None = None
        # The states are those of the host's generator, and of the GPU's.
        self.random_states: list[Tensor] = []
        self.deliveries: list[tuple[Tensor, Tensor | None]] = []  # leaves, and which of their rows are of this wave


@dataclass(frozen=True, eq=False)
class ModalityPass:
    """The waves of one modality on this rank in one step; `training` is the mode of the encoder's modules.

    `items` are those of the micro-batches that are run, `width` is the size of the language model's hidden states.
    """

    encoder: Encoder
    world: World
    plan: ModalityPlan
    items: ItemTable
    width: int
    training: bool

    @cached_property
    def trains(self) -> bool:
        """Whether gradients come back to the encoder."""
        return self.training and not self.encoder.is_frozen

    @cached_property
    def waves(self) -> list[_LocalWave]:
        """The waves of the plan as this rank runs them, made on first use.

        Gradients of rows are summed over the ranks that use them, if the encoder is trained; of a slot's
        tensor-parallel ranks, which differentiate alike, one counts.
        """
        gradient: RowGradient = "partial" if self.trains else "none"
        if self.trains and self.world.home.tp > 1 and not self.plan.split_over_tp:
            gradient = "partial_over_slots"  # a slot's tp ranks use, and so differentiate, alike
        return [
            _LocalWave(wave, self.plan, self.encoder, self.world, gradient=gradient) for wave in self.plan.waves
        ]

    def read_items(self, documents: Any) -> None:
        """Read what each wave encodes here from the caller's documents, without other ranks; an error
        names its item.
        """
        for wave in self.waves:
            if self.encoder.max_cp > 1:
                wave.shard = bind(wave.micro_batch, self.encoder.world)
            wave.inputs = []
            for item in wave.items:
                with _add_note_to_errors(lambda item=item: f"reading {self.items.item_text(item)}"):
                    wave.inputs.append(documents.read(self.items.numbers[item]))

    def nonfinite_inputs(self) -> list[str]:
        """Return words for the items of this rank that hold a number which is not finite; waits for the device."""
        inputs = {item: value for wave in self.waves for item, value in zip(wave.items, wave.inputs, strict=True)}
        return [
            self.items.item_text(item)
            for item, value in sorted(inputs.items(), key=lambda entry: entry[0])
            if not all(x.isfinite().all() for x in find_tensors(value))
        ]

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Return a context in which the encoder's modules are in their modes for the step.

        At its end the encoder's gradients are summed over its slots, and no parameter stays gathered.
        """
        module = self.encoder.module
        with preserve_modes(module), ExitStack() as stack:
            # In an evaluation all modules are in evaluation mode. In a training step an encoder that is trained, and
            # is in evaluation mode, is put in training mode; others, and parts of others, keep their modes.
            if not self.training or (self.trains and not module.training):
                module.train(self.training)
            if self.trains:
                stack.enter_context(sum_gradients_over_slots(module, self.encoder.world))
            has_ended = False
            try:
                yield
                has_ended = True
            finally:
                # Only a backward pass frees gathered parameters, which would be stale in the next step.
                if not (self.trains and has_ended):
                    reshard(module)
                for wave in self.waves:
                    wave.output = None
                    wave.deliveries = []

    def encode_waves(self) -> ModelError | None:
        """Run the encoder over all waves and keep their outputs; return the error of the first wave that made other
        rows than its items take, None if all are right.

        No output is kept from that wave on.
        """
        error: ModelError | None = None
        # All waves run, also after an error: other ranks may wait in the collectives of an encoder.
        for wave in self.waves:
            if self.encoder.recompute and self.trains:  # backward runs the wave again, with the same dropout
                wave.random_states = [torch.get_rng_state()]
                if self.world.device.type == "cuda":
                    wave.random_states.append(torch.cuda.get_rng_state(self.world.device))
            with torch.set_grad_enabled(self.trains and not self.encoder.recompute):
                output = self._call_encoder(wave)
            error = error or self._rows_error(wave, output)
            # A wave that only enters the collectives delivers no row; its graph enters the collectives of backward.
            wave.output = output if wave.has_items else output[:0]
            if error:
                wave.output = None
        return error

    def _call_encoder(self, wave: _LocalWave) -> Tensor:
        """Only an encoder whose slots share items takes a shard. Rows are (n, width)."""
        with _add_note_to_errors(lambda: f"encoding {self._items_text(wave)} on rank {self.world.rank}"):
            return self.encoder.module(wave.inputs, **({} if wave.shard is None else {"shard": wave.shard}))

    def _items_text(self, wave: _LocalWave) -> str:
        return ", ".join(map(self.items.item_text, wave.items[:3])) + (", …" if len(wave.items) > 3 else "")

    def _rows_error(self, wave: _LocalWave, output: Any) -> ModelError | None:
        """None for the rows that the wave's items take, of the right width."""
        names = self._items_text(wave)
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

        A micro-batch takes its rows as one leaf of the graph, whose gradients `run_backward` reads.
        """
        arrived: list[Tensor] = []  # the rows that this rank needs of each wave
        for wave in self.waves:
            assert wave.output is not None
            with torch.no_grad():
                arrived.append(wave.bridge(wave.output.detach()))
            if self.encoder.recompute or not self.trains:  # backward needs no graph of this output
                wave.output = None
        # A wave's start is its first row that is not delivered yet.
        starts = np.zeros(len(self.waves), dtype=np.int64)
        shards = {id(batch.shard.micro_batch): batch.shard for batch in batches}
        for index, micro_batch in enumerate(micro_batches):
            # The rows are for this rank's own tokens, and for those further on, depth by depth.
            needed_rows = [needed[self.world.rank][index] for needed in (self.plan.needed, *self.plan.ahead)]
            rows = np.concatenate([item_rows.row for item_rows in needed_rows])
            if not len(rows):
                continue
            wave_of_row = self.plan.wave_of_row[rows]
            leaf = self._collect_rows(wave_of_row, arrived, starts).requires_grad_(self.trains)
            starts += np.bincount(wave_of_row, minlength=len(self.waves))
            shard = shards[id(micro_batch)]
            spliced, added = self._rows_at_places(leaf, needed_rows, shard.device)
            shard.derived.add_items(leaf, spliced, added)

    def _rows_at_places(
        self, leaf: Tensor, needed_rows: Sequence[ItemRows], device: torch.device
    ) -> tuple[dict[int, RowsAt], dict[int, RowsAt]]:
        """The first are in place of embeddings, by depth of prediction (0: the model itself), the second are added
        to outputs, by layer. A row's first `width` columns are an embedding, each further `width` columns are
        added in one layer."""
        spliced = dict[int, RowsAt]()
        added = dict[int, RowsAt]()
        with torch.set_grad_enabled(self.trains):
            rows_by_depth = leaf.split([len(item_rows.row) for item_rows in needed_rows])
            for depth, (item_rows, rows) in enumerate(zip(needed_rows, rows_by_depth, strict=True)):
                places = to_device(item_rows.local, device)
                parts = rows.split(self.width, -1) if self.encoder.deep_layers else (rows,)
                embedding_rows, *layer_rows = parts
                spliced[depth] = ((places, embedding_rows),)
                if depth == 0:
                    added = {layer: ((places, rows_of_layer),) for layer, rows_of_layer in enumerate(layer_rows)}
        return spliced, added

    def _collect_rows(self, wave_of_row: Integers, arrived: Sequence[Tensor], starts: Integers) -> Tensor:
        """`wave_of_row` (n,) says which wave has each row; in wave i they begin at `starts[i]`. Each wave keeps the
        leaf and the indices of its rows in it (None: all), to read their gradients from."""
        waves = sorted(set(wave_of_row.tolist()))
        if len(waves) == 1:
            (index,) = waves
            leaf = arrived[index][starts[index] : starts[index] + len(wave_of_row)].detach()
            places: list[Tensor | None] = [None]
        else:
            leaf = arrived[0].new_empty((len(wave_of_row), *arrived[0].shape[1:]))
            places = [to_device((wave_of_row == index).nonzero()[0], leaf.device) for index in waves]
        for index, place in zip(waves, places, strict=True):
            if place is not None:
                leaf[place] = arrived[index][starts[index] : starts[index] + len(place)]
            self.waves[index].deliveries.append((leaf, place))
        return leaf

    def run_backward(self) -> None:
        """Bring the gradients of every wave back, the last first, and run the encoder's backward pass."""
        if not self.trains or not self.waves:
            return
        device = self.world.device
        with defer_until_last_pass(self.encoder.module) as finish:
            for wave in reversed(self.waves):
                if wave is self.waves[0]:  # the last to run, with which gradients are summed
                    finish()
                output = wave.output
                if self.encoder.recompute:  # once more, with the random state of the first time
                    devices = [device] if device.type == "cuda" else []
                    with torch.random.fork_rng(devices=devices), torch.enable_grad():
                        torch.set_rng_state(wave.random_states[0])
                        if device.type == "cuda":
                            torch.cuda.set_rng_state(wave.random_states[1], device)
                        output = self._call_encoder(wave)
                    output = output if wave.has_items else output[:0]
                assert output is not None
                gradient = wave.bridge.carry_back(_row_gradient(wave, output))
                torch.autograd.backward(output, gradient)
                wave.output = None
                wave.deliveries = []


def _row_gradient(wave: _LocalWave, output: Tensor) -> Tensor:
    """(n, width), in the order of delivery; None: all rows of a leaf. A leaf that no loss reached has gradient 0."""
    parts = [output.new_zeros((0, *output.shape[1:]))]
    for leaf, places in wave.deliveries:
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        parts.append(gradient if places is None else gradient[places])
    return torch.cat(parts)


@contextmanager
def _add_note_to_errors(text: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(text())
        raise


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, dicts and dataclasses (`ImageInput`), however deep."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from find_tensors([getattr(leaf, field.name) for field in fields(leaf)])


class Encoding:
    """All waves of some micro-batches of a plan, over all modalities, for one step or portion.

    Made on the host: no rank waits for another. Enter `passes_context` once all ranks have read their items.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        micro_batches: Sequence[MicroBatch],
        table: ItemTable,
        *,
        backward: bool,
        depths: int = 0,
    ) -> None:
        """Plan the waves of these micro-batches, from the items of their documents in `table`.

        `depths` of multi-token prediction need rows of later tokens too, on the last stage.
        """
        world = model.world
        documents = {document for batch in micro_batches for group in batch.groups for document in group.documents}
        numbers = tuple(i for i, item in enumerate(table.items) if item.document in documents)
        items = table
        if len(numbers) < len(table):
            items = ItemTable(table.lengths, [table.items[i] for i in numbers], numbers)
        language_model = model.language_model
        multiple = call_rules(language_model).row_multiple
        needed_by = NeededBy(
            micro_batches=tuple(micro_batches),
            home=world.home,
            row_multiple=plan.row_multiple,
            # Under sequence parallelism the tp ranks of a slot have different rows.
            split_over_tp=multiple > 1,
            depths=depths,
            # the stage whose ranks run the depths
            depths_at=language_model.pipeline_settings.pp - 1 if isinstance(language_model, PipelineModel) else 0,
        )
        planning = {
            modality: EncoderPlanning(
                home=encoder.world.home,
                max_rows_per_slot=encoder.max_rows_per_slot,
                max_cp=encoder.max_cp,
                cost=encoder.cost.shared_by(encoder.world.home.tp),
            )
            for modality, encoder in model.encoder_settings.items()
        }
        plans = plan_items(items, needed_by, planning)
        self._world = world
        self._clock = DeviceClock(world.device)
        width = model.config.get_text_config().hidden_size
        self._modality_passes = [
            ModalityPass(model.encoder_settings[modality], world, part, items, width, training=backward)
            for modality, part in plans.items()
        ]

    @property
    def items_here(self) -> list[int]:
        """The numbers of the items that this rank encodes, as the caller's documents count them."""
        return [
            modality_pass.items.numbers[item]
            for modality_pass in self._modality_passes
            for wave in modality_pass.waves
            for item in wave.items
        ]

    def read_items(self, documents: Any) -> None:
        """Read what this rank encodes, of all waves; raises whatever a document raises, without other ranks."""
        for modality_pass in self._modality_passes:
            modality_pass.read_items(documents)

    def nonfinite_inputs(self) -> list[str]:
        return [name for modality_pass in self._modality_passes for name in modality_pass.nonfinite_inputs()]

    @contextmanager
    def passes_context(self, micro_batches: Sequence[MicroBatch], batches: Sequence[LocalBatch]) -> Iterator[None]:
        """Encode and deliver rows, let the `with` block run the language model, then bring gradients back.

        `micro_batches` are those of the `batches`, equal to those that the waves were planned for.
        """
        with ExitStack() as stack:
            for modality_pass in self._modality_passes:
                stack.enter_context(modality_pass.step_context())
            with self._clock.add_time(), self._name_part("encoders, and rows to their owners"):
                errors = [modality_pass.encode_waves() for modality_pass in self._modality_passes]
                error = next(filter(None, errors), None)
                if self._world.control.flag_on_any_rank(error is not None):
                    raise_first_error(self._world, error)
                for modality_pass in self._modality_passes:
                    modality_pass.deliver_rows(micro_batches, batches)
            yield
            with self._clock.add_time(), self._name_part("gradients to encoders, and their backward passes"):
                for modality_pass in reversed(self._modality_passes):
                    modality_pass.run_backward()

    def gather_times(self) -> EncoderTimes:
        """Return the times, read after the step has waited for the device; all ranks enter together."""
        (seconds,) = self._world.control.sum_over_ranks([self._clock.seconds()], "times of encoders")
        predicted = sum(modality_pass.plan.plan.predicted_seconds for modality_pass in self._modality_passes)
        return EncoderTimes(seconds / len(self._world.home.ranks), predicted)

    def _name_part(self, part: str) -> AbstractContextManager[None]:
        return self._world.watch.name_collectives(part, self._world.home.ranks)
