"""A step through a pipeline: what `run_step` does where the model's layers are on several stages.

Every stage of a slot binds the same micro-batches; the first reads token ids, the last labels, and the last alone knows
the loss, which all ranks are told once a step. Schedules are torch's (`longspan.model.pipeline.schedules`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import to_device
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.stages import StageInput
from longspan.train.chunked_loss import chunked_cross_entropy
from longspan.train.local_batch import LocalBatch, padding_batch
from longspan.train.passes import Passes


def run_through_stages(passes: Passes, work: Sequence[LocalBatch]) -> float:
    """The loss summed over this slot's rows, on ranks of the last stage (0 elsewhere); with backward, gradients too.

    Micro-batches of padding are added where the schedule needs more of them. The loads of routers are counted in a
    forward pass of their own beforehand.
    """
    model, total = passes.model, torch.zeros((), dtype=torch.float64, device=passes.world.device)
    assert isinstance(model, PipelineModel)
    if passes.counts_loads:
        with torch.no_grad():
            model.run([_counting_input(passes, each) for each in work], backward=False)
    passes.settle()
    count = model.pipeline_settings.enough_micro_batches(len(work)) if passes.backward else len(work)
    padding = [padding_batch(passes.plan, passes.world) for _ in range(count - len(work))]
    model.run([_stage_input(passes, each, total) for each in (*work, *padding)], backward=passes.backward)
    return total.item()


def _stage_input(passes: Passes, work: LocalBatch, total: Tensor) -> StageInput:
    """One micro-batch through the stages; the last adds its loss to `total`, and gives its part of the step's."""
    device = passes.world.device
    labels = to_device(work.labels, device)

    def make_output(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
        chunk = passes.chunk_rows
        loss = part(**arguments, row_loss=lambda x, head: chunked_cross_entropy(x, labels, head, chunk))
        total.add_(loss.detach())
        return passes.mean(loss)

    return StageInput(work.shard, to_device(work.ids, device)[None], make_output, passes.router())


def _counting_input(passes: Passes, work: LocalBatch) -> StageInput:
    """One micro-batch through the stages for the loads of its routers alone."""

    def make_output(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
        return part(**arguments, row_loss=lambda x, _: x.new_zeros((), dtype=torch.float64))

    ids = to_device(work.ids, passes.world.device)[None]
    return StageInput(work.shard, ids, make_output, passes.router(counting=True))


def makes_loss(model: nn.Module) -> bool:
    """Whether the loss and the targets of this rank's slot are counted here: on the last stage of a pipeline."""
    return not isinstance(model, PipelineModel) or any(stage.last for stage in model.stages)


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that this rank's stages count in the gradient norm: a tied embedding is counted on the first."""
    skipped = model.tied_embedding.counted_elsewhere if isinstance(model, PipelineModel) else None
    return [parameter for parameter in model.parameters() if parameter is not skipped]
