"""The formats of weights in 4 or 8 bits that are read, each in a file of its own, by their names in `PackedForm`."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from longspan.model.frozen.formats.float8 import store_compressed_float8, store_fine_grained_float8
from longspan.model.frozen.formats.four_bit import store_four_bit
from longspan.model.frozen.formats.int4 import store_compressed_int4
from longspan.model.frozen.formats.int8 import store_int8
from longspan.model.frozen.formats.mxfp4 import store_mxfp4
from longspan.model.frozen.formats.stored_weight import StorageMethod
from longspan.plan.shape.quantization import PackedForm, find_quantization_settings, read_quantization

FORMATS: dict[str, Callable[[PackedForm], StorageMethod]] = {
    "fp8": store_fine_grained_float8,
    "compressed float8": store_compressed_float8,
    "compressed int4": store_compressed_int4,
    "bitsandbytes int8": store_int8,
    "bitsandbytes 4 bits": store_four_bit,
    "mxfp4": store_mxfp4,
}


def find_storage_method(config: PreTrainedConfig | Mapping[str, Any]) -> StorageMethod | None:
    """Return how a folder holds its weights, by the `quantization_config` of its configuration; None: whole.

    >>> find_storage_method({"quant_method": "fp8", "weight_block_size": [128, 128]}).description
    'float8 in blocks of 128 × 128 (fp8)'

    A mapping is that `quantization_config` itself. ModelError for a method that is not read.
    """
    settings = find_quantization_settings(config) if isinstance(config, PreTrainedConfig) else config
    if not settings:
        return None
    form = read_quantization(settings)
    return FORMATS[form.format](form)
