"""Passes of mamba_ssm's Triton files on a CPU, by Triton's interpreter in float32, beside torch's in float64.

    python -m tests.ssm.interpreted

Prints the relative error of every pass. Needs Triton and mamba_ssm's Triton files; one block size of each kernel runs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from longspan.ssm.kernels import TORCH, Inputs, LocalRuns
from longspan.ssm.kernels.decay import by_mamba_ssm
from longspan.ssm.kernels.table import MAMBA
from tests.reference import relative_error
from tests.ssm import test_fla as cases

LENGTHS = (70, 1, 64, 3, 40)
SHAPES = ((1, 4, 16, 16), (2, 4, 16, 32))  # heads of keys and of values, key and value sizes
LARGEST_BLOCK = 64


def on_a_cpu() -> None:
    """Let kernels be launched without a GPU: one block size each, masks as the interpreter wants them."""
    from triton.runtime import autotuner, interpreter  # pyright: ignore[reportMissingImports]

    run: Any = autotuner.Autotuner.run
    masked: Any = interpreter.InterpreterBuilder.create_masked_load

    def one_config(self: Any, *given: Any, **named: Any) -> Any:
        sizes = [c for c in self.configs if max(c.kwargs.values(), default=0) <= LARGEST_BLOCK]
        self.configs = (sizes or self.configs)[-1:]
        self.best_config = self.configs[0]
        return run(self, *given, **named)

    def with_flags(self: Any, pointers: Any, mask: Any, *given: Any, **named: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return masked(self, pointers, mask, *given, **named)

    autotuner.Autotuner.run = one_config
    interpreter.InterpreterBuilder.create_masked_load = with_flags
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)


def errors(shape: tuple[int, int, int, int]) -> dict[str, float]:
    """The relative error of each pass, over runs that share documents with others."""
    cases.CUDA, cases.KINDS = torch.device("cpu"), {"mamba 2": (shape, False, False)}
    given = cases.inputs("mamba 2", sum(LENGTHS))
    runs = LocalRuns(np.array(LENGTHS), cases.CUDA, np.array([True] * len(LENGTHS)))
    single = Inputs(*(x if x is None else x.float() for x in given))  # pyright: ignore[reportArgumentType]
    found = cases.passes(MAMBA, single, runs, "mamba 2")
    wanted = cases.passes(TORCH, Inputs(*given), runs, "mamba 2")  # pyright: ignore[reportArgumentType]
    return {name: relative_error(found[name].double(), exact) for name, exact in wanted.items()}


if __name__ == "__main__":
    on_a_cpu()
    by_mamba_ssm._CHUNK = 32  # pyright: ignore[reportPrivateUsage]
    for sizes in SHAPES:
        print(sizes, {name: f"{error:.1e}" for name, error in errors(sizes).items()}, flush=True)
