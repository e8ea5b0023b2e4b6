"""Weights that wait in the host's memory, with their gradients: FSDP2 gathers copies, and its sums go back there.

A copy to the device begins when FSDP2 gathers the group of parameters before, in the next pass of a step too. Sums of
gradients leave on FSDP2's own stream, which adds those of earlier passes first: they come back while the layer runs. On
a CPU the same code copies at once.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import is_peft_module
from longspan.model.feature import Call, Feature
from longspan.model.host_arena import HostArena, HostRange, check_free_host_memory, range_bytes
from longspan.model.layers import architecture_name
from longspan.model.marks import HOST_STORE, find_packed_weight, record_norm_on_device
from longspan.model.sharding import check_fsdp_names, fsdp_modules, fsdp_param_groups
from longspan.plain_text import bytes_text

check_fsdp_names(
    "weights on the host take",
    "weights on the device",
    read=("_sharded_param_data", "padded_sharded_param_size", "param_dtype", "sharded_param", "sharded_size"),
    called=(
        *("_get_grad_inner_tensor", "_setattr_on_modules", "all_gather_inputs", "init_dtype_attrs"),
        "to_sharded_dtensor",
    ),
)


class _DeviceCopy(NamedTuple):
    """A copy on the device of something on the host; it is there at the event `arrived` (None: already)."""

    copy: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the copy, once the current stream has been made to wait for it."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.copy.device).wait_event(self.arrived)
        return self.copy


class HostStore:
    """The host's memory of the weights and gradients of one model on this rank, and the copies of weights from it.

    Memory of the device for these copies belongs to the stream that copies: groups of one size take the same.
    """

    def __init__(self, device: torch.device, bytes: int) -> None:
        self.arena: HostArena = HostArena(device, bytes)
        self.groups: list[HostParamGroup] = []  # the root's first
        self.last_in_forward: HostParamGroup | None = None  # of the groups gathered in forward passes, the newest
        self.root_is_ahead = False  # its copies are for the next pass of a step: weights stay as they are
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, parameters: "Iterable[HostParam]") -> None:
        """Begin to copy shards to the device (`staged`), unless they are there, or on their way."""
        unstaged = [parameter for parameter in parameters if parameter.staged is None]
        for parameter, copy in zip(
            unstaged, self._begin_copies([p._sharded_param_data for p in unstaged]), strict=True
        ):
            parameter.staged = copy

    def fetch_gradients(self, parameters: "Iterable[HostParam]") -> None:
        """Begin to copy the sums of earlier passes to the device (`staged_sum`), behind those that still leave it."""
        summed = [parameter for parameter in parameters if parameter.sharded_param.grad is not None]
        for parameter in summed:
            if self._stream is not None and parameter.grad_offload_event is not None:
                self._stream.wait_event(parameter.grad_offload_event)
        sums: list[Any] = [parameter.sharded_param.grad for parameter in summed]
        for parameter, copy in zip(summed, self._begin_copies([x._local_tensor for x in sums]), strict=True):
            parameter.staged_sum = copy

    @torch.no_grad()
    def _begin_copies(self, sources: Sequence[Tensor]) -> "list[_DeviceCopy]":
        """Begin to copy tensors of the host to the device, on the stream that copies; one event for all."""
        if not sources:
            return []
        self.wait_for_reads()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            copies = [torch.empty_like(source, device=self._device) for source in sources]
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            arrived: Any = None if self._stream is None else self._stream.record_event()
        return [_DeviceCopy(copy, arrived) for copy in copies]

    @torch.no_grad()
    def take(self, parameter: "HostParam") -> Tensor:
        """Return a shard in the type in which it is gathered, for the current stream; its copy in another type is
        freed.
        """
        self.fetch([parameter])
        assert parameter.staged is not None
        shard = parameter.staged.wait()
        if parameter.gathered_dtype in (None, shard.dtype):
            return shard
        cast = shard.to(parameter.gathered_dtype)
        self.free([parameter])
        return cast

    def free(self, parameters: "Iterable[HostParam]") -> None:
        """Free the copies of shards and sums that the current stream has read."""
        self.wait_for_reads()
        for parameter in parameters:
            parameter.staged = None
            parameter.staged_sum = None

    def wait_for_reads(self) -> None:
        """Have the stream that copies wait until the current one has read the copies, whose memory it takes anew."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))


