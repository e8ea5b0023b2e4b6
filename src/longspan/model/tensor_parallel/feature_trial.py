"""Whether a split block works on each feature by itself between its column-wise and its row-wise linears.

A tensor-parallel rank holds some of these features, so that a mean or a threshold over all of them would be another one
on every rank. Blocks that cannot be called with hidden states alone, such as attention, are not tried here.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longspan.errors import ModelError
from longspan.model.tensor_parallel.family_plans import COLWISE, ROWWISE
from longspan.model.tensor_parallel.plan import StyledModule, split_blocks

_FEATURES = 64  # of a trial: an even number, large enough for some to pass a threshold of the largest twentieth


def refuse_mixed_features(model: nn.Module, placed: Sequence[StyledModule]) -> None:
    """Raise ModelError, naming it, for a block whose features depend on each other where they are split."""
    styles = {id(entry.module): entry.style for entry in placed}
    for name in sorted(split_blocks(placed)):
        block = model.get_submodule(name)
        if mixes_features(block, styles):
            raise ModelError(
                f"{name} ({type(block).__name__}) computes from all its features together what its row-wise linear "
                "gets, and a tensor-parallel rank holds some of them; use tp 1"
            )


@torch.no_grad()
def mixes_features(block: nn.Module, styles: Mapping[int, str]) -> bool:
    """Whether some of the features give other row-wise inputs than among all; shown with numbers on the host."""
    columns = [module for module in block.modules() if styles.get(id(module)) == COLWISE]
    rows = [module for module in block.modules() if styles.get(id(module)) == ROWWISE]
    if not columns or not rows:
        return False
    numbers = torch.randn(1, 2, _FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = [numbers.roll(3 * shift, -1) for shift in range(len(columns))]
    parts = [outputs, *zip(*(output.chunk(2, -1) for output in outputs), strict=True)]
    try:
        at_once, *of_parts = (_row_wise_input(block, dict(zip(columns, part, strict=True)), rows) for part in parts)
        return not torch.allclose(at_once, torch.cat(of_parts, -1))
    except Exception:  # whatever a block raises that needs more than hidden states, or its own number of features
        return False


def _row_wise_input(block: nn.Module, outputs: Mapping[nn.Module, Tensor], rows: Sequence[nn.Module]) -> Tensor:
    """What the first row-wise linear gets where the column-wise ones give `outputs`."""
    inside = {id(p) for module in (*outputs, *rows) for p in module.parameters()}
    named = (*block.named_parameters(), *block.named_buffers())
    ones = {name: torch.ones(x.shape, dtype=torch.float64) for name, x in named if id(x) not in inside}
    with _answering(outputs, rows):
        try:
            functional_call(block, ones, (torch.zeros(1, 2, 1, dtype=torch.float64),))
        except _Reached as reached:
            return reached.input
    raise ModelError("no row-wise linear was reached")


class _Reached(Exception):  # noqa: N818 (it ends a trial)
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.input = value


@contextmanager
def _answering(outputs: Mapping[nn.Module, Tensor], rows: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, column-wise linears answer with given numbers, and a row-wise one ends the trial."""

    def end(value: Tensor, *_: Any) -> NoReturn:
        raise _Reached(value)

    forwards: dict[nn.Module, Any] = {module: (lambda *_, out=out: out) for module, out in outputs.items()}
    forwards |= dict.fromkeys(rows, end)
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward
