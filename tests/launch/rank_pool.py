"""Local ranks that stay for many calls, so that a device is set up and its kernels are compiled once.

On a GPU, a fresh process spends seconds on the device's context, its libraries and its kernels before it computes
anything; a suite of tests spends most of its time there. Fresh ranks for every call are `run_local`'s business.
"""

import atexit
import gc
import os
import pickle
import socket
import tempfile
import unittest
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from multiprocessing.connection import Client, Connection
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from longspan.launch.launch import LocalRank, LocalRanks, pickle_call, start_store_server
from longspan.launch.rank_process import answer_call

RANKS_PER_GPU = "LONGSPAN_TEST_RANKS_PER_GPU"
SLOWER = 4  # times as long may a test take where ranks share a GPU
READY_SECONDS = 30.0  # a rank that has not put back what a call changed by then is ended
START_SECONDS = 300.0
READY = b"ready"


@dataclass(frozen=True)
class ProcessState:
    """What a call may change in the process of a rank, noted before and put back after it: torch's switches, seeds and
    default process group, the names of longspan's modules and the environment. Not covered: what a call changes inside
    other packages, and values that it changes in place.
    """

    names: dict[str, dict[str, Any]]
    environment: dict[str, str]
    seed: int
    threads: int
    dtype: torch.dtype

    @classmethod
    def now(cls) -> "ProcessState":
        names = {module.__name__: dict(vars(module)) for module in _modules()}
        return cls(names, dict(os.environ), torch.initial_seed(), torch.get_num_threads(), torch.get_default_dtype())

    def restore(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        for module in _modules():
            names = self.names[module.__name__]
            for name in vars(module).keys() - names.keys():
                delattr(module, name)
            vars(module).update(names)
        _forget_worlds()
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.manual_seed(self.seed)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _modules() -> list[ModuleType]:
    package = import_module("longspan")
    modules: list[ModuleType] = []
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        with suppress(ImportError):
            modules += [import_module(module.name)] if not module.name.endswith("__main__") else []
    return modules


def _forget_worlds() -> None:
    """Worlds find each other by their number in a process; a later store may have the port of one that is gone."""
    from longspan.comm import rendezvous, world

    world._worlds.clear()
    rendezvous._stores.clear()
    world._keys = count()


def serve_calls(rank: int, address: str) -> None:
    """Answer calls that come through a socket, until it closes; READY says that nothing is left of the one before."""
    state = ProcessState.now()
    with Client(address) as calls:
        calls.send(rank)
        with suppress(EOFError, OSError):
            while True:
                spec = pickle.loads(calls.recv_bytes())
                os.environ.clear()
                os.environ.update(spec.environment)
                answer_call(spec, calls)
                state.restore()
                calls.send_bytes(READY)


class RankPool:
    """Up to `size` local ranks, started at the first call and started again after one that failed.

    >>> pool = RankPool(4)
    >>> pool.run(fn, 2, args, timeout=60)
    >>> pool.close()

    Between calls each rank puts back what a call may leave behind (`ProcessState`). A call that fails ends all
    ranks, for a communicator may be broken and a kernel may still wait.
    """

    def __init__(self, size: int, threads: int = 1) -> None:
        self.size, self.threads = size, threads
        self._ranks: LocalRanks | None = None
        self._started: list[LocalRank] = []
        self._calls: dict[int, Connection[Any, Any]] = {}  # by rank
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], n: int, args: Sequence[Any] = (), *, timeout: float, grace: float = 10.0
    ) -> list[Any]:
        payload, ranks = pickle_call(fn, args), self._running()
        try:
            ranks.store = start_store_server()
            ranks.ranks = [LocalRank(rank.index, rank.process, self._calls[rank.index]) for rank in self._started[:n]]
            for rank in ranks.ranks:
                rank.pipe.send_bytes(pickle.dumps(ranks.rank_spec(rank.index, n, payload)))
            ranks.collect_answers(timeout, grace)
            if ranks.failure is not None:
                raise ranks.failure
        except BaseException:
            self.close()
            raise
        return [rank.answer.unpickle_value() for rank in ranks.ranks if rank.answer is not None]

    def _running(self) -> LocalRanks:
        if self._ranks is not None and not all(map(self._is_ready, self._ranks.ranks)):
            self.close()
        if self._ranks is None:
            self._folder = tempfile.TemporaryDirectory(prefix="longspan-ranks-")
            address = f"{self._folder.name}/calls"
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(address)
                listening.listen(self.size)
                listening.settimeout(START_SECONDS)
                payload = pickle_call(serve_calls, (address,))
                self._ranks = LocalRanks(Path(self._folder.name), self.threads)
                self._ranks.start(self.size, payload)
                self._started = self._ranks.ranks
                for _ in range(self.size):
                    calls = Connection(listening.accept()[0].detach())
                    self._calls[calls.recv()] = calls
        return self._ranks

    def _is_ready(self, rank: LocalRank) -> bool:
        try:
            return rank.pipe.poll(READY_SECONDS) and rank.pipe.recv_bytes() == READY
        except (EOFError, OSError):  # it died of what the call had left
            return False

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.ranks = self._started  # they are waited for until their sockets are closed
            self._ranks.end()
            self._ranks = None
        while self._calls:
            self._calls.popitem()[1].close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def most_ranks() -> int:
    return torch.cuda.device_count() * int(os.environ[RANKS_PER_GPU])


@cache
def _gpu_pool(ranks_of_gpu: int) -> RankPool:
    return RankPool(ranks_of_gpu * torch.cuda.device_count())


def run_on_gpus(fn: Callable[..., Any], n: int, args: Sequence[Any], timeout: float) -> list[Any]:
    """`run_ranks` under `pytest --backend nccl`; a test that needs more ranks than there are GPUs is skipped.

    With `--ranks-per-gpu` several ranks share a GPU, which takes turns.
    """
    gpus, ranks_of_gpu = torch.cuda.device_count(), int(os.environ[RANKS_PER_GPU])
    if n > most_ranks():
        each = f" of {ranks_of_gpu} ranks each" if ranks_of_gpu > 1 else ""
        raise unittest.SkipTest(f"needs {n} GPUs, this machine has {gpus}{each}")
    pool = _gpu_pool(ranks_of_gpu)
    if ranks_of_gpu == 1:
        return pool.run(fn, n, args, timeout=timeout)
    return pool.run(_share_gpu, n, (gpus, fn, *args), timeout=SLOWER * timeout)


def _share_gpu(rank: int, gpus: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` on a GPU that other ranks use too. NCCL takes it for one of another host, and uses sockets."""
    os.environ |= {"LOCAL_RANK": str(rank % gpus), "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ["NCCL_NET"] = "Socket"
    return fn(rank, *args)
