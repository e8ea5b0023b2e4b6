"""The waves of a coming step, planned ahead by a thread while another step runs; `EncodersTerm` takes them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan
from longspan.plan.items.item_table import ItemTable
from longspan.train.step_inputs import StepDocuments
from longspan.train.terms.encoding import Encoding

MOST_AHEAD = 4  # steps of a model whose waves are planned and not yet taken; older ones are dropped
_pool = ThreadPoolExecutor(1, "longspan-waves")
_planned_encodings = WeakKeyDictionary[nn.Module, "dict[Any, Future[Encoding]]"]()


def plan_waves_ahead(model: MultimodalModel, plan: Plan, documents: Any, *, depths: int = 0) -> None:
    """Begin to plan the waves of a coming step with a backward pass; `run_step` takes them when it comes to the step.

    >>> following = plans.plan(step + 1)
    >>> plan_waves_ahead(model, following, documents_of(step + 1))
    >>> run_step(model, plan, documents, world, optimizer=optimizer)

    `depths` of multi-token prediction are those of the step. A thread plans, on the host, which items a rank encodes
    and which rows go where. It calls the documents' method `read_ahead(items)`, if they have one, with the items that
    this rank will read; nothing else is read. An error in the thread is raised by the step that takes the waves. Raises
    what `run_step` raises for documents without items.
    """
    table = StepDocuments(model, documents, plan.lengths).items
    assert table is not None  # a MultimodalModel's documents have items
    planned = _planned_encodings.setdefault(model, {})
    device = model.world.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    make = partial(Encoding, model, plan, plan.micro_batches, table, backward=True, depths=depths)
    key = _encoding_key(model, plan, table, backward=True, depths=depths)
    planned[key] = _pool.submit(_plan_in_thread, stream, make, documents)
    while len(planned) > MOST_AHEAD:
        planned.pop(next(iter(planned)))


def take_planned_encoding(
    model: MultimodalModel, plan: Plan, table: ItemTable, *, backward: bool, depths: int
) -> Encoding:
    """Return the waves of a step: those that were planned ahead, for which it waits, or planned now.

    Waves are taken once. Raises the error of the thread that planned them.
    """
    key = _encoding_key(model, plan, table, backward=backward, depths=depths)
    ahead = _planned_encodings.get(model, {}).pop(key, None)
    if ahead is None:
        return Encoding(model, plan, plan.micro_batches, table, backward=backward, depths=depths)
    return ahead.result()


def _plan_in_thread(stream: torch.cuda.Stream | None, make: Callable[[], Encoding], documents: Any) -> Encoding:
    """Run by the thread of `plan_waves_ahead`. Tensors of the plan are made on the caller's `stream` (None: no GPU)."""
    if stream is not None:
        torch.cuda.set_stream(stream)
    encoding = make()
    if (read_ahead := getattr(documents, "read_ahead", None)) is not None:
        read_ahead(encoding.items_here)
    return encoding


def _encoding_key(
    model: MultimodalModel, plan: Plan, table: ItemTable, *, backward: bool, depths: int
) -> tuple[object, ...]:
    """The key holds all that waves depend on, and which encoders are frozen: a caller may freeze one in between."""
    are_frozen = tuple(encoder.is_frozen for encoder in model.encoder_settings.values())
    return plan.digest(), table.digest(), backward, depths, are_frozen
