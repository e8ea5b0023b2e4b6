"""Linears that transformers has loaded in 4 or 8 bits, for peft or TRL: their own codes, taken over as packed rows."""

from typing import Any

from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.frozen.formats.stored import stored_weights
from longspan.model.frozen.packed_format import PackedFormat

_SETTINGS = {  # by the name of a class
    "Linear4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "Linear8bitLt": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "FP8Linear": {"quant_method": "fp8"},
}


def packed_from_module(module: nn.Module) -> tuple[PackedFormat, Tensor] | None:
    """Return the format and the packed rows, uint8 (rows, row_bytes), of a linear in 4 or 8 bits, on its device.

    >>> packed_from_module(nn.Linear(64, 64)) is None          # its weight is whole
    True

    Of a linear that peft has wrapped give the base layer. ModelError for classes and states that are not read.
    """
    kind = next((name for name in (c.__name__ for c in type(module).__mro__) if name in _SETTINGS), "")
    if not kind:
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if codes := [name for name, x in own if not x.is_floating_point() or x.element_size() == 1]:
            raise ModelError(
                f"a {type(module).__name__} holds codes ({codes[0]}), which are not read; load the model with "
                "BitsAndBytesConfig, or dequantize it (model.dequantize())"
            )
        return None
    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    if weight.is_floating_point() and weight.element_size() > 1 and state is None:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ModelError(
            f"a {kind} has weights in {dtype}, which bitsandbytes has not quantised: load the model by "
            "from_pretrained, without llm_int8_has_fp16_weight"
        )
    if getattr(state, "packing_format_for_cpu", False):  # of bitsandbytes 0.50, which rounds scales to bfloat16
        raise ModelError(
            f"a {kind} has run on this CPU, for which bitsandbytes rounded its scales; load the model again, and use "
            "it here before it runs"
        )
    settings = _SETTINGS[kind] | {"weight_block_size": getattr(module, "block_size", None)}
    stored = stored_weights(settings)
    assert stored is not None
    tensors = {f"linear.{name}": x for name, x in module.state_dict().items()}
    entry = stored.weight("linear.weight", tensors)
    return entry.format, entry.read()
