"""What local ranks are started from: the fork server with its imports, the store that they share, their environment."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

# Imported once, by the fork server; a module that cannot be imported is left out.
PRELOAD = (
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
)


def start_fork_server() -> ForkServerContext:
    """Start the fork server if it does not run; it imports in the background while this process imports torch.

    What it imports may ask torch for GPUs, which makes CUDA unusable in everything forked from it unless torch asks the
    driver's management library (PYTORCH_NVML_BASED_CUDA_CHECK, torch 2.11 to 2.13).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return context


def start_store_server() -> Any:
    """A store in this process on a free port, which all ranks share."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def torchrun_variables(n: int, port: int, threads: int) -> dict[str, str]:
    """The environment of n ranks on this machine, but for RANK and LOCAL_RANK."""
    variables = {
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 does not serve the store, this process does
        "OMP_NUM_THREADS": threads,
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: str(value) for name, value in variables.items()}
