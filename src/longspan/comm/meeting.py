"""How processes meet: the store that they share, the default process group, and its end.

Which processes meet is decided by `world`, which reads torchrun's variables.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store

from longspan.errors import CommError
from longspan.layout.layout import short

BOTH = "cpu:gloo,cuda:nccl"  # tensors on GPUs through NCCL, the host's integers through gloo
_shared: dict[str, Store] = {}  # by address: a process keeps its store, so that it can open worlds in turn


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that were started together."""

    rank: int
    size: int
    local_rank: int
    address: str  # empty where a single process needs no store


def meet(place: Place, timeout: float) -> Store:
    """The store that all processes of this launch share: the launcher's, or one that rank 0 serves.

    Raises CommError where it cannot be reached in `timeout` seconds.
    """
    if not place.address:
        return HashStore()
    if place.address not in _shared:
        limit = timedelta(seconds=timeout)
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.size, timeout=limit)))
        except RuntimeError as error:
            raise CommError(
                f"rank {place.rank} of {place.size} could not reach the store at {place.address} in {timeout:g} s; "
                f"check MASTER_ADDR and MASTER_PORT, and that rank 0 or torchrun runs there ({error})"
            ) from error
        _shared[place.address] = store
    return _shared[place.address]


def begin(place: Place, store: Store, backend: str, timeout: float) -> None:
    """Initialise the default process group. Raises CommError that names the ranks which did not come."""
    store.set(f"here/{place.rank}", "")
    try:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout)
        )
    except RuntimeError as error:
        absent = [rank for rank in range(place.size) if not store.check([f"here/{rank}"])]
        who = f"rank(s) {short(absent)} did not come" if absent else "all ranks came"
        raise CommError(
            f"rank {place.rank} could not open the world of {place.size} ranks in {timeout:g} s: {who}; start them "
            f"all, or give more time ({error})"
        ) from error


def own_connection(store: Store) -> Store | None:
    """A connection of its own to the same store for roll calls; None where that kind of store cannot serve them."""
    if not store.has_extended_api():  # pyright: ignore[reportAttributeAccessIssue]
        return None
    connection: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    connection.set_timeout(timedelta(seconds=10))
    return connection


def corner(store: Store, name: str) -> Store:
    """The part of a store whose keys begin with a name."""
    return PrefixStore(name, store)


def choose_device(backend: str | None, device: torch.device | str | None, local_rank: int) -> torch.device:
    """The device of this rank: the one that was asked for, or its GPU where there are GPUs, or the CPU.

    Raises CommError for a backend that longspan does not use, and where there are fewer GPUs than local ranks.
    """
    if backend not in (None, "gloo", "nccl", BOTH):
        raise CommError(f"backend {backend!r} is not known; use 'gloo' (CPU), 'nccl' (GPU) or None")
    if device is None:
        gpu = torch.cuda.is_available() if backend is None else backend != "gloo"
        device = f"cuda:{local_rank}" if gpu else "cpu"
    found = torch.device(device)
    if found.type == "cuda":
        there = torch.cuda.device_count()
        index = local_rank if found.index is None else found.index
        if index >= there:
            raise CommError(
                f"local rank {local_rank} needs cuda:{index}, but this host shows {there} CUDA device(s); start at "
                f"most {there} ranks per host, or use backend='gloo'"
            )
        found = torch.device("cuda", index)
        torch.cuda.set_device(found)
    return found


def end(groups: Sequence[ProcessGroup], *, default: bool, patient: bool) -> None:
    """Destroy what a world made: these groups, or with `default` everything.

    After an error nobody waits for it: a group with a collective in flight ends only when that does.
    """

    def destroy() -> None:
        if default:
            dist.destroy_process_group()
        else:
            for group in groups:
                dist.destroy_process_group(group)

    if patient:
        destroy()
    else:
        thread = threading.Thread(target=destroy, name="longspan leaving", daemon=True)
        thread.start()
        thread.join(1.0)
