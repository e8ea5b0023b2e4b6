"""Bytes in use on a GPU by its allocator's figures, or of this process on a CPU, and what may still be taken."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from longspan.plain_text import bytes_text

_highest: dict[torch.device, int] = {}  # the peak of each GPU before `measure_added_peak` reset its allocator's figure


@contextmanager
def measure_added_peak(device: torch.device) -> Iterator[list[int]]:
    """Measure the most bytes of a GPU that the block uses in addition; once it has ended they are in the list.

    It resets the allocator's peak, and keeps the old one, so that `peak_memory_bytes` stays that of the whole process.
    """
    added = list[int]()
    if device.type != "cuda":
        yield added
        return
    _highest[device], bytes_before = peak_memory_bytes(device), _memory_figure(device, "allocated_bytes", "current")
    torch.cuda.reset_peak_memory_stats(device)
    yield added
    added.append(_memory_figure(device, "allocated_bytes", "peak") - bytes_before)


def unused_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes that a rank could still take of its GPU, or of the host's memory, which `ranks` ranks share.

    Those that the allocator has reserved and does not use count. 0 means unknown.
    """
    if device.type == "cuda":
        free, in_use = torch.cuda.mem_get_info(device)[0], _memory_figure(device, "allocated_bytes", "current")
        return free + _memory_figure(device, "reserved_bytes", "current") - in_use
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    except (AttributeError, ValueError):  # Windows and macOS have no such figures
        return 0


def _memory_figure(device: torch.device, name: str, which: Literal["current", "peak"]) -> int:
    # torch.cuda.memory_allocated and the like take longer: they flatten and sort all two hundred figures
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return figures[name]["all"][which] if figures else 0


def allocator_retries(device: torch.device) -> int:
    """Return how often this process's allocator ran out of memory, freed its cache, and tried again; 0 on a CPU."""
    figures = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return figures.get("num_alloc_retries", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the most memory that the allocator took of a GPU, in use or not, since its peak was last set back."""
    return _memory_figure(device, "reserved_bytes", "peak") if device.type == "cuda" else 0


def retries_text(times: float, in_use: int, reserved: int) -> str:
    """Return a warning of an allocator that ran out of memory `times` a step; `in_use`, `reserved` are peak bytes."""
    return (
        f"the GPU's allocator ran out of memory {times:.3g} times a step: each time it waits for the GPU, gives back "
        f"what is free and takes it again ({bytes_text(reserved)} taken at most, {bytes_text(in_use)} in use); a lower "
        "train.memory_fraction or train.memory_bytes leaves it room (docs/memory.md)"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(_memory_figure(device, "allocated_bytes", "peak"), _highest.get(device, 0))
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
