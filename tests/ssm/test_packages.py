"""Kernels of mamba_ssm and causal_conv1d on a GPU that has them, beside the recurrence and torch's float64.

`python -m pytest --backend nccl tests/ssm/test_packages.py`: scans need the Triton files of mamba_ssm alone,
convolutions the CUDA extension of causal_conv1d; what is not there is skipped.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from longspan import Layout, World, bind
from longspan.comm import SequenceShard
from longspan.ssm import causal_conv
from longspan.ssm.kernels import TORCH, Inputs, LocalRuns, Recurrence
from longspan.ssm.kernels.convolutions import PACKAGE_CONVOLUTION
from longspan.ssm.kernels.table import MAMBA
from longspan.testing import backend, run_ranks
from tests.reference import relative_error
from tests.ssm import test_fla as cases
from tests.ssm.parity import batches
from tests.ssm.recurrence import convolved

CUDA = torch.device("cuda")
LENGTHS = cases.LENGTHS
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def _lacks_scans() -> str:
    return MAMBA.lacks(Recurrence(torch.bfloat16, CUDA, 128, 64, delta=False, by_channel=False))


def _lacks_convolutions() -> str:
    return PACKAGE_CONVOLUTION.lacks(torch.empty(1, 8, dtype=torch.bfloat16, device=CUDA), torch.empty(8, 4))


def _slots() -> int:
    return torch.cuda.device_count() if backend() == "nccl" else 1


@pytest.mark.parametrize("groups", [1, 8])
def test_every_pass_of_mamba_ssm_is_that_of_torch_in_float64(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking := _lacks_scans():
        pytest.skip(lacking)
    name = "mamba 2"
    monkeypatch.setitem(cases.KINDS, name, ((groups, 128, 128, 64), False, False))
    given = cases.inputs(name, sum(LENGTHS))
    runs = LocalRuns(np.array(LENGTHS), CUDA, np.array([True] * len(LENGTHS)))
    found = cases.passes(MAMBA, cases.in_half(given), runs, name)
    wanted = cases.passes(TORCH, Inputs(*given), runs, name)  # pyright: ignore[reportArgumentType]
    errors = {key: relative_error(found[key].double(), exact) for key, exact in wanted.items()}
    print(errors)
    assert max(errors.values()) <= 1e-2, errors


def test_scans_of_mamba_ssm_are_the_recurrence() -> None:
    if lacking := _lacks_scans():
        pytest.skip(lacking)
    for worst in run_ranks(cases.measure, _slots(), _slots(), "mamba 2", ("mamba_ssm",), timeout=600):
        print(worst)
        assert max(worst) <= 1e-2, worst


def _convolutions(rank: int, slots: int) -> dict[tuple[object, ...], float]:
    """The worst error of each case, over rows and gradients."""
    worst = {}
    with World(Layout(ranks=slots), backend=backend()) as world:
        for dtype in (torch.bfloat16, torch.float32):
            for partition in ("contiguous", "zigzag"):
                for shape, batch in batches(LENGTHS, slots, partition).items():
                    shard = bind(batch, world).with_padding()
                    order = [document for group in batch.groups for document in group.documents]
                    lengths = [LENGTHS[document] for document in order]
                    for width in (2, 4):
                        for extras in ((False, False), (True, True)):
                            error = _error(width, lengths, shard, world, dtype, extras)
                            worst[dtype, partition, shape, width, extras] = error
    return worst


def _error(
    width: int,
    lengths: Sequence[int],
    shard: SequenceShard,
    world: World,
    dtype: torch.dtype,
    extras: tuple[bool, bool],
) -> float:
    generator, (with_bias, silu) = torch.Generator().manual_seed(width), extras
    shapes = ((sum(lengths), 96), (96, width), *([(96,)] if with_bias else []))
    given = [torch.randn(s, generator=generator).to(dtype).to(CUDA) for s in shapes]
    dout = torch.randn(shapes[0], generator=generator).to(dtype).to(CUDA)
    exact = [x.double().requires_grad_() for x in given]
    wanted = convolved(exact[0], exact[1], exact[2] if with_bias else None, lengths)
    wanted = F.silu(wanted) if silu else wanted
    gradients = torch.autograd.grad(wanted, exact, dout.double())
    leaves = [(shard.scatter(x) if i == 0 else x.clone()).requires_grad_() for i, x in enumerate(given)]
    bias = leaves[2] if with_bias else None
    out = causal_conv(leaves[0], leaves[1], bias, shard, silu=silu, kernels=("causal_conv1d",))
    out.backward(shard.scatter(dout))
    rows, errors = shard.rows >= 0, []
    for x, whole in ((out, wanted), (leaves[0].grad, gradients[0])):
        difference = (x.double() - shard.scatter(whole.detach()))[rows]  # pyright: ignore[reportOptionalMemberAccess]
        errors.append((difference.norm() / whole.norm()).item())
    for x, whole in zip(leaves[1:], gradients[1:], strict=True):
        summed = world.control.sum_over_slots(x.grad.double().flatten().tolist())
        errors.append(relative_error(torch.tensor(summed, dtype=torch.float64), whole.flatten().cpu()))
    return max(errors) / (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_convolutions_of_causal_conv1d_are_the_definition() -> None:
    if lacking := _lacks_convolutions():
        pytest.skip(lacking)
    for worst in run_ranks(_convolutions, _slots(), _slots(), timeout=600):
        print(max(worst.items(), key=lambda item: item[1]))
        assert len(worst) >= 16 and max(worst.values()) <= 1, max(worst.items(), key=lambda item: item[1])
