"""The seconds of a start by part, from the command to the end of step 1, as the first rank sees them.

A part is all that happens between two notes, whatever thread does it. A run logs them in one line after its first step
and keeps them in run.json under "starts"; `bench/training/first_steps.py` records them.

`begin_gpu_imports` takes the modules that only GPUs need out of that line: a thread imports them while the rank makes
its CUDA context, joins the others and reads its data.
"""

import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module

# What the first step on GPUs would import: the compiler of layers and the kernels of FlashAttention-4.
GPU_MODULES = ("triton", "torch._inductor.compile_fx", "flash_attn.cute.interface")
# Seconds that a thread which imports may keep the main one waiting (Python's: 5 ms). An operator or a message of some
# tens of microseconds gives the interpreter away, and waits that long to have it back: 300 products of 160 x 160 on a
# CPU took 0.03 s alone, 2.1 s beside a thread of Python's default, and 0.4 s beside one that takes turns of this.
TURN = 0.0005


@dataclass
class Starts:
    """Seconds by part of one process's start, which begins here."""

    parts: dict[str, float] = field(default_factory=dict[str, float])
    _last: float = field(default_factory=time.time)  # when the last part ended

    def end_part(self, name: str) -> None:
        """Note that a part has ended now; the next one begins. Parts of one name are added."""
        now = time.time()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._last
        self._last = now

    def to_json(self) -> dict[str, float]:
        return {name: round(seconds, 2) for name, seconds in self.parts.items()} | {
            "total": round(sum(self.parts.values()), 2)
        }

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.05)
        return f"ready after {sum(self.parts.values()):.1f} s: {parts}"


def begin_gpu_imports(ranks_of_host: int, *, compiled: bool) -> threading.Thread:
    """Import what ranks on GPUs need later, in a thread; code that imports one of these meanwhile waits for the thread.

    With `compiled`, the processes that compile layers are started first. A module that is absent is left to the code
    that needs it. Threads take turns of at most TURN seconds until it ends.
    """

    # here: of two threads that import transformers at once, one gets it without its names
    from longspan.model.compiled_layers import start_compile_workers

    def import_modules() -> None:
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
