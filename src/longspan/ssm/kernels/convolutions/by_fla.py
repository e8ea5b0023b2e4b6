"""Causal depthwise convolutions by the kernel of flash-linear-attention."""

from torch import Tensor

from longspan.ssm.kernels import fla
from longspan.ssm.kernels.convolutions.call import Before, Convolution, ConvolutionKernel, Gradients
from longspan.ssm.kernels.convolutions.first_rows import owed, write_first
from longspan.ssm.kernels.runs import LocalRuns

_MODULE = "modules.causal_conv1d.ops"


def _edge(x: Tensor, arrived: Tensor, runs: LocalRuns, before: Before) -> Tensor | None:
    """The rows before each run as its state (R, C, W), of which the kernel reads all but the first column."""
    if not len(arrived):
        return None
    state = x.new_zeros((len(runs.lengths), x.shape[1], before.width + 1))
    state[before.run, :, before.column] = arrived
    return state


def _given(convolution: Convolution, runs: LocalRuns, state: Tensor | None) -> dict[str, object]:
    return {
        "weight": convolution.weight.contiguous(),
        "bias": convolution.bias,
        "residual": None,
        "initial_state": state,
        "activation": "silu" if convolution.silu else None,
        "cu_seqlens": runs.ends,
        "chunk_indices": runs.chunk_indices,
    }


def _by_fla(x: Tensor, convolution: Convolution, runs: LocalRuns, alone: Before) -> Tensor:
    given = _given(convolution, runs, None)
    return fla.function(_MODULE, "causal_conv1d_fwd")(x=x.unsqueeze(0), **given)[0].squeeze(0)


def _fla_backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before
) -> Gradients:
    given = _given(convolution, runs, _edge(x, arrived, runs, before))
    backward = fla.function(_MODULE, "causal_conv1d_bwd")
    dx, dweight, dbias, *_ = backward(x=x.unsqueeze(0), dy=dout.unsqueeze(0), dht=None, **given)
    return dx.squeeze(0), dweight, dbias


FLA_CONVOLUTION = ConvolutionKernel(
    "fla", lambda x, weight: fla.lacks(x.dtype, x.device), _by_fla, _fla_backward, write_first, owed
)
