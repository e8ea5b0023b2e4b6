"""A small copy with an adapter over frozen weights in 4 bits, and the stock one over the values that they stand for."""

import zlib
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapters.adapter import adapter_parameters
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.frozen.frozen_weights import choose_formats
from longspan.plan.form import Form

_WIDTH = 128  # so that the part of each of two tensor-parallel ranks is a block
# The width is that of four heads.
_HEAD = 32
_WIDTHS = ("hidden_size", "intermediate_size", "_lora_rank", "latent_size")
_RANK = 4


def adapter_text(form: Form | None) -> str:
    """In words, which follow those of a small copy, over what its adapter is trained; "" without one."""
    return f", with an adapter over weights in {form.frozen}" if form else ""


def widen_rows(config: PreTrainedConfig, form: Form) -> PreTrainedConfig:
    """Return a copy of a small configuration whose linears have rows that can be packed as the form says. Raises
    ModelError where a model of such sizes cannot be made, or its rows cannot be packed all the same.
    """
    wide = deepcopy(config)
    text: Any = wide.get_text_config()
    for name, value in text.to_dict().items():
        if type(value) is int and value > 0 and name.endswith(_WIDTHS):
            setattr(text, name, _WIDTH)
        elif type(value) is int and value > 0 and name.endswith("head_dim"):
            setattr(text, name, _HEAD)
    try:
        model = make_tiny_model(wide, torch.float32)
        reasons = {
            name: packed.rows.reason_against(model.get_parameter(name).shape[-1])
            for name, packed in choose_formats(model, form.frozen).items()
        }
    except Exception as error:  # configurations and models raise errors of every kind
        text_of_error = " ".join(str(error).split())[:200]
        raise ModelError(f"no small copy with rows of {_WIDTH} can be made: {text_of_error}") from error
    if not reasons or any(reasons.values()):
        first = next((f"{name}: {reason}" for name, reason in reasons.items() if reason), "it has no linears")
        raise ModelError(f"no small copy of {type(config).__name__} can be frozen as {form.frozen!r}: {first}")
    return wide


@torch.no_grad()
def add_drawn_adapter(model: PreTrainedModel) -> Any:
    """Return the model as a PeftModel with a drawn adapter of its dtype on every linear of its decoder layers."""
    peft_model = add_lora(model.requires_grad_(False), NewAdapter(rank=_RANK))
    for name, parameter in adapter_parameters(peft_model.get_base_model()):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
            model.dtype
        )
    return peft_model


@torch.no_grad()
def add_adapter_to_dequantised(model: PreTrainedModel, form: Form) -> PreTrainedModel:
    """Add the adapter to a stock model; return the model inside, its weights as packed ones are computed with."""
    inside: Any = add_drawn_adapter(model).get_base_model()
    for name, packed in choose_formats(inside, form.frozen).items():
        rows = inside.get_parameter(name).data.flatten(0, -2)
        # The numbers are written into the weight's own memory.
        packed.unpack(packed.pack(rows), rows)
    return inside
