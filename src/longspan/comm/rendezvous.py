"""The processes of a world: their place, device and open files, the store that they share, the default process group.

Which processes these are is decided by `world`, which reads torchrun's variables.
"""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, DistStoreError, HashStore, PrefixStore, ProcessGroup, Store

from longspan.errors import CommError, plural
from longspan.launch.fork_server import temporary_variables
from longspan.plain_text import excerpt

T = TypeVar("T")
BOTH = "cpu:gloo,cuda:nccl"  # tensors on GPUs through NCCL, the host's integers through gloo
# Gloo connects every pair of members of a group that carries a CPU's tensors when it makes it: of the plane's group, of
# three for meshes and all planes, and of four that plans gain. In the default and the control group the first rank may
# come to talk to all others. A process has some 25 other files open in a bare world.
CONNECTIONS = 10
OTHER_FILES = 256
_LAZY = "TORCH_GLOO_LAZY_INIT"
STORE_SECONDS = 10.0  # in which a store answers
_NEWEST = "longspan/newest"  # the prefix of the world that rank 0 began last
_OPENED = "opened"
_DECIDED = "decided"  # the first to add to it decides: rank 0 opens this world, or a rank leaves it


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that were started together."""

    rank: int
    size: int
    local_rank: int
    address: str  # of the store; empty where a single process needs none, or the default group has one already
    node: str = ""  # the name of its node, for messages
    store_server: str = "the launcher"  # which serves the store, for messages


def raise_open_file_limit(size: int) -> None:
    """Raise this process's limit of open files to what a world of `size` ranks opens, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = OTHER_FILES + CONNECTIONS * size
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard)
        )


def choose_device(backend: str | None, device: torch.device | str | None, local_rank: int) -> torch.device:
    """Choose the device of this rank: the requested one, else its GPU, else the CPU; a GPU becomes the current one.

    Raises CommError for a backend that longspan does not use, and where this host has no GPU of the device's index.
    """
    if backend not in (None, "gloo", "nccl", BOTH):
        raise CommError(f"backend {backend!r} is not known; use 'gloo' (CPU), 'nccl' (GPU) or None")
    if device is None:
        gpu = torch.cuda.is_available() if backend is None else backend != "gloo"
        device = f"cuda:{local_rank}" if gpu else "cpu"
    result = torch.device(device)
    if result.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if result.index is None else result.index
        if index >= count:
            raise CommError(
                f"local rank {local_rank} needs cuda:{index}, but this host shows {plural(count, 'CUDA device')}; "
                f"start at most {plural(count, 'rank')} per host, or use backend='gloo' (--device cpu)"
            )
        result = torch.device("cuda", index)
        torch.cuda.set_device(result)
    return result


_stores: dict[str, Store] = {}  # by address: a process keeps its store, so that it can open worlds in turn
_being_destroyed: list[threading.Thread] = []  # destroying the groups of worlds that were left with an error


def shared_store(place: Place, timeout: float) -> Store:
    """Return the store that all processes of this launch share: the launcher's, or one that rank 0 serves.

    A process that is alone has no address, and gets a store in its own memory. Raises CommError where the store cannot
    be reached in `timeout` seconds.
    """
    if not place.address:
        return HashStore()
    if place.address not in _stores:
        limit = timedelta(seconds=timeout)
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.size, timeout=limit)))
        except RuntimeError as error:
            raise CommError(
                f"rank {place.rank} of {place.size} could not reach the store at {place.address} in {timeout:g} s; "
                f"check MASTER_ADDR and MASTER_PORT, and that rank 0 or torchrun runs there ({error})"
            ) from error
        _stores[place.address] = store
    return _stores[place.address]


