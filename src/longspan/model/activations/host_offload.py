"""Activations of decoder layers that wait in the host's memory between forward and backward, a layer at a time.

An arena of exact size is registered with CUDA once. A layer's tensors leave the device when the second layer after it
begins, and come back when backward reaches the layer after it. Memory of the device is taken and freed on the stream
that computes, which waits for the copies by events. On a CPU the same code copies at once.
"""

import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from socket import gethostname
from typing import Any

import torch
from torch import Tensor

from longspan.comm import World, on_all_ranks
from longspan.errors import ModelError, plural
from longspan.host import free_host_bytes

_ALIGNMENT = 256  # bytes: what CUDA's own allocations begin at a multiple of
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_GIB = 1 << 30
_LESS = (
    "keep less on the host (offload_activations, measures with +host, offload_optimizer_states, offload_weights)"
)


def range_bytes(bytes: int) -> int:
    """Return the bytes of an arena that a range of so many takes (0 counts as 1)."""
    return -(-max(bytes, 1) // _ALIGNMENT) * _ALIGNMENT


class HostArena:
    """Host memory for tensors of one device: `place = arena.take_range(bytes)`; `place.memory` is a tensor in it.

    >>> arena = HostArena(torch.device("cpu"), 1024)
    >>> place = arena.take_range(100)
    >>> place.memory.shape, arena.bytes_in_use, arena.bytes
    (torch.Size([100]), 256, 1024)

    A range is free once nothing holds it. The arena grows by what is missing; when it is empty its parts become one. On
    a GPU all copies run on its stream `copies`, so that a range may be taken while its last copy is under way. Raises
    ModelError where the host has less free than the arena grows by.
    """

    def __init__(self, device: torch.device, bytes: int = 0) -> None:
        self.device = device
        self.copies: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.RLock()  # backward passes run in threads of their own
        # ranges are collected in any thread, also inside `take`
        self._freed: deque[tuple[_ArenaPart, int, int]] = deque()
        self._parts: list[_ArenaPart] = []
        self._used = 0
        if bytes:
            self._add_part(bytes)

    @property
    def bytes(self) -> int:
        """The arena's size now, in bytes, in use or free."""
        return sum(part.size for part in self._parts)

    @property
    def parts(self) -> int:
        """In how many pieces the memory is registered: one, except after the arena grew."""
        return len(self._parts)

    @property
    def bytes_in_use(self) -> int:
        """How many bytes of the arena are in use."""
        with self._lock:
            self._reclaim_freed_ranges()
            return self._used

    def take_range(self, bytes: int) -> "HostRange":
        """Take a range of so many bytes (0 counts as 1), in the first piece with room; the arena grows if none has."""
        size = range_bytes(bytes)
        with self._lock:
            self._reclaim_freed_ranges()
            if not self._used and len(self._parts) > 1:
                total = self.bytes
                self._parts.clear()
                self._add_part(total)
            for piece in self._parts:
                if (start := piece.take_bytes(size)) is not None:
                    break
            else:
                piece = self._add_part(size)
                start = piece.take_bytes(size)
            assert start is not None
            self._used += size
        return HostRange(self._freed, piece, start, size, bytes)

    def close(self) -> None:
        """Give the memory back, now or once all ranges are free. `take_range` adds memory again."""
        with self._lock:
            self._reclaim_freed_ranges()
            self._parts.clear()

    def close_when_world_is_left(self, world: World) -> None:
        """Close the arena when the world is left, if the arena still exists then (the world does not keep it)."""
        close = weakref.WeakMethod(self.close)

        def close_arena() -> None:
            if (method := close()) is not None:
                method()

        world.on_leaving(close_arena)

    def _add_part(self, bytes: int) -> "_ArenaPart":
        free = free_host_bytes()
        if free is not None and bytes > free:
            raise ModelError(
                f"the host's arena needs {bytes:,} bytes more ({bytes / _GIB:.2f} GiB) next to the {self.bytes:,} that "
                f"it has, and {free:,} are free ({free / _GIB:.2f} GiB); {_LESS}, or use more slots"
            )
        piece = _ArenaPart(range_bytes(bytes), self.copies)
        self._parts.append(piece)
        return piece

    def _reclaim_freed_ranges(self) -> None:
        """The lock must be held."""
        while self._freed:
            part, start, size = self._freed.popleft()
            part.give_back_bytes(start, size)
            self._used -= size


class HostRange:
    """Bytes of an arena, `memory`. They are free again when this object is deleted: no view may outlive it."""

    __slots__ = ("_freed", "_part", "_size", "_start", "memory")

    def __init__(
        self, freed: "deque[tuple[_ArenaPart, int, int]]", part: "_ArenaPart", start: int, size: int, bytes: int
    ) -> None:
        self._freed = freed
        self._part = part
        self._start = start
        self._size = size
        self.memory: Tensor = part.memory[start : start + bytes]  # (bytes,) of uint8

    def __del__(self) -> None:
        self._freed.append((self._part, self._start, self._size))  # without the lock, which this thread may hold

    def view_like(self, x: Tensor) -> Tensor:
        """Return a tensor in this memory with shape, dtype and strides of `x`; contiguous if `x` is not dense."""
        strides = torch.empty_like(x, device="meta").stride()
        return self.memory.view(x.dtype).as_strided(x.shape, strides)


class _ArenaPart:
    def __init__(self, size: int, copies: torch.cuda.Stream | None) -> None:
        """Map `size` bytes; with a stream of `copies`, so on a GPU, pin them until this object is deleted."""
        self.size = size
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # processes of data loaders would copy pinned pages
            with suppress(AttributeError, OSError):  # Linux only; a kernel may be built without
                pages.madvise(getattr(mmap, advice))
        self.memory: Tensor = torch.frombuffer(pages, dtype=torch.uint8)  # holds the pages
        if copies is not None:
            _pin_memory(self.memory)
            # The end of a process unregisters too, and waits for nothing: a failed run may have copies that never end.
            weakref.finalize(self, _unpin_memory, self.memory.data_ptr(), copies, os.getpid()).atexit = False
        self._free = [(0, size)]  # start and end

    def take_bytes(self, size: int) -> int | None:
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give_back_bytes(self, start: int, size: int) -> None:
        insort(self._free, (start, start + size))
        merged: list[tuple[int, int]] = []
        for start_of_range, end in self._free:
            if merged and merged[-1][1] == start_of_range:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start_of_range, end))
        self._free = merged


