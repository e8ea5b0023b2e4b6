"""A rank's device: its name, and the bytes that are free there, that were held, and that its allocator took."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from longspan.host import free_host_bytes

# the peak of each GPU before `measure_added_peak` reset its allocator's figure
_highest: dict[torch.device, int] = {}


@contextmanager
def measure_added_peak(device: torch.device) -> Iterator[list[int]]:
    """Measure the most bytes that the block adds on a GPU, put into the list at its end; `peak_memory_bytes` stays."""
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
    """Return the bytes that a rank could still take of its GPU, or of the host, shared by `ranks`; 0: unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        in_use = _allocator_figure(device, "allocated_bytes", "current")
        return free + _allocator_figure(device, "reserved_bytes", "current") - in_use
    return (free_host_bytes() or 0) // ranks


def _allocator_figure(device: torch.device, name: str, which: Literal["current", "peak"]) -> int:
    # torch.cuda.memory_allocated and the like take longer: they flatten and sort all two hundred figures
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return figures[name]["all"][which] if figures else 0


def allocator_retries(device: torch.device) -> int:
    figures = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return figures.get("num_alloc_retries", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    return _allocator_figure(device, "reserved_bytes", "peak") if device.type == "cuda" else 0


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(_allocator_figure(device, "allocated_bytes", "peak"), _highest.get(device, 0))
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
