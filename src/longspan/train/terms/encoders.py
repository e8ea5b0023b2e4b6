"""The encoders' part of a step: waves of items, encoded and brought to the owners of their rows, and back.

Before the language model runs, every wave is encoded, on all ranks, and its rows go straight to the ranks that own
their positions; each micro-batch there has one leaf, which takes the places of its placeholders. After it, each wave's
gradients go back and the encoder runs one backward pass for the wave. All ranks enter all waves in one order: a rank
without items of a wave encodes its smallest one, whose rows go nowhere, for the collectives inside an encoder.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longspan.comm import raise_first_error
from longspan.errors import ModelError
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules
from longspan.plan import MicroBatch, Plan
from longspan.plan.items import EncoderPlanning, ItemTable, NeededBy, plan_items
from longspan.train.passes import Term
from longspan.train.reading.local_batch import read_and_agree
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.reading.step_inputs import StepDocuments, StepInputs
from longspan.train.terms.modality_pass import EncoderTimes, ModalityPass, PartClock, gather_times


class EncodersTerm(Term):
    """The encoders of a MultimodalModel in a step: all waves of a whole step, or those of a portion at a time.

    Where any rank cannot read its items, `read` raises DataError on every rank.
    """

    def __init__(self, model: MultimodalModel, inputs: StepInputs, items: ItemTable, depths: int = 0) -> None:
        """Keep what waves are planned from; `read` plans the waves, also for `depths` of multi-token prediction."""
        self._model, self._inputs, self._items, self._depths = model, inputs, items, depths
        self._micro_batches: Sequence[MicroBatch] = ()
        self._encoding: Encoding | None = None

    def read(self, batches: Sequence[LocalBatch]) -> None:
        """Plan the waves of the step, unless that was done ahead, and read the inputs of this rank's items."""
        inputs, table = self._inputs, self._items
        passes = {"backward": inputs.backward, "depths": self._depths}
        self._micro_batches = inputs.plan.micro_batches
        self._encoding = encoding = take_encoding(self._model, inputs.plan, table, **passes)
        read = partial(encoding.read_items, inputs.documents.documents)
        read_and_agree(read, table.digest(), inputs.world, what="lists of items")

    def read_portion(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Plan the waves of some micro-batches of an evaluation and read the inputs of this rank's items.

        It runs without the other ranks: an error is raised on this rank only, and the caller agrees on errors.
        """
        self._micro_batches = micro_batches
        self._encoding = Encoding(self._model, self._inputs.plan, micro_batches, self._items, backward=False)
        self._encoding.read_items(self._inputs.documents.documents)

    def passes_context(self, batches: Sequence[LocalBatch]) -> AbstractContextManager[None]:
        """Encode before the passes of the language model, and bring gradients back after them."""
        assert self._encoding is not None, "read first"
        return self._encoding.passes_context(self._micro_batches, batches)

    def nonfinite_inputs(self) -> list[str]:
        """Return the items for which this rank read something that is not finite."""
        return [] if self._encoding is None else self._encoding.nonfinite_inputs()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return what the encoders took of a step with a backward pass."""
        assert self._encoding is not None
        return {"encoders": self._encoding.gather_times()} if self._inputs.backward else {}


class Encoding:
    """All waves of some micro-batches of a plan. Enter `passes_context` once all ranks have read their items."""

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
        """Plan which slot encodes which item of these micro-batches, and which ranks need its rows, by modality."""
        world = model.world
        items = _batch_items(table, micro_batches)
        multiple = call_rules(model.language_model).row_multiple
        needed_by = NeededBy(
            micro_batches=tuple(micro_batches),
            home=world.home,
            row_multiple=plan.row_multiple,
            split_over_tp=multiple > 1,  # under sequence parallelism the tp ranks of a slot have different rows
            depths=depths,
            depths_at=_last_stage(model.language_model),  # whose ranks run the depths
        )
        planning = {modality: _encoder_planning(encoder) for modality, encoder in model.encoder_settings.items()}
        plans = plan_items(items, needed_by, planning)
        self._world, self._clock = world, PartClock(world.device)
        width = model.config.get_text_config().hidden_size
        self._modality_passes = [
            ModalityPass(model.encoder_settings[modality], world, part, items, width=width, backward=backward)
            for modality, part in plans.items()
        ]

    @property
    def items_here(self) -> list[int]:
        """The items that this rank reads, as documents number them."""
        return [number for modality_pass in self._modality_passes for number in modality_pass.items_here]

    def read_items(self, documents: Any) -> None:
        """Read what this rank encodes from the documents; raises whatever they raise."""
        for modality_pass in self._modality_passes:
            modality_pass.read_items(documents)

    def nonfinite_inputs(self) -> list[str]:
        """Return the items for which this rank read something that is not finite."""
        return [name for modality_pass in self._modality_passes for name in modality_pass.nonfinite_inputs()]

    @contextmanager
    def passes_context(self, micro_batches: Sequence[MicroBatch], batches: Sequence[LocalBatch]) -> Iterator[None]:
        """Encode and deliver rows, let the `with` block run the language model, then bring gradients back.

        `micro_batches` are those of the `batches`, equal to those that the waves were planned for.
        """
        with ExitStack() as stack:
            for modality_pass in self._modality_passes:
                stack.enter_context(modality_pass.step_context())
            with self._clock.time_part("phases"), self._name_part("encoders, and rows to their owners"):
                self._raise_errors_together([modality_pass.encode_waves() for modality_pass in self._modality_passes])
                for modality_pass in self._modality_passes:
                    modality_pass.deliver_rows(micro_batches, batches)
            yield
            with self._clock.time_part("phases"), self._name_part("gradients to encoders, and their backward passes"):
                for modality_pass in reversed(self._modality_passes):
                    modality_pass.backward()

    def gather_times(self) -> EncoderTimes:
        """Return the times of all parts, read after the step has waited for the device; all ranks enter together."""
        plans = [modality_pass.plan for modality_pass in self._modality_passes]
        seconds = sum(plan.plan.predicted_seconds for plan in plans)
        balance = max((plan.balance for plan in plans), default=1.0)
        return gather_times(
            [self._clock, *(modality_pass.clock for modality_pass in self._modality_passes)],
            self._world,
            (seconds, balance),
        )

    def _name_part(self, part: str) -> AbstractContextManager[None]:
        return self._world.watch.naming(part, self._world.home.ranks)

    def _raise_errors_together(self, errors: Sequence[ModelError | None]) -> None:
        """Raise, on every rank, the first of `errors` that any rank has, as for an encoder that made too few rows."""
        error = next((error for error in errors if error is not None), None)
        if self._world.control.any_rank(error is not None):
            raise_first_error(self._world, error)


def _last_stage(language_model: nn.Module) -> int:
    return language_model.pipeline_settings.loss_place if isinstance(language_model, PipelineModel) else 0


def _batch_items(table: ItemTable, micro_batches: Sequence[MicroBatch]) -> ItemTable:
    documents = {document for batch in micro_batches for group in batch.groups for document in group.documents}
    index = tuple(i for i, item in enumerate(table.items) if item.document in documents)
    if len(index) == len(table):
        return table
    return ItemTable(table.lengths, [table.items[i] for i in index], index)


def _encoder_planning(encoder: Encoder) -> EncoderPlanning:
    """Return what an encoder's waves are planned with: its home, limits, and the cost of a slot."""
    return EncoderPlanning(
        home=encoder.world.home,
        max_rows_per_slot=encoder.max_rows_per_slot,
        max_cp=encoder.max_cp,
        cost=encoder.cost.shared_by(encoder.world.home.tp),
    )


# ---- waves of a coming step, planned in a thread while another step runs

MOST_AHEAD = 4  # steps of a model whose waves are planned and not yet taken; older ones are dropped
_pool = ThreadPoolExecutor(1, "longspan-waves")
_planned_encodings = WeakKeyDictionary[nn.Module, "OrderedDict[Any, Future[Encoding]]"]()


def plan_waves_ahead(
    model: MultimodalModel, plan: Plan, documents: Any, *, backward: bool = True, depths: int = 0
) -> None:
    """Begin to plan the waves of a coming step, and return at once; `run_step` takes them when it comes to the step.

    >>> following = plans.plan(step + 1)
    >>> plan_waves_ahead(model, following, documents_of(step + 1))
    >>> run_step(model, plan, documents, world, optimizer=optimizer)

    `backward`, and how many `depths` of multi-token prediction run, are those of the step. What is planned is on the
    host: which items a rank encodes, and which rows go where. A method `read_ahead(items)` of the documents is called
    with the items that this rank will read; nothing else is read. An error is raised by the step. Raises what
    `run_step` raises for documents without items.
    """
    table = StepDocuments(model, documents, plan.lengths).items
    assert table is not None  # a MultimodalModel's documents have items
    planned = _planned_encodings.setdefault(model, OrderedDict())
    device = model.world.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    make = partial(Encoding, model, plan, plan.micro_batches, table, backward=backward, depths=depths)
    planned[_encoding_key(model, plan, table, (backward, depths))] = _pool.submit(
        _plan_in_thread, stream, make, documents
    )
    while len(planned) > MOST_AHEAD:
        planned.popitem(last=False)


def take_encoding(model: MultimodalModel, plan: Plan, table: ItemTable, *, backward: bool, depths: int = 0) -> Encoding:
    """Take the waves of a step: those planned ahead, which it waits for, or planned now."""
    ahead = _planned_encodings.get(model, OrderedDict()).pop(
        _encoding_key(model, plan, table, (backward, depths)), None
    )
    if ahead is not None:
        return ahead.result()
    return Encoding(model, plan, plan.micro_batches, table, backward=backward, depths=depths)


def _plan_in_thread(stream: torch.cuda.Stream | None, make: Callable[[], Encoding], documents: Any) -> Encoding:
    if stream is not None:
        torch.cuda.set_stream(stream)
    encoding = make()
    if (read_ahead := getattr(documents, "read_ahead", None)) is not None:
        read_ahead(encoding.items_here)
    return encoding


def _encoding_key(model: MultimodalModel, plan: Plan, table: ItemTable, passes: tuple[bool, int]) -> tuple[object, ...]:
    """Return the key of what an encoding depends on; `passes` are `backward` and `depths` of the step.

    The key has which encoders are frozen, as the caller may freeze one between planning ahead and the step.
    """
    frozen = tuple(encoder.frozen for encoder in model.encoder_settings.values())
    return plan.digest(), table.digest(), passes, frozen