def _pin_memory(memory: Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)):
        raise ModelError(
            f"cudaHostRegister gave error {code} for {memory.numel():,} bytes of the host's memory "
            f"({memory.numel() / _GIB:.2f} GiB); {_LESS}"
        )


def _unpin_memory(address: int, copies: torch.cuda.Stream, process: int) -> None:
    """Errors are suppressed, as CUDA refuses every call after a GPU's error."""
    if process == os.getpid():
        with suppress(Exception):
            copies.synchronize()
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(address)


def check_free_host_memory(
    bytes: int,
    world: World,
    what: str,
    advice: Callable[[float], str] = lambda share: "",
) -> None:
    """Raise ModelError on all ranks where the ranks of a host ask for more bytes together than are free there.

    All ranks call it, each with its bytes, before any takes memory; not checked where a host does not say what is free.
    `advice` gets the share of the bytes that is free.
    """
    reports = world.control.gather_objects((gethostname(), bytes, free_host_bytes()), "check of the host's memory")
    for host in dict.fromkeys(name for name, _, _ in reports):
        of_ranks = [size for name, size, _ in reports if name == host]
        free_bytes = [free for name, _, free in reports if name == host and free is not None]
        total = sum(of_ranks)
        if free_bytes and total > (room := min(free_bytes)):  # ranks of one host read it at different moments
            raise on_all_ranks(
                ModelError(
                    f"{what} {total:,} bytes ({total / _GIB:.2f} GiB) for {plural(len(of_ranks), 'rank')} of host "
                    f"{host}, at most {max(of_ranks):,} for one, and {room:,} are free there ({room / _GIB:.2f} GiB)"
                    f"{advice(room / total)}; {_LESS}, start fewer ranks on a host, or use more hosts"
                )
            )


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
        self._on_device: deque[weakref.ref[ParkedLayer] | None] = deque()  # None: a layer that parks nothing

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
        """Note this layer as the newest of the ON_DEVICE layers with tensors on the device; older ones leave it."""
        reference = None if layer is None else weakref.ref(layer)
        if reference is not None and reference in self._on_device:
            self._on_device.remove(reference)
        self._on_device.append(reference)
        if len(self._on_device) > ON_DEVICE:
            oldest = self._on_device.popleft()
            if oldest is not None and (earlier := oldest()) is not None:
                earlier.free_device_tensors()


class ParkedLayer:
    """The tensors that one call of a layer keeps on the host; fetching one brings all back, and begins on others."""

    def __init__(self, offload: HostOffload, before: "weakref.ref[ParkedLayer] | None") -> None:
        self._offload = offload
        self._layer_before = before
        self._on_host: list[tuple[HostRange, Tensor]] = []  # memory of the arena, and the parked tensor in it
        self._on_device: dict[int, Tensor] = {}  # by index; from the allocator of the stream that computes
        self._versions: dict[int, int] = {}  # torch's counts of in-place changes, when a tensor was parked
        self._copied: torch.cuda.Event | None = None  # after the last copy, there or back

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
            self._record_copies(copies)
            # The copy may be under way: x stays until the layer's tensors are freed. On a CPU it is done.
            self._on_device[index], self._versions[index] = x, x._version
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
        x = self._on_device.pop(index)  # from now on the caller's; a second fetch copies it anew
        self._refuse_changed_tensor(index, x)
        return x

    def begin_copies_to_device(self) -> None:
        """Begin to copy the layer's tensors to the device, unless they are there."""
        copies = self._offload.arena.copies
        device = self._offload.arena.device
        absent = [index for index in range(len(self._on_host)) if index not in self._on_device]
        for index in absent:
            self._versions.pop(index, None)  # of the tensor that was parked, not of this new one
            self._on_device[index] = torch.empty_like(self._on_host[index][1], device=device)
        if copies is not None:  # kernels that used the memory of the new tensors before may still run
            copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies) if copies is not None else nullcontext():
            for index in absent:
                self._on_device[index].copy_(self._on_host[index][1], non_blocking=True)
        if copies is not None:
            self._record_copies(copies)

    def _record_copies(self, copies: torch.cuda.Stream) -> None:
        self._copied = torch.cuda.Event()
        self._copied.record(copies)

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
        with suppress(Exception):  # at the end of a process
            for x in self._on_device.values():
                if self._offload.arena.copies is not None:
                    x.record_stream(self._offload.arena.copies)
