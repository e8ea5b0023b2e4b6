"""A prepared model, whole, back to a folder that stock transformers loads.

Training checkpoints, which hold optimizer state and stay sharded, are not in this module.
"""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.hf_folder import no_progress_bars
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.pipeline.state import state_of_all_stages


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
    result_or_first_error(
        world,
        lambda: _write(model, full, Path(folder), tokenizer) if world.rank == writer else None,
        lambda error: ModelError(f"the model could not be saved to {folder}: {type(error).__name__}: {error}"),
    )


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
    with no_progress_bars():
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
