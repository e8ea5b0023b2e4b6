"""The fork server from which local ranks are started, with what it imports once for all of them."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

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
    "longspan.train.run.loop",
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
