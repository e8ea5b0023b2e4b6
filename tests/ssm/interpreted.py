"""Triton kernels on a CPU, by Triton's interpreter in float32, beside float64.

    python -m tests.ssm.interpreted [maps] [first_rows]

Prints relative errors of our own kernels of delta rules (`maps`) and of convolutions behind rows that arrived
(`first_rows`). Needs Triton; one block size of each kernel runs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import sys
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from longspan.ssm.kernels import LocalRuns
from longspan.ssm.kernels.call import CHUNK
from longspan.ssm.kernels.delta import compute_entry_gradients, run_maps
from tests.reference import relative_error
from tests.ssm import first_rows

LENGTHS = (70, 1, 64, 3, 40)
DELTAS = ((1, 2, 16, 16, False), (2, 4, 32, 80, False), (2, 2, 48, 32, True), (1, 2, 128, 128, False))  # by channel?
LARGEST_BLOCK = 64
SCALE = 0.7


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


def maps_errors(case: tuple[int, int, int, int, bool]) -> dict[str, float]:
    """Relative errors of B, M and what is entry_gradients to entering states, of runs of random rows."""
    groups, heads, size, width, by_channel = case
    torch.manual_seed(0)
    total, decay = sum(LENGTHS), "gk" if by_channel else "g"
    shapes = {"q": (groups, size), "k": (groups, size), "w": (heads, size), "u": (heads, width)}
    shapes |= {"do": (heads, width), "dv": (heads, width)}
    rows = {name: 0.2 * torch.randn(1, total, *shape) for name, shape in shapes.items()}
    rows[decay] = -torch.rand(1, total, heads, *([size] if by_channel else []))
    runs = LocalRuns(np.array(LENGTHS), torch.device("cpu"))
    found = (*run_maps(rows, runs), compute_entry_gradients(rows, runs, SCALE))
    exact = zip(
        *(_by_chunks(rows, stop - n, stop) for n, stop in zip(LENGTHS, accumulate(LENGTHS), strict=True)), strict=True
    )
    return {
        name: relative_error(x.double(), torch.stack(wanted))
        for name, x, wanted in zip(("B", "M", "owed"), found, exact, strict=True)
    }


def _by_chunks(rows: dict[str, torch.Tensor], start: int, stop: int) -> tuple[torch.Tensor, ...]:
    """B, M and what is entry_gradients of one run, in float64; decays are sums inside chunks, in base 2."""
    heads, size = rows["w"].shape[2:]
    wide = {name: x[0].double() for name, x in rows.items()}
    wide |= {name: wide[name].repeat_interleave(heads // wide[name].shape[1], 1) for name in "qk"}
    g = wide["gk"] if "gk" in wide else wide["g"].unsqueeze(-1).expand(-1, -1, size)
    each = 0.0 if "gk" in wide else 1.0  # a number of each row's own stands in keys and values otherwise
    unit = torch.eye(size, dtype=torch.float64).expand(heads, size, size)
    state = torch.cat([torch.zeros(heads, size, wide["u"].shape[-1], dtype=torch.float64), unit], -1)
    entry_gradients = torch.zeros_like(state[..., : wide["u"].shape[-1]])
    chunks = [slice(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]
    for chunk in chunks:
        k, w, u = (wide[name][chunk].transpose(0, 1) for name in "kwu")
        last = g[chunk.stop - 1]
        new = torch.cat([u, torch.zeros_like(w)], -1) - w @ state
        new = new * torch.exp2(each * (last[None] - g[chunk])[..., :1]).transpose(0, 1)
        state = torch.exp2(last)[..., None] * state + k.mT @ new
    for chunk in reversed(chunks):
        q, k, w, do, dv = (wide[name][chunk].transpose(0, 1) for name in ("q", "k", "w", "do", "dv"))
        last = g[chunk.stop - 1]
        gradient = (k @ entry_gradients) * torch.exp2(each * (last[None] - g[chunk])[..., :1]).transpose(0, 1) + dv
        outer = SCALE * do * torch.exp2(each * g[chunk][..., :1]).transpose(0, 1)
        entry_gradients = torch.exp2(last)[..., None] * entry_gradients + q.mT @ outer - w.mT @ gradient
    width = wide["u"].shape[-1]
    return state[..., :width], state[..., width:], entry_gradients


if __name__ == "__main__":
    on_a_cpu()
    asked = sys.argv[1:] or ["maps", "first_rows"]
    if "maps" in asked:
        for delta in DELTAS:
            print("maps", delta, {name: f"{error:.1e}" for name, error in maps_errors(delta).items()}, flush=True)
    if "first_rows" in asked:
        for case in first_rows.CASES:
            worst = first_rows.errors(*case, torch.device("cpu"), torch.float32)
            print("first_rows", case, {name: f"{error:.1e}" for name, error in worst.items()}, flush=True)
