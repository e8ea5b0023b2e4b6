"""Checkpoints: saved by all ranks with torch's distributed checkpoint, complete or not there at all.

A checkpoint is a folder `step-000100` with the ranks' `.distcp` files, `state.json` (step, configuration) and, written
last, `manifest.json` (size and SHA-256 of every file). It is written as `step-000100.partial`, synced and renamed, so
an interrupted save never damages an older one. Weights and optimizer state are stored by name and global shape: any
number of ranks may load them. The data position is the step alone (`order.py`), and random numbers are seeded by
(seed, step, slot), so neither needs a state of its own. What stands in a folder is judged by `checkpoint_files.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
from longspan.train.together import first_does, is_first, together

Say = Callable[[str], None]


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
    except Exception as error:  # torch wraps what any rank's file system raised
        raise CheckpointError(f"checkpoint {path} could not be written: {error}") from error
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

    All ranks call it together, with any number of ranks. Raises CheckpointError where it belongs to another model.
    """
    state = read_state(path)
    tensors = _tensors(model, optimizer)
    try:
        dcp.load(tensors, checkpoint_id=path, process_group=world.control)
    except Exception as error:  # torch wraps missing names, other shapes and unreadable files alike
        raise CheckpointError(f"checkpoint {path} does not fit this model: {error}") from error
    optimizers = [] if optimizer is None else [optimizer]
    set_state_dict(model, optimizers, model_state_dict=tensors["model"], optim_state_dict=tensors.get("optimizer", {}))
    return state


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


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    weights, moments = get_state_dict(model, [] if optimizer is None else [optimizer])
    return {"model": weights} | ({} if optimizer is None else {"optimizer": moments})
