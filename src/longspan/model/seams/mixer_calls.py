"""What the mixers of transformers call in place of their own kernels: the same arguments, over a sharded sequence.

A mixer's class, weights and keys stay. An instance gets its own class's forward with other names behind it: where it
says `causal_conv1d_fn` or the name of a scan, functions of this module are found. Projections, gates, norms and
multipliers are the model's own code.

Tensors have a batch of one packed row. Each function computes in the precision that the fallbacks of transformers do,
float32 or better, and returns what they return, without states of a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from longspan.comm import SequenceShard
from longspan.errors import LayoutError, ModelError
from longspan.model.seams.attention_record import Probe
from longspan.model.seams.layer_arguments import shard_of_layer
from longspan.model.seams.mixers import mixers_of, with_functions
from longspan.model.seams.separate_rows import SeparateRows, convolve_separately, scan_separately
from longspan.ssm import causal_conv, kernel_of, linear_scan, unit
from longspan.ssm.kernels import check_asked
from longspan.ssm.kernels.call import state_dtype

Convolution = Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
_EPSILON = 1e-6  # of the norm of queries and keys, as in flash-linear-attention


@dataclass(frozen=True)
class Rows:
    """How a mixer's rows meet: its convolution (T, C) and its scan (T, H, ·), as `longspan.ssm` has them.

    `kernels` are the names of those asked for, of which the scan takes its own.
    """

    convolution: Convolution
    scan: Scan
    kernels: tuple[str, ...] = ()


class OverShard:
    """The rows of the shard that a mixer, or the decoder layer around it, was called with."""

    def __init__(self, name: str, kernels: tuple[str, ...] = ()) -> None:
        self.name, self.kernels = name, kernels

    def __call__(self, shard: object, batch: int, rows: int) -> Rows:
        """Raises ModelError without a shard, with more than one batch row, or with other rows than the shard's."""
        shard = shard_of_layer() if shard is None else shard
        if isinstance(shard, Probe):
            return _SHAPES
        if not isinstance(shard, SequenceShard):
            raise ModelError(
                f"{self.name} got no shard, so it cannot know which rows it holds; call model(..., shard=shard) with "
                "shard = bind(micro_batch, world)"
            )
        if batch != 1 or rows != shard.local_rows:
            raise ModelError(
                f"{self.name} got {batch} x {rows} rows; the shard is one packed row of {shard.local_rows}"
            )
        if isinstance(shard, SeparateRows):
            return ROWS_ALONE
        return Rows(
            lambda x, weight, bias, silu: causal_conv(x, weight, bias, shard, silu=silu, kernels=self.kernels),
            lambda q, k, v, g, beta, scale: linear_scan(q, k, v, g, beta, shard, scale, kernels=self.kernels),
            self.kernels,
        )


# For passes that show shapes; and for rows that see themselves alone, by which what is around a mixer can be tried.
_SHAPES = Rows(lambda x, weight, bias, silu: torch.empty_like(x), lambda q, k, v, g, beta, scale: torch.empty_like(v))
ROWS_ALONE = Rows(convolve_separately, scan_separately)
RowsOf = Callable[[object, int, int], Rows]


def calls_of(rows_of: RowsOf) -> dict[str, Callable[..., Any]]:
    """The functions by the names under which mixers call them."""
    delta_rule = partial(_delta_rule, rows_of)
    return {
        "causal_conv1d_fn": partial(_convolve, rows_of),
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": partial(_mamba2, rows_of),
        "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # a fused kernel, which may decline
    }


def _convolve(
    rows_of: RowsOf,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    shard: object = None,
    **others: Any,
) -> Tensor:
    """hidden_states (1, C, T), weight (C, W) -> (1, C, T)."""
    x = hidden_states.to(weight.dtype).squeeze(0).t()
    silu = activation in ("silu", "swish")
    y = rows_of(shard, len(hidden_states), len(x)).convolution(x, weight, bias, silu)
    y = y if activation is None or silu else ACT2FN[activation](y)
    return y.to(hidden_states.dtype).t().unsqueeze(0)


def _delta_rule(
    rows_of: RowsOf,
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
    """query, key (1, T, K heads, K), value (1, T, H, V), g (1, T, H) or (1, T, H, K), beta (1, T, H)."""
    _refuse_state(initial_state)
    rows = rows_of(shard, len(query), query.shape[1])
    q, k, v, decay, weight = (x.squeeze(0) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = unit(q, _EPSILON), unit(k, _EPSILON)
    decay = decay if decay.ndim == 3 else decay.unsqueeze(-1)
    return rows.scan(q, k, v, decay, weight, q.shape[-1] ** -0.5).to(query.dtype).unsqueeze(0), None


def _mamba2(
    rows_of: RowsOf,
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
    """x (1, T, H, P), dt (1, T, H), A and D (H,), B and C (1, T, G, N) -> (1, T, H, P)."""
    _refuse_state(initial_states)
    if z is not None:
        raise ModelError("a Mamba 2 layer gives its gate to the scan (z), which no known layer does")
    rows = rows_of(shard, len(x), x.shape[1])
    wide = state_dtype(x.dtype)
    v, step, k, q = (t.squeeze(0) for t in (x, dt, B, C))
    step = step.to(wide) if dt_bias is None else step.to(wide) + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    half = kernel_of(v, k.shape[-1], delta=False, asked=rows.kernels).half
    values = (v * step.unsqueeze(-1)).to(v.dtype if half else wide)
    out = rows.scan(q, k, values, (step * A).unsqueeze(-1), None, 1.0)
    out = out if D is None else out + D.unsqueeze(-1) * v
    return out.to(x.dtype).unsqueeze(0)


def _refuse_state(state: Tensor | None) -> None:
    if state is not None:
        raise ModelError("a mixer begins with a state of a cache; there is no cache in training: use_cache=False")


def check_kernels(model: PreTrainedModel, kernels: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError for kernels of state-space layers that were asked for and cannot be used here."""
    if not kernels:
        return
    if not mixers_of(model):
        raise ModelError(
            f"kernels of state-space layers are {', '.join(kernels)}, and {type(model).__name__} has no such layers; "
            "leave them out"
        )
    try:
        check_asked(kernels, dtype, device)
    except LayoutError as error:
        raise ModelError(str(error)) from None


def shard_mixers(model: PreTrainedModel, kernels: tuple[str, ...] = ()) -> None:
    """From here on, the model's mixers run over the shard that their layers are called with, by `kernels`."""
    for name, mixer in mixers_of(model).items():
        redirect(mixer, OverShard(f"{name} ({type(mixer).__name__})", kernels))


def redirect(mixer: nn.Module, rows_of: RowsOf) -> None:
    """Give an instance its class's forward with the functions of this module for these rows."""
    with_functions(mixer, calls_of(rows_of))