class HostParam(FSDPParam):
    """FSDP2's parameter whose shard, and the shard's gradient, are in the host's memory."""

    store: HostStore
    staged: _DeviceCopy | None = None  # of the shard
    staged_sum: _DeviceCopy | None = None  # of `earlier_gradient`
    gathered_dtype: torch.dtype | None  # None: that of the shard
    memory: tuple[HostRange, ...]  # of the shard, and of its gradient if it is trained
    earlier_gradient: Any = None  # the gradient of earlier passes while FSDP2 sums that of this one
    gradient_in_arena: Any = None  # a weak reference to the gradient that is in the memory for it

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """Keep the type in which FSDP2 would gather, and leave FSDP2 none: it then takes `all_gather_inputs` as they
        are.
        """
        super().init_dtype_attrs(mp_policy)
        self.gathered_dtype = self.param_dtype
        self.param_dtype: torch.dtype | None = None

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """FSDP2 asks for the shard that it is to gather: it is brought to the device, and cast, here."""
        return [self.store.take(self)]

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        """Return what FSDP2 will sum, as FSDP2 asks for it, and take the earlier gradient out of its sight.

        FSDP2 would add the sum to it on the device; `to_sharded_dtensor` adds them.
        """
        self.earlier_gradient = self.sharded_param.grad
        self.sharded_param.grad = None
        return super()._get_grad_inner_tensor(grad)

    @torch.no_grad()
    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        """Return the gradient on the host, to which a copy of the sum over passes is under way: FSDP2 waits for the
        event.

        `tensor` is the sum of this pass's gradients; those of earlier passes are added to it. The stream of FSDP2's
        sums is the current one, and has the memory of `tensor`.
        """
        gradient = self.earlier_gradient
        self.earlier_gradient = None
        if gradient is None:
            has_place = len(self.memory) > 1  # not if the parameter is trained only since `prepare`
            # a caller may still have the last gradient there
            is_free = self.gradient_in_arena is None or self.gradient_in_arena.expired()
            if has_place and is_free:
                gradient = super().to_sharded_dtensor(_view_with_own_version(self.memory[1], tensor))
                self.gradient_in_arena = torch._C._WeakTensorRef(gradient)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                gradient = super().to_sharded_dtensor(torch.empty_like(tensor, device="cpu"))
        else:
            if self.staged_sum is None:
                self.staged_sum = _DeviceCopy(gradient._local_tensor.to(tensor.device, non_blocking=True), None)
            tensor.add_(self.staged_sum.wait())
            self.store.wait_for_reads()
            self.staged_sum = None
        (norm,) = torch._foreach_norm([tensor], 2, dtype=torch.promote_types(tensor.dtype, torch.float32))
        gradient._local_tensor.copy_(tensor, non_blocking=True)
        record_norm_on_device(gradient, norm)
        if tensor.is_cuda:
            self.grad_offload_event: torch.Event | None = torch.cuda.current_stream(tensor.device).record_event()
        return gradient


