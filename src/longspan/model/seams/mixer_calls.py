"""What the mixers of transformers call in place of their own kernels: the same arguments, over a sharded sequence.

A mixer's class, weights and keys stay. An instance gets its own class's forward with other names behind it: where it
calls `causal_conv1d_fn` or a scan by its name, functions of this module run. Projections, gates, norms and
multipliers are the model's own code.

Tensors have a batch of one packed row. Each function computes in the precision that the fallbacks of transformers do,
float32 or better, and returns what they return, without states of a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.seams.attention_calls import Probe, SeparateRows, convolve_separately, scan_separately
from longspan.model.seams.layer_arguments import check_shard, find_layer_shard
from longspan.model.seams.mixers import find_mixers, replace_functions
from longspan.ssm import causal_conv, linear_scan, scan_kernel, unit_vectors
from longspan.ssm.kernels.call import state_dtype

_EPSILON = 1e-6  # of the norm of queries and keys, as in flash-linear-attention


class MixerOps(Protocol):
    """What a mixer computes across rows: its convolution (T, C) and its scan (T, H, ·), as `longspan.ssm` has them."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor: ...

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor: ...


FindOps = Callable[[object, int, int], MixerOps]  # of the `shard=` of a call, its batch and its rows


@dataclass(frozen=True)
class ShardedMixerOps:
    """Over the rows of a shard."""

    shard: SequenceShard

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Convolve each row with the rows before it in its document."""
        return causal_conv(x, weight, bias, self.shard, silu=silu)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
        """Scan the recurrence over each document."""
        return linear_scan(q, k, v, g, beta, self.shard, scale)


@dataclass(frozen=True)
class SeparateMixerOps:
    """For rows that see only themselves, by which everything around a mixer can be tried."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Convolve each row by itself."""
        return convolve_separately(x, weight, bias, silu)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
        """Scan each row by itself."""
        return scan_separately(q, k, v, g, beta, scale)


@dataclass(frozen=True)
class _ShapeOps:
    """For passes on the meta device: empty results of the right shape."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        return torch.empty_like(x)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
        return torch.empty_like(v)


ROWS_ALONE = SeparateMixerOps()


def _find_ops(name: str, shard: object, batch: int, rows: int) -> MixerOps:
    """Find the operations over the shard that a mixer of this name, or the decoder layer around it, was called with.

    A probe gets results of the right shape only, a shard of separate rows operations on each row. Raises ModelError
    without a shard, with more than one batch row, or with other rows than the shard's.
    """
    shard = find_layer_shard() if shard is None else shard
    if isinstance(shard, Probe):
        return _ShapeOps()
    checked = check_shard(name, shard, batch, rows)
    return ROWS_ALONE if isinstance(checked, SeparateRows) else ShardedMixerOps(checked)


def kernel_replacements(find_ops: FindOps) -> dict[str, Callable[..., Any]]:
    """Return what mixers call in place of their own kernels, by the names under which they call them.

    Further arguments of those kernels, about packing, chunk sizes and states to return, are ignored.
    """
    delta_rule = partial(_run_delta_rule, find_ops)
    return {
        "causal_conv1d_fn": partial(_run_convolution, find_ops),
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": partial(_run_mamba2, find_ops),
        "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # declines, so that the mixer calls the others
    }


def _run_convolution(
    find_ops: FindOps,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    shard: object = None,
    **others: Any,
) -> Tensor:
    x = hidden_states.to(weight.dtype).squeeze(0).t()
    silu = activation in ("silu", "swish")
    y = find_ops(shard, len(hidden_states), len(x)).convolve(x, weight, bias, silu)
    y = y if activation is None or silu else ACT2FN[activation](y)
    return y.to(hidden_states.dtype).t().unsqueeze(0)


def _run_delta_rule(
    find_ops: FindOps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    shard: object = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run a gated delta rule over the shard, in place of the class's kernel; returns (1, T, H, V) and no state.

    query, key (1, T, K heads, K), value (1, T, H, V), g (1, T, H) or (1, T, H, K), beta (1, T, H).
    """
    _refuse_state(initial_state)
    ops = find_ops(shard, len(query), query.shape[1])
    q, k, v, decay, strength = (x.squeeze(0) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = unit_vectors(q, _EPSILON), unit_vectors(k, _EPSILON)
    decay = decay if decay.ndim == 3 else decay.unsqueeze(-1)
    out = ops.scan(q, k, v, decay, strength, scale=q.shape[-1] ** -0.5)
    return out.to(query.dtype).unsqueeze(0), None


def _run_mamba2(
    find_ops: FindOps,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    shard: object = None,
    **others: Any,
) -> Tensor:
    """Run Mamba 2's scan over the shard: x (1, T, H, P), dt (1, T, H), A, D (H,), B, C (1, T, G, N) -> (1, T, H, P).

    Steps are softplus(dt + bias), cut to `dt_limit`. The state decays by exp(step A), takes step · x at B and is read
    at C; D · x is added to what is read.
    """
    _refuse_state(initial_states)
    if z is not None:
        raise ModelError("a Mamba 2 layer gives its gate to the scan (z), which no known layer does")
    ops = find_ops(shard, len(x), x.shape[1])
    wide_dtype = state_dtype(x.dtype)
    v, step, k, q = (t.squeeze(0) for t in (x, dt, B, C))  # as linear attention: x are values, B keys, C queries
    step = step.to(wide_dtype) if dt_bias is None else step.to(wide_dtype) + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    # A kernel that computes on half precision gets the values as the model has them, else in the state's type.
    takes_half = scan_kernel(v, k.shape[-1], delta=False).half
    values = (v * step.unsqueeze(-1)).to(v.dtype if takes_half else wide_dtype)
    out = ops.scan(q, k, values, (step * A).unsqueeze(-1), beta=None, scale=1.0)
    out = out if D is None else out + D.unsqueeze(-1) * v
    return out.to(x.dtype).unsqueeze(0)


def _refuse_state(state: Tensor | None) -> None:
    if state is not None:
        raise ModelError("a mixer begins with a state of a cache; there is no cache in training: use_cache=False")


def shard_mixers(model: PreTrainedModel) -> None:
    """Let the model's mixers run over the shard that their layers are called with, from here on."""
    for name, mixer in find_mixers(model).items():
        set_mixer_ops(mixer, partial(_find_ops, f"{name} ({type(mixer).__name__})"))


def set_mixer_ops(mixer: nn.Module, find_ops: FindOps) -> None:
    """Give an instance its class's forward with the functions of this module over these operations."""
    replace_functions(mixer, kernel_replacements(find_ops))
