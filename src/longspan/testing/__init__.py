"""Run a function on a few fresh local ranks: what longspan's own tests use, and yours may.

>>> def add_ranks(rank: int, start: int) -> int: ...
>>> run_ranks(add_ranks, 4, 10)
"""

import os
import unittest
from collections.abc import Callable
from functools import cache
from typing import Any

from longspan.launch.launch import run_local
from longspan.testing.rank_pool import RankPool


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120, threads: int = 1) -> list[Any]:
    """Run `fn(rank, *args)` on n fresh processes and return the results by rank.

    Processes are forked from one fork server per session that has torch and transformers imported, so that eight ranks
    start in half a second. `fn` starts with torchrun's variables set and no process group, and must be at the top of a
    module. Raises the first failing rank's error; CommError for a rank that was killed, and when `timeout` seconds are
    over. Under `pytest --backend nccl` ranks stay from call to call, one on each GPU (`RankPool`); a test that needs
    more of them than there are GPUs is skipped.
    """
    if backend() == "nccl":
        _skip_without_gpus(n)
        return _pool().run(fn, n, args, timeout=timeout)
    return run_local(fn, n, args, timeout=timeout, threads=threads)


@cache
def _pool() -> RankPool:
    """One rank for each GPU, for all calls of this process."""
    import torch

    return RankPool(torch.cuda.device_count())


def backend() -> str:
    """The backend that tests open their worlds with: "gloo", or "nccl" under `pytest --backend nccl`."""
    return os.environ.get("LONGSPAN_TEST_BACKEND", "gloo")


def _skip_without_gpus(n: int) -> None:
    import torch

    there = torch.cuda.device_count()
    if n > there:
        raise unittest.SkipTest(f"needs {n} GPUs, this machine has {there}")
