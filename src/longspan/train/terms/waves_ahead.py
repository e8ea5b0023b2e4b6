"""The encoders' part of a step, as a term; a thread may plan its waves ahead, while another step runs.

An item, such as an image, takes places of a document, for which an encoder makes rows; a wave is one pass of an encoder
over some of a step's items, on all ranks. `encoding.py` runs waves.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import MicroBatch, Plan
from longspan.plan.items.item_table import ItemTable
from longspan.train.passes import Term
from longspan.train.rows.agreed_reading import read_and_compare_digest
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.step_inputs import StepDocuments, StepInputs
from longspan.train.terms.encoding import Encoding

MOST_AHEAD = 4  # steps of a model whose waves are planned and not yet taken; older ones are dropped
_pool = ThreadPoolExecutor(1, "longspan-waves")
_planned_encodings = WeakKeyDictionary[nn.Module, "dict[Any, Future[Encoding]]"]()


def plan_waves_ahead(model: MultimodalModel, plan: Plan, documents: Any, *, depths: int = 0) -> None:
    """Begin to plan the waves of a coming step with a backward pass; `run_step` takes them when it comes to the step.

    >>> following = plans.plan(step + 1)
    >>> plan_waves_ahead(model, following, documents_of(step + 1))
    >>> run_step(model, plan, documents, world, optimizer=optimizer)

    `depths` of multi-token prediction are those of the step. What is planned is on the host: which items a rank
    encodes, and which rows go where. A method `read_ahead(items)` of the documents is called
    with the items that this rank will read; nothing else is read. An error is raised by the step. Raises what
    `run_step` raises for documents without items.
    """
    table = StepDocuments(model, documents, plan.lengths).items
    assert table is not None  # a MultimodalModel's documents have items
    planned = _planned_encodings.setdefault(model, {})
    device = model.world.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    make = partial(Encoding, model, plan, plan.micro_batches, table, backward=True, depths=depths)
    planned[_encoding_key(model, plan, table, (True, depths))] = _pool.submit(
        _plan_in_thread, stream, make, documents
    )
    while len(planned) > MOST_AHEAD:
        planned.pop(next(iter(planned)))


def _plan_in_thread(stream: torch.cuda.Stream | None, make: Callable[[], Encoding], documents: Any) -> Encoding:
    """Plan the waves of a coming step and begin to read their items; run by the thread of `plan_waves_ahead`.

    `stream` is that of the caller, on which tensors of the plan are made.
    """
    if stream is not None:
        torch.cuda.set_stream(stream)
    encoding = make()
    if (read_ahead := getattr(documents, "read_ahead", None)) is not None:
        read_ahead(encoding.items_here)
    return encoding


def _encoding_key(
    model: MultimodalModel, plan: Plan, table: ItemTable, passes: tuple[bool, int]
) -> tuple[object, ...]:
    """Return the key by which a step finds the waves that were planned ahead for it.

    A caller may freeze an encoder between planning ahead and the step: the key has which ones are frozen. `passes` are
    (backward, depths).
    """
    frozen = tuple(encoder.frozen for encoder in model.encoder_settings.values())
    return plan.digest(), table.digest(), passes, frozen


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
    _encoding: "Encoding | None" = None

    def read(self, batches: Sequence[LocalBatch]) -> None:
        """Take the waves that were planned ahead, or plan them, and read this rank's items; entered by all ranks.

        Raises DataError on every rank where any cannot read, CommError for another list of items.
        """
        inputs = self._inputs
        table = self._items
        plan = inputs.plan
        self._micro_batches = plan.micro_batches
        # the waves that were planned ahead, for which it waits, or planned now
        key = _encoding_key(self._model, plan, table, (inputs.backward, self._depths))
        ahead = _planned_encodings.get(self._model, {}).pop(key, None)
        if ahead is None:
            passes = {"backward": inputs.backward, "depths": self._depths}
            encoding = Encoding(self._model, plan, plan.micro_batches, table, **passes)
        else:
            encoding = ahead.result()
        self._encoding = encoding
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
