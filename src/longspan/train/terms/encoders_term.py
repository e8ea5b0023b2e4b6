"""The encoders' part of a step, as a term.

An item, such as an image, takes places of a document, for which an encoder makes rows; a wave is one pass of an encoder
over some of a step's items, on all ranks. `encoding.py` runs waves.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import MicroBatch
from longspan.plan.items.item_table import ItemTable
from longspan.train.passes import Term
from longspan.train.rows.agreed_reading import read_and_compare_digest
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.step_inputs import StepInputs
from longspan.train.terms.encoding import Encoding
from longspan.train.terms.waves_ahead import take_planned_encoding


@dataclass(eq=False)
class EncodersTerm(Term):
    """The encoders of a MultimodalModel in a step: all waves of a whole step, or those of a portion at a time.

    Where any rank cannot read its items, `read` raises DataError on every rank.
    """

    _model: MultimodalModel
    _inputs: StepInputs
    _items: ItemTable
    _depths: int = 0
    _micro_batches: Sequence[MicroBatch] = ()
    _encoding: Encoding | None = None

    def read(self, batches: Sequence[LocalBatch]) -> None:
        """Take the waves that were planned ahead, or plan them, and read this rank's items; entered by all ranks.

        Raises DataError on every rank where any cannot read, CommError for another list of items.
        """
        inputs = self._inputs
        table = self._items
        plan = inputs.plan
        self._micro_batches = plan.micro_batches
        self._encoding = encoding = take_planned_encoding(
            self._model, plan, table, backward=inputs.backward, depths=self._depths
        )
        read_items = partial(encoding.read_items, inputs.documents.documents)
        read_and_compare_digest(read_items, table.digest(), inputs.world, what="lists of items")

    def read_portion(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Plan the waves of some micro-batches of an evaluation and read this rank's items, without the other ranks.

        Raises what reading raises, and PlanError for items that fit no slot, on this rank alone: the caller tells the
        others.
        """
        self._micro_batches = micro_batches
        self._encoding = Encoding(self._model, self._inputs.plan, micro_batches, self._items, backward=False)
        self._encoding.read_items(self._inputs.documents.documents)

    def passes_context(self, batches: Sequence[LocalBatch]) -> AbstractContextManager[None]:
        assert self._encoding is not None, "read first"
        return self._encoding.passes_context(self._micro_batches, batches)

    def nonfinite_inputs(self) -> list[str]:
        return [] if self._encoding is None else self._encoding.nonfinite_inputs()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        assert self._encoding is not None
        return {"encoders": self._encoding.gather_times()} if self._inputs.backward else {}
