"""Linears that transformers has loaded in 4 or 8 bits, for peft or TRL: their own codes, taken over as packed rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import is_adapted
from longspan.model.frozen.formats.storage_methods import find_storage_method
from longspan.model.frozen.formats.stored_weight import StoredWeight
from longspan.plan.shape.quantization import DEQUANTIZE

# The key is the name of a class.
_SETTINGS = {
    "Linear4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "Linear8bitLt": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "FP8Linear": {"quant_method": "fp8"},
}
# This attribute of an nn.Linear is its StoredWeight.
OWN_CODES = "own_codes"


@contextmanager
def take_over_codes(model: PreTrainedModel) -> Iterator[None]:
    """Put an nn.Linear in place of each linear in 4 or 8 bits; if the context raises, the old ones are put back.

    The new weights are frozen, on the meta device; an attribute of the linear, OWN_CODES, has the bytes. The model is
    no longer marked as quantised. ModelError for codes that are not read.
    """
    marked = vars(model).get("is_quantized")
    linears = dict[nn.Module, nn.Linear]()
    for module in [*model.modules()]:
        if (codes := stored_weight_of_module(module)) is not None:
            rows, columns = codes.shape
            linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=model.dtype).requires_grad_(False)
            linear.bias = module.bias  # pyright: ignore[reportAttributeAccessIssue]
            vars(linear)[OWN_CODES] = codes
            linears[module] = linear.train(module.training)
    places = [(m, name, child) for m in model.modules() for name, child in m._modules.items() if child in linears]
    wrappers = {module: type(module) for module, name, _ in places if is_adapted(module) and name == "base_layer"}
    for module, name, child in places:
        module._modules[name] = linears[child]
    for wrapper in wrappers:  # peft has other classes over bitsandbytes, which multiply as its usual one
        from peft.tuners.lora import Linear

        wrapper.__class__ = Linear
        vars(wrapper).setdefault("is_target_conv_1d_layer", False)
    if linears and marked:
        vars(model)["is_quantized"] = False
    try:
        yield
    except BaseException:
        for module, name, child in places:
            module._modules[name] = child
        for wrapper, kind in wrappers.items():
            wrapper.__class__ = kind
        if marked:
            vars(model)["is_quantized"] = marked
        raise


def holds_codes(model: nn.Module) -> bool:
    """Return whether transformers has loaded linears of a model in 4 or 8 bits, of a kind that is read."""
    return any(map(_kind_of_codes, model.modules()))


def _kind_of_codes(module: nn.Module) -> str:
    if is_adapted(module):  # peft's classes have the same names
        return ""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _SETTINGS), "")


def stored_weight_of_module(module: nn.Module) -> StoredWeight | None:
    """Return the weight of a linear in 4 or 8 bits, whose packed rows lie on its device.

    >>> stored_weight_of_module(nn.Linear(64, 64)) is None          # its weight is whole
    True

    Of a linear that peft has wrapped give the base layer. ModelError for classes and states that are not read.
    """
    kind = _kind_of_codes(module)
    if not kind:
        own_parameters = module.named_parameters(recurse=False)
        if codes := [name for name, x in own_parameters if not x.is_floating_point() or x.element_size() == 1]:
            raise ModelError(
                f"a {type(module).__name__} holds codes ({codes[0]}), which are not read; read the folder by "
                f"load_model(folder, quantized=True), load whole weights with BitsAndBytesConfig, or {DEQUANTIZE}"
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
    # bitsandbytes 0.50 rounds these scales to bfloat16.
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"a {kind} has run on this CPU, for which bitsandbytes rounded its scales; load the model again, and use "
            "it here before it runs"
        )
    settings = _SETTINGS[kind] | {"weight_block_size": getattr(module, "block_size", None)}
    stored = find_storage_method(settings)
    assert stored is not None
    tensors = {f"linear.{name}": x for name, x in module.state_dict().items()}
    return stored.make_weight("linear.weight", tensors)
