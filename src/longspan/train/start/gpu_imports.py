"""Modules that only GPUs need, imported by a thread while the rank makes its CUDA context and reads its data."""

import sys
import threading
from contextlib import suppress
from importlib import import_module

# What the first step on GPUs would import: the compiler of layers and the kernels of FlashAttention-4.
GPU_MODULES = ("triton", "torch._inductor.compile_fx", "flash_attn.cute.interface")


# Seconds for which a thread that imports may keep the main one waiting (Python's own: 5 ms). The main thread gives the
# interpreter away in each operator or message of some tens of microseconds, and waits for a turn to have it back: 300
# products of 160 x 160 on a CPU took 0.03 s alone, 2.1 s beside a thread with Python's turns, 0.4 s with turns of TURN.
TURN = 0.0005


def begin_gpu_imports(ranks_of_host: int, *, compiled: bool) -> threading.Thread:
    """Import what ranks on GPUs need later, in a thread; code that imports one of these meanwhile waits for the thread.

    With `compiled`, the processes that compile layers are started first. A module that is absent is left to the code
    that needs it. Threads take turns of at most TURN seconds until it ends.
    """

    # Imported here and not in the thread: of two threads that import transformers at once, one gets it without names.
    from longspan.model.compiled_layers import start_compile_workers

    def import_modules() -> None:
        """Start the compile processes, import the modules one by one, and give threads their usual turns back.

        Errors are passed over.
        """
        if compiled:
            with suppress(Exception):  # `prepare` starts them where this failed
                start_compile_workers(ranks_of_host)
        for name in GPU_MODULES:
            with suppress(Exception):
                import_module(name)
        if compiled:
            with suppress(Exception):  # the digest of torch's files, part of the key of every compiled graph
                import_module("torch._inductor.codecache").torch_key()
        sys.setswitchinterval(usual_turn)

    usual_turn = sys.getswitchinterval()
    sys.setswitchinterval(min(TURN, usual_turn))
    thread = threading.Thread(target=import_modules, name="longspan imports", daemon=True)
    thread.start()
    return thread
