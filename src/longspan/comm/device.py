"""A rank's device: which it is, how arrays get there, and the bytes that are free, held, and taken by its allocator."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.errors import CommError, plural
from longspan.host import free_host_bytes

# the peak of each GPU before `measure_added_peak` reset its allocator's figure
_highest: dict[torch.device, int] = {}


@contextmanager
def measure_added_peak(device: torch.device) -> Iterator[list[int]]:
    """Measure the most bytes that the block adds on a GPU: they are appended to the list that is yielded, at its end.

    The list stays empty on a CPU, and where the block raises. The allocator's peak is reset, and the one before is
    kept in `_highest`, so that `peak_memory_bytes` still counts it.
    """
    added = list[int]()
    if device.type != "cuda":
        yield added
        return
    _highest[device] = peak_memory_bytes(device)
    bytes_before = _allocator_figure(device, "allocated_bytes", "current")
    torch.cuda.reset_peak_memory_stats(device)
    yield added
    added.append(_allocator_figure(device, "allocated_bytes", "peak") - bytes_before)


def unused_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes that a rank can still take: of its GPU, with what torch's allocator has cached there.

    On a CPU it is the rank's share of what is free on the host, for as many `ranks`; 0 where that is not known.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        in_use = _allocator_figure(device, "allocated_bytes", "current")
        return free + _allocator_figure(device, "reserved_bytes", "current") - in_use
    return (free_host_bytes() or 0) // ranks


def _allocator_figure(device: torch.device, name: str, which: Literal["current", "peak"]) -> int:
    """Bytes over all pools of the allocator; 0 before its first allocation."""
    # torch.cuda.memory_allocated and the like take longer: they flatten and sort all two hundred figures
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return figures[name]["all"][which] if figures else 0


def allocator_retries(device: torch.device) -> int:
    """Return how often the allocator gave back cached memory to get more; 0 on a CPU."""
    figures = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return figures.get("num_alloc_retries", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the most bytes that the allocator has taken from the GPU; 0 on a CPU."""
    if device.type == "cuda":
        return _allocator_figure(device, "reserved_bytes", "peak")
    return 0


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes of memory that this process has held: of its GPU, or resident where it runs on a CPU."""
    if device.type == "cuda":
        return max(_allocator_figure(device, "allocated_bytes", "peak"), _highest.get(device, 0))
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """Return the name of a GPU as its driver gives it, else "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def to_device(x: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    """Return an array as a tensor on `device`; on a CPU it shares the array's memory.

    To a GPU the array goes through page-locked memory, and the host does not wait. From ordinary memory CUDA would let
    all queued work end first, so that every micro-batch would begin with an empty queue.
    """
    tensor: Any = torch.from_numpy(x)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


BOTH = "cpu:gloo,cuda:nccl"  # tensors on GPUs through NCCL, the host's integers through gloo


def choose_device(backend: str | None, device: torch.device | str | None, local_rank: int) -> torch.device:
    """Choose the device of this rank: the requested one, else its GPU, else the CPU; a GPU becomes the current one.

    Raises CommError for a backend that longspan does not use, and where this host has no GPU of the device's index.
    """
    if backend not in (None, "gloo", "nccl", BOTH):
        raise CommError(f"backend {backend!r} is not known; use 'gloo' (CPU), 'nccl' (GPU) or None")
    if device is None:
        gpu = torch.cuda.is_available() if backend is None else backend != "gloo"
        device = f"cuda:{local_rank}" if gpu else "cpu"
    rank_device = torch.device(device)
    if rank_device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if rank_device.index is None else rank_device.index
        if index >= count:
            raise CommError(
                f"local rank {local_rank} needs cuda:{index}, but this host shows {plural(count, 'CUDA device')}; "
                f"start at most {plural(count, 'rank')} per host, or use backend='gloo' (--device cpu)"
            )
        rank_device = torch.device("cuda", index)
        torch.cuda.set_device(rank_device)
    return rank_device


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that no memory was left, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
