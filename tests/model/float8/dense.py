"""Float8 by rows in float64 on one process, written down once more: what every product and model is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from longspan.model import float8_layers
from tests.model.stock import SIZES, at_random

WIDE = SIZES | {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 62, "initializer_range": 0.02}


def rounded(x: Tensor) -> Tensor:
    """The rows (…, n) as float8 has them, each by its own scale, in float64."""
    most = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-30)
    scaled = x.float() * torch.div(torch.tensor(448.0), most)
    return scaled.to(torch.float8_e4m3fn).double() * (most * (1 / 448)).double()


class DenseLinear(torch.autograd.Function):
    """x W' of rows and a weight rounded by rows; the gradient of x from rounded rows of dy and columns of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_weight = torch.einsum("...n,...k->nk", dy, x)
        return rounded(dy) @ rounded(weight.t()).t(), of_weight


def use_dense_float8(model: PreTrainedModel) -> PreTrainedModel:
    """Let every linear of a stock model's layers compute by these formulas."""
    for layer in model.model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, linear=module: DenseLinear.apply(x, linear.weight)
    return model


def random_model(experts: int = 0) -> PreTrainedModel:
    of_experts: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": experts, "num_experts_per_tok": 2}
    return at_random(Qwen3MoeConfig(**WIDE, **of_experts) if experts else Qwen3Config(**WIDE))


@contextmanager
def float8_on_cpus() -> Iterator[None]:
    """Let `prepare` take float8 on CPUs and in any dtype: products are then made in float64."""
    lacks = float8_layers.float8_device_reason, float8_layers.float8_dtype_reason
    float8_layers.float8_device_reason = float8_layers.float8_dtype_reason = lambda _: ""
    try:
        yield
    finally:
        float8_layers.float8_device_reason, float8_layers.float8_dtype_reason = lacks
