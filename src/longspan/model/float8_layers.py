"""Which linear layers and experts of a model compute in float8, and models and devices that are refused.

All linears of decoder layers and depths do, under an adapter too, and experts; not head, embedding, norms, routers,
adapters, encoders, gates, and linears narrower than 64. A linear's `forward` is set, nothing else.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter
from longspan.model.execution import Execution
from longspan.model.feature import Feature
from longspan.model.float8.products import (
    ScaledRows,
    add_float8_weights,
    find_or_make_float8_weight,
    linear_in_float8,
    multiply_scaled_rows,
    quantise_by_torch,
)
from longspan.model.kinds import expert_modules, is_linear, router_modules
from longspan.model.layers import MTP, decoder_layers, mtp_depths
from longspan.model.marks import find_float8_weight
from longspan.model.seams.set_forwards import has_forward_of_others
from longspan.model.tensor_parallel import module_styles as styles
from longspan.model.tensor_parallel.module_styles import list_styles

# Products in float8 need widths of a matrix that are multiples of this number.
MULTIPLE = 16
_LEAST_WIDTH = 64
_LEAST_CAPABILITY = (8, 9)
# Routers that are plain linears, the gate of experts that every row visits, and one number a head in mixers.
_GATES = frozenset(
    ("gate", "router", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj")
)
_OUT_SPLIT = (styles.COLWISE, styles.PACKED, styles.QKV, *styles.GATHERED)
_IN_SPLIT = (styles.ROWWISE, styles.SPLIT_INPUT)


def float8_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linears that compute in float8, each once, by qualified name."""
    blocks = [*decoder_layers(model), *([MTP] if mtp_depths(model) else [])]
    prefixes = tuple(f"{name}." for name in blocks)
    router_prefixes = tuple(f"{name}." for name in router_modules(model))
    linears = dict[str, nn.Linear]()
    for name, module in model.named_modules():
        is_left_out = f"{name}.".startswith(router_prefixes) or belongs_to_adapter(f"{name}.")
        if not is_linear(module) or not name.startswith(prefixes) or is_left_out or has_forward_of_others(module):
            continue
        # the last word, without the `base_layer` that peft puts behind a linear's name
        linear_name = [word for word in name.split(".") if word != "base_layer"][-1]
        if linear_name not in _GATES and min(module.in_features, module.out_features) >= _LEAST_WIDTH:
            linears[name] = module
    return linears


def float8_device_reason(device: torch.device) -> str:
    """Return what a device lacks to multiply in float8; "" if nothing."""
    need = f"needs a GPU of compute capability {'.'.join(map(str, _LEAST_CAPABILITY))} or more"
    if device.type != "cuda":
        return f"{need}, and this rank computes on a CPU"
    capability = torch.cuda.get_device_capability(device)
    if capability >= _LEAST_CAPABILITY:
        return ""
    return f"{need}, and {torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"


