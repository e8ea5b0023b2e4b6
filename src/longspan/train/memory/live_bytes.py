"""Bytes in use: of tensors that are alive, counted if an allocator has no figures, and the most of this process."""

import os
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.plain_text import bytes_text


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators make inside it, in this thread, until they are freed.

    >>> with LiveBytes() as counted:
    ...     x = torch.ones(1000) + 1
    >>> counted.peak
    8000

    What a kernel takes for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it made."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, torch.nn.Parameter):
                self._note_storage(x.untyped_storage())
        return out

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage once, until it is freed."""
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak: int = max(self.peak, self.now)
        weakref.finalize(storage, self._forget_storage, key)

    def _forget_storage(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


class AddedBytes:
    """The most memory of a GPU that was in use inside `measure_added_peak` above that before it; None on a CPU."""

    bytes: int | None = None


_highest: dict[torch.device, int] = {}  # of each GPU, before its allocator's own mark was set back


@contextmanager
def measure_added_peak(device: torch.device) -> Iterator[AddedBytes]:
    """Measure what is added to a GPU's memory inside; `peak_memory_bytes` stays that of the whole process."""
    added = AddedBytes()
    if device.type != "cuda":
        yield added
        return
    _highest[device], bytes_before = peak_memory_bytes(device), _memory_figure(device, "allocated_bytes", "current")
    torch.cuda.reset_peak_memory_stats(device)
    yield added
    added.bytes = _memory_figure(device, "allocated_bytes", "peak") - bytes_before


def unused_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes that a rank could still take of its GPU, or of the host's memory, which so many ranks share.

    0 means unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (
            free
            + _memory_figure(device, "reserved_bytes", "current")
            - _memory_figure(device, "allocated_bytes", "current")
        )
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    except (AttributeError, ValueError):  # Windows and macOS have no such figures
        return 0


def _memory_figure(device: torch.device, name: str, which: Literal["current", "peak"]) -> int:
    """Return one figure of a GPU's allocator. Functions as torch.cuda.memory_allocated sort all two hundred of them."""
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return figures[name]["all"][which] if figures else 0


def allocator_retries(device: torch.device) -> int:
    """Return how often this process's allocator of a GPU had to wait for it, give back what was free, and ask again.

    Each time takes milliseconds, and what is given back is asked for again. 0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the most memory that the allocator took of a GPU, in use or not, since its peak was last set back."""
    return _memory_figure(device, "reserved_bytes", "peak") if device.type == "cuda" else 0


def retries_text(times: float, in_use: int, reserved: int) -> str:
    """Return what a user should know of an allocator that had to ask again so many times a step."""
    return (
        f"the GPU's allocator ran out of memory {times:.3g} times a step: each time it waits for the GPU, gives back "
        f"what is free and takes it again ({bytes_text(reserved)} taken at most, {bytes_text(in_use)} in use); a lower "
        "train.memory_fraction or train.memory_bytes leaves it room (docs/memory.md)"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(_memory_figure(device, "allocated_bytes", "peak"), _highest.get(device, 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
