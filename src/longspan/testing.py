"""Run a function on a few fresh local ranks: what longspan's own tests use, and yours may.

>>> def add_ranks(rank: int, start: int) -> int: ...
>>> run_ranks(add_ranks, 4, 10)
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from longspan.launch.launch import run_local

__all__ = ["backend", "run_ranks"]

# Runs ranks under `pytest --backend nccl`, where processes stay from call to call; tests/conftest.py sets it.
run_on_gpus: Callable[[Callable[..., Any], int, Sequence[Any], float], list[Any]] | None = None


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120, threads: int = 1) -> list[Any]:
    """Run `fn(rank, *args)` on n fresh processes and return the results by rank.

    Processes are forked from one fork server per session that has torch and transformers imported, so that eight ranks
    start in half a second. `fn` starts with torchrun's variables set and no process group, and must be at the top of a
    module. Each process computes with so many `threads`. Raises the first failing rank's error; CommError for a rank
    that was killed, and when `timeout` seconds are over.
    """
    if run_on_gpus is not None:
        return run_on_gpus(fn, n, args, timeout)
    return run_local(fn, n, args, timeout=timeout, threads=threads)


def backend() -> str:
    """The backend that tests open their worlds with: "gloo", or "nccl" under `pytest --backend nccl`."""
    return os.environ.get("LONGSPAN_TEST_BACKEND", "gloo")
