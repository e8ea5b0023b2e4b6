"""torch's pipeline schedules (2.11 to 2.15) over micro-batches of unequal sizes, with buffers sized by the plan.

A backward pass in two parts (zero bubble, arXiv:2401.10241) is ours: torch 2.11's cannot start at an autograd.Function,
and 2.13's fails where a weight is used twice on a stage. torch's can take its place once the oldest torch passes
tests/model/pipeline/test_split_backward.py.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from longspan.comm import World
from longspan.errors import ModelError, PlanError
from longspan.model.fsdp_params import accumulate_gathered_gradients, fsdp_modules, fsdp_param_groups, unshard
from longspan.model.pipeline.stages import Stage, StageInput
from longspan.model.weights.gradients import add_gradient


class PendingWeights(NamedTuple):
    """What `compute_weight_gradients` needs, which takes it once; `output` keeps the graph alive.

    `groups` are weights by the nodes where their paths meet those of the input; `gradients` are those that reached each
    of these nodes, one for each of its outputs.
    """

    output: GradientEdge
    groups: dict[frozenset[Node], list[Tensor]]
    gradients: dict[Node, tuple[Tensor | None, ...]]


def compute_input_gradient(
    output: Tensor, gradient: Tensor | None, x: Tensor, weights: Iterable[Tensor]
) -> tuple[Tensor, PendingWeights]:
    """Return the gradient of the input `x`, and what `compute_weight_gradients` needs later.

    `gradient` is the output's; None: the output is a loss. No weight's `.grad` changes.
    """
    edge = get_gradient_edge(output)
    pending = PendingWeights(edge, _group_weights(edge.node, get_gradient_edge(x).node, weights), {})
    nodes = frozenset[Node]().union(*pending.groups)
    # A prehook gets the gradients that have reached its node: they are recorded for the second part.
    handles = [node.register_prehook(partial(setitem, pending.gradients, node)) for node in nodes]
    try:
        (input_gradient,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return input_gradient, pending


def compute_weight_gradients(pending: PendingWeights) -> None:
    """Compute the gradients of the weights, added to their `.grad`; empties `pending`."""
    while pending.groups:
        nodes, weights = pending.groups.popitem()
        gradients = {node: pending.gradients[node] for node in nodes if node in pending.gradients}
        # A node's recorded gradient includes what reached it through other nodes of the group. Backward from all of
        # them would add that again, so hooks set each node's gradient to the recorded one.
        hooks = gradients.items() if len(gradients) > 1 else ()
        handles = [node.register_prehook(lambda _, gradient=gradient: gradient) for node, gradient in hooks]
        try:
            _add_gradients(gradients, weights)
        finally:
            for handle in handles:
                handle.remove()
    pending.gradients.clear()


def _add_gradients(gradients: dict[Node, tuple[Tensor | None, ...]], weights: list[Tensor]) -> None:
    """It calls the engine as `torch.autograd.grad` does, since that, in torch 2.11, reads shapes of nodes that those
    of autograd.Functions lack."""
    edges = {
        GradientEdge(node, i): gradient
        for node, gradient_of_node in gradients.items()
        for i, gradient in enumerate(gradient_of_node)
        if gradient is not None
    }
    if not edges:
        return
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    targets = tuple(map(get_gradient_edge, weights))
    # Other weights may need the same part of the graph, so it is kept.
    keep_graph = True
    create_graph = False
    allow_unreachable = True
    accumulate = False
    flags = keep_graph, create_graph, targets, allow_unreachable, accumulate
    for weight, gradient in zip(
        weights, engine.run_backward(tuple(edges), tuple(edges.values()), *flags), strict=True
    ):
        add_gradient(weight, gradient)


def _group_weights(
    output: Node, input_node: Node, weights: Iterable[Tensor]
) -> dict[frozenset[Node], list[Tensor]]:
    """All nodes on a path from the input depend on it; the search from a weight stops at the first of them."""
    # Every node that the output depends on has the nodes that use its result: the graph turned around.
    users: dict[Node, list[Node]] = {output: []}
    to_visit = [output]
    while to_visit:
        node = to_visit.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in users:
                users[below] = []
                to_visit.append(below)
            users[below].append(node)
    input_users = _dependent_nodes(input_node, users)
    groups: dict[frozenset[Node], list[Tensor]] = {}
    for weight in weights:
        if weight.requires_grad and (node := get_gradient_edge(weight).node) in users:
            groups.setdefault(frozenset(_dependent_nodes(node, users, input_users) & input_users), []).append(
                weight
            )
    return groups


def _dependent_nodes(start: Node, users: dict[Node, list[Node]], last_nodes: Set[Node] = frozenset()) -> set[Node]:
    """`start` is among them; the search does not go on behind `last_nodes`."""
    dependents = {start}
    to_visit = [start]
    while to_visit:
        node = to_visit.pop()
        following = () if node in last_nodes else users.get(node, ())
        new_nodes = [user for user in following if user not in dependents]
        dependents.update(new_nodes)
        to_visit += new_nodes
    return dependents


SCHEDULES = ("1f1b", "zero_bubble")


@dataclass(frozen=True)
class PipelineSettings:
    """A schedule over `pp` ranks that hold `virtual_stages` stages each, every pp-th; PlanError for an unknown one."""

    schedule: str = "1f1b"
    pp: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Raise PlanError for settings that no schedule has."""
        count = self.virtual_stages
        if self.schedule not in SCHEDULES:
            raise PlanError(f"pipeline_schedule is {self.schedule!r}; use {', '.join(SCHEDULES)}")
        if count < 1:
            raise PlanError(f"virtual_stages is {count}; a rank holds at least one pipeline stage")
        if self.pp == 1 and count > 1:
            raise PlanError(f"virtual_stages is {count} with pp 1; interleaved stages need a pipeline: use pp 2")

    @property
    def stages(self) -> int:
        """The number of stages, over all pipeline positions."""
        return self.pp * self.virtual_stages

    def round_up_micro_batches(self, count: int) -> int:
        """Return the least number of micro-batches, `count` or more, that a training step can take; dummies are added.

        torch's interleaved schedules run n in n // pp rounds of equal size, or raise an error.
        """
        if self.pp > 1 and (self.schedule == "zero_bubble" or self.virtual_stages > 1):
            return next(n for n in range(count, count + self.pp) if n % max(1, n // self.pp) == 0)
        return count


class ScheduledStage(PipelineStage):
    """A stage in one schedule: receives hidden states (1, T, D), T by micro-batch, and sends its own on.

    Set `inputs` before each step. Each of `row_parts` tensor-parallel ranks has a part of the rows. Where layers read
    the embedding too, its rows follow behind the hidden states.
    """

    def __init__(self, stage: Stage, world: World, *, hidden_size: int, dtype: torch.dtype, row_parts: int) -> None:
        """Tell torch's stage, by templates of one row on the meta device, what it reads and returns."""
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
        # The input is that of the micro-batch that runs.
        self._input: StageInput | None = None
        self._row = row
        self._world = world
        self._row_parts = row_parts
        self._stage = stage
        self._leaves: tuple[Tensor, ...] = ()  # rows of its images, which get gradients as parameters do
        self._freed = torch.empty(0, dtype=dtype, device=world.device)  # stands for a buffer that is freed
        # The first name is that of torch 2.15, the second that before.
        name = "_forward_chunk_states" if hasattr(self, "_forward_chunk_states") else "fwd_cache"
        # A forward pass leaves this for its backward pass.
        self._forward_states = vars(self)[name]

    def _count_rows(self, stage_input: StageInput) -> int:
        return stage_input.shard.local_rows // self._row_parts * (1 + self._stage.with_embedding)

    def _allocate_receive_buffers(self, receives: list[Any], infos: Sequence[Any], micro_batch: int) -> list[Any]:
        for receive, info in zip(receives, infos, strict=False):
            rows = self._count_rows(self.inputs[micro_batch])
            receive.tensor = info.buffer = receive.tensor.new_empty(1, rows, self._row.shape[2])
        return receives

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Do as torch's method does, with buffers of this micro-batch's rows."""
        infos = self.args_recv_info[fwd_chunk_id]
        return self._allocate_receive_buffers(super().get_fwd_recv_ops(fwd_chunk_id), infos, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Do as torch's method does, with buffers of this micro-batch's rows."""
        infos = self.grad_recv_info.get(bwd_chunk_id, ())
        return self._allocate_receive_buffers(super().get_bwd_recv_ops(bwd_chunk_id), infos, bwd_chunk_id)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, *flags: Any, **options: Any
    ) -> Any:
        """Do as torch's method does, with this micro-batch's ids and arguments, in buffers of our own.

        The watch notes the hand-off first, so that its report can say that this rank waits. Raises ModelError for
        hidden states of another shape or dtype than the next stage awaits.
        """
        stage_input = self.inputs[fwd_chunk_id]
        if not self.is_first:
            with self._world.watch.enter_operation(
                "hand-off between pipeline stages", self._world.channels.pipeline.ranks
            ) as operation:
                self._world.watch.watch_stream(operation)
            (info,) = self.args_recv_info[fwd_chunk_id]
            assert info.buffer is not None
            info.buffer.requires_grad_(self.has_backward)
        self._input = stage_input
        out = super().forward_one_chunk(fwd_chunk_id, (stage_input.ids,), None, *flags, **options)
        shape = (1, self._count_rows(stage_input), self._row.shape[2])
        if not self.is_last and (tuple(out.shape) != shape or out.dtype != self._row.dtype):
            raise ModelError(
                f"stage {self.stage_index} made hidden states {tuple(out.shape)} of {out.dtype}, the next stage awaits "
                f"{shape} of {self._row.dtype}; use one dtype for parameters and hidden states"
            )
        return out

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage forward; its other arguments are passed here, out of sight of torch, which expects tensors."""
        return self.submod(*args, stage_input=self._input)

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
            self._free_receive_buffers(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Do as torch's method does, but a pass in two parts is made here.

        FSDP2 then neither reduces gradients nor frees parameters: that comes after the last part.
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
            accumulate_gathered_gradients(fsdp_param_groups(fsdp_modules(self.submod)))
            return (), None
        (output,), (x,) = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
        gradients = bwd_kwargs["output_grads"]  # None on the last stage, whose output is the loss
        # gradients of images' rows are found as those of weights
        weights = (*self.submod.parameters(), *self._leaves)
        input_gradient, pending = compute_input_gradient(output, gradients and gradients[0], x, weights)
        return (input_gradient,), pending

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do as torch's method does, in training only."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def drop_step_state(self) -> None:
        """Drop all that belongs to a step: a schedule of another number of micro-batches may come next."""
        self.clear_runtime_states()
        self.backward_state.clear()
        self.bwd_cache.clear()
        self.dw_runner.clear()
        for micro_batch in self.args_recv_info:
            self._free_receive_buffers(micro_batch)
        self.inputs = ()
        self._input = None
        self._leaves = ()

    def _free_receive_buffers(self, micro_batch: int) -> None:
        for info in (*self.args_recv_info.get(micro_batch, ()), *self.grad_recv_info.get(micro_batch, ())):
            if getattr(info, "buffer", None) is not None:  # torch 2.15 makes buffers, and drops them, itself
                info.buffer = None if hasattr(info, "take_buffer") else self._freed

    def _do_nothing(self, *_: Any) -> Any:
        return []

    _post_metadata_inference_cleanup = _do_nothing  # torch 2.13 would drop all gradients of FSDP2's parameters
    _validate_fwd_input = _validate_fwd_outputs = _do_nothing  # torch 2.11 compares with the first micro-batch
    _get_init_p2p_neighbors_ops = _do_nothing  # torch 2.11 sends a first message, which our groups do not need


def make_schedule(
    pipeline_settings: PipelineSettings, stages: Sequence[ScheduledStage], micro_batches: int, *, backward: bool
) -> Callable[[], None]:
    """Make the schedule of one step over `micro_batches`; call it once the stages have their inputs.

    Evaluation has no loss function, so that torch runs no backward passes. The loss is a sum over targets: gradients
    are not scaled.
    """
    interleaved = pipeline_settings.virtual_stages > 1
    # All forward passes first: in evaluation, and where 1F1B would have fewer micro-batches than stages.
    kind = ScheduleGPipe
    if not backward:
        kind = ScheduleLoopedBFS if interleaved else ScheduleGPipe
    elif pipeline_settings.schedule == "zero_bubble":
        kind = ScheduleInterleavedZeroBubble
    elif interleaved:
        kind = ScheduleInterleaved1F1B
    elif micro_batches >= pipeline_settings.pp:
        kind = Schedule1F1B
    settings: dict[str, Any] = {"loss_fn": (lambda output, _: output) if backward else None, "scale_grads": False}
    # These two schedules take no list.
    stages_here: Any = stages[0] if kind in (Schedule1F1B, ScheduleGPipe) else list(stages)
    schedule = kind(stages_here, micro_batches, **settings)
    # torch splits the targets, one dummy for each micro-batch; no loss reads them
    return partial(schedule.step, target=torch.arange(micro_batches), return_outputs=False)
