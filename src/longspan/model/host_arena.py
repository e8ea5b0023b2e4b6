"""Pinned memory of the host for tensors of one device, in an arena of exact size that is registered with CUDA once.

Activations, weights and states of optimizers that wait on the host lie in it. `check_free_host_memory` comes first.
"""

import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
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
# what an error advises
_LESS = (
    "keep less on the host (offload_activations, checkpoint_policies with +host, offload_optimizer_states, "
    "offload_weights)"
)


def range_bytes(bytes: int) -> int:
    """Return the bytes of an arena that a range of so many takes (0 counts as 1)."""
    return -(-max(bytes, 1) // _ALIGNMENT) * _ALIGNMENT


class HostArena:
    """Host memory for tensors of one device: `place = arena.take_range(bytes)`; `place.memory` is a tensor in it.

    >>> arena = HostArena(torch.device("cpu"), 1024)
    >>> place = arena.take_range(100)
    >>> place.memory.shape, arena.bytes
    (torch.Size([100]), 1024)

    A range is free once nothing holds it. The arena grows by what is missing; when it is empty its parts become one. On
    a GPU all copies run on its stream `copies`, so that a range may be taken while its last copy is under way. Raises
    ModelError where the host has less free than the arena grows by.
    """

    def __init__(self, device: torch.device, bytes: int = 0, *, filled_first: bool = False) -> None:
        """Take memory. Where it is `filled_first`, with what is freed meanwhile, pages come as they are written, and
        `pin` comes behind that.
        """
        self.device = device
        self.copies: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.RLock()  # backward passes run in threads of their own
        # Ranges that are not reclaimed yet: part, start, size. `HostRange.__del__` appends them in any thread, also
        # while that thread is inside `take_range`.
        self._freed: deque[tuple[_ArenaPart, int, int]] = deque()
        self._parts: list[_ArenaPart] = []
        self._used = 0  # bytes of ranges that are taken, or freed and not reclaimed yet
        if bytes and filled_first:
            self._parts.append(_ArenaPart(range_bytes(bytes)))
        elif bytes:
            self._add_part(bytes)

    def pin(self) -> None:
        """Pin, on a GPU, the memory that was filled first. ModelError where CUDA refuses."""
        for piece in self._parts:
            piece.pin(self.copies)

    @property
    def bytes(self) -> int:
        """The arena's size now, in bytes, in use or free."""
        return sum(part.size for part in self._parts)

    @property
    def parts(self) -> int:
        """In how many pieces the memory is registered: one, except after the arena grew."""
        return len(self._parts)

    def take_range(self, bytes: int) -> "HostRange":
        """Take a range of so many bytes (0 counts as 1), in the first piece with room; the arena grows if none has."""
        size = range_bytes(bytes)
        with self._lock:
            self._reclaim_freed_ranges()
            if not self._used and len(self._parts) > 1:  # empty: its pieces become one
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
        piece = _ArenaPart(range_bytes(bytes))
        piece.pin(self.copies)
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
        # This thread may hold the lock already, so that none is taken.
        self._freed.append((self._part, self._start, self._size))

    def view_like(self, x: Tensor) -> Tensor:
        """Return a tensor in this memory with shape, dtype and strides of `x`; contiguous if `x` is not dense.

        Its values are what the memory holds, not those of `x`.
        """
        strides = torch.empty_like(x, device="meta").stride()
        return self.memory.view(x.dtype).as_strided(x.shape, strides)


class _ArenaPart:
    """One mapped piece of an arena's memory, and which of its bytes are free; it knows nothing of locks."""

    def __init__(self, size: int) -> None:
        self.size = size
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # processes of data loaders would copy pinned pages
            with suppress(AttributeError, OSError):  # Linux only; a kernel may be built without
                pages.madvise(getattr(mmap, advice))
        self.memory: Tensor = torch.frombuffer(pages, dtype=torch.uint8)  # holds the pages
        self._is_pinned = False
        self._free = [(0, size)]  # start and end of free ranges, in order, none next to another

    def pin(self, copies: torch.cuda.Stream | None) -> None:
        """Register the memory with CUDA until this object is deleted, so that `copies` run beside the CPU; None: not.

        ModelError where CUDA refuses.
        """
        if copies is None or self._is_pinned:
            return
        cudart: Any = torch.cuda.cudart()
        if code := int(cudart.cudaHostRegister(self.memory.data_ptr(), self.size, _PORTABLE)):
            raise ModelError(
                f"cudaHostRegister gave error {code} for {self.size:,} bytes of the host's memory "
                f"({self.size / _GIB:.2f} GiB); {_LESS}"
            )
        self._is_pinned = True
        # The end of a process unregisters too, and waits for nothing: a failed run may have copies that never end.
        weakref.finalize(self, _unpin_memory, self.memory.data_ptr(), copies, os.getpid()).atexit = False

    def take_bytes(self, size: int) -> int | None:
        """Take so many bytes of the first free range that has them; returns where they start, None if none has."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give_back_bytes(self, start: int, size: int) -> None:
        """Make bytes that were taken free again, joined with free ranges beside them."""
        insort(self._free, (start, start + size))
        merged: list[tuple[int, int]] = []
        for start_of_range, end in self._free:
            if merged and merged[-1][1] == start_of_range:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start_of_range, end))
        self._free = merged


def _unpin_memory(address: int, copies: torch.cuda.Stream, process: int) -> None:
    """A forked process does nothing. CUDA refuses every call after a GPU's error, so that errors are suppressed."""
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
    The error begins with `what`, a subject and "take"; `advice` gets the share of the bytes that is free, below 1.
    """
    reports = world.control.gather_objects((gethostname(), bytes, free_host_bytes()), "check of the host's memory")
    for host in dict.fromkeys(name for name, _, _ in reports):
        rank_bytes = [size for name, size, _ in reports if name == host]
        free_bytes = [free for name, _, free in reports if name == host and free is not None]
        total = sum(rank_bytes)
        if free_bytes and total > (room := min(free_bytes)):  # ranks of one host read it at different moments
            raise on_all_ranks(
                ModelError(
                    f"{what} {total:,} bytes ({total / _GIB:.2f} GiB) for {plural(len(rank_bytes), 'rank')} of host "
                    f"{host}, at most {max(rank_bytes):,} for one, and {room:,} are free there ({room / _GIB:.2f} GiB)"
                    f"{advice(room / total)}; {_LESS}, start fewer ranks on a host, or use more hosts"
                )
            )
