"""torch's pipeline schedules over micro-batches of unequal sizes, with a stage that sizes its buffers by the plan.

torch's `PipelineStage` allocates receive buffers once, from the first micro-batch. `ScheduledStage` is given a template
of one row, so that torch runs no forward pass to infer shapes, and replaces every buffer by one with the micro-batch's
number of rows before torch receives into it. It hands token ids and arguments to its forward pass itself, so that
`step()` takes none. A schedule belongs to one number of micro-batches and to training or evaluation; each schedule has
its own stages.

Written for torch 2.11 to 2.15. In 2.11 stages compare every micro-batch with the first (`_validate_fwd_input`,
`_validate_fwd_outputs`), which fails for unequal sizes, and begin with a message to their neighbours, in a V schedule
to themselves too (`_get_init_p2p_neighbors_ops`), which our groups, used before, do not need. Both are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from longspan.comm import World
from longspan.errors import ModelError, PlanError
from longspan.model.pipeline.split_backward import compute_input_gradient, compute_weight_gradients
from longspan.model.pipeline.stages import Stage, StageInput
from longspan.model.sharding import unshard, widen_gradients

ScheduleName = Literal["gpipe", "1f1b", "zero_bubble", "zbv"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class PipelineSettings:
    """A schedule over `pp` ranks that hold `virtual_stages` stages each.

    >>> PipelineSettings("1f1b", pp=2, virtual_stages=2).stages_at(1)
    (1, 3)

    Raises PlanError for an unknown schedule, or one that cannot have so many stages a rank.
    """

    schedule: str = "1f1b"
    pp: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        count = self.virtual_stages
        if self.schedule not in SCHEDULES:
            raise PlanError(f"pipeline_schedule is {self.schedule!r}; use {', '.join(SCHEDULES)}")
        if count < 1:
            raise PlanError(f"virtual_stages is {count}; a rank holds at least one pipeline stage")
        if self.pp == 1 and count > 1:
            raise PlanError(f"virtual_stages is {count} with pp 1; interleaved stages need a pipeline: use pp 2")
        if self.is_folded and count != 2:
            raise PlanError(
                f"pipeline_schedule 'zbv' folds two stages onto each rank, virtual_stages is {count}; use 2, or "
                "'zero_bubble'"
            )

    @property
    def stages(self) -> int:
        """The number of stages, over all pipeline positions."""
        return self.pp * self.virtual_stages

    @property
    def is_folded(self) -> bool:
        """Whether stages go down the pipeline positions and up again, so that the first holds the last stage too."""
        return self.schedule == "zbv"

    @property
    def loss_place(self) -> int:
        """The pipeline position of the ranks that hold the last stage."""
        return 0 if self.is_folded else self.pp - 1

    def stages_at(self, place: int) -> tuple[int, ...]:
        """Return the stages, in model order, that the ranks at pipeline position `place` (from 0) hold.

        Every pp-th stage; with "zbv" one from the front and one from the back.
        """
        if self.is_folded:
            return place, self.stages - 1 - place
        return tuple(range(place, self.stages, self.pp))

    @property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage, in model order."""
        positions = {stage: place for place in range(self.pp) for stage in self.stages_at(place)}
        return tuple(positions[stage] for stage in range(self.stages))

    def enough_micro_batches(self, count: int) -> int:
        """Return the least number of micro-batches, `count` or more, that a training step can take; dummies are added.

        torch's interleaved schedules run n micro-batches in n // pp rounds of equal size (one round if n is below pp),
        and raise an error where that number of rounds does not divide n.
        """
        in_rounds = self.schedule == "zero_bubble" or (self.schedule == "1f1b" and self.virtual_stages > 1)
        if self.pp > 1 and in_rounds:
            return next(n for n in range(count, count + self.pp) if n % max(1, n // self.pp) == 0)
        return count


class ScheduledStage(PipelineStage):
    """A stage in one schedule: receives hidden states (1, T, D), T by micro-batch, and sends its own on.

    Set `inputs`, one for each micro-batch, before each step. Each of `row_parts` tensor-parallel ranks has one part of
    the rows of hidden states. Where layers read the embedding too, its rows are sent behind the hidden states.
    """

    def __init__(self, stage: Stage, world: World, *, hidden_size: int, dtype: torch.dtype, row_parts: int) -> None:
        """Tell torch's stage what it reads (token ids or hidden states) and returns (hidden states or the loss).

        These templates only say dtypes: they have one row, on the meta device, as every micro-batch has another number.
        """
        row = torch.empty(1, 1, hidden_size, dtype=dtype, device="meta", requires_grad=True)
        ids = torch.empty(1, 1, dtype=torch.long, device="meta")
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        super().__init__(
            stage,
            stage.index,
            stage.count,
            world.device,
            input_args=(ids if stage.first else row,),
            output_args=(loss if stage.last else row,),
            group=world.channels.pipeline.group,
        )
        self.inputs: Sequence[StageInput] = ()
        self._input: StageInput | None = None  # of the micro-batch that runs
        self._row, self._world, self._row_parts, self._stage = row, world, row_parts, stage
        self._leaves: tuple[Tensor, ...] = ()  # rows of its images, which get gradients as parameters do
        self._freed = torch.empty(0, dtype=dtype, device=world.device)  # stands for a buffer that is freed
        name = "_forward_chunk_states" if hasattr(self, "_forward_chunk_states") else "fwd_cache"  # torch 2.15, before
        self._forward_states = vars(self)[name]  # what a forward pass leaves for its backward pass

    def _count_rows(self, stage_input: StageInput) -> int:
        return stage_input.shard.local_rows // self._row_parts * (1 + self._stage.with_embedding)

    def _size_buffers(self, receives: list[Any], infos: Sequence[Any], micro_batch: int) -> list[Any]:
        for receive, info in zip(receives, infos, strict=False):
            rows = self._count_rows(self.inputs[micro_batch])
            receive.tensor = info.buffer = receive.tensor.new_empty(1, rows, self._row.shape[2])
        return receives

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Do as torch's method does, with a buffer of this micro-batch's rows."""
        infos = self.args_recv_info[fwd_chunk_id]
        return self._size_buffers(super().get_fwd_recv_ops(fwd_chunk_id), infos, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Do as torch's method does, with a buffer of this micro-batch's rows."""
        infos = self.grad_recv_info.get(bwd_chunk_id, ())
        return self._size_buffers(super().get_bwd_recv_ops(bwd_chunk_id), infos, bwd_chunk_id)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, *flags: Any, **options: Any
    ) -> Any:
        """Do as torch's method does, with this micro-batch's ids and arguments.

        The watch notes the hand-off first, so that a report of the watch can say that this rank waits for hidden
        states. Hidden states are received into a buffer of ours, which needs a gradient as torch's own would.
        """
        stage_input = self.inputs[fwd_chunk_id]
        if not self.is_first:
            with self._world.watch.during(
                "hand-off between pipeline stages", self._world.channels.pipeline.ranks
            ) as operation:
                self._world.watch.watch_stream(operation)
            (info,) = self.args_recv_info[fwd_chunk_id]
            assert info.buffer is not None
            info.buffer.requires_grad_(self.has_backward)
        self._input = stage_input
        out = super().forward_one_chunk(fwd_chunk_id, (stage_input.ids,), None, *flags, **options)
        if not self.is_last:
            self._check_output(out, stage_input)
        return out

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage forward; its other arguments are passed here, out of sight of torch, which expects tensors."""
        return self.submod(*args, stage_input=self._input)

    def _check_output(self, out: Tensor, stage_input: StageInput) -> None:
        shape = (1, self._count_rows(stage_input), self._row.shape[2])
        if tuple(out.shape) != shape or out.dtype != self._row.dtype:
            raise ModelError(
                f"stage {self.stage_index} made hidden states {tuple(out.shape)} of {out.dtype}, the next stage awaits "
                f"{shape} of {self._row.dtype}; use one dtype for parameters and hidden states"
            )

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Do as torch's method does; without a backward pass nothing of the micro-batch is kept."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self._forward_states.pop(fwd_chunk_id)
        return ops

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Do as torch's method does, and free the micro-batch's buffers; leaves, rows of images, get gradients too."""
        self._leaves = self.inputs[bwd_chunk_id].shard.derived.leaves
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._free_received(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Do as torch's method does, but a pass in two parts is made by `split_backward`.

        In such a pass FSDP2 neither reduces gradients nor frees parameters: that comes after the last part of the step.
        """
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        # torch 2.11 may have freed blocks of several modules after a forward pass that followed a recomputation: the
        # stage's parameters would be shards, which are in no graph, and its gradients lost.
        unshard(self.submod)
        if backward_type == "weight":
            compute_weight_gradients(bwd_kwargs["param_groups"])
            widen_gradients(self.submod)
            return (), None
        (output,), (x,) = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
        gradients = bwd_kwargs["output_grads"]  # None on the last stage, whose output is the loss
        weights = (*self.submod.parameters(), *self._leaves)  # gradients of images' rows are found as those of weights
        input_gradient, pending = compute_input_gradient(output, gradients and gradients[0], x, weights)
        return (input_gradient,), pending

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Do as torch's method does, and nothing in evaluation, where torch's V schedules fail."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Do as torch's method does, and nothing in evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do as torch's method does, and nothing in evaluation, where there is no gradient."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def drop_step(self) -> None:
        """Drop all that belongs to a step: a schedule of another number of micro-batches may come next."""
        self.clear_runtime_states()
        self.backward_state.clear()
        self.bwd_cache.clear()
        self.dw_runner.clear()
        for micro_batch in self.args_recv_info:
            self._free_received(micro_batch)
        self.inputs, self._input, self._leaves = (), None, ()

    def _free_received(self, micro_batch: int) -> None:
        for info in (*self.args_recv_info.get(micro_batch, ()), *self.grad_recv_info.get(micro_batch, ())):
            if getattr(info, "buffer", None) is not None:  # torch 2.15 makes buffers, and drops them, itself
                info.buffer = None if hasattr(info, "take_buffer") else self._freed

    def _post_metadata_inference_cleanup(self) -> None:
        """torch 2.13 would drop all gradients of FSDP2's parameters when a schedule first runs."""

    def _validate_fwd_input(self, *_: Any) -> None:
        """Check nothing: torch 2.11 compares with the first micro-batch."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Check nothing: torch 2.11 compares with the first micro-batch."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return no operations: torch 2.11 sends a first message to neighbours, which our groups do not need."""
        return []


def make_schedule(
    pipeline_settings: PipelineSettings, stages: Sequence[ScheduledStage], micro_batches: int, *, backward: bool
) -> Callable[[], None]:
    """Make the schedule of one step over `micro_batches` micro-batches; call it once the stages have their inputs.

    Without `backward` (evaluation) there is no loss function, by which torch knows that no backward passes are to run.
    Gradients are not scaled, as the loss is a sum over targets.
    """
    settings: dict[str, Any] = {"loss_fn": _return_loss if backward else None, "scale_grads": False}
    kind = _schedule_class(pipeline_settings, micro_batches, backward=backward)
    takes_one_stage = kind in (Schedule1F1B, ScheduleGPipe)  # torch's classes of one stage a rank take no list
    schedule = kind(stages[0] if takes_one_stage else list(stages), micro_batches, **settings)

    def run_schedule() -> None:
        """Run the schedule; torch splits the targets over micro-batches, and no loss reads them."""
        schedule.step(target=torch.arange(micro_batches), return_outputs=False)

    return run_schedule


def _schedule_class(pipeline_settings: PipelineSettings, micro_batches: int, *, backward: bool) -> Any:
    """Evaluation takes a class that runs all forward passes first, except for "zbv": no other class has its order of
    stages. So does 1F1B with fewer micro-batches than stages, which torch's class for single stages refuses.
    """
    if pipeline_settings.is_folded:
        return ScheduleZBVZeroBubble
    if pipeline_settings.schedule == "zero_bubble" and backward:
        return ScheduleInterleavedZeroBubble
    alternating = pipeline_settings.schedule == "1f1b" and backward
    if pipeline_settings.virtual_stages > 1:
        return ScheduleInterleaved1F1B if alternating else ScheduleLoopedBFS
    return Schedule1F1B if alternating and micro_batches >= pipeline_settings.pp else ScheduleGPipe


def _return_loss(output: Tensor, _: Tensor) -> Tensor:
    return output
