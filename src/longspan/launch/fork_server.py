"""The fork server from which local ranks are started, with what it imports once for all of them."""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any

from longspan.launch.stop_signals import blocked

# Imported once, by the fork server; a module that cannot be imported is left out.
PRELOAD: tuple[str, ...] = (
    "__main__",
    "torch",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "longspan.comm.world",
    "longspan.comm.shard",
    "longspan.attention",
    "longspan.model.prepare_model",
    "longspan.train.step",
    "longspan.run.loop",
)


def start_fork_server() -> ForkServerContext:
    """Start the fork server if it does not run; it imports in the background while this process imports torch.

    What it imports may ask torch for GPUs, which makes CUDA unusable in everything forked from it unless torch asks the
    driver's management library (PYTORCH_NVML_BASED_CUDA_CHECK, torch 2.11 to 2.13).

    It gets no SIGINT and SIGTERM, which a supervisor may send to all processes of a command: it ends with its launcher.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["longspan.launch.no_collections", *PRELOAD])
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    resource_tracker.ensure_running()  # starting it, Python (3.11 to 3.13) unblocks the signals
    try:
        with blocked():
            forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return context


def kill_fork_server() -> None:
    """End the fork server, which may be importing still; the next `start_fork_server` starts another."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
