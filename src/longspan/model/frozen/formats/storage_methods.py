"""Folders with weights in 4 or 8 bits, as published: which tensors of the files make a weight, and in which format.

What is not read is refused by name, with what to do.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from longspan.errors import ModelError
from longspan.model.frozen.formats.stored_weight import (
    StoredWeight,
    Tensors,
    stored_float8_weight,
    stored_four_bit_weight,
    stored_int8_weight,
    stored_mxfp4_weight,
    tensor_dtype,
)

# Scales of activations and of caches, which say nothing of the weights.
_OF_ACTIVATIONS = re.compile(r".*\.(activation|input|output|[qkv])_(scale|zero_point|global_scale)(_inv)?")
_ADVICE = (
    "use a folder in float8 (fp8 or compressed-tensors), in 4 or 8 bits of bitsandbytes or in MXFP4, or dequantize "
    "this one: load it in transformers, call model.dequantize() and save it"
)


@dataclass(frozen=True)
class StorageMethod:
    """How a folder holds its weights in 4 or 8 bits: a weight is codes, and tensors beside them, such as scales.

    >>> weights: StorageMethod = find_storage_method({"quant_method": "fp8", "weight_block_size": [128, 128]})
    >>> weights.description
    'float8 in blocks of 128 × 128 (fp8)'

    `endings` has the names: "_scale_inv" to "" says that `weight_scale_inv` is beside `weight`, ".weight_scale" to
    ".weight" that `x.weight_scale` is beside `x.weight`. A weight has just one tensor of each tuple in `needed`, whose
    "" is the weight's own name. `make(name, tensors)` makes it.
    """

    description: str
    endings: Mapping[str, str]
    needed: tuple[tuple[str, ...], ...]
    make: Callable[[str, Tensors], StoredWeight]

    def make_weight(self, weight_name: str, tensors: Tensors) -> StoredWeight:
        """Make the weight of this name from its tensors, which are by their names in the folder.

        ModelError for a needed tensor that is missing or there under two names, and for what `make` refuses, such as
        tensors of another shape or dtype.
        """
        for alternatives in self.needed:
            names = [weight_name.removesuffix(self.endings.get(end, "")) + end for end in alternatives]
            if not (present := [name for name in names if name in tensors]):
                raise ModelError(
                    f"{weight_name} lacks {' or '.join(names)}, and has {', '.join(sorted(tensors))}; the folder is "
                    f"damaged, or not in {self.description} as its config.json says"
                )
            if len(present) > 1:
                raise ModelError(f"{weight_name} has its scales twice, {' and '.join(present)}; keep one of them")
        return self.make(weight_name, tensors)

    def join_weights(self, tensors: Tensors) -> dict[str, Any]:
        """Return the tensors of a folder by name, with those that make one weight as a StoredWeight.

        Scales of activations are left out. ModelError for codes without scales, and for what `make_weight` refuses.
        """
        joined = dict[str, Any]()
        groups = defaultdict[str, dict[str, Any]](dict)  # by a weight's name: the tensors that make it, by theirs
        for name, tensor in tensors.items():
            if _OF_ACTIVATIONS.fullmatch(name):
                continue
            if end := next((end for end in self.endings if name.endswith(end)), ""):
                groups[name.removesuffix(end) + self.endings[end]][name] = tensor
            else:
                joined[name] = tensor
        for name, group in groups.items():
            if name in joined:
                group[name] = joined[name]
            joined[name] = self.make_weight(name, group)
        for name in joined.keys() - groups.keys():
            if tensor_dtype(joined[name]) in ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32") and name.endswith("weight"):
                self.make_weight(name, {name: joined[name]})  # raises: codes with nothing beside them
        return joined


def find_storage_method(config: PreTrainedConfig | Mapping[str, Any]) -> StorageMethod | None:
    """Return how a folder holds its weights, by the `quantization_config` of its configuration; None: whole.

    A mapping is that `quantization_config` itself. ModelError for a method that is not read.
    """
    settings: Any = getattr(config, "quantization_config", None) if isinstance(config, PreTrainedConfig) else config
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not settings:
        return None
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in _METHODS:
        raise ModelError(f"weights of {method} are not read; {_ADVICE}")
    return _METHODS[method](settings)


def _fine_grained_float8(settings: Mapping[str, Any]) -> StorageMethod:
    """Read the settings of `fp8`: codes, and inverse scales of blocks or of a weight."""
    block = settings.get("weight_block_size")
    rows, columns = block or (0, 0)
    text = f"in blocks of {rows} × {columns}" if block else "with a scale for each weight"
    return StorageMethod(
        f"float8 {text} (fp8)",
        endings={"_scale_inv": "", ".weight_scale": ".weight"},
        needed=(("",), ("_scale_inv", ".weight_scale")),
        make=partial(stored_float8_weight, blocks=((rows, columns),)),
    )


def _compressed_tensors(settings: Mapping[str, Any]) -> StorageMethod:
    """Read the settings of compressed-tensors; ModelError for all but symmetric float8 with scales of weights, rows,
    blocks.
    """
    blocks = list[tuple[int, int]]()  # rows and columns that share a scale; 0: all
    texts = list[str]()
    for group in settings.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        strategy = str(weights.get("strategy"))
        # rows and columns of a block by the name of a strategy
        strategies: dict[str, Any] = {
            "tensor": (0, 0),
            "channel": (1, 0),
            "block": tuple(weights.get("block_structure") or ()),
        }
        scheme = weights.get("type"), weights.get("num_bits"), bool(weights.get("symmetric"))
        block = strategies.get(strategy, ())
        if scheme != ("float", 8, True) or len(block) != 2:
            raise ModelError(
                f"compressed-tensors weights of {scheme[1]} bits ({scheme[0]}, {'' if scheme[2] else 'not '}symmetric, "
                f"{strategy}, {settings.get('format')}) are not read; {_ADVICE}"
            )
        blocks.append(block)
        texts.append(f"{block[0]} × {block[1]} blocks" if strategy == "block" else strategy)
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(f"compressed-tensors weights of format {sparsity} are not read; {_ADVICE}")
    if not blocks:
        raise ModelError(f"compressed-tensors weights without config_groups are not read; {_ADVICE}")
    return StorageMethod(
        f"float8 by {' and '.join(dict.fromkeys(texts))} (compressed-tensors)",
        endings={".weight_scale": ".weight"},
        needed=(("",), (".weight_scale",)),
        make=partial(stored_float8_weight, blocks=tuple(blocks), scale_dtype=True),
    )


def _bitsandbytes(settings: Mapping[str, Any]) -> StorageMethod:
    """Read the settings of bitsandbytes: int8, or 4 bits with a state as JSON and scales that may be quantised too."""
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return StorageMethod(
            "int8 (bitsandbytes)",
            endings={".SCB": ".weight", ".weight_format": ".weight"},
            needed=(("",), (".SCB",)),
            make=stored_int8_weight,
        )
    states = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    beside = [f".weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")]
    again = ", scales quantised" if settings.get("bnb_4bit_use_double_quant") else ""
    return StorageMethod(
        f"{settings.get('bnb_4bit_quant_type', 'fp4')} (bitsandbytes{again})",
        endings=dict.fromkeys((*states, *beside), ".weight"),
        needed=(("",), states, (".weight.absmax",)),
        make=stored_four_bit_weight,
    )


def _mxfp4(settings: Mapping[str, Any]) -> StorageMethod:
    """Read the settings of MXFP4: blocks and scales of stacked experts."""
    return StorageMethod(
        "experts in 4 bits (mxfp4)",
        endings={"_proj_blocks": "_proj", "_proj_scales": "_proj"},
        needed=(("_proj_blocks",), ("_proj_scales",)),
        make=stored_mxfp4_weight,
    )


_METHODS: dict[str, Callable[[Mapping[str, Any]], StorageMethod]] = {
    "fp8": _fine_grained_float8,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
