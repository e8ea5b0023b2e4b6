"""Linears that transformers loaded in 4 and 8 bits are taken over with their own codes; others are refused by name."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Linear

from longspan.errors import ModelError
from longspan.model.frozen.formats.loaded_linears import stored_weight_of_module


def _weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn((96, 128), generator=torch.Generator().manual_seed(0)).to(dtype)


def _four_bit(**options: Any) -> Any:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    linear = bitsandbytes.nn.Linear4bit(128, 96, bias=False, **options)
    linear.weight = bitsandbytes.nn.Params4bit(_weight(), module=linear, **options)
    return linear


@pytest.mark.parametrize(
    "options",
    [
        {"quant_type": "nf4", "compress_statistics": False},
        {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16},
        {"quant_type": "fp4", "compress_statistics": True},
    ],
    ids=str,
)
def test_codes_of_four_bits(options: dict[str, Any]) -> None:
    linear = _four_bit(**options).to("cpu")
    codes = linear.weight.data.clone().view(torch.uint8).view(96, 64)
    from bitsandbytes.functional import dequantize_4bit

    exact = dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    found = stored_weight_of_module(linear)
    assert found is not None
    assert torch.equal(found.read()[:, :64], codes)
    values = torch.empty((96, 128), dtype=torch.bfloat16)
    found.format.unpack(found.read(), values)
    assert torch.equal(values, exact)
    linear.weight.quant_state.packing_format_for_cpu = True  # as evaluation on some CPUs leaves it
    with pytest.raises(ModelError, match="a Linear4bit has run on this CPU, for which bitsandbytes rounded its scales"):
        stored_weight_of_module(linear)


@pytest.mark.parametrize("has_run", [False, True])
def test_codes_of_eight_bits(has_run: bool) -> None:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    linear = bitsandbytes.nn.Linear8bitLt(128, 96, bias=False, has_fp16_weights=False)
    linear.weight = bitsandbytes.nn.Int8Params(_weight(torch.float16), has_fp16_weights=False, requires_grad=False)
    linear = linear.to("cpu")
    exact = bitsandbytes.functional.int8_vectorwise_dequant(linear.weight.data, linear.weight.SCB)
    if has_run:
        linear(torch.ones((1, 128), dtype=torch.float16))
    found = stored_weight_of_module(linear)
    assert found is not None
    assert torch.equal(found.read()[:, :128].view(torch.int8), linear.weight.data)
    assert torch.equal(found[...], exact)


def test_codes_of_float8() -> None:
    linear = FP8Linear(128, 96, block_size=(64, 64))
    codes, scales = _weight().to(torch.float8_e4m3fn), torch.rand(2, 2)
    linear.weight, linear.weight_scale_inv = (nn.Parameter(x, requires_grad=False) for x in (codes, scales))
    found = stored_weight_of_module(linear)
    assert found is not None
    wide = scales.repeat_interleave(64, 0)[:96].repeat_interleave(64, 1)
    assert torch.equal(found[...], codes.float() * wide)


def test_whole_and_unknown_linears() -> None:
    assert stored_weight_of_module(nn.Linear(64, 64)) is None
    coded = nn.Linear(64, 64, bias=False)
    coded.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    says = (
        r"a Linear holds codes \(weight\), which are not read; read the folder by load_model\(folder, quantized=True\),"
    )
    with pytest.raises(ModelError, match=says):
        stored_weight_of_module(coded)
    with pytest.raises(ModelError, match="a Linear4bit has weights in bfloat16, which bitsandbytes has not quantised"):
        stored_weight_of_module(_four_bit(quant_type="nf4"))
    whole = pytest.importorskip("bitsandbytes").nn.Linear8bitLt(64, 64, has_fp16_weights=True)
    with pytest.raises(ModelError, match="a Linear8bitLt has weights in float32, which bitsandbytes has not quantised"):
        stored_weight_of_module(whole)
