"""Tiny folders in 4 and 8 bits, written by bitsandbytes, compressed-tensors and transformers, and what these read.

transformers quantises to MXFP4 by a kernel of GPUs alone: its blocks and scales are drawn, by the published definition.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.model.stock import SIZES, random_model
from tests.versions import transformers_before

Weights = dict[str, Tensor]
WIDE = SIZES | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
GATE = "model.layers.0.mlp.gate_proj.weight"


def _stock(folder: Path, kind: str = "Qwen3Config", dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Weights:
    config = getattr(transformers, kind)(**WIDE | sizes)
    random_model(config, torch.float32).to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _write(folder: Path, weights: Weights, **settings: Any) -> None:
    write_config(folder, **settings)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")


def _is_linear(name: str) -> bool:
    return "_proj.weight" in name


# ---- bitsandbytes, through transformers


def _bitsandbytes(**settings: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pytest.importorskip("bitsandbytes")
        _stock(folder)
        quantization = transformers.BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.bfloat16)
        model.save_pretrained(folder)

    return write


def _read_bitsandbytes(folder: Path, dtype: torch.dtype) -> Weights:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return dict(model.dequantize().state_dict())


# ---- float8 of transformers: its quantiser on tensors, as it asks for a GPU to quantise a model


def quantise_float8(folder: Path, **settings: Any) -> None:
    """Convert the linears of a folder's layers, as a `fp8` folder has them."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    weights = load_file(folder / "model.safetensors")
    config = transformers.FineGrainedFP8Config(**settings)
    quantiser: Any = type("Quantiser", (), {"quantization_config": config})()
    for name in [name for name in weights if _is_linear(name)]:
        weights |= Fp8Quantize(quantiser).convert({name: weights[name]})
        if config.weight_block_size is None:
            scale = f"{name}_scale_inv"
            weights |= {scale: weights[scale].reshape(()), name.replace("weight", "activation_scale"): torch.ones(())}
    _write(folder, weights, **config.to_dict())


def _float8(kind: str = "Qwen3Config", sizes: dict[str, Any] | None = None, **settings: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        _stock(folder, kind, **(sizes or {}))
        quantise_float8(folder, **settings)

    return write


def read_float8(folder: Path, dtype: torch.dtype) -> Weights:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = transformers.FineGrainedFP8Config(**settings | {"dequantize": True})
    return dict(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).state_dict())


# ---- float8 of compressed-tensors


def _compressed(strategy: str, scale_dtype: torch.dtype, **arguments: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )

        _stock(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **arguments)
        inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format="float-quantized")
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                scale = module.weight_scale.data.to(scale_dtype)
                largest = module.weight.detach().abs().max() / 448
                module.weight_scale = torch.nn.Parameter(torch.full_like(scale, float(largest)), requires_grad=False)
                module.weight_scale.data.view(-1)[::2] *= 1.25
        ModelCompressor(quantization_config=config).compress_model(model)
        weights = {name: x.contiguous() for name, x in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        write_config(folder, **config.model_dump(mode="json"))

    return write


def _read_compressed(folder: Path, dtype: torch.dtype) -> Weights:
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    # transformers 5.17 rounds scales to the dtype that is asked for, before they multiply weights
    if transformers_before("5.24"):
        return _read_decompressed(folder, dtype)
    config.quantization_config["dequantize"] = True
    return dict(AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).state_dict())


