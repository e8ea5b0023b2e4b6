"""The encoders' part of a step: waves of items, encoded and brought to the owners of their rows, and back.

Before the language model runs, every wave is encoded, on all ranks, and its rows go straight to the ranks that own
their positions; each micro-batch there has one leaf, which takes the places of its placeholders. After it, each wave's
gradients go back and the encoder runs one backward pass for the wave. All ranks enter all waves in one order: a rank
without items of a wave encodes its smallest one, of which nothing goes anywhere, for the collectives inside an encoder.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from longspan.bridge.item_documents import item_table_of
from longspan.comm import raise_first_error
from longspan.errors import DataError, ModelError
from longspan.model.multimodal.encoder import Encoder
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import call_rules
from longspan.plan import MicroBatch, Plan
from longspan.plan.items import EncoderPlanning, ItemTable, NeededBy, plan_items
from longspan.plan.simulate.simulate import slot_cost
from longspan.train.encoding.modality_pass import ModalityPass
from longspan.train.encoding.times import EncoderTimes, PartClock, times_of_ranks
from longspan.train.reading.read_rows import LocalBatch


def items_of(model: nn.Module, plan: Plan, documents: Any) -> ItemTable | None:
    """The items of a step's documents; None for a model without encoders.

    Raises DataError for items that do not fit their documents, ModelError where the model has no encoder for items.
    """
    table = item_table_of(documents, plan.lengths)
    if isinstance(model, MultimodalModel):
        if table is None:
            raise DataError(
                f"the documents ({type(documents).__name__}) have no items; a MultimodalModel takes ItemDocuments, "
                "with an empty list of items where there are none"
            )
        return table
    if table is not None and len(table):
        raise ModelError(
            f"the documents have {len(table)} items, {type(model).__name__} has no encoder; run a "
            "MultimodalModel(encoders, language_model, world)"
        )
    return None


class Encoding:
    """All waves of some micro-batches of a plan. Enter `around` them once `read` has succeeded on all ranks."""

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
        world = model.world
        items = _of_micro_batches(table, micro_batches)
        multiple = call_rules(model.language_model).row_multiple
        needed_by = NeededBy(
            micro_batches=tuple(micro_batches),
            home=world.home,
            row_multiple=plan.row_multiple,
            split_over_tp=multiple > 1,
            depths=depths,
            depths_at=_last_stage(model.language_model),
        )
        planning = {modality: _planning(encoder) for modality, encoder in model.encoder_settings.items()}
        plans = plan_items(items, needed_by, planning)
        self._world, self._clock = world, PartClock(world.device)
        width = model.config.get_text_config().hidden_size
        self._parts = [
            ModalityPass(model.encoder_settings[modality], world, part, items, width=width, backward=backward)
            for modality, part in plans.items()
        ]

    @property
    def items_here(self) -> list[int]:
        """The items that this rank reads, as documents number them."""
        return [number for part in self._parts for number in part.items_here]

    def read(self, documents: Any) -> None:
        """What this rank encodes, from the documents; whatever they raise."""
        for part in self._parts:
            part.read(documents)

    def not_finite(self) -> list[str]:
        """The items of which this rank read something that is not finite."""
        return [name for part in self._parts for name in part.not_finite()]

    @contextmanager
    def around(self, micro_batches: Sequence[MicroBatch], batches: Sequence[LocalBatch]) -> Iterator[None]:
        """Encode and deliver before the body, which runs the language model; bring gradients back after it.

        `micro_batches` are those of the `batches`, equal to those that the waves were planned for.
        """
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.open())
            with self._clock.timing("phases"), self._naming("encoders, and rows to their owners"):
                self._agree([part.encode() for part in self._parts])
                for part in self._parts:
                    part.deliver(micro_batches, batches)
            yield
            with self._clock.timing("phases"), self._naming("gradients to encoders, and their backward passes"):
                for part in reversed(self._parts):
                    part.backward()

    def times(self) -> EncoderTimes:
        """What it all took, once the step has waited for the device; all ranks enter together."""
        plans = [part.plan for part in self._parts]
        seconds = sum(plan.plan.predicted_seconds for plan in plans)
        balance = max((plan.balance for plan in plans), default=1.0)
        return times_of_ranks([self._clock, *(part.clock for part in self._parts)], self._world, (seconds, balance))

    def _naming(self, what: str) -> AbstractContextManager[None]:
        return self._world.watch.naming(what, self._world.home.ranks)

    def _agree(self, errors: Sequence[ModelError | None]) -> None:
        """Raise on every rank where any encoder made other rows than its items take."""
        error = next((error for error in errors if error is not None), None)
        if self._world.control.any_rank(error is not None):
            raise_first_error(self._world, error)


def _last_stage(language_model: nn.Module) -> int:
    """The place in a pipeline of the rank that holds its last stage."""
    return language_model.pipeline_settings.loss_place if isinstance(language_model, PipelineModel) else 0


def _of_micro_batches(table: ItemTable, micro_batches: Sequence[MicroBatch]) -> ItemTable:
    """The items of the documents of these micro-batches, under their numbers among all."""
    documents = {document for batch in micro_batches for group in batch.groups for document in group.documents}
    index = tuple(i for i, item in enumerate(table.items) if item.document in documents)
    if len(index) == len(table):
        return table
    return ItemTable(table.lengths, [table.items[i] for i in index], index)


def _planning(encoder: Encoder) -> EncoderPlanning:
    return EncoderPlanning(
        home=encoder.world.home,
        max_rows_per_slot=encoder.max_rows_per_slot,
        max_cp=encoder.max_cp,
        cost=slot_cost(encoder.cost, encoder.world.home.tp),
    )
