"""Weights that wait in the host's memory, with their gradients: FSDP2 gathers copies, and its sums go back there.

A copy to the device begins when FSDP2 gathers the group of parameters before, in the next pass of a step too. Sums of
gradients leave on FSDP2's own stream, which adds those of earlier passes first: they come back while the layer runs. On
a CPU the same code copies at once.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapted_modules import is_peft_module
from longspan.model.feature import Call, Feature
from longspan.model.frozen.formats.loaded_linears import OWN_CODES
from longspan.model.fsdp_params import (
    HookedParam,
    HookedParamGroup,
    check_fsdp_names,
    fsdp_modules,
    fsdp_param_groups,
    hook_group,
    hook_parameter,
    sum_on_own_stream,
)
from longspan.model.host_arena import HostArena, HostRange, check_free_host_memory, range_bytes
from longspan.model.layers import architecture_name
from longspan.model.marks import HOST_STORE, packed_weights, record_norm_on_device
from longspan.plain_text import bytes_text


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

    def __init__(self, device: torch.device, bytes: int, *, filled_first: bool = False) -> None:
        self.arena: HostArena = HostArena(device, bytes, filled_first=filled_first)
        self.groups: list[HostGroup] = []  # the root's first
        # Groups as the last forward pass gathered them, and this one its first `gathers` of them; one may come twice.
        self.order: list[HostGroup] = []
        self.gathers = 0
        # The first copies are for the next pass of a step: weights stay as they are.
        self.root_is_ahead = False
        # Called with the parameters whose shards are to be copied: their updates may be under way.
        self.before_fetch: Callable[[Sequence[nn.Parameter]], object] | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, shards: "Iterable[HostShard]") -> None:
        """Begin to copy shards to the device (`staged`), unless they are there, or on their way."""
        shards = [*shards]
        if self.before_fetch is not None:
            self.before_fetch([shard.parameter.sharded_param for shard in shards])
        unstaged = [shard for shard in shards if shard.staged is None]
        for shard, copy in zip(unstaged, self._begin_copies([x.parameter.shard for x in unstaged]), strict=True):
            shard.staged = copy

    def fetch_gradients(self, shards: "Iterable[HostShard]") -> None:
        """Begin to copy the sums of earlier passes to the device (`staged_sum`), behind those that still leave it."""
        summed = [shard for shard in shards if shard.parameter.sharded_param.grad is not None]
        for shard in summed:
            if self._stream is not None and shard.parameter.grad_offload_event is not None:
                self._stream.wait_event(shard.parameter.grad_offload_event)
        sums: list[Any] = [shard.parameter.sharded_param.grad for shard in summed]
        for shard, copy in zip(summed, self._begin_copies([x._local_tensor for x in sums]), strict=True):
            shard.staged_sum = copy

    @torch.no_grad()
    def _begin_copies(self, sources: Sequence[Tensor]) -> "list[_DeviceCopy]":
        """All copies, on the stream that copies, have one event."""
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
    def take(self, shard: "HostShard", dtype: torch.dtype | None) -> Tensor:
        """Return a shard in this type (None: its own), for the current stream; its copy in another type is freed."""
        self.fetch([shard])
        assert shard.staged is not None
        copy = shard.staged.wait()
        if dtype in (None, copy.dtype):
            return copy
        cast = copy.to(dtype)
        self.free([shard])
        return cast

    def free(self, shards: "Iterable[HostShard]") -> None:
        """Free the copies of shards and sums that the current stream has read."""
        self.wait_for_reads()
        for shard in shards:
            shard.staged = None
            shard.staged_sum = None

    def begin_pass(self) -> None:
        """Begin to compare a forward pass with the one before."""
        del self.order[self.gathers :]
        self.gathers = 0

    def note_gather(self, group: "HostGroup") -> "HostGroup | None":
        """Note what a forward pass gathers; returns the group that came next in the last pass, None for a new one."""
        self.order[self.gathers : self.gathers + 1] = [group]
        self.gathers += 1
        return self.order[self.gathers] if self.gathers < len(self.order) else None

    def opening_groups(self) -> "list[HostGroup]":
        """List what forward passes gather first and backward passes do not: the root, which stays, and an embedding."""
        stay = takewhile(lambda x: x is self.groups[0] or not x.group.unshard_in_backward, self.order)
        return [*stay]

    def wait_for_reads(self) -> None:
        """Have the stream that copies wait until the current one has read the copies, whose memory it takes anew."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))


