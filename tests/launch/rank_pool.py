"""Local ranks that stay for many calls, so that a device is set up and its kernels are compiled once.

On a GPU, a fresh process spends seconds on the device's context, its libraries and its kernels before it computes
anything; a suite of tests spends most of its time there. Fresh ranks for every call are `run_local`'s business.
"""

import atexit
import os
import tempfile
import unittest
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from longspan.launch.launch import LocalRanks, pickle_call
from tests.launch.process_state import ProcessState

RANKS_PER_GPU = "LONGSPAN_TEST_RANKS_PER_GPU"
SLOWER = 4  # times as long may a test take where ranks share a GPU
READY_SECONDS = 30.0  # a rank that has not put back what a call changed by then is ended


class RankPool:
    """Up to `size` local ranks, started at the first call and started again after one that failed.

    >>> pool = RankPool(4)
    >>> pool.run(fn, 2, args, timeout=60)
    >>> pool.close()

    Between calls each rank puts back what a call may leave behind (`process_state.py`). A call that fails ends all
    ranks, for a communicator may be broken and a kernel may still wait.
    """

    def __init__(self, size: int, threads: int = 1) -> None:
        self.size, self.threads = size, threads
        self._ranks: LocalRanks | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], n: int, args: Sequence[Any] = (), *, timeout: float, grace: float = 10.0
    ) -> list[Any]:
        """`fn(rank, *args)` on the first n ranks; returns and raises as `run_local` does."""
        payload, ranks = pickle_call(fn, args), self._running()
        try:
            ranks.start_call(payload, n)
            ranks.collect_answers(timeout, grace)
            if ranks.failure is not None:
                raise ranks.failure
        except BaseException:
            self.close()
            raise
        return [rank.answer.value() for rank in ranks.ranks if rank.answer is not None]

    def _running(self) -> LocalRanks:
        if self._ranks is not None and not self._ranks.are_ready(READY_SECONDS):
            self.close()
        if self._ranks is None:
            self._folder = tempfile.TemporaryDirectory(prefix="longspan-ranks-")
            self._ranks = LocalRanks(self.size, Path(self._folder.name), self.threads, state=ProcessState.now)
            self._ranks.start()
        return self._ranks

    def close(self) -> None:
        """End all ranks; the next call starts them again."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def most_ranks() -> int:
    """Ranks that a test can have under `pytest --backend nccl`."""
    return torch.cuda.device_count() * int(os.environ[RANKS_PER_GPU])


@cache
def _gpu_pool(ranks_of_gpu: int) -> RankPool:
    """So many ranks for each GPU, for all calls of this process."""
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
