"""Checkpoints: saved by all ranks with torch's distributed checkpoint, complete or not there at all.

A checkpoint is a folder `step-000100` with the ranks' `.distcp` files, `state.json` (step, configuration) and, written
last, `manifest.json` (size and SHA-256 of every file). It is written as `step-000100.partial`, synced and renamed, so
an interrupted save never damages an older one. Weights and optimizer state are stored by name and global shape, as they
are in the whole model: any number of ranks may load them, in any number of pipeline stages. The data position is the
step alone (`order.py`), and random numbers are seeded by (seed, step, slot), so neither needs a state of its own. What
stands in a folder is judged by `checkpoint_files.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import CheckpointError
from longspan.train.checkpoint_files import (
    PARTIAL,
    Digest,
    begin,
    checkpoint_path,
    digest_own_files,
    finish,
    latest_checkpoint,
    prune,
    read_state,
)
from longspan.train.together import Say, first_does, is_first, together

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # no list of parameters, which differs between stages


def save_checkpoint(
    root: Path,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    step: int,
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint `step` under `root` and keep the newest `keep` (0: all); all ranks call it together.

    `state` is whatever else a resumed run wants to see, as JSON. Raises CheckpointError on every rank where any could
    not write.
    """
    path = checkpoint_path(root, step)
    folder = path.with_name(path.name + PARTIAL)
    first_does(world, lambda: begin(folder), refuse=CheckpointError)
    tensors = _tensors(model, optimizer)
    try:
        dcp.save(tensors, checkpoint_id=folder, process_group=world.control)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(f"checkpoint {path} could not be written: {_reason(error)}") from error
    own = partial(digest_own_files, folder, world.rank, first=is_first(world))
    digests = together(world, own, refuse=CheckpointError)
    first_does(world, lambda: _finish(folder, path, step, state, digests, keep), refuse=CheckpointError)
    return path


def find_checkpoint(root: Path, world: World, say: Say) -> Path | None:
    """The newest good checkpoint under `root`, None where there is none; the same on every rank.

    What is unfinished or damaged is skipped and told to `say`. Raises CheckpointError where nothing good is left.
    """
    return first_does(world, lambda: latest_checkpoint(root, say), refuse=CheckpointError)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None, world: World) -> dict[str, Any]:
    """Load a checkpoint into a model and an optimizer (or the model alone); returns its state.

    Moments and step counts come from the checkpoint. The optimizer keeps its own hyperparameters (lr, weight decay,
    betas, eps): a resumed run is one of the configuration at hand. All ranks call it together, with any number of
    ranks. Raises CheckpointError where it belongs to another model.
    """
    state = read_state(path)
    tensors = _tensors(model, optimizer)
    hyperparameters = {name: tensors["optimizer"].pop(name) for name in _hyperparameters(tensors)}
    _check_names(path, {name for names in world.gather_objects(list(tensors["model"])) for name in names})
    try:
        dcp.load(tensors, checkpoint_id=path, process_group=world.control)
    except (Exception, CheckpointException) as error:  # other shapes and unreadable files alike
        raise CheckpointError(f"checkpoint {path} does not fit this model: {_reason(error)}") from error
    optimizers = [] if optimizer is None else [optimizer]
    moments = tensors.get("optimizer", {}) | hyperparameters
    set_state_dict(model, optimizers, model_state_dict=tensors["model"], optim_state_dict=moments, options=_BY_NAME)
    return state


def _check_names(path: Path, weights: set[str]) -> None:
    """torch refuses weights that the checkpoint lacks; those that the model lacks would be passed over in silence.

    `weights` are those of all ranks.
    """
    try:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # an unreadable pickle raises anything
        raise CheckpointError(f"checkpoint {path}: .metadata cannot be read: {error}") from error
    saved = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    if saved != weights:
        lacks, extra = sorted(weights - saved), sorted(saved - weights)
        raise CheckpointError(
            f"checkpoint {path} is of another model: it lacks {len(lacks)} of this model's weights "
            f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} that this model has not "
            f"({', '.join(extra[:2]) or 'none'}); load it with the model that it was saved from"
        )


def _reason(error: BaseException) -> str:
    """What went wrong on the first rank where something did, without the tracebacks of all of them."""
    failures = list(error.failures.items()) if isinstance(error, CheckpointException) else []
    return f"{failures[0][1][0]} (on rank {failures[0][0]})" if failures else str(error)


def _finish(
    folder: Path,
    path: Path,
    step: int,
    state: Mapping[str, Any],
    digests: Sequence[Mapping[str, Digest]],
    keep: int,
) -> None:
    finish(folder, path, {"step": step, **state}, digests)
    prune(path.parent, keep)


def _hyperparameters(tensors: Mapping[str, Any]) -> list[str]:
    """Names of what an optimizer was told, beside its moments."""
    return [name for name in tensors.get("optimizer", {}) if name.startswith("param_groups.")]


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    weights, moments = get_state_dict(model, [] if optimizer is None else [optimizer], options=_BY_NAME)
    return {"model": weights} | ({} if optimizer is None else {"optimizer": moments})
