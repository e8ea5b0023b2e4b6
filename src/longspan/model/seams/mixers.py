"""State-space layers of transformers ("mixers"), recognised by what their forward calls, over a sharded sequence.

A mixer's class, weights and keys stay; an instance gets its class's forward with functions of this module behind the
names of its kernels. They compute in float32 or better, as transformers' fallbacks do. Other convolutions are refused.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from longspan.errors import ModelError
from longspan.model.feature import Feature
from longspan.model.kinds import CONVOLUTION, SCANS, called_functions, class_forward, find_mixers
from longspan.model.seams.model_calls import require_one_row_shard
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe, SeparateRows
from longspan.ssm import causal_conv, linear_scan, scan_kernel, unit_vectors
from longspan.ssm.kernels.interface import state_dtype


def replace_functions(mixer: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Give a mixer its class's forward, in which these names stand for these functions.

    The forward is a copy with other globals: the class and its module stay as they are. Names that it does not use are
    left out.
    """
    forward = class_forward(mixer)
    names = {
        **forward.__globals__,
        **{name: function for name, function in functions.items() if name in forward.__code__.co_names},
    }
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    mixer.forward = MethodType(copy, mixer)


def use_torch_operations(model: nn.Module) -> None:
    """Let mixers call transformers' own operations in torch, not the wrappers around them that choose a kernel."""
    for mixer in find_mixers(model).values():
        called = {name: class_forward(mixer).__globals__[name] for name in called_functions(class_forward(mixer))}
        replace_functions(mixer, {name: inspect.unwrap(function) for name, function in called.items()})


# This is the epsilon of the norm of queries and keys in flash-linear-attention.
_EPSILON = 1e-6


class MixerOps(NamedTuple):
    """What a mixer computes across rows: its convolution (T, C) and its scan (T, H, ·), as `longspan.ssm` has them."""

    convolve: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]  # (x, weight, bias, silu)
    scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]  # (q, k, v, g, beta, scale)


FindOps = Callable[[int, int], MixerOps]  # (batch, rows) of a call


def _convolve_alone(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Each row (T, C) is the only one of its document: of a channel's weights only the last one counts."""
    y = x * weight[:, -1] + (0 if bias is None else bias)
    return F.silu(y) if silu else y


def _scan_alone(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
    """q, k (T, H, K), v (T, H, V), g (T, H, 1 or K) to (T, H, V). It is no model's formula, but depends on every
    input, so that a trial sees a change of any."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out = scale * (q * k).sum(-1, keepdim=True) * v * (1 + g.exp().mean(-1, keepdim=True))
    return out if beta is None else out * beta.unsqueeze(-1)


ROWS_ALONE = MixerOps(_convolve_alone, _scan_alone)  # rows see only themselves: what is around a mixer is tried so
_SHAPES_ALONE = MixerOps(lambda x, *_: torch.empty_like(x), lambda q, k, v, *_: torch.empty_like(v))


def _ops_of_running_layer(name: str, batch: int, rows: int) -> MixerOps:
    """`name` is the mixer's, for messages. Operations for a probe return empty tensors of the right shapes."""
    shard = running_layer().shard
    if isinstance(shard, Probe):
        return _SHAPES_ALONE
    checked = require_one_row_shard(name, shard, batch, rows)
    if isinstance(checked, SeparateRows):
        return ROWS_ALONE
    return MixerOps(
        lambda x, weight, bias, silu: causal_conv(x, weight, bias, checked, silu=silu),
        lambda q, k, v, g, beta, scale: linear_scan(q, k, v, g, beta, checked, scale),
    )


def _refuse_cached_state(state: Tensor | None) -> None:
    if state is not None:
        raise ModelError("a mixer begins with a state of a cache; there is no cache in training: use_cache=False")


def _run_convolution(
    find_ops: FindOps,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """Rows are (1, C, T), a weight (C, width). Computed in the weight's type and returned in that of the rows."""
    x = hidden_states.to(weight.dtype).squeeze(0).t()
    silu = activation in ("silu", "swish")
    y = find_ops(len(hidden_states), len(x)).convolve(x, weight, bias, silu)
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
    **others: Any,
) -> tuple[Tensor, None]:
    """query, key (1, T, K heads, K), value (1, T, H, V), g (1, T, H, 1 or K), beta (1, T, H) to (1, T, H, V)."""
    _refuse_cached_state(initial_state)
    ops = find_ops(len(query), query.shape[1])
    q, k, v, decay, strength = (x.squeeze(0) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = unit_vectors(q, _EPSILON), unit_vectors(k, _EPSILON)
    decay = decay if decay.ndim == 3 else decay.unsqueeze(-1)
    out = ops.scan(q, k, v, decay, strength, q.shape[-1] ** -0.5)
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
    **others: Any,
) -> Tensor:
    """x (1, T, H, P), dt (1, T, H), A, D (H,), B, C (1, T, G, N) to (1, T, H, P). Steps are softplus(dt + bias), cut
    to `dt_limit`. The state decays by exp(step A), takes step · x at B and is read at C; D · x is added to what
    is read."""
    _refuse_cached_state(initial_states)
    if z is not None:
        raise ModelError("a Mamba 2 layer gives its gate to the scan (z), which no known layer does")
    ops = find_ops(len(x), x.shape[1])
    wide_dtype = state_dtype(x.dtype)
    # As linear attention: x are values, B keys and C queries. `step` is dt, then with its bias, softplus and limits.
    v, step, k, q = (t.squeeze(0) for t in (x, dt, B, C))
    step = step.to(wide_dtype) if dt_bias is None else step.to(wide_dtype) + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    # A kernel that computes on half precision gets the values as the model has them, else in the state's type.
    takes_half = scan_kernel(v, k.shape[-1], delta=False).half
    values = (v * step.unsqueeze(-1)).to(v.dtype if takes_half else wide_dtype)
    out = ops.scan(q, k, values, (step * A).unsqueeze(-1), None, 1.0)
    out = out if D is None else out + D.unsqueeze(-1) * v
    return out.to(x.dtype).unsqueeze(0)


class MixerFeature(Feature):
    """Mixers over the shard that their layers are called with."""

    def connect(self, model: PreTrainedModel) -> None:
        """Give each mixer the operations of the shard with which its layer runs, and count them in the description."""
        mixers = find_mixers(model)
        self.description["mixers"] = len(mixers)
        for name, mixer in mixers.items():
            set_mixer_ops(mixer, partial(_ops_of_running_layer, f"{name} ({type(mixer).__name__})"))


def set_mixer_ops(mixer: nn.Module, find_ops: FindOps) -> None:
    """Give a mixer its class's forward, in which functions of this module over these operations stand for kernels.

    Arguments about packing, chunk sizes and states to return are ignored.
    """
    functions: dict[str, Callable[..., Any]] = {
        CONVOLUTION: partial(_run_convolution, find_ops),
        **dict.fromkeys(SCANS[:2], partial(_run_delta_rule, find_ops)),  # the last one is Mamba 2's
        SCANS[2]: partial(_run_mamba2, find_ops),
        "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # declines, so that the mixer calls the others
    }
    replace_functions(mixer, functions)