def join_world_of_all_ranks(store: Store, place: Place, timeout: float) -> str:
    """Wait for all processes of this launch; returns the prefix of the keys of the world that they open now.

    Rank 0 gives the world a number and opens it once all others have joined it. A store may outlive the processes of a
    launch, as torchrun's does at a restart (torch 2.13): a process joins no world that an earlier process of its rank
    joined, and none that was opened for another number of ranks. A process that leaves because others did not come may
    try again. Raises CommError with the ranks that did not come.
    """
    try:
        if place.size == 1:  # no other is waited for
            return f"longspan/world {store.add('longspan/worlds', 1)}"
        begin = _open_world if place.rank == 0 else _join_world
        return LimitedStore(store).ask(partial(begin, store, place, timeout), timeout + STORE_SECONDS)
    except DistError as error:
        raise CommError(
            f"rank {place.rank} could not open a world of {plural(place.size, 'rank')}: their store does not answer; "
            f"check that {place.store_server}, which serves it, runs ({error})"
        ) from error


def _open_world(store: Store, place: Place, timeout: float) -> str:
    """Begin worlds until one has all ranks, and none that left added to `_DECIDED` first; return its prefix."""
    prefix = ""
    world_store = store
    for _ in _iterate_pauses(place.size, timeout):
        if not prefix:
            prefix = f"longspan/world {store.add('longspan/worlds', 1)}"
            world_store = PrefixStore(prefix, store)
            world_store.set("rank/0", place.node)
            store.set(_NEWEST, prefix)
        if world_store.add("joined", 0) == place.size - 1:
            if world_store.add(_DECIDED, 1) == 1:
                world_store.set(_OPENED, str(place.size))
                return prefix
            prefix = ""
    world_store.set("rank/0", "left")
    raise _absence_error(world_store, place, timeout)


def _join_world(store: Store, place: Place, timeout: float) -> str:
    """Register in rank 0's newest world until one opens, and return its prefix."""
    prefix = ""
    seen = {""}
    try:
        for _ in _iterate_pauses(place.size, timeout):
            newest = store.get(_NEWEST).decode() if store.check([_NEWEST]) else ""
            if prefix and _is_open(PrefixStore(prefix, store), place.size):  # rank 0 may already be at the next
                return prefix
            if newest not in seen:
                seen.add(newest)
                # a world that an earlier process of this rank joined is of a former launch: wait for the next
                prefix = newest if _register_rank(PrefixStore(newest, store), place) else ""
    except BaseException:
        if prefix:
            _leave_unopened_world(PrefixStore(prefix, store), place)
        raise
    if not prefix:
        raise _incomplete_world_error(place, timeout, "rank(s) (0) did not come")
    if _leave_unopened_world(PrefixStore(prefix, store), place):
        raise _absence_error(PrefixStore(prefix, store), place, timeout)
    return prefix


def _register_rank(world_store: Store, place: Place) -> bool:
    """Return whether this is the first process of its rank in a world of the store."""
    if world_store.add(f"joined/{place.rank}", 1) != 1:
        return False
    world_store.set(f"rank/{place.rank}", place.node)
    world_store.add("joined", 1)
    return True


def _leave_unopened_world(world_store: Store, place: Place) -> bool:
    """Where rank 0 decided first, the key that says that it opened the world may follow up to a second later."""
    if world_store.add(_DECIDED, 1) != 1 and any(
        _is_open(world_store, place.size) for _ in _iterate_pauses(1, 1.0)
    ):
        return False
    world_store.add(f"joined/{place.rank}", -1)
    world_store.set(f"rank/{place.rank}", "left")
    world_store.add("joined", -1)
    return True


def _is_open(world_store: Store, size: int) -> bool:
    return world_store.check([_OPENED]) and int(world_store.get(_OPENED)) == size


def _iterate_pauses(size: int, timeout: float) -> Iterator[None]:
    """Yield after each pause between questions to a store that `size` ranks ask; a last time after the time-out.

    Pauses grow with the time waited, to 0.2 s, and are long enough that all ranks ask at most 5,000 times a second.
    """
    began = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - began
        if waited >= timeout:
            return
        time.sleep(min(timeout - waited, max(0.003, size / 5000, min(waited / 8, 0.2))))


