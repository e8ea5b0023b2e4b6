"""Kernels that are used only where asked for: who takes them, what is refused, and the calls made of causal_conv1d."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan import Group
from longspan.comm import ShardPart
from longspan.errors import LayoutError, ModelError
from longspan.model.seams.mixer_calls import check_kernels
from longspan.ssm.chains import Chains
from longspan.ssm.conv import find_halo
from longspan.ssm.kernels import TORCH, LocalRuns, Recurrence, check_mixer_kernels, choose_scan_kernel, describe_kernels
from longspan.ssm.kernels import convolutions as by_causal_conv1d
from longspan.ssm.kernels import delta as by_channel
from longspan.ssm.kernels.convolutions import PACKAGE_CONVOLUTION, TORCH_CONVOLUTION, Convolution, choose_convolution
from tests.mutation import mutate, restore

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SCAN = Recurrence(torch.bfloat16, CPU, 16, 16, delta=False, by_channel=False)


def test_packages_are_taken_where_they_are_named_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.ssm.kernels.by_mamba_ssm.package_lack", lambda *_: "")
    monkeypatch.setattr("longspan.ssm.kernels.convolutions.package_lack", lambda *_: "")
    x, weight = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(8, 4)
    both = ("mamba_ssm", "causal_conv1d")
    assert choose_scan_kernel(SCAN).name == "torch" and choose_convolution(x, weight).name == "torch"
    assert (
        choose_scan_kernel(SCAN, both).name == "mamba_ssm"
        and choose_convolution(x, weight, both).name == "causal_conv1d"
    )
    assert choose_scan_kernel(SCAN._replace(delta=True), both).name == "torch"  # no such scan there
    assert (
        choose_scan_kernel(SCAN, ("torch",)) is TORCH and choose_scan_kernel(SCAN, ("causal_conv1d",)).name == "torch"
    )
    check_mixer_kernels(both, torch.bfloat16, CPU)
    assert describe_kernels(torch.bfloat16, CPU, both) == (
        "mamba_ssm (tried on one H200) and causal_conv1d (its CUDA code untried), as asked for, and torch's operations"
    )


@pytest.mark.parametrize(
    "asked, dtype, message",
    [
        (("mamba",), torch.bfloat16, "'mamba' is no kernel of state-space layers; use torch, mamba_ssm, causal_conv1d"),
        (("torch", "mamba_ssm"), torch.bfloat16, "are torch, mamba_ssm; give torch alone, or without it"),
        (("mamba_ssm",), torch.float32, "mamba_ssm .* needs bfloat16 or float16, got float32; leave it out"),
        (
            ("mamba_ssm",),
            torch.bfloat16,
            "mamba_ssm of state-space layers was asked for and needs cuda tensors, got cpu",
        ),
        (("causal_conv1d",), torch.float64, "needs bfloat16, float16 or float32, got float64"),
    ],
)
def test_what_cannot_be_is_refused(asked: tuple[str, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_mixer_kernels(asked, dtype, CPU)


def test_a_model_without_such_layers_is_refused() -> None:
    model: Any = torch.nn.Linear(1, 1)
    check_kernels(model, (), torch.float32, CPU)
    with pytest.raises(ModelError, match="are torch, and Linear has no such layers; leave them out"):
        check_kernels(model, ("torch",), torch.float32, CPU)


def test_sizes_and_versions_are_said() -> None:
    x, weight = torch.zeros(3, 12, dtype=torch.bfloat16), torch.zeros(12, 4)
    assert PACKAGE_CONVOLUTION.lacks(x, weight) == "channels in multiples of 8, got 12"
    assert PACKAGE_CONVOLUTION.lacks(x, torch.zeros(16, 5)) == "a convolution of width 2 to 4, got 5"
    of_channels = "a delta rule of a decay for each key number"
    assert (
        by_channel.kimi_lack(SCAN._replace(delta=True))
        == by_channel.kimi_lack(SCAN._replace(by_channel=True))
        == of_channels
    )
    lacking = choose_scan_kernel.__globals__["MAMBA"].lacks(SCAN._replace(device=CUDA))
    assert lacking == "mamba_ssm 2.3, which is not installed: pip install 'mamba_ssm==2.3.*'"


# ---- the calls of causal_conv1d, by a stand-in of the same signature


def _stand_in() -> SimpleNamespace:
    """`causal_conv1d.cpp_functions` in torch, of what its CUDA code says of strides and shapes."""

    def forward(x, weight, bias, seq_idx, initial_states, final_states_out, silu):
        assert seq_idx is None and final_states_out is None and x.stride(1) == 1 and x.shape[1] % 8 == 0
        assert initial_states is None or initial_states.stride(1) == 1
        edge = x.new_zeros((1, x.shape[1], weight.shape[1] - 1)) if initial_states is None else initial_states
        assert edge.shape == (1, x.shape[1], weight.shape[1] - 1)
        y = F.conv1d(torch.cat([edge, x], -1), weight.unsqueeze(1), bias, groups=x.shape[1])
        return F.silu(y) if silu else y

    def backward(x, weight, bias, dout, seq_idx, initial_states, dfinal, dx, return_dinitial, silu):
        assert dfinal is None and dx is None and not return_dinitial
        given = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            edge = x.new_zeros((1, x.shape[1], weight.shape[1] - 1)) if initial_states is None else initial_states
            y = F.conv1d(torch.cat([edge, given[0]], -1), given[1].unsqueeze(1), given[2], groups=x.shape[1])  # pyright: ignore
            y = F.silu(y) if silu else y
        found = iter(torch.autograd.grad(y, [t for t in given if t is not None], dout))
        return (*(None if t is None else next(found) for t in given), None)

    return SimpleNamespace(causal_conv1d_fwd_function=forward, causal_conv1d_bwd_function=backward)


@pytest.mark.parametrize("lengths", [(37,), (9, 1, 14, 2, 3)])
@pytest.mark.parametrize("partition", ["contiguous", "zigzag"])
@pytest.mark.parametrize("extras", [True, False])
def test_the_calls_of_causal_conv1d(
    lengths: tuple[int, ...], partition: str, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one run with rows before it, of one without, and of several: outputs and all gradients are torch's."""
    monkeypatch.setattr(by_causal_conv1d, "_conv_package", _stand_in)
    assert _worst(lengths, partition, extras) <= 1e-12


