"""Waves of a coming step, planned in a thread while another step runs: the same as planned in the step itself."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan
from longspan.plan.items import ItemTable
from longspan.train.encoding.encoding import Encoding, items_of

MOST = 4  # steps of a model whose waves are planned and not yet taken; older ones are dropped

_pool = ThreadPoolExecutor(1, "longspan-waves")
_planned = WeakKeyDictionary[nn.Module, "OrderedDict[Any, Future[Encoding]]"]()


def plan_waves_ahead(
    model: MultimodalModel, plan: Plan, documents: Any, *, backward: bool = True, depths: int = 0
) -> None:
    """Begin to plan the waves of a coming step, and return at once; `run_step` takes them when it comes to the step.

    >>> following = plans.plan(step + 1)
    >>> plan_waves_ahead(model, following, documents_of(step + 1))
    >>> run_step(model, plan, documents, world, optimizer=optimizer)

    `backward`, and how many `depths` of multi-token prediction run, are those of the step. What is planned is on the
    host: which items a rank encodes, and which rows go where. Documents with a method `read_ahead(items)` are told
    which items this rank will ask for; nothing else is read. An error is raised by the step. Raises what `run_step`
    raises for documents without items.
    """
    table = items_of(model, plan, documents)
    assert table is not None  # a MultimodalModel's documents have items
    planned = _planned.setdefault(model, OrderedDict())
    device = model.world.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    make = partial(Encoding, model, plan, plan.micro_batches, table, backward=backward, depths=depths)
    planned[_key(model, plan, table, (backward, depths))] = _pool.submit(_planned_on, stream, make, documents)
    while len(planned) > MOST:
        planned.popitem(last=False)


def planned_encoding(
    model: MultimodalModel, plan: Plan, table: ItemTable, *, backward: bool, depths: int = 0
) -> Encoding:
    """The waves of a step: those planned ahead, waited for if need be, or planned now."""
    ahead = _planned.get(model, OrderedDict()).pop(_key(model, plan, table, (backward, depths)), None)
    if ahead is not None:
        return ahead.result()
    return Encoding(model, plan, plan.micro_batches, table, backward=backward, depths=depths)


def _planned_on(stream: torch.cuda.Stream | None, make: Callable[[], Encoding], documents: Any) -> Encoding:
    """The same in a thread, whose current device and stream are others: indices go there on the step's stream."""
    if stream is not None:
        torch.cuda.set_stream(stream)
    encoding = make()
    if (read_ahead := getattr(documents, "read_ahead", None)) is not None:
        read_ahead(encoding.items_here)
    return encoding


def _key(model: MultimodalModel, plan: Plan, table: ItemTable, passes: tuple[bool, int]) -> tuple[object, ...]:
    """What an encoding depends on; which encoders are frozen may change until its step."""
    frozen = tuple(encoder.frozen for encoder in model.encoder_settings.values())
    return plan.digest(), table.digest(), passes, frozen
