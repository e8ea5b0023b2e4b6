"""How the processes of a launch find each other: the store that they share, and how all of them join a new world.

Which processes these are is decided by `world`, which reads torchrun's variables.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, DistStoreError, HashStore, PrefixStore, Store

from longspan.errors import CommError, plural
from longspan.plain_text import excerpt

T = TypeVar("T")
# A store answers in this time.
STORE_SECONDS = 10.0
_NEWEST = "longspan/newest"  # the prefix of the world that rank 0 began last
_OPENED = "opened"
_DECIDED = "decided"  # the first to add to it decides: rank 0 opens this world, or a rank leaves it


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that were started together."""

    rank: int
    size: int
    local_rank: int
    # The store's address is empty where a single process needs none, or the default group has one already.
    address: str
    node: str = ""  # the name of its node, for messages
    # Messages name the process that serves the store.
    store_server: str = "the launcher"


# A process keeps its stores by address, so that it can open worlds in turn.
_stores: dict[str, Store] = {}


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
        return LimitedStore(store).run_request(partial(begin, store, place, timeout), timeout + STORE_SECONDS)
    except DistError as error:
        raise CommError(
            f"rank {place.rank} could not open a world of {plural(place.size, 'rank')}: their store does not answer; "
            f"check that {place.store_server}, which serves it, runs ({error})"
        ) from error


def _open_world(store: Store, place: Place, timeout: float) -> str:
    """Entered by rank 0, which opens the world once all other ranks have joined it. A rank that gives up decides about
    the world too: where it does so first, rank 0 begins another."""
    prefix = ""
    # Once a world is begun, this is its store.
    world_store = store
    is_begun = False
    for _ in _iterate_pauses(place.size, timeout):
        if not is_begun:
            prefix = f"longspan/world {store.add('longspan/worlds', 1)}"
            world_store = PrefixStore(prefix, store)
            world_store.set("rank/0", place.node)
            store.set(_NEWEST, prefix)
            is_begun = True
        if world_store.add("joined", 0) != place.size - 1:
            continue
        if world_store.add(_DECIDED, 1) == 1:
            world_store.set(_OPENED, str(place.size))
            return prefix
        # Another rank decided first, and leaves this world.
        is_begun = False
    world_store.set("rank/0", "left")
    raise _absence_error(world_store, place, timeout)


def _join_world(store: Store, place: Place, timeout: float) -> str:
    """Entered by all ranks but 0; where no world opens in `timeout` seconds, the one that this rank is in is left."""
    # This rank is registered in the world of this prefix; "" stands for none.
    prefix = ""
    seen = {""}  # prefixes of the worlds that it has tried to join
    try:
        for _ in _iterate_pauses(place.size, timeout):
            newest = store.get(_NEWEST).decode() if store.check([_NEWEST]) else ""
            if prefix and _is_open(PrefixStore(prefix, store), place.size):  # rank 0 may already be at the next
                return prefix
            if newest not in seen:
                seen.add(newest)
                prefix = ""
                world_store = PrefixStore(newest, store)
                # a world that an earlier process of this rank joined is of a former launch: wait for the next
                if world_store.add(f"joined/{place.rank}", 1) == 1:
                    world_store.set(f"rank/{place.rank}", place.node)
                    world_store.add("joined", 1)
                    prefix = newest
    except BaseException:
        if prefix:
            _leave_unopened_world(PrefixStore(prefix, store), place)
        raise
    if not prefix:
        raise _incomplete_world_error(place, timeout, "rank(s) (0) did not come")
    # the time is up: rank 0 may have opened the world since the last look
    if _leave_unopened_world(PrefixStore(prefix, store), place):
        raise _absence_error(PrefixStore(prefix, store), place, timeout)
    return prefix


def _leave_unopened_world(world_store: Store, place: Place) -> bool:
    """Return False where rank 0 has opened the world now. Where another decided first, it may be rank 0: the key that
    says that it opened the world is waited for, a second."""
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
    """At once, after each pause, and last after the time-out: pauses grow with the time waited, to 0.2 s, and are long
    enough that all ranks ask at most 5,000 times a second."""
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


@dataclass(eq=False)
class LimitedStore:
    """A store whose requests raise DistStoreError after STORE_SECONDS, and at once while one of them is that late.

    torch waits without a limit for a store whose process stands still, so a thread makes each request.
    """

    _store: Store
    _late: Future[Any] | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.run_request(partial(getattr(self._store, name), *arguments), STORE_SECONDS)

    def run_request(self, request: Callable[[], T], seconds: float) -> T:
        """Run a function that asks the store, and return its result, within so many seconds.

        Raises DistStoreError after these seconds, and at once while an earlier request is late.
        """
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
        with _no_warnings_of_torch():
            result = request()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


_WARNING = 1  # a level of torch's C++ log
_ERROR = 2
_level_lock = threading.Lock()
_open_requests = 0
_level_before = _WARNING


@contextmanager
def _no_warnings_of_torch() -> Iterator[None]:
    """Leave out warnings of torch's C++ code while requests are open; a level that the user has set stays.

    Where a store ends with a request on its way, as that of a launcher that is killed, torch writes 25 lines of frames
    ("recvValue failed"), for which it has no switch at run time (2.11 to 2.15); an error follows that says it in words.
    """
    global _level_before, _open_requests
    level = _torch_log_level()
    with _level_lock:
        if not _open_requests:
            _level_before = level.value
            level.value = _ERROR if level.value == _WARNING else level.value
        _open_requests += 1
    try:
        yield
    finally:
        with _level_lock:
            _open_requests -= 1
            if not _open_requests:
                level.value = _level_before


@cache
def _torch_log_level() -> ctypes.c_int:
    """The level from which on torch's C++ code writes, or an idle number where this torch has none of that name."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with suppress(OSError, ValueError):
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    return ctypes.c_int(0)


def clone_store_connection(store: Store) -> Store:
    """Return another connection to the store, whose reads of keys that are not there fail after STORE_SECONDS."""
    connection: Store = LimitedStore(store).clone()
    # A request for a key that is not there ends after this time.
    connection.set_timeout(timedelta(seconds=STORE_SECONDS))
    return connection
