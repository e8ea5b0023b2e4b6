"""A step through a pipeline: what `run_step` does where the model's layers are on several stages.

Every stage of a slot binds the same micro-batches; the first reads token ids, the last labels, and the last alone knows
the loss, which all ranks are told once a step. Schedules are torch's (`longspan.model.schedules`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.comm import SequenceShard, World, bind
from longspan.model.pipeline import PipelinedModel
from longspan.model.router import RouterStep
from longspan.model.stages import Call
from longspan.plan import MicroBatch, Plan
from longspan.train.chunked_loss import chunked_cross_entropy
from longspan.train.loss import NO_TARGET, Rows

Work = tuple[SequenceShard, Rows, Rows]


def run_through_stages(
    model: PipelinedModel,
    plan: Plan,
    work: Sequence[Work],
    world: World,
    *,
    backward: bool,
    chunk_rows: int,
    routing: RouterStep | None,
) -> float:
    """The loss summed over this slot's rows, on ranks of the last stage (0 elsewhere); with backward, gradients too.

    `work` is (shard, ids (T,), labels (T,)) of every micro-batch. Dummy micro-batches are added where the schedule
    needs more of them. The loads of routers are counted in a forward pass of their own beforehand.
    """
    total = torch.zeros((), dtype=torch.float64, device=world.device)

    def call(shard: SequenceShard, ids: Rows, labels: Rows, *, counting: bool = False) -> Call:
        wanted = torch.from_numpy(labels).to(world.device)

        def finish(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
            if counting:
                return part(**arguments, row_loss=lambda x, _: x.new_zeros((), dtype=torch.float64))
            loss = part(**arguments, row_loss=lambda x, head: chunked_cross_entropy(x, wanted, head, chunk_rows))
            total.add_(loss.detach())
            return loss / max(plan.targets, 1)

        more = {} if routing is None else {"router": routing.tally(counting=counting)}
        return Call(shard, torch.from_numpy(ids).to(world.device)[None], finish, more)

    if routing is not None and backward:
        if routing.coefficients.balance:
            with torch.no_grad():
                model.run([call(*each, counting=True) for each in work], backward=False)
        routing.settle()
    count = model.pipelining.enough_micro_batches(len(work)) if backward else len(work)
    model.run([call(*each) for each in _with_dummies(work, count, plan, world)], backward=backward)
    return total.item()


def _with_dummies(work: Sequence[Work], count: int, plan: Plan, world: World) -> Iterator[Work]:
    yield from work
    for _ in range(count - len(work)):
        shard = bind(MicroBatch(), world).with_padding(minimum=1, multiple=plan.row_multiple)
        yield shard, *no_rows(shard)


def no_rows(shard: SequenceShard) -> tuple[Rows, Rows]:
    """Ids and labels (T,) of a rank that reads none: a dummy micro-batch, or a stage in the middle."""
    return np.zeros(shard.local_rows, dtype=np.int64), np.full(shard.local_rows, NO_TARGET, dtype=np.int64)


def makes_loss(model: nn.Module) -> bool:
    """Whether the loss and the targets of this rank's slot are counted here: on the last stage of a pipeline."""
    return not isinstance(model, PipelinedModel) or any(stage.last for stage in model.stages)


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that this rank's stages count in the gradient norm: a tied embedding is counted on the first."""
    skipped = model.tied.counted_elsewhere if isinstance(model, PipelinedModel) else None
    return [parameter for parameter in model.parameters() if parameter is not skipped]


def norm_over_stages(norm: Tensor, world: World) -> Tensor:
    """The gradient norm of all stages together, from that of each; the same bits on every rank."""
    found = world.gather_values([norm.item()], "gradient norms of the stages")
    squares = [found[world.home.rank_at(0, pp=stage)][0] ** 2 for stage in range(world.home.pp)]
    return torch.tensor(math.sqrt(math.fsum(squares)), dtype=norm.dtype, device=norm.device)
