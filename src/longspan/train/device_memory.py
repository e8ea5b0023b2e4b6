"""Bytes of this rank's GPU and host: what is free, what was held, and whether a model fits at all."""

import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural
from longspan.host import free_host_bytes
from longspan.plain_text import bytes_text, gib_text
from longspan.plan import MemoryBudget
from longspan.plan.memory.settings import GPU_SHARE, HOST_SHARE, MOMENTS
from longspan.plan.memory.stage_bytes import CONTEXT_BYTES

# the peak of each GPU before `measure_added_peak` reset its allocator's figure
_highest: dict[torch.device, int] = {}


@contextmanager
def measure_added_peak(device: torch.device) -> Iterator[list[int]]:
    """Measure the most bytes that the block adds on a GPU, put into the list at its end; `peak_memory_bytes` stays."""
    added = list[int]()
    if device.type != "cuda":
        yield added
        return
    _highest[device], bytes_before = (
        peak_memory_bytes(device),
        _allocator_figure(device, "allocated_bytes", "current"),
    )
    torch.cuda.reset_peak_memory_stats(device)
    yield added
    added.append(_allocator_figure(device, "allocated_bytes", "peak") - bytes_before)


def unused_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes that a rank could still take of its GPU, or of the host, shared by `ranks`; 0: unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        in_use = _allocator_figure(device, "allocated_bytes", "current")
        return free + _allocator_figure(device, "reserved_bytes", "current") - in_use
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    except (AttributeError, ValueError):  # Windows and macOS have no such figures
        return 0


def _allocator_figure(device: torch.device, name: str, which: Literal["current", "peak"]) -> int:
    # torch.cuda.memory_allocated and the like take longer: they flatten and sort all two hundred figures
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return figures[name]["all"][which] if figures else 0


def allocator_retries(device: torch.device) -> int:
    figures = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return figures.get("num_alloc_retries", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    return _allocator_figure(device, "reserved_bytes", "peak") if device.type == "cuda" else 0


def allocator_retries_text(times: float, in_use: int, reserved: int) -> str:
    """Return a warning of an allocator that ran out of memory `times` a step; `in_use`, `reserved` are peak bytes."""
    return (
        f"the GPU's allocator ran out of memory {times:.3g} times a step: each time it waits for the GPU, gives back "
        f"what is free and takes it again ({bytes_text(reserved)} taken at most, {bytes_text(in_use)} in use); a lower "
        "train.device_memory_limit leaves it room (docs/memory.md)"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(_allocator_figure(device, "allocated_bytes", "peak"), _highest.get(device, 0))
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def count_ranks_of_host(world: World) -> int:
    return min(len(world.home.ranks), world.node_size * world.home.tp)


def check_model_fits(
    config: RunConfig, model: PreTrainedModel, world: World, *, training: bool, frozen: str = "whole"
) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared, and is with its weights `frozen`. Without `training` only weights count. All is taken
    as split: more is needed, never less.
    """
    saved = 0
    if frozen != "whole":
        from longspan.model.frozen.frozen_weights import choose_formats, packed_sizes

        sizes = packed_sizes(model, choose_formats(model, frozen))
        saved = sizes.whole_bytes - sizes.packed_bytes

    def check_rank_has_room() -> None:
        home = world.home
        train = config.train
        gpu = world.device.type == "cuda"
        shards = home.tp * home.pp * home.slots // home.dp_replicate
        weights = (sum(p.nbytes for p in model.parameters()) - saved) // shards
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and training) // shards
        moments = 0 if train.offload_optimizer_states else MOMENTS.get(config.optimizer.class_, 0)
        parts = {"weights": weights, "gradients": trained, "optimizer states": int(moments * trained)}
        needed, ranks = sum(parts.values()), count_ranks_of_host(world)
        free = torch.cuda.mem_get_info(world.device)[0] if gpu else free_host_bytes(swap=True)
        if free is None or needed <= (free := free if gpu else free // ranks):
            return
        figures = ", ".join(f"{name} {gib_text(size)}" for name, size in parts.items() if size)
        gpus = plural(math.ceil(needed / max(1, free)) * len(home.ranks), "such GPU")
        where = f"rank {world.rank}, one of {ranks} on its host,"
        advice = "use GPUs, hosts with more memory, or a smaller model (are all sizes in its configuration?)"
        if gpu:
            where = f"the GPU of rank {world.rank}"
            advice = f"use at least {gpus}, parameters of fewer bytes (model.dtype), or a smaller model"
        raise ConfigError(
            f"the model does not fit: a rank needs at least {gib_text(needed)} before any activation ({figures}), and "
            f"{where} has {gib_text(free)} free; {advice}"
        )

    run_on_every_rank(world, check_rank_has_room, ConfigError)


def memory_budget(config: RunConfig, world: World) -> MemoryBudget:
    """Return the bytes that a rank may fill of device and host, the least of all ranks (host 0: not known)."""
    host = int(HOST_SHARE * (free_host_bytes() or 0) / count_ranks_of_host(world))
    device = config.train.device_memory_limit or host or sys.maxsize
    if world.device.type == "cuda" and not config.train.device_memory_limit:
        # The CUDA context exists by now, and a plan of memory counts its bytes too, CONTEXT_BYTES at most.
        free, all_bytes = torch.cuda.mem_get_info(world.device)
        device = int(GPU_SHARE * min(all_bytes, free + CONTEXT_BYTES))
    # The control group has only a maximum.
    negative_bytes = world.control.largest_over_ranks([-float(device), -float(host)], "the least free memory")
    return MemoryBudget(device=int(-negative_bytes[0]), host=int(-negative_bytes[1]))