class Float8Feature(Feature):
    """Linears and experts in float8."""

    def rank_error(self, model: PreTrainedModel) -> ModelError | None:
        """Return why this rank's device, or the model, cannot have float8; None if it can."""
        word = self.options.float8
        if word != "rowwise":
            return ModelError(f'float8 is {word!r}; use "rowwise" (one scale a row), or "" for none')
        dtype = self.options.sharding(self.world).compute_dtype_of(model)
        if reasons := [*_reasons_against_float8(model, self.world.device, dtype, self.world.home.tp)]:
            return ModelError(
                f'float8 is "rowwise" for {type(model).__name__}, and {"; ".join(reasons)}; leave float8 out'
            )
        return None

    def convert(self, model: PreTrainedModel, execution: Execution) -> None:
        """Set the forwards of linears, mark experts, and describe what share of the layers' weights is in float8."""
        linears = float8_linears(model)
        experts = expert_modules(model)
        float8_numbers = sum(linear.weight.numel() for linear in linears.values())
        for linear in linears.values():
            add_float8_weights(linear, ["weight"])
            # a method, so that layers of a kind share compiled graphs
            linear.forward = MethodType(_run_linear, linear)
        for module in experts.values():
            matrices = {name: p.numel() for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
            add_float8_weights(module, matrices)
            float8_numbers += sum(matrices.values())
        layers = (*decoder_layers(model).values(), *mtp_depths(model))
        layer_numbers = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
        experts_text = f", experts of {len(experts)} layers" if experts else ""
        percent = 100 * float8_numbers / layer_numbers
        self.words["products"] = (
            f"float8 by rows: {len(linears)} linears{experts_text}, {percent:.1f} % of the layers' weights"
        )


def _reasons_against_float8(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, tp: int
) -> Iterator[str]:
    """Parameters of experts with three dims are stacked matrices, one for each expert; they are looked at whole."""
    if reason := float8_device_reason(device):
        yield reason
    if reason := float8_dtype_reason(dtype):
        yield reason
    linears = float8_linears(model)
    experts = expert_modules(model)
    if not linears and not experts:
        yield f"no linear of its decoder layers has {_LEAST_WIDTH} inputs and outputs or more"
    styles_by_name = {entry.name: entry.style for entry in list_styles(model)} if tp > 1 else {}
    style_of = {name: styles_by_name.get(name.removesuffix(".base_layer"), "") for name in linears}
    # into how many parts tensor parallelism cuts a linear's outputs, and its inputs
    out_parts = {name: tp if style in _OUT_SPLIT else 1 for name, style in style_of.items()}
    in_parts = {name: tp if style in _IN_SPLIT else 1 for name, style in style_of.items()}
    widths = {n: (x.out_features // out_parts[n], x.in_features // in_parts[n]) for n, x in linears.items()}
    for name, module in experts.items():
        widths |= {f"{name}.{key}": tuple(p.shape[1:]) for key, p in module.named_parameters() if p.ndim == 3}
    uneven = {name: pair for name, pair in widths.items() if any(width % MULTIPLE for width in pair)}
    if uneven:
        name, pair = next(iter(uneven.items()))
        of_rank = f" on each of {tp} tensor-parallel ranks" if tp > 1 else ""
        others = f", as of {len(uneven) - 1} more" if len(uneven) > 1 else ""
        yield f"products in float8 need widths that {MULTIPLE} divides: those of {name}{of_rank} are {pair}{others}"


def float8_dtype_reason(dtype: torch.dtype) -> str:
    """Return why a model that computes in this dtype cannot have float8; "" if it can."""
    if dtype == torch.bfloat16:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"its other arithmetic must be in bfloat16, and is in {name} (compute_dtype=torch.bfloat16)"


def _run_linear(linear: nn.Linear, input: Tensor) -> Tensor:
    """Widths are checked here as well, since the parts of linears in mixers are not known before the split."""
    weight = linear.weight
    if any(width % MULTIPLE for width in weight.shape):
        raise ModelError(
            f"products in float8 need widths that {MULTIPLE} divides, and this rank's part of the weight "
            f"{(linear.out_features, linear.in_features)} of a linear is {tuple(weight.shape)}; use another tp, or "
            "leave float8 out"
        )
    # torch.compile traces none of the code below, so that an operator runs it.
    if torch.compiler.is_compiling():
        rows = input.reshape(-1, input.shape[-1])
        y = _multiply_rows(rows, *quantise_by_torch(rows.detach()), weight, linear.bias)
        return y.view(*input.shape[:-1], weight.shape[0])
    float8_weight = find_float8_weight(linear, "weight")
    assert float8_weight is not None
    return linear_in_float8(input, weight, linear.bias, float8_weight)


# ---- inside code that torch.compile traces: custom operators, as it cannot trace `products.py`

# (torch 2.13 fails if the output of an autograd.Function goes into another one and its number of rows changes.) Rows
# are converted by torch's operations, which the compiler fuses with the norm or gate before, and computes once for all
# linears of the same rows. Weights are converted by the kernels, in each pass, or once for several passes
# (`products.keep_quantised_weights`).


@torch.library.custom_op("longspan::float8_linear", mutates_args=())
def _multiply_rows(x: Tensor, values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows x (S, K) in float8 times a weight (N, K); x itself gives the result's dtype, and is what backward reads."""
    return multiply_scaled_rows(
        ScaledRows(values, scales), find_or_make_float8_weight(weight).rows(weight), x.dtype, bias
    )


@torch.library.custom_op("longspan::float8_row_gradient", mutates_args=())
def _multiply_row_gradients(dy: Tensor, values: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """dy (S, N) in float8 times a weight (N, K); of dy itself only the dtype is read."""
    return multiply_scaled_rows(
        ScaledRows(values, scales), find_or_make_float8_weight(weight).columns(weight), dy.dtype
    )


@_multiply_rows.register_fake
def _(x: Tensor, values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@_multiply_row_gradients.register_fake
def _(dy: Tensor, values: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[0], weight.shape[1]))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, weight, _ = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight)


def _gradients_of_inputs(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Values and scales get no gradient, as they are made of x."""
    x, weight = ctx.saved_tensors
    # of the inputs x, values, scales, weight, bias
    needs_rows, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 3, 4))
    return (
        _multiply_row_gradients(dy, *quantise_by_torch(dy), weight) if needs_rows else None,
        None,
        None,
        (dy.t() @ x).to(weight.dtype) if needs_weight else None,
        dy.sum(0) if needs_bias else None,
    )


_multiply_rows.register_autograd(_gradients_of_inputs, setup_context=_save_inputs)
