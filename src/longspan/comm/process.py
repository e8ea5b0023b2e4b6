"""What a process of a world is: its place among those that were started, its device, and the files that it may open."""

import resource
import warnings
from dataclasses import dataclass

import torch

from longspan.errors import CommError, counted

BOTH = "cpu:gloo,cuda:nccl"  # tensors on GPUs through NCCL, the host's integers through gloo
# Gloo connects every pair of members of a group when it makes it: of the default, the control and the plane's group, of
# three for meshes and all planes, and of four that plans gain. A process has some 25 other files open in a bare world.
CONNECTIONS, OTHER_FILES = 10, 256


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that were started together."""

    rank: int
    size: int
    local_rank: int
    address: str  # empty where a single process needs no store


def allow_open_files(size: int) -> None:
    """Raise this process's limit of open files to what a world of so many ranks opens, as far as the system lets it.

    Warns where that is not enough: connections fail then, one by one, when a group is made.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = OTHER_FILES + CONNECTIONS * size
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    allowed = need if hard == resource.RLIM_INFINITY else min(need, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < need:
        warnings.warn(
            f"this process may open {allowed:,} files, and a world of {counted(size, 'rank')} opens up to {need:,}: "
            f"{CONNECTIONS} connections to each other rank and {OTHER_FILES} more; raise the hard limit "
            f"(`ulimit -Hn {need}`, or LimitNOFILE of the service that starts the ranks)",
            RuntimeWarning,
            stacklevel=3,
        )


def choose_device(backend: str | None, device: torch.device | str | None, local_rank: int) -> torch.device:
    """The device of this rank: the one that was asked for, or its GPU where there are GPUs, or the CPU.

    Raises CommError for a backend that longspan does not use, and where there are fewer GPUs than local ranks.
    """
    if backend not in (None, "gloo", "nccl", BOTH):
        raise CommError(f"backend {backend!r} is not known; use 'gloo' (CPU), 'nccl' (GPU) or None")
    if device is None:
        gpu = torch.cuda.is_available() if backend is None else backend != "gloo"
        device = f"cuda:{local_rank}" if gpu else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if chosen.index is None else chosen.index
        if index >= count:
            raise CommError(
                f"local rank {local_rank} needs cuda:{index}, but this host shows {counted(count, 'CUDA device')}; "
                f"start at most {counted(count, 'rank')} per host, or use backend='gloo'"
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen
