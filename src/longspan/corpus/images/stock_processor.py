"""Transformers' processor of a model's folder, loaded without torchvision.

transformers 5.17 to 5.23 loads a processor together with its video processor, which needs torchvision. So it is
loaded here without its parts for video (`video_processor.py`). Once transformers loads processors without torchvision,
`AutoProcessor.from_pretrained` takes the place of this file.
"""

import hashlib
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.files import read_json
from longspan.model.weights.hf_folder import FOLDER_OPTIONS
from longspan.model.weights.tokenizer_files import PROCESSOR_FILES

NESTED = "processor_config.json"
LEGACY = "preprocessor_config.json"


def load_stock_processor(folder: Path) -> Any:
    """Load the stock processor with its parts for images and text only.

    Raises DataError for one that lacks such a part.
    """
    from transformers import AutoTokenizer

    # the name at the top needs torchvision
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    stock = _stock_class(_class_name(folder))

    def load_parts(cls: Any, path: Any, *_: Any, **__: Any) -> list[Any]:
        loaders = {
            "tokenizer": lambda: AutoTokenizer.from_pretrained(path, **FOLDER_OPTIONS),
            "image_processor": lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **FOLDER_OPTIONS),
        }
        # The order is that of the constructor's arguments; None stands for video.
        return [loaders[name]() if name in loaders else None for name in cls.get_attributes()]

    # A subclass that neither loads the part for video nor checks its class.
    methods = {
        "_get_arguments_from_pretrained": classmethod(load_parts),
        "check_argument_for_proper_class": lambda *_: None,
    }
    processor = type(stock.__name__, (stock,), methods).from_pretrained(folder, **FOLDER_OPTIONS)
    for attribute in ("image_processor", "image_token"):
        if getattr(processor, attribute, None) is None:
            raise DataError(
                f"{stock.__name__}, the processor in {folder}, has no {attribute}; images need one that has"
            )
    return processor


def _stock_class(name: str) -> Any:
    """If the class's file imports an image processor of torchvision, Pillow's takes its place."""
    import transformers

    stock = getattr(transformers, name)
    if "torchvision" not in getattr(stock, "_backends", ()):
        return stock
    package, _, file = stock.__module__.rpartition(".")
    needs_torchvision = f"{package}.image_{file}"
    on_pillow = needs_torchvision.replace("image_processing_", "image_processing_pil_")
    # Pillow's module stands in only until the class's file, which imports torchvision's, is read.
    sys.modules[needs_torchvision] = import_module(on_pillow)
    try:
        return getattr(import_module(stock.__module__), name)
    finally:
        del sys.modules[needs_torchvision]


def _class_name(folder: Path) -> str:
    """Without "Fast" at its end. The first of processor_config.json, preprocessor_config.json and tokenizer_config.json
    that names a class decides, else the type of model in config.json."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings = [read_settings(folder / name) for name in (NESTED, LEGACY, "tokenizer_config.json")]
    class_name = next((values["processor_class"] for values in settings if values.get("processor_class")), None)
    class_name = class_name or PROCESSOR_MAPPING_NAMES.get(
        read_settings(folder / "config.json").get("model_type", "")
    )
    if class_name is None:
        raise DataError(
            f"neither {NESTED} nor {LEGACY} in {folder} names a processor_class, and there is no config.json of a "
            "model that transformers has one for; save the model's processor there"
        )
    return re.sub(r"Fast$", "", str(class_name))


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a file of a processor; {} without the file."""
    return read_json(file) if file.is_file() else {}


def processor_digest(folder: Path) -> str:
    """Return the SHA-256 of the settings of a folder's processor, by which its placeholders may change."""
    values = [read_settings(folder / name) for name in PROCESSOR_FILES]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
