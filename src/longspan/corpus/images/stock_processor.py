"""Transformers' own processor of a model's folder: the files that say which it is, loaded without torchvision."""

import hashlib
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.model.hf_folder import FOLDER_OPTIONS

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def has_processor(folder: Path | None) -> bool:
    """Whether a folder holds an image processor."""
    return folder is not None and any((folder / name).is_file() for name in FILES[:2])


def load_stock(folder: Path) -> Any:
    """The stock processor without what it has beside images and text."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17's own name wants torchvision

    stock = _stock_class(_class_name(folder))

    def parts(cls: Any, path: Any, *_: Any, **__: Any) -> list[Any]:
        made = {
            "tokenizer": lambda: AutoTokenizer.from_pretrained(path, **FOLDER_OPTIONS),
            "image_processor": lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **FOLDER_OPTIONS),
        }
        return [made[name]() if name in made else None for name in cls.get_attributes()]

    unchecked = {"_get_arguments_from_pretrained": classmethod(parts), "check_argument_for_proper_class": _no_check}
    made = type(stock.__name__, (stock,), unchecked).from_pretrained(folder, **FOLDER_OPTIONS)
    for needed in ("image_processor", "image_token"):
        if getattr(made, needed, None) is None:
            raise DataError(f"{stock.__name__}, the processor in {folder}, has no {needed}; images need one that has")
    return made


def _stock_class(name: str) -> Any:
    """The processor's class; of one whose file asks for torchvision, by its image processor on Pillow in its place."""
    import transformers

    stock = getattr(transformers, name)
    if "torchvision" not in getattr(stock, "_backends", ()):
        return stock
    package, _, file = stock.__module__.rpartition(".")
    asked = f"{package}.image_{file}"
    sys.modules[asked] = import_module(asked.replace("image_processing_", "image_processing_pil_"))
    try:
        return getattr(import_module(stock.__module__), name)
    finally:
        del sys.modules[asked]


def _no_check(*_: Any) -> None:
    """Stock processors check the classes of their parts; video, which is left out, has none."""


def _class_name(folder: Path) -> str:
    """The class that the folder's files name, or that transformers has for its kind of model."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings = [_json(folder / name) for name in (*FILES[1::-1], "tokenizer_config.json")]
    named = next((made["processor_class"] for made in settings if made.get("processor_class")), None)
    named = named or PROCESSOR_MAPPING_NAMES.get(_json(folder / "config.json").get("model_type", ""))
    if named is None:
        raise DataError(
            f"neither {FILES[1]} nor {FILES[0]} in {folder} names a processor_class, and there is no config.json of a "
            "model that transformers has one for; save the model's processor there"
        )
    return re.sub(r"Fast$", "", str(named))


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def digest_of(folder: Path) -> str:
    """SHA-256 of what the files of a folder's processor say, however they are written; nothing is loaded."""
    said = [_json(folder / name) for name in FILES]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