class HostShard:
    """The shard of a parameter, and the shard's gradient, in the host's memory: what FSDP2 gathers, where sums go."""

    def __init__(self, parameter: HookedParam, store: HostStore) -> None:
        """Move the shard, and make the model's parameter anew.

        One of the meta device gets memory, which `prepare` fills later.
        """
        self.parameter: HookedParam = parameter
        self.store: HostStore = store
        # The copies are of the shard, and of the gradient of earlier passes.
        self.staged: _DeviceCopy | None = None
        self.staged_sum: _DeviceCopy | None = None
        self._gradient_in_arena: Any = None  # a weak reference to the gradient that is in the memory for it
        # of the shard, and of its gradient if it is trained
        self._memory: tuple[HostRange, ...] = tuple(map(store.arena.take_range, _host_bytes(parameter)))
        padded = _view_with_own_version(self._memory[0], parameter.shard)
        if not parameter.shard.is_meta:
            padded.copy_(parameter.shard)
        setattr(parameter.move_shard(padded), HOST_STORE, store)
        parameter.source = parameter.sums = self

    def take_shard(self, parameter: HookedParam) -> Tensor:
        """Bring the shard to the device, cast to what FSDP2 gathers."""
        return self.store.take(self, parameter.gathered_dtype)

    @torch.no_grad()
    def store_sum(self, parameter: HookedParam, total: Tensor, earlier: Any) -> Any:
        """Return the gradient on the host, to which a copy of the sum over passes is under way: FSDP2 waits for the
        event.
        """
        gradient = earlier
        if gradient is None:
            has_place = len(self._memory) > 1  # not if the parameter is trained only since `prepare`
            # a caller may still have the last gradient there
            is_free = self._gradient_in_arena is None or self._gradient_in_arena.expired()
            if has_place and is_free:
                gradient = parameter.as_dtensor(_view_with_own_version(self._memory[1], total))
                self._gradient_in_arena = torch._C._WeakTensorRef(gradient)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                gradient = parameter.as_dtensor(torch.empty_like(total, device="cpu"))
        else:
            if self.staged_sum is None:
                self.staged_sum = _DeviceCopy(gradient._local_tensor.to(total.device, non_blocking=True), None)
            total.add_(self.staged_sum.wait())
            self.store.wait_for_reads()
            self.staged_sum = None
        (norm,) = torch._foreach_norm([total], 2, dtype=torch.promote_types(total.dtype, torch.float32))
        gradient._local_tensor.copy_(total, non_blocking=True)
        record_norm_on_device(gradient, norm)
        if total.is_cuda:
            parameter.grad_offload_event = torch.cuda.current_stream(total.device).record_event()
        return gradient


class HostGroup:
    """FSDP2's group of parameters that are gathered as one, some of which (`waiting`) wait on the host."""

    def __init__(self, group: HookedParamGroup, parameters: Sequence[HookedParam], store: HostStore) -> None:
        """Move the shards of these parameters of the group to the store's arena, and have the group fetch them."""
        self.group: HookedParamGroup = group
        self.store: HostStore = store
        self.waiting: tuple[HostShard, ...] = tuple(HostShard(x, store) for x in parameters)
        group.listener = self
        store.groups.append(self)
        if any(shard.parameter.sharded_param.requires_grad for shard in self.waiting):
            group.sum_in_own_memory()  # sums leave the device at once

    def begin_gather(self, group: HookedParamGroup) -> None:
        """Begin to copy all shards of the group together, before a backward pass.

        The root's group opens a pass: copies of all groups are dropped, as weights may have changed, unless they were
        made for another pass of the same step (`root_is_ahead`).
        """
        store = self.store
        if self is store.groups[0] and group.is_in_forward:
            store.begin_pass()
            if not group.is_sharded:
                store.note_gather(self)
        if self is store.groups[0] and group.is_sharded and not store.root_is_ahead:
            for other in store.groups:
                store.free(other.waiting)
        if group.is_before_backward and group.is_sharded and not group.is_gathering:
            store.fetch(self.waiting)

    def end_gather(self, group: HookedParamGroup) -> None:
        """Free the copies that the gather read, and begin on copies for what runs next.

        In a forward pass these are the shards of the group that was gathered next in the last forward pass; in a
        backward pass this group's sums of earlier passes. The last gather of a backward pass also begins copies of the
        root's sums, and, if another pass of the step follows, of its shards and those of a frozen embedding.
        """
        store = self.store
        root = store.groups[0]
        store.free(self.waiting)
        if self is root:
            store.root_is_ahead = False
        if group.is_in_forward:
            following = store.note_gather(self)
            if following is not None and following.group.is_sharded:
                store.fetch(following.waiting)
            return
        store.fetch_gradients(self.waiting)
        opening = store.opening_groups()
        if self in store.order[len(opening) : len(opening) + 1]:  # the last gather of a backward pass
            store.fetch_gradients(root.waiting)
            if not group.all_reduce_grads:  # `defer_until_last_pass`: a pass follows
                store.root_is_ahead = True
                for first in opening:
                    store.fetch(first.waiting)

    def end_reshard(self, group: HookedParamGroup) -> None:
        """Free copies that were made and not gathered, after a pass or an error."""
        if group.is_idle:
            self.store.free(self.waiting)
            self.store.root_is_ahead = False