def _absence_error(world_store: Store, place: Place, timeout: float) -> CommError:
    peers = [rank for rank in range(place.size) if rank != place.rank]
    absent = [rank for rank in peers if not world_store.check([f"rank/{rank}"])]
    departed = [rank for rank in peers if rank not in absent and world_store.get(f"rank/{rank}") == b"left"]
    causes = [f"rank(s) {excerpt(absent)} did not come"] if absent else []
    causes += [f"rank(s) {excerpt(departed)} came and left again"] if departed else []
    return _incomplete_world_error(place, timeout, " and ".join(causes) or "the last came too late")


def _incomplete_world_error(place: Place, timeout: float, cause: str) -> CommError:
    return CommError(
        f"rank {place.rank} could not open the world of {plural(place.size, 'rank')} in {timeout:g} s: {cause}; start "
        "them all, or give more time"
    )


def init_default_group(place: Place, store: Store, backend: str, timeout: float) -> None:
    try:
        with defer_connections():  # longspan itself sends nothing over it
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout)
            )
    except RuntimeError as error:
        raise CommError(
            f"rank {place.rank} could not connect to the others of {plural(place.size, 'rank')}, which all came, in "
            f"{timeout:g} s; check that the hosts reach each other, or name the network in GLOO_SOCKET_IFNAME ({error})"
        ) from error


def defer_connections() -> AbstractContextManager[None]:
    """Let groups made inside connect two ranks over gloo at their first message, not all with all when they are made.

    A rank that leaves before the first message is not noticed by the other, so groups over which tensors of a CPU
    travel are connected at once. torch reads the variable when it makes a group (2.8 to 2.15).
    """
    return temporary_variables({_LAZY: os.environ.get(_LAZY, "1")})


@dataclass(eq=False)
class LimitedStore:
    """A store whose requests raise DistStoreError after STORE_SECONDS, and at once while one of them is that late.

    torch waits without a limit for a store whose process stands still, so a thread makes each request.
    """

    _store: Store
    _late: Future[Any] | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.ask(partial(getattr(self._store, name), *arguments), STORE_SECONDS)

    def ask(self, request: Callable[[], T], seconds: float) -> T:
        """Return what a function of requests returns, within so many seconds."""
        if self._late is not None and not self._late.done():
            raise DistStoreError("the store has not answered an earlier request yet")
        future = Future[T]()
        threading.Thread(target=_fulfil, args=(future, request), name="longspan store", daemon=True).start()
        try:
            return future.result(seconds)
        except TimeoutError:
            self._late = future
            raise DistStoreError(f"the store did not answer in {seconds:g} s") from None


def _fulfil(future: Future[T], request: Callable[[], T]) -> None:
    try:
        future.set_result(request())
    except BaseException as error:
        future.set_exception(error)


def clone_store_connection(store: Store) -> Store:
    connection: Store = LimitedStore(store).clone()
    connection.set_timeout(timedelta(seconds=STORE_SECONDS))  # for keys that are not there
    return connection


def destroy_groups(groups: Sequence[ProcessGroup], *, default: bool, patient: bool) -> None:
    """Destroy these groups, or with `default` everything that a world made.

    Without `patient`, as after an error, it waits a second at most, and the rest goes on in a thread: a group with a
    collective in flight ends only when that does.
    """

    def destroy() -> None:
        if default and dist.is_initialized():
            dist.destroy_process_group()
        elif not default:
            for group in groups:
                dist.destroy_process_group(group)

    if patient:
        destroy()
    else:
        thread = threading.Thread(target=destroy, name="longspan leaving", daemon=True)
        thread.start()
        thread.join(1.0)
        _being_destroyed[:] = [running for running in (*_being_destroyed, thread) if running.is_alive()]


def wait_until_destroyed(timeout: float) -> None:
    """Wait until groups of worlds that were left with an error are gone: torch would take a new world's for theirs.

    Raises CommError where one is still there after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    for thread in _being_destroyed:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise CommError(
                f"the process groups of a world that was left with an error have not ended in {timeout:g} s, as a "
                "collective of theirs still runs; open the next world in a new process, or give more time"
            )
    _being_destroyed.clear()