class HostParamGroup(FSDPParamGroup):
    """FSDP2's group of parameters that are gathered as one, some of which wait on the host."""

    store: HostStore
    waiting: tuple[HostParam, ...]  # those that are on the host
    follower: "HostParamGroup | None" = None  # the group that was gathered next in the last forward pass

    def unshard(self, async_op: bool = False) -> None:
        """Gather the group. In a backward pass FSDP2 asks for it one group before it is used: then copies of all its
        shards to the device begin together.

        The root's group opens a pass: copies of all groups are dropped, as weights may have changed, unless they were
        made for another pass of the same step (`root_is_ahead`).
        """
        if self is self.store.groups[0] and self.is_sharded and not self.store.root_is_ahead:
            for group in self.store.groups:
                self.store.free(group.waiting)
        ahead = self._training_state == TrainingState.PRE_BACKWARD
        if ahead and self.is_sharded and self._all_gather_result is None:
            self.store.fetch(self.waiting)
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Wait for the gather, free the copies that it read, and begin on copies for what runs next.

        In a forward pass these are the shards of the group that was gathered next in the last forward pass; in a
        backward pass this group's sums of earlier passes. The last gather of a backward pass also begins copies of the
        root's sums, and of its shards if another pass of the step follows.
        """
        is_gathered_now = self._all_gather_result is not None
        super().wait_for_unshard()
        if not is_gathered_now:
            return
        store = self.store
        root = store.groups[0]
        store.free(self.waiting)
        if self is root:
            store.root_is_ahead = False
        if self._training_state == TrainingState.FORWARD:
            if store.last_in_forward is not None:
                store.last_in_forward.follower = self
            store.last_in_forward = self
            if self.follower is not None and self.follower.is_sharded:
                store.fetch(self.follower.waiting)
            return
        store.fetch_gradients(self.waiting)
        if self is root.follower:  # the last gather of a backward pass: the root stays gathered
            store.fetch_gradients(root.waiting)
            if not self.all_reduce_grads:  # `defer_until_last_pass`: a pass follows
                store.root_is_ahead = True
                store.fetch(root.waiting)

    def reshard(self) -> None:
        """Free the gathered parameters, and after a pass or an error copies that were made and not gathered."""
        super().reshard()
        if self._training_state == TrainingState.IDLE:
            self.store.free(self.waiting)
            self.store.root_is_ahead = False


def _view_with_own_version(memory: HostRange, like: Tensor) -> Tensor:
    """Return a contiguous tensor in this memory, shaped as `like`, whose count of in-place changes is its own."""
    return memory.memory.data.view(like.dtype).view(like.shape)


def _put_on_host(group: Any, waiting: Sequence[Any], store: HostStore) -> None:
    """Move the shards of these parameters of one of FSDP2's groups to the store's arena, and make the group fetch them.

    The model's parameters are replaced by new ones there; FSDP2's records of them become HostParams, and the group a
    HostParamGroup. Parameters of the meta device get memory, which `prepare` fills later.
    """
    for parameter in waiting:
        shard = parameter._sharded_param_data
        sizes = _host_bytes(parameter)
        memory = tuple(store.arena.take_range(size) for size in sizes)
        padded = _view_with_own_version(memory[0], shard)
        if not shard.is_meta:
            padded.copy_(shard)
        dim = parameter.fsdp_placement.dim
        local = padded.view(parameter.padded_sharded_param_size).narrow(dim, 0, parameter.sharded_size[dim])
        trained = parameter.sharded_param.requires_grad
        parameter._sharded_param_data = padded
        parameter.sharded_param = nn.Parameter(parameter.to_sharded_dtensor(local), requires_grad=trained)
        setattr(parameter.sharded_param, HOST_STORE, store)
        parameter._setattr_on_modules(parameter.sharded_param)
        parameter.__class__ = HostParam
        parameter.store = store
        parameter.memory = memory
    group.__class__ = HostParamGroup
    group.store = store
    group.waiting = tuple(waiting)
    store.groups.append(group)
    if any(parameter.sharded_param.requires_grad for parameter in waiting):
        # Sums leave the device at once: FSDP2's own stream keeps no more memory than those of a group.
        group._reduce_scatter_comm = DefaultReduceScatter()


def _host_bytes(parameter: Any) -> tuple[int, ...]:
    """Return the bytes of a shard, padded to those of other ranks, and then of its gradient if it is trained."""
    dtype = parameter._sharded_param_data.dtype
    sizes = [parameter._sharded_param_data.nbytes]
    if parameter.sharded_param.requires_grad:
        sizes.append(parameter.sharded_size.numel() * dtype.itemsize)
    return tuple(sizes)


class HostWeightsFeature(Feature):
    """Weights on the host, with their gradients; of a model with an adapter those that are frozen and not packed."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._keeps_trained = any(map(is_peft_module, call.model.modules()))  # on the device

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError, with all reasons, where weights or sums of gradients stay on the device all the time."""
        options = self.options
        reasons = [
            (
                not options.shard_parameters,
                "every rank keeps a copy of all weights (shard_parameters=False); shard them",
            ),
            (
                not options.reshard_after_forward,
                "weights stay gathered through a step (reshard_after_forward=False); free them after each pass",
            ),
            (
                self.world.home.pp > 1,
                f"stages of a pipeline keep them gathered; use pp 1, not {self.world.home.pp}",
            ),
            (
                self.world.home.dp_replicate > 1,
                f"sums of {self.world.home.dp_replicate} replicas stay on the device; use dp_replicate 1",
            ),
        ]
        if texts := [text for applies, text in reasons if applies]:
            raise ModelError(
                f"the weights of {architecture_name(model)} cannot wait on the host (offload_weights): "
                f"{'; '.join(texts)}, or leave offload_weights out"
            )

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Move weights that FSDP2 has sharded; the memory is taken, and on a GPU registered, before any pass."""
        groups = {
            group: [*filter(self._belongs_on_host, group.fsdp_params)]
            for group in fsdp_param_groups(fsdp_modules(root))
        }
        sizes_of_parameters = [_host_bytes(parameter) for waiting in groups.values() for parameter in waiting]
        weights = sum(sizes[0] for sizes in sizes_of_parameters)
        total = sum(range_bytes(size) for sizes in sizes_of_parameters for size in sizes)
        check_free_host_memory(
            total,
            self.world,
            "weights and gradients on the host (train.offload_weights) take",
            advice=partial(_room_advice, model),
        )
        if not self._keeps_trained:
            # Gradients leave the device on FSDP2's own stream of sums, which `shard_over_slots` may have put aside.
            state: Any = root._get_fsdp_state  # pyright: ignore[reportAttributeAccessIssue]
            vars(state()._comm_ctx).pop("lazy_init", None)
        store = HostStore(self.world.device, total)
        store.arena.close_when_world_is_left(self.world)
        for group, waiting in groups.items():
            if waiting:
                _put_on_host(group, waiting, store)
        self.description["host"] = f"weights of {bytes_text(weights)}"
        gradients = sum(sum(sizes[1:]) for sizes in sizes_of_parameters)
        if gradients:  # none under an adapter, whose frozen weights alone wait
            self.description["host"] += f" and gradients of {bytes_text(gradients)}"

    def _belongs_on_host(self, parameter: Any) -> bool:
        """Return whether one of FSDP2's parameters goes to the host: not packed, and under an adapter not trained."""
        place = parameter._module_info
        if find_packed_weight(place.module, place.param_name) is not None:
            return False
        return not (self._keeps_trained and parameter.sharded_param.requires_grad)

    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Mark the model: `has_weights_on_host`."""
        setattr(prepared, HOST_STORE, True)


def _room_advice(model: PreTrainedModel, share: float) -> str:
    """Return what an error adds where a `share` of the bytes is free: how large a model has room, and in which type."""
    numbers = int(share * sum(parameter.numel() for parameter in model.parameters()))
    halves = ', and model.dtype = "bfloat16" halves their bytes' if model.dtype == torch.float32 else ""
    return f", room for a model of {numbers:,} numbers in {str(model.dtype).removeprefix('torch.')}{halves}"
