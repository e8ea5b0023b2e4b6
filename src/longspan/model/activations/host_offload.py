"""Activations of decoder layers that wait in the host's memory between forward and backward, a layer at a time.

They lie in a `HostArena`. A layer's tensors leave the device when the second layer after it begins, and come back when
backward reaches the layer after it. Memory of the device is taken and freed on the stream that computes, which waits
for the copies by events. On a CPU the same code copies at once.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from longspan.model.host_arena import HostArena, HostRange

HOST_OFFLOAD = "host_offload"  # the attribute of prepared models
ON_DEVICE = 2  # layers: the one that runs and its neighbour


class HostOffload:
    """Where the layers of one model keep tensors on the host: `park = offload.open_layer(first=…)` at each call.

    >>> fetch = HostOffload(HostArena(torch.device("cpu"))).open_layer(first=True)(torch.ones(3))
    >>> fetch().tolist()
    [1.0, 1.0, 1.0]

    `park(x)` returns the function that fetches the tensor, in any order and repeatedly; its memory is free once nothing
    holds that. A call with `first` begins a new forward pass; backward fetches a layer ahead within one pass only.
    """

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        # weak: a layer's tensors are freed with the graph that fetches them
        self._last_layer: weakref.ref[ParkedLayer] | None = None
        # the newest layers, at most ON_DEVICE, that may have tensors on the device; None: a layer that parks nothing
        self._on_device: deque[weakref.ref[ParkedLayer] | None] = deque()

    def open_layer(self, *, first: bool) -> "ParkedLayer":
        """Make the object by which one call of a layer parks tensors; `first`: a forward pass begins with this call."""
        layer = ParkedLayer(self, None if first else self._last_layer)
        self._last_layer = weakref.ref(layer)
        self.mark_newest_on_device(layer)
        return layer

    def count_empty_layer(self) -> None:
        """Count a layer that parks nothing, so that tensors of the layers before its neighbour leave the device."""
        self.mark_newest_on_device(None)

    def mark_newest_on_device(self, layer: "ParkedLayer | None") -> None:
        """Make this layer the newest of the ON_DEVICE layers with tensors on the device; tensors of older ones are
        freed.
        """
        reference = None if layer is None else weakref.ref(layer)
        if reference is not None and reference in self._on_device:
            self._on_device.remove(reference)
        self._on_device.append(reference)
        if len(self._on_device) > ON_DEVICE:
            oldest = self._on_device.popleft()
            if oldest is not None and (earlier := oldest()) is not None:
                earlier.free_device_tensors()


class ParkedLayer:
    """The tensors that one call of a layer keeps on the host; a call with a tensor copies it there.

    To fetch one of them brings all back, and begins to bring back those of the layer before.
    """

    def __init__(self, offload: HostOffload, before: "weakref.ref[ParkedLayer] | None") -> None:
        """Begin without tensors; `before` is the layer that ran before this one in the pass, None for the first."""
        self._offload = offload
        self._layer_before = before
        self._on_host: list[tuple[HostRange, Tensor]] = []  # memory of the arena, and the parked tensor in it
        # The stream that computes allocates these tensors; each one's key is its index.
        self._on_device: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}  # torch's counts of in-place changes, when a tensor was parked
        # This event follows the last copy, there or back.
        self._copied: torch.Event | None = None

    def __call__(self, x: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor to the host, unless it is empty or elsewhere; returns the function that fetches it."""
        x = x.detach()
        arena = self._offload.arena
        if x.device.type != arena.device.type or not x.numel():
            return x.detach
        place = arena.take_range(x.numel() * x.element_size())
        index = len(self._on_host)
        on_host = place.view_like(x)
        self._on_host.append((place, on_host))
        if (copies := arena.copies) is None:
            on_host.copy_(x)
        else:
            copies.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(copies):
                on_host.copy_(x, non_blocking=True)
            self._copied = copies.record_event()
            # The copy may be under way: x stays until the layer's tensors are freed. On a CPU it is done.
            self._on_device[index] = x
            self._versions[index] = x._version
        return partial(self.fetch_tensor, index)

    def fetch_tensor(self, index: int, *, ahead: bool = True) -> Tensor:
        """Return a tensor as it was; copies of the layer before, which backward needs next, begin too if `ahead`."""
        self._offload.mark_newest_on_device(self)  # earlier fetched layers leave the device
        if index not in self._on_device:
            self.begin_copies_to_device()
        layer_before = self._layer_before() if ahead and self._layer_before is not None else None
        if layer_before is not None and not layer_before._on_device:
            self._offload.mark_newest_on_device(layer_before)
            layer_before.begin_copies_to_device()
        if self._copied is not None:
            torch.cuda.current_stream(self._offload.arena.device).wait_event(self._copied)
        # From now on the tensor is the caller's; a second fetch copies it anew.
        x = self._on_device.pop(index)
        self._refuse_changed_tensor(index, x)
        return x

    def begin_copies_to_device(self) -> None:
        """Begin to copy the layer's tensors to the device, unless they are there."""
        copies = self._offload.arena.copies
        device = self._offload.arena.device
        absent = [index for index in range(len(self._on_host)) if index not in self._on_device]
        for index in absent:
            # The count is that of the tensor that was parked, not of this new one.
            self._versions.pop(index, None)
            self._on_device[index] = torch.empty_like(self._on_host[index][1], device=device)
        if copies is not None:  # kernels that used the memory of the new tensors before may still run
            copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies) if copies is not None else nullcontext():
            for index in absent:
                self._on_device[index].copy_(self._on_host[index][1], non_blocking=True)
        if copies is not None:
            self._copied = copies.record_event()

    def free_device_tensors(self) -> None:
        """Free the layer's tensors on the device, after the copies that are under way."""
        if self._copied is not None and self._on_device:
            torch.cuda.current_stream(self._offload.arena.device).wait_event(self._copied)
        for index, x in self._on_device.items():
            self._refuse_changed_tensor(index, x)
        self._on_device.clear()

    def _refuse_changed_tensor(self, index: int, x: Tensor) -> None:
        if x._version != self._versions.get(index, x._version):
            raise RuntimeError(
                f"a tensor {tuple(x.shape)} that a layer keeps on the host was modified by an inplace operation before "
                "it had been copied; write x = x + y in place of x += y, or keep it on the device"
            )

    def __del__(self) -> None:
        """Keep the allocator from reusing the memory of tensors on the device before copies under way have ended."""
        # Calls of torch may fail at the end of a process.
        with suppress(Exception):
            for x in self._on_device.values():
                if self._offload.arena.copies is not None:
                    x.record_stream(self._offload.arena.copies)