def _view_with_own_version(memory: HostRange, like: Tensor) -> Tensor:
    """The tensor's count of in-place changes is its own."""
    return memory.memory.data.view(like.dtype).view(like.shape)


def _host_bytes(parameter: HookedParam) -> tuple[int, ...]:
    """The shard's bytes are padded to those of other ranks; those of its gradient follow if it is trained."""
    sizes = [parameter.shard.nbytes]
    if parameter.sharded_param.requires_grad:
        sizes.append(parameter.sharded_size.numel() * parameter.shard.dtype.itemsize)
    return tuple(sizes)


class HostWeightsFeature(Feature):
    """Weights on the host, with their gradients; of a model with an adapter those that are frozen, packed or whole."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        check_fsdp_names("weights on the host take", "weights on the device")
        # Trained parameters beside an adapter stay on the device.
        self._keeps_trained = any(map(is_peft_module, call.model.modules()))

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
            group: [hook_parameter(x) for x in group.fsdp_params if self._belongs_on_host(x)]
            for group in fsdp_param_groups(fsdp_modules(root))
        }
        sizes_of_parameters = [_host_bytes(parameter) for waiting in groups.values() for parameter in waiting]
        weights = sum(sizes[0] for sizes in sizes_of_parameters)
        total = sum(range_bytes(size) for sizes in sizes_of_parameters for size in sizes)
        # Codes that transformers has loaded make room, weight by weight (FrozenFeature).
        codes = [vars(module)[OWN_CODES] for module in root.modules() if OWN_CODES in vars(module)]
        check_free_host_memory(
            max(0, total - sum(x.packed_bytes for x in codes)),
            self.world,
            "weights and gradients on the host (train.offload_weights) take",
            advice=partial(_room_advice, model),
        )
        if not self._keeps_trained and any(parameter.requires_grad for parameter in root.parameters()):
            # Gradients leave the device on FSDP2's own stream of sums, which `shard_over_slots` may have put aside.
            sum_on_own_stream(root)
        store = result_or_first_error(
            self.world, lambda: HostStore(self.world.device, total, filled_first=bool(codes)), _as_model_error
        )
        self._arena = store.arena
        store.arena.close_when_world_is_left(self.world)
        for group, waiting in groups.items():
            if waiting:
                HostGroup(hook_group(group), waiting, store)
        self.words["on the host"] = f"weights of {bytes_text(weights)}"
        gradients = sum(sum(sizes[1:]) for sizes in sizes_of_parameters)
        # Under an adapter frozen weights alone wait, so that there are no gradients.
        if gradients:
            self.words["on the host"] += f" and gradients of {bytes_text(gradients)}"

    def _belongs_on_host(self, parameter: Any) -> bool:
        return not (self._keeps_trained and parameter.sharded_param.requires_grad)

    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Mark the model: `has_weights_on_host`. Memory that was filled first is pinned now."""
        result_or_first_error(self.world, self._arena.pin, _as_model_error)
        setattr(prepared, HOST_STORE, True)


def _as_model_error(error: Exception) -> ModelError:
    return error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")


def _room_advice(model: PreTrainedModel, share: float) -> str:
    if packed_weights(model):
        return f", room for {share:.0%} of these weights"
    numbers = int(share * sum(parameter.numel() for parameter in model.parameters()))
    halves = ', and model.dtype = "bfloat16" halves their bytes' if model.dtype == torch.float32 else ""
    return f", room for a model of {numbers:,} numbers in {str(model.dtype).removeprefix('torch.')}{halves}"
