"""Models from a local Hugging Face folder or a preset, and back to a folder that stock transformers loads.

Nothing is downloaded. Training checkpoints, which hold optimizer state and stay sharded, are not in this module.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from longspan.comm import World, patience
from longspan.errors import ModelError
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.state import state_of_all_stages
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
    sharded: bool = False,
) -> PreTrainedModel:
    """A causal language model on the CPU: from a local folder, or else a preset with random weights.

    >>> model = load_model(preset="qwen3-tiny", vocab_size=2048, seed=0)
    >>> model = prepare(load_model("Qwen3-8B", sharded=True), world)

    With `sharded`, parameters have no memory until `prepare` has decided which part this rank keeps; it then reads that
    part from the folder's safetensors files, straight to the world's device, so that no rank ever holds the whole.

    Random weights are a function of the preset, `vocab_size` and `seed` alone: the same on every rank, whatever the
    world. With a folder, `vocab_size` is that of the tokenizer, which must fit into the model's. Raises ModelError for
    an unknown preset or dtype, and for a folder that is missing, incomplete or damaged.
    """
    kind = _dtype(dtype)
    if path is not None:
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
        with _no_progress_bars():
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


def save_model(model: PreTrainedModel | PipelineModel, folder: str | Path, world: World, tokenizer: Any = None) -> None:
    """Write the full weights to a folder that stock transformers loads; all ranks call it together.

    One rank writes safetensors, configuration and tokenizer next to `folder` and renames, so an interrupted save
    leaves what was there: rank 0, or with pipeline stages the home's first rank. Raises ModelError on every rank
    where writing failed.
    """
    if isinstance(model, PipelineModel):
        writer, full = world.home.ranks[0], state_of_all_stages(model, world)
    else:
        writer, full = 0, full_state_dict(model)  # torch gathers on rank 0, wherever that is in the home
    failure: Exception | None = None
    with patience(world):
        try:
            if world.rank == writer:
                _write(model, full, Path(folder), tokenizer)
        except Exception as error:  # whatever the file system raises: the other ranks must learn of it
            failure = error
    reasons = world.control.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    if reasons := [reason for reason in reasons if reason is not None]:
        raise ModelError(f"the model could not be saved to {folder}: {reasons[0]}") from failure


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole, on the CPU of rank 0, and nothing on the others; all ranks call it together.

    Weights may be sharded over slots, split over tensor-parallel ranks, or both.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))  # pyright: ignore[reportReturnType]


def _write(model: PreTrainedModel | PipelineModel, full: dict[str, Tensor], folder: Path, tokenizer: Any) -> None:
    partial, old = (folder.with_name(f"{folder.name}{ending}") for ending in (".partial", ".old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with _no_progress_bars():
        _stock_twin(model, full).save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _stock_twin(model: PreTrainedModel | PipelineModel, full: dict[str, Tensor]) -> PreTrainedModel:
    """The unprepared model class over the gathered weights, tied where the original ties."""
    config = deepcopy(model.config)
    config._attn_implementation = "eager"
    config.use_cache = True  # prepare turned it off for training; who loads the folder wants transformers' default
    architecture = model.architecture if isinstance(model, PipelineModel) else type(model)
    stock: Any = next(kind for kind in architecture.__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        twin = stock(config)
    twin.load_state_dict(full, assign=True)
    twin.tie_weights()
    twin.generation_config = model.generation_config
    return twin


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
