"""Hugging Face folders on disk: the configuration that one holds, its files of weights, and what its files are called.

Nothing is downloaded.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from longspan.adapter_folder import ADAPTER_CONFIGURATION, adapter_folder_advice
from longspan.errors import ModelError, plural
from longspan.files import read_json
from longspan.model.presets import PRESETS
from longspan.model.weights.tokenizer_files import GENERATION
from longspan.plan.shape.families import first_version
from longspan.plan.shape.quantization import DEQUANTIZE, find_quantization_settings

# Every from_pretrained of a folder gets these options.
FOLDER_OPTIONS = {"local_files_only": True, "trust_remote_code": False}
OWN_MODEL = (
    "use a folder in transformers' own format, or make the model in a program of your own and give it to "
    "longspan.prepare"
)
_QUANTIZED = "quantization_config"
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_configuration(path: Path) -> PreTrainedConfig:
    """Read the configuration in a folder or config.json, without what it says of quantized weights; or ModelError."""
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"there is no model folder {path}; {_folder_advice()}")
    if not file.is_file():
        raise ModelError(f"{path} has no config.json; {adapter_folder_advice(path) or _folder_advice()}")
    try:
        config = AutoConfig.from_pretrained(file, **FOLDER_OPTIONS)
    except Exception as error:  # json, huggingface_hub and transformers each raise their own
        raise ModelError(f"the model in {path} cannot be loaded: {folder_error_text(error, OWN_MODEL)}") from error
    names: object = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f'{file} has "architectures": {names!r}; give a list of names of classes, or leave it out')
    dtype: object = config.dtype
    if not isinstance(dtype, str | torch.dtype | None):
        raise ModelError(f'{file} has "dtype": {dtype!r}; give the name of one of torch, or leave it out')
    return remove_code_and_quantization(config)


@contextmanager
def raise_model_error(sentence: str) -> Iterator[None]:
    """Raise an error of transformers or torch, inside, as a ModelError that begins with a sentence."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{sentence}: {folder_error_text(error, OWN_MODEL)}") from error


def save_configuration(config: PreTrainedConfig, folder: Path) -> None:
    """Write config.json into a folder, where it replaces a file or a link of that name."""
    with TemporaryDirectory(prefix=".config-", dir=folder) as partial, no_progress_bars():
        config.save_pretrained(partial)
        for file in Path(partial).iterdir():
            file.replace(folder / file.name)


def remove_code_and_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove from a configuration, and return it, code of its folder, kernels of the hub, and quantized weights."""
    for key in ("auto_map", _QUANTIZED):
        vars(config).pop(key, None)
    for key in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(getattr(config, key, None)):
            setattr(config, key, None)
    for sub_config in (getattr(config, name, None) for name in config.sub_configs):
        if isinstance(sub_config, PreTrainedConfig):
            remove_code_and_quantization(sub_config)
    return config


def read_generation_settings(folder: Path) -> GenerationConfig | None:
    """Read the generation_config.json of a folder; None without one. Raises ModelError for one that cannot be read."""
    file = folder / GENERATION
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # json, huggingface_hub and transformers each raise their own
        raise ModelError(
            f"{file} cannot be read: {' '.join(str(error).split())}; restore it, or remove it, and the model's "
            "configuration counts"
        ) from error


def folder_error_text(error: Exception, instead: str) -> str:
    """Return why transformers could not read a folder, in one line, with what to do `instead` of running its code."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"its auto_map names Python code of its own, and no code of a folder is run; {instead}"
    if unknown := re.search(r"model type `([\w-]+)` but Transformers does not recognize", text):
        since = first_version(unknown[1])
        needed = f"it needs {since}: pip install 'transformers>={since}'" if since else "a later one may have it"
        return f"transformers {transformers.__version__} has no model type {unknown[1]}; {needed}"
    if "weights_only" in text:
        return "its weights are a pickle with more than tensors in it, which may be code; give them as safetensors"
    return f"{type(error).__name__}: {text}"


def weight_files(folder: Path, *, quantized: bool = False) -> list[Path]:
    """List a folder's files of weights, sorted; they may be in 4 or 8 bits if `quantized`.

    ModelError for none, quantized, missing or outside ones, for a damaged index, and beside an adapter.
    """
    if (folder / ADAPTER_CONFIGURATION).is_file():
        raise ModelError(
            f"{folder} holds a model and an adapter of peft ({ADAPTER_CONFIGURATION}) beside it; put the files of the "
            "adapter into a folder of their own, or merge them into the model"
        )
    weights = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(
            f"{folder} has no weights; expected one of {', '.join(_WEIGHTS)} (model.config = FOLDER draws random ones)"
        )
    if (settings := quantization_settings(folder)) and not quantized:
        method = settings.get("quant_method", "by a method without a name")
        raise ModelError(
            f"{folder} is quantized ({method}, by its config.json), and whole weights are trained; train an adapter "
            f"over it (lora.rank, or load_model(…, quantized=True)), or {DEQUANTIZE}"
        )
    if not weights.endswith(".index.json"):
        return [folder / weights]
    index = folder / weights
    try:
        files: list[str] = sorted({*read_json(index)["weight_map"].values()})
        outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    if outside:
        raise ModelError(
            f"{index} names {plural(len(outside), 'file')} outside its folder ({outside[0]}), which are not read; put "
            "them, or links to them, into the folder"
        )
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:4])}")
    return [folder / name for name in files]


def quantization_settings(folder: Path) -> dict[str, Any]:
    """Return the `quantization_config` of a folder's config.json, also of one of its parts; empty: whole weights."""
    try:
        return find_quantization_settings(read_json(folder / "config.json"))
    except (ValueError, TypeError, OSError):  # whoever reads the configuration says so
        return {}


def planned_configuration(configuration: Any, folder: str) -> Any:
    """Return the configuration by which plans count the weights of a model that is read from a folder ("": from none):
    with the folder's `quantization_config`, which a model's own configuration leaves out.
    """
    settings = quantization_settings(Path(folder)) if folder else {}
    if not settings:
        return configuration
    planned = copy(configuration)
    planned.quantization_config = settings
    return planned


def _folder_advice() -> str:
    return f"give a folder in Hugging Face format, or use a preset: {', '.join(PRESETS)}"


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch transformers' progress bars off inside, and on again if they were."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
