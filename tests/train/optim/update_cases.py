"""Updates of tensors of every kind that the kernel of AdamW takes, and which of their results are not the reference's.

    python -m tests.train.optim.update_cases

The same on a CPU that has Triton, by Triton's interpreter. It rounds to bfloat16 toward zero, and subnormal numbers to
other ones, so that there what is rounded to the nearest is left out, and no square is subnormal.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from longspan.train.optim import one_pass_adamw
from longspan.train.optim.one_pass_adamw import Factors, Key, Places, Update, apply_by_torch

GROUP: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
SINGLE, HALF = torch.float32, torch.bfloat16
DTYPES = [(SINGLE,) * 3, (HALF,) * 3, (SINGLE, SINGLE, HALF), (HALF, HALF, SINGLE), (HALF, SINGLE, HALF)]
SIZES = (1, 1023, 1024, 5003, 20_000)
BLOCKS = {  # of whole parameters: the place of a block, which is whole, of rows, of columns, of both, or a part
    "whole": Places.of((20_000,), (slice(0, 20_000),)),
    "far": Places.of((2**21, 2**13), (slice(2**20, 2**20 + 3), slice(0, 2**13))),
    "columns": Places.of((5000, 40), (slice(0, 5000), slice(7, 11))),
    "columns of some experts": Places.of((90, 1000, 40), (slice(3, 50), slice(100, 201), slice(7, 12))),
    "a part": Places.of((90, 1000, 40), (slice(3, 50), slice(100, 201), slice(7, 12)))._replace(start=1025),
    "wide columns": Places.of((40, 5000), (slice(0, 40), slice(2500, 5000))),
    "wide columns of some experts": Places.of((30, 5, 5000), (slice(3, 20), slice(1, 4), slice(2000, 3100))),
    "past 2^32, wide": Places.of((9, 2**21, 5000), (slice(1, 9), slice(1, 2**20), slice(7, 3007)))._replace(
        start=2**33
    ),
    "past 2^32, narrow": Places.of((2**31, 40), (slice(0, 2**31), slice(7, 11)))._replace(start=2**32 - 1500),
    "across 2^32": Places.of((2**21, 2**13), (slice(2**19 - 1, 2**19 + 2), slice(0, 2**13))),
}
SCALES = (None, 0.37, math.nan)


def updates(powers: float) -> Iterator[Update]:
    """Every mix of types, size and way to round, with numbers down to 10^−powers."""
    draws = torch.Generator().manual_seed(0)

    def numbers(size: int, dtype: torch.dtype, powers: float) -> torch.Tensor:
        magnitudes = 10.0 ** torch.empty(size).uniform_(-powers, 0, generator=draws)
        return (torch.randn(size, generator=draws) * magnitudes).to(dtype)

    for size in SIZES:
        for dtypes in DTYPES:
            for key, places in ((None, None), *((Key(3**20 + size, 5**13), block) for block in BLOCKS.values())):
                first = numbers(size, dtypes[2], powers)
                tensors = (numbers(size, dtypes[0], 3), numbers(size, dtypes[1], powers), first, first.float().square())
                factors = Factors.of(GROUP | {"maximize": size % 2 == 0}, 1 + size % 3)
                update = Update(*tensors[:3], tensors[3].to(dtypes[2]), factors, key, places)
                yield update
                if size == SIZES[-1]:  # addresses that no load of many numbers takes
                    yield update._replace(**{name: getattr(update, name)[1:] for name in Update._fields[:4]})


def _copy(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on a device that begins as many numbers behind its memory's beginning."""
    first = x.storage_offset()
    return torch.empty(first + len(x), dtype=x.dtype, device=device)[first:].copy_(x)


def update_differences(device: str, scale: float | None, *, nearest: bool = True, powers: float = 20) -> list[str]:
    """Say which results of the kernel on a device are not the bits of the reference on a CPU."""
    expected, results = list[Update](), list[Update]()
    for update in updates(powers):
        if nearest or update.key is not None or all(tensor.dtype == SINGLE for tensor in update[:4]):
            for into, place in ((expected, "cpu"), (results, device)):
                into.append(update._replace(**{n: _copy(getattr(update, n), place) for n in Update._fields[:4]}))
    factor = None if scale is None else torch.tensor(scale)
    launches = one_pass_adamw.launch_updates(results, None if factor is None else factor.to(device))
    assert launches <= 2 * 3 * len(DTYPES) < len(results) // 4, launches
    for update in expected:
        if factor is None or not factor.isnan():
            apply_by_torch(update, factor)
    return [
        f"{name} of {update.parameter.numel()} in {[str(x.dtype) for x in update[:3]]}, {update.places}"
        for update, result in zip(expected, results, strict=True)
        for name in ("parameter", "mean", "square")
        if not torch.equal(getattr(update, name), getattr(result, name).cpu())
    ]


def _take_interpreter() -> None:
    """Let the kernel be launched with tensors of a CPU."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    from tests.ssm.interpreted import on_a_cpu

    on_a_cpu()
    make_patches = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        make_patches(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # numpy 2 refuses arrays

    interpreter._patch_lang_tensor = patch
    one_pass_adamw.on_gpu = lambda tensor: True
    one_pass_adamw.PROGRAMS = 3


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    _take_interpreter()
    for scale in SCALES:
        differences = update_differences("cpu", scale, nearest=False, powers=15)
        print(f"scale {scale}: {len(differences)} differences", *differences[:9], sep="\n", flush=True)
    assert one_pass_adamw.kernel_takes(next(updates(1)))
