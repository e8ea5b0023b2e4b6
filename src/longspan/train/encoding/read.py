"""The waves of a step with what this rank encodes, read by all ranks before any of them computes."""

from typing import Any

from torch import nn

from longspan.comm import raise_first_error
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan
from longspan.plan.items import ItemTable
from longspan.train.encoding.ahead import planned_encoding
from longspan.train.encoding.encoding import Encoding
from longspan.train.reading.local_batch import reading_error


def read_encoding(
    model: nn.Module, plan: Plan, documents: Any, table: ItemTable | None, *, backward: bool, depths: int = 0
) -> Encoding | None:
    """The encoding of a whole step, read by all ranks; where any cannot read its items, all raise DataError.

    `depths` are those of multi-token prediction that the step runs.
    """
    if table is None or not isinstance(model, MultimodalModel):
        return None
    encoding, failure = planned_encoding(model, plan, table, backward=backward, depths=depths), None
    try:
        encoding.read(documents)
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = reading_error(error, model.world)
    if model.world.control.agree(table.digest(), flag=failure is not None, what="lists of items"):
        raise_first_error(model.world, failure)
    return encoding
