"""The processes of a verb: those of torchrun, N that are started here, or one, as flags and environment decide."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from longspan.cli.machine import find_gpus, set_gpu_environment
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, LongspanError, plural
from longspan.host import usable_cores
from longspan.launch.launch import run_local
from longspan.launch.launcher_watch import stop_when_torchrun_is_gone
from longspan.plain_text import escape_controls
from longspan.resolve.planner_config import home_of

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Processes:
    """How many processes a verb has, the backend of their world, and a note about them for the user."""

    ranks: int
    backend: Literal["gloo", "nccl"]
    note: str = ""

    @contextmanager
    def add_note_to_errors(self) -> Iterator[None]:
        """Add the note to an error that is raised inside, of processes on GPUs: nobody may have given their number."""
        try:
            yield
        except LongspanError as error:
            if self.note and self.backend == "nccl":
                error.add_note(self.note)
            raise


def choose_processes(
    world: int, device: Device = "auto", *, on_gpus: int = 0, on_cpus: int = 1, for_cpus: str = "--device cpu"
) -> Processes:
    """Choose the processes of a verb: torchrun's; else `world` local ones (0: not given); else `on_gpus` where this
    machine has GPUs (0: one process for each), else `on_cpus`.

    On GPUs this process's environment is set as ranks need it. Raises ConfigError for an impossible --world, for a lack
    of GPUs that are asked for, and for more processes than GPUs. `for_cpus` is the flag that the error recommends for
    processes on CPUs.
    """
    if world < 0:
        raise ConfigError(f"--world is {world}; give the number of processes to start, or leave it out")
    if has_torchrun() and world:
        raise ConfigError(
            f"--world {world} starts processes, but torchrun has started {os.environ['WORLD_SIZE']}; leave it out"
        )
    gpus = 0 if device == "cpu" else usable_gpus()
    if device == "cuda" and not gpus:
        raise ConfigError(f"torch finds no GPU here, and GPUs are asked for; use {for_cpus}")
    if has_torchrun():
        ranks = int(os.environ["WORLD_SIZE"])
        ranks_here = count_host_ranks()
    else:
        default_ranks = (on_gpus or gpus) if gpus else on_cpus
        ranks = ranks_here = world or default_ranks
    if ranks_here > gpus > 0:
        raise ConfigError(
            f"{plural(ranks_here, 'process', 'es')} on this machine need a GPU each, and it has {plural(gpus, 'GPU')}; "
            f"start at most {gpus}, or give {for_cpus} for processes on CPUs"
        )
    if gpus:
        set_gpu_environment()
        return Processes(ranks, "nccl", _gpu_note(ranks_here, gpus))
    cores = usable_cores()
    note = ""
    if ranks_here > cores:
        turns = "they take turns, so a step takes longer than with fewer"
        note = f"{ranks_here} processes on {plural(cores, 'core')}: {turns}"
    return Processes(ranks, "gloo", note)


def _gpu_note(ranks: int, gpus: int) -> str:
    """No text where torchrun uses all."""
    if has_torchrun():
        advice = f"torchrun --nproc-per-node {gpus} uses all"
        if ranks < gpus:
            return f"{ranks} of {gpus} GPUs used, {gpus - ranks} idle: {advice}"
        return ""
    if ranks < gpus:
        used_text = f"{plural(ranks, 'process', 'es')}, one GPU each"
        return f"{used_text}; {gpus - ranks} of {gpus} GPUs idle, --world {gpus} uses all"
    if gpus == 1:
        return "1 process on 1 GPU"
    return f"{gpus} processes, one on each GPU; --world N starts N of them"


def usable_gpus() -> int:
    return find_gpus().count


def count_ranks(world: int, device: Device) -> int:
    """Return `world`, or where it is 0 torchrun's ranks, else one for each GPU here, else one; nothing is checked."""
    if has_torchrun() and not world:
        return int(os.environ["WORLD_SIZE"])
    return world or (0 if device == "cpu" else usable_gpus()) or 1


def has_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def count_host_ranks(ranks: int | None = None) -> int:
    """Count the ranks that run on this host: those that torchrun says, else all of them, `ranks`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or ranks or os.environ["WORLD_SIZE"])


def prints_results() -> bool:
    """Return whether this process prints results: the launcher, or torchrun's first rank."""
    return not has_torchrun() or os.environ["RANK"] == "0"


def print_note(note: str, stream: TextIO) -> None:
    """Print a note, unless it is empty, in the process that prints results."""
    if note and prints_results():
        print(escape_controls(note), file=stream, flush=True)


def run_on_ranks(
    fn: Callable[..., Any],
    args: Sequence[Any],
    ranks: int,
    timeout: float | None = None,
    *,
    ignored: Sequence[int] = (),
) -> Any:
    """Run `fn(rank, *args)` on every rank; returns the first rank's result, or under torchrun this rank's result.
    `timeout`: seconds that local ranks may take. Signals that are `ignored` do nothing in local ranks until `fn`
    handles them.
    """
    if has_torchrun():
        stop_when_torchrun_is_gone()
        return fn(int(os.environ["RANK"]), *args)
    return run_local(fn, ranks, args, timeout=timeout, ignored=ignored)[0]


def compile_attention_ahead(
    config: RunConfig, processes: Processes, *, backward: bool
) -> AbstractContextManager[None]:
    """Compile attention's kernels on GPUs while a context is open, those of backward passes too if `backward`: in
    the first process of a host, for all processes there.
    """
    if processes.backend != "nccl" or os.environ.get("LOCAL_RANK", "0") != "0":
        return nullcontext()
    from longspan.train.start.kernels_ahead import compile_kernels_ahead

    gpus = find_gpus()
    slots = home_of(config.parallel, processes.ranks).slots
    return compile_kernels_ahead(config, slots, gpus.capability, gpus.multiprocessors, backward=backward)
