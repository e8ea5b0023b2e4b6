"""Our Triton kernels of convolutions behind rows that arrived on a CPU that has Triton, by its interpreter, in float32.

    python -m tests.ssm.interpreted

Prints relative errors beside float64; one block size of each kernel runs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

LARGEST_BLOCK = 64


def on_a_cpu() -> None:
    """Let kernels be launched without a GPU: one block size each, masks as the interpreter wants them."""
    from triton.runtime import autotuner, interpreter  # pyright: ignore[reportMissingImports]

    run: Any = autotuner.Autotuner.run
    builder: Any = interpreter.InterpreterBuilder

    def one_config(self: Any, *given: Any, **named: Any) -> Any:
        sizes = [c for c in self.configs if max(c.kwargs.values(), default=0) <= LARGEST_BLOCK]
        self.configs = (sizes or self.configs)[-1:]
        self.best_config = self.configs[0]
        return run(self, *given, **named)

    def with_flags(masked: Any, at: int) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            given[at].data = given[at].data.astype(bool)
            return masked(*given, **named)

        return run

    autotuner.Autotuner.run = one_config
    builder.create_masked_load = with_flags(builder.create_masked_load, 2)
    builder.create_masked_store = with_flags(builder.create_masked_store, 3)
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)


if __name__ == "__main__":
    on_a_cpu()
    from tests.ssm.parity import FIRST_ROWS, first_row_errors

    for case in FIRST_ROWS:
        worst = first_row_errors(*case, torch.device("cpu"), torch.float32)
        print(case, {name: f"{error:.1e}" for name, error in worst.items()}, flush=True)