def _read_decompressed(folder: Path, dtype: torch.dtype) -> Weights:
    """What compressed-tensors decompresses, as a folder of whole weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model_config: Any = transformers.AutoConfig.from_pretrained(folder)
    config = QuantizationConfig.model_validate(model_config.quantization_config)
    del model_config.quantization_config
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    weights = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_scale") for name in weights if name.endswith(".weight_scale")]:
        ends = [end for end in ("", "_packed", "_scale", "_shape") if f"{name}{end}" in weights]
        tensors = {f"weight{end}": weights.pop(f"{name}{end}") for end in ends}
        weights[name] = compressor.decompress(tensors, config.config_groups["group_0"])["weight"]
    whole = folder.with_name(f"{folder.name}, whole")
    model_config.save_pretrained(whole)
    save_file({name: x.contiguous() for name, x in weights.items()}, whole / "model.safetensors")
    return dict(AutoModelForCausalLM.from_pretrained(whole, dtype=dtype).state_dict())


# ---- int4 of compressed-tensors


def _int4(
    kind: str = "Qwen3Config", sizes: dict[str, Any] | None = None, *, scale_dtype: torch.dtype, **arguments: Any
) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

        weights = _stock(folder, kind, **(sizes or {}))
        args = QuantizationArgs(num_bits=4, type="int", symmetric=True, **arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            ignore=["lm_head"],
            format="pack-quantized",
            quantization_status="compressed",
        )
        compressor: Any = BaseCompressor.get_value_from_registry(config.format)
        for name in [name for name in weights if _is_linear(name)]:
            weight = weights.pop(name)
            groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
            tensors = {"weight": weight, "weight_scale": (groups.abs().amax(-1) / 7.5).to(scale_dtype)}
            compressed = compressor.compress(tensors, scheme)
            weights |= {name.replace("weight", key): x for key, x in compressed.items()}
        _write(folder, weights, **config.model_dump(mode="json"))

    return write


# ---- MXFP4 of gpt-oss


def _mxfp4(folder: Path) -> None:
    sizes = {"intermediate_size": 64, "hidden_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    weights = _stock(folder, "GptOssConfig", **sizes, sliding_window=16)
    random = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        weights[f"{name}_blocks"] = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(118, 125, shape[:-1], generator=random, dtype=torch.uint8)
    _write(folder, weights, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])


def _read_mxfp4(folder: Path, dtype: torch.dtype) -> Weights:
    config = transformers.Mxfp4Config(dequantize=True)
    return dict(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).state_dict())


Case = tuple[Callable[[Path], None], Callable[[Path, torch.dtype], Weights], str]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
AGAIN = NF4 | {"bnb_4bit_use_double_quant": True}
IN_BFLOAT16 = AGAIN | {"bnb_4bit_quant_storage": "bfloat16"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BLOCKS = {"weight_block_size": (64, 64), "modules_to_not_convert": ["lm_head"]}
CASES: dict[str, Case] = {
    "nf4": (_bitsandbytes(**NF4), _read_bitsandbytes, "nf4 (bitsandbytes)"),
    "nf4, scales quantised": (_bitsandbytes(**AGAIN), _read_bitsandbytes, "nf4 (bitsandbytes, scales quantised)"),
    "nf4 in bfloat16": (_bitsandbytes(**IN_BFLOAT16), _read_bitsandbytes, "nf4 (bitsandbytes, scales quantised)"),
    "fp4": (_bitsandbytes(load_in_4bit=True), _read_bitsandbytes, "fp4 (bitsandbytes)"),
    "int8": (_bitsandbytes(load_in_8bit=True), _read_bitsandbytes, "int8 (bitsandbytes)"),
    "float8 in blocks": (_float8(**BLOCKS), read_float8, "float8 in blocks of 64 × 64 (fp8)"),
    "float8 of experts": (
        _float8("Qwen3MoeConfig", MOE, **BLOCKS),
        read_float8,
        "float8 in blocks of 64 × 64 (fp8)",
    ),
    "float8 by exponents": (
        _float8(**BLOCKS, scale_fmt="ue8m0"),
        read_float8,
        "float8 in blocks of 64 × 64 (fp8)",
    ),
    "float8, one scale": (
        _float8(weight_block_size=None, activation_scheme="static"),
        read_float8,
        "float8 with a scale for each weight (fp8)",
    ),
    "compressed by channel": (
        _compressed("channel", torch.bfloat16),
        _read_compressed,
        "float8 by channel (compressed-tensors)",
    ),
    "compressed by tensor": (
        _compressed("tensor", torch.float32),
        _read_compressed,
        "float8 by tensor (compressed-tensors)",
    ),
    "compressed by block": (
        _compressed("block", torch.float32, block_structure=[64, 64]),
        _read_compressed,
        "float8 by 64 × 64 blocks (compressed-tensors)",
    ),
    "int4 by group": (
        _int4(scale_dtype=torch.bfloat16, strategy="group", group_size=32, actorder="weight"),
        _read_decompressed,
        "int4 by groups of 32 (compressed-tensors)",
    ),
    "int4 by channel": (
        _int4(sizes={"intermediate_size": 180}, scale_dtype=torch.float32, strategy="channel"),
        _read_decompressed,
        "int4 by channel (compressed-tensors)",
    ),
    "int4 of experts": (
        _int4("Qwen3MoeConfig", MOE, scale_dtype=torch.float16, strategy="group", group_size=64),
        _read_decompressed,
        "int4 by groups of 64 (compressed-tensors)",
    ),
    "mxfp4": (_mxfp4, _read_mxfp4, "experts in 4 bits (mxfp4)"),
}
