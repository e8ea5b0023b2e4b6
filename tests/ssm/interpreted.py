"""Our Triton kernels of convolutions behind rows that arrived, by Triton's interpreter, in float32 beside float64."""

from typing import Any

import torch

from tests.ssm.parity import FIRST_ROWS, first_row_errors


def interpreted() -> None:
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    builder: Any = interpreter.InterpreterBuilder

    def with_flags(masked: Any, at: int) -> Any:
        """The interpreter wants masks as bool."""

        def run(*given: Any, **named: Any) -> Any:
            given[at].data = given[at].data.astype(bool)
            return masked(*given, **named)

        return run

    builder.create_masked_load = with_flags(builder.create_masked_load, 2)
    builder.create_masked_store = with_flags(builder.create_masked_store, 3)
    for case in FIRST_ROWS:
        worst = first_row_errors(*case, torch.device("cpu"), torch.float32)
        assert max(worst.values()) <= 1e-6, (case, worst)
