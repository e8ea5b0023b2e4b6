"""The processes of a verb: those of torchrun, N that are started here, or one, as flags and environment decide."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from longspan.cli.gpu_environment import set_gpu_environment
from longspan.comm import run_local
from longspan.errors import ConfigError


def ranks_wanted(world: int) -> int:
    """How many processes there are or will be. Raises ConfigError for an impossible --world."""
    if world < 0:
        raise ConfigError(f"--world is {world}; give the number of processes to start, or leave it out")
    if not under_torchrun():
        return world or 1
    if world:
        raise ConfigError(
            f"--world {world} starts processes, but torchrun has started {os.environ['WORLD_SIZE']}; leave it out"
        )
    return int(os.environ["WORLD_SIZE"])


def under_torchrun() -> bool:
    """Whether this process is one of torchrun's."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def reports_here() -> bool:
    """Whether this process prints results: the launcher, or torchrun's first rank."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def run_on_ranks(
    fn: Callable[..., Any], args: Sequence[Any], ranks: int, timeout: float | None = None, *, compile_cache: str = ""
) -> Any:
    """Run `fn(rank, *args)` on every rank; returns the first rank's result, or under torchrun this rank's result.

    `compile_cache` is the folder in which GPUs' compiled kernels are kept ("": the user's).
    """
    set_gpu_environment(compile_cache)
    if under_torchrun():
        return fn(int(os.environ["RANK"]), *args)
    return run_local(fn, ranks, args, timeout=timeout)[0]