@pytest.mark.parametrize(
    "lengths, old, new",
    [
        ((37,), "state[before.column - 1] = arrived", "pass"),
        ((9, 1, 14, 2, 3), "return torch.cat([x, arrived, x.new", "return torch.cat([x, 0 * arrived, x.new"),
        ((9, 1, 14, 2, 3), "drows.index_select(0, before.local)", "drows[: len(x)]"),
    ],
)
def test_what_is_dropped_is_noticed(
    lengths: tuple[int, ...], old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_causal_conv1d, "_conv_package", _stand_in)
    undo = mutate("ssm.kernels.convolutions", old, new)
    try:
        assert _worst(lengths, "contiguous", extras=True) > 1e-3
    finally:
        restore(undo)


def _worst(lengths: tuple[int, ...], partition: str, extras: bool) -> float:
    """The largest difference of outputs and gradients from those of torch, over widths and members."""
    group = Group((0, 1, 2), tuple(range(len(lengths))), lengths, partition=partition)  # pyright: ignore
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for width in (2, 4):
        for member in range(3):
            chains = Chains(ShardPart(group, member, member, 0, world_key=-1), CPU)
            halo = find_halo(chains, width - 1)
            shapes = (int(chains.lengths.sum()), 8), (sum(halo.receives), 8), (8, width), (8,)
            x, arrived, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
            parameters = (weight.requires_grad_(), bias.requires_grad_() if extras else None)
            convolution, runs = Convolution(*parameters, silu=extras), chains.local_runs
            dout, found = torch.randn(x.shape, generator=generator, dtype=torch.float64), list[list[Tensor]]()
            for kernel in (PACKAGE_CONVOLUTION, TORCH_CONVOLUTION):
                gradients = kernel.backward(dout, x, arrived, convolution, runs, halo.before)
                y = kernel.forward(x, convolution, runs, halo.isolated)
                found.append([t.detach() for t in (y, *gradients) if t is not None])
            worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*found, strict=True) if b.numel()))
    return worst


def test_chunks_of_another_size_hold_the_same_rows() -> None:
    runs = LocalRuns(np.array([70, 1, 64, 130]), CPU)
    for chunk in (32, 128):
        cut = runs.cut_chunks(chunk)
        assert cut is runs.cut_chunks(chunk) and cut.chunks == sum(-(-n // chunk) for n in (70, 1, 64, 130))
        rows = torch.cat([torch.arange(runs.rows), torch.tensor([-1])])[cut.padded_rows]
        assert torch.equal(rows[cut.padded_places], torch.arange(runs.rows)) and len(rows) == cut.chunks * chunk
