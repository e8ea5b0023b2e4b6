"""The process that ranks are forked from: it has imported what they need, while its command was still at work.

A command whose verb starts ranks begins it before its own imports (`import_for_ranks`); elsewhere the first call of
ranks does, and later calls find it running. What it imports takes most of the time until a rank runs.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any

from longspan.launch.environment import import_path_variables, temporary_variables
from longspan.launch.stop_signals import block_signals

# Imported once, by the fork server; a module that cannot be imported is left out.
PRELOAD: tuple[str, ...] = (
    "longspan.launch.import_quickly",
    "__main__",
    "torch",
    "longspan.launch.without_cuda",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "longspan.comm.world",
    "longspan.comm.shard",
    "longspan.attention",
    "longspan.model.prepared",
    "longspan.train.step",
    "longspan.run.loop",
)


def start_fork_server(environment: Mapping[str, str] | None = None) -> ForkServerContext:
    """Start the fork server if it does not run; it imports in the background while this process imports torch. What it
    imports may ask torch for GPUs, which makes CUDA unusable in everything forked from it unless torch asks the
    driver's management library (PYTORCH_NVML_BASED_CUDA_CHECK, torch 2.11 to 2.15). An `environment` is added to this
    process's for its imports. The server gets no signals that stop, which a supervisor may send to all processes of a
    command: it ends with its launcher.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    variables = {**import_path_variables(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **(environment or {})}
    # First the server's tracker: as it starts, Python (3.11 to 3.13) unblocks SIGINT and SIGTERM in this process. The
    # tracker ignores these two by itself, and the other signals only if they are blocked here.
    with temporary_variables(variables):
        with block_signals():
            resource_tracker.ensure_running()
        with block_signals():
            forkserver.ensure_running()
    return context


@contextmanager
def import_for_ranks(environment: Mapping[str, str]) -> Iterator[None]:
    """Let the fork server import what ranks need, in this environment, while the command does its own imports and
    checks; end it on leaving.
    """
    try:
        start_fork_server(environment)
        yield
    finally:
        kill_fork_server()


def kill_fork_server() -> None:
    """End the fork server, which may be importing still; the next `start_fork_server` starts another."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
