"""Models from a local Hugging Face folder or a preset; nothing is downloaded. How they are saved is in `save.py`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from longspan.errors import ModelError
from longspan.model.prepared import vocabulary_size
from longspan.model.presets import PRESETS, preset_config
from longspan.model.weights.empty import empty_model
from longspan.model.weights.fill import fill_when_prepared
from longspan.model.weights.folder import FolderWeights

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def load_model(
    path: str | Path | None = None,
    preset: str | None = None,
    *,
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    vocab_size: int | None = None,
    sharded: bool | None = False,
) -> PreTrainedModel:
    """A causal language model on the CPU: from a local folder, or else a preset with random weights.

    >>> model = load_model(preset="qwen3-tiny", vocab_size=2048, seed=0)
    >>> model = prepare(load_model("Qwen3-8B", sharded=True), world)

    With `sharded`, parameters have no memory until `prepare` has decided which part this rank keeps; it then reads that
    part from the folder's safetensors files, straight to the world's device, so that no rank ever holds the whole. None
    decides by the folder's files: of pytorch_model.bin no part can be read alone.

    Random weights are a function of the preset, `vocab_size` and `seed` alone: the same on every rank, whatever the
    world. With a folder, `vocab_size` is that of the tokenizer, which must fit into the model's. Raises ModelError for
    an unknown preset or dtype, and for a folder that is missing, incomplete or damaged.
    """
    kind = _dtype(dtype)
    if path is not None:
        if sharded is None:
            sharded = _check_folder(Path(path))[0].suffix == ".safetensors"
        model = _to_be_read(Path(path), kind) if sharded else _from_folder(Path(path), kind)
        return _fitting(model, path, vocab_size)
    if preset is None:
        raise ModelError(f"give a folder, or a preset: {', '.join(PRESETS)}")
    return _random(preset, vocab_size, kind, seed)


def _fitting(model: PreTrainedModel, path: str | Path, vocab_size: int | None) -> PreTrainedModel:
    vocabulary = vocabulary_size(model)
    if vocab_size is not None and vocabulary is not None and vocab_size > vocabulary:
        raise ModelError(
            f"the tokenizer has {vocab_size} ids, the model in {path} only {vocabulary}; "
            "use the tokenizer that belongs to the model"
        )
    return model


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    for name, torch_dtype in _DTYPES.items():
        if dtype in (name, torch_dtype):
            return torch_dtype
    raise ModelError(f"unknown dtype {dtype!r}; use {', '.join(_DTYPES)}")


def _random(preset: str, vocab_size: int | None, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    if vocab_size is None:
        raise ModelError(f"preset {preset} needs vocab_size, the number of ids of the tokenizer")
    config = preset_config(preset, vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # drawn in float32, so that every dtype holds the same numbers, rounded
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _from_folder(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    _check_folder(folder)
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # json, safetensors, torch, huggingface_hub and transformers each raise their own
        raise ModelError(f"the model in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    model, loading_info = loaded
    if absent := sorted(loading_info["missing_keys"]):
        raise ModelError(
            f"the model in {folder} lacks {len(absent)} weights that its config.json asks for, which would be random: "
            f"{', '.join(absent[:4])}; complete the folder, or correct config.json"
        )
    return model


def _to_be_read(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The folder's model without memory for its parameters, and what fills them."""
    files = _check_folder(folder)
    if files[0].suffix != ".safetensors":
        raise ModelError(
            f"{folder} has {files[0].name}, of which no part can be read alone; save the model again with "
            "save_pretrained of transformers, which writes safetensors, or load it with sharded=False"
        )
    try:
        model = empty_model(AutoConfig.from_pretrained(folder, local_files_only=True), dtype)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # json, huggingface_hub and transformers each raise their own
        raise ModelError(f"the model in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    fill_when_prepared(model, FolderWeights(folder, files, model))
    return model


def _check_folder(folder: Path) -> list[Path]:
    """The folder's files of weights."""
    presets = f"or use a preset: {', '.join(PRESETS)}"
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; give a folder in Hugging Face format, {presets}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give a folder in Hugging Face format, {presets}")
    weights = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(f"{folder} has no weights; expected one of {', '.join(_WEIGHTS)}")
    return _indexed(folder, folder / weights) if weights.endswith(".index.json") else [folder / weights]


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:4])}")
    return [folder / name for name in files]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers shows no progress of files."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
