"""Checkpoints: saved by all ranks with torch's distributed checkpoint, complete or not there at all.

A checkpoint is a folder `step-000100` with the ranks' `.distcp` files, `metadata.json` (which tensor is in which file),
`state.json` (step, configuration) and, written last, `manifest.json`: size and SHA-256 of every file, taken by its
writer while it wrote. It is written as `step-000100.partial`, synced and renamed, so an interrupted save never damages
an older one. All of it is read as data: a checkpoint cannot run code. Weights and optimizer
state are stored by name and global shape, as they are in the whole model: any number of ranks may load them, in any
number of pipeline stages. Of a model with an adapter a checkpoint holds the adapter, and what is trained of an encoder.
The data position is only the step (`step_order.py`), and dropout's masks are drawn from the run's seed and the step,
so neither needs a state of its own. What stands in a folder is judged by `files.py`; before a checkpoint is loaded, its
files are hashed once, each by one of the ranks.

An optimizer has after loading the moments that it had when it was saved: a parameter that never had a gradient has
none. torch (2.11 to 2.15) makes moments by a step with zero gradients if an optimizer has none, to have something to
load into, and if there are gradients it silently makes and loads none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from longspan.checkpoint.files import (
    PARTIAL,
    Digest,
    check_contents,
    check_sizes,
    checkpoint_path,
    complete_checkpoints,
    create_partial,
    files_by_rank,
    newest_good_checkpoint,
    note_damage,
    partial_path,
    publish_checkpoint,
    read_state,
    remove_folder,
    remove_old_checkpoints,
)
from longspan.checkpoint.metadata import read_metadata
from longspan.checkpoint.storage import DataPlanner, HashingWriter, PatientReader, first_failure_text
from longspan.checkpoint.store_path import as_root
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.errors import CheckpointError, CommError, plural
from longspan.model.adapters import adapter_entries, model_adapter
from longspan.model.multimodal.multimodal_model import are_multimodal

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # no list of parameters, which differs between stages
SOME_BY_NAME = replace(BY_NAME, strict=False)  # weights that are not named stay as they are
STATE, SETTINGS = "state.", "param_groups."


def save_checkpoint(
    root: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    keep: int = 0,
    best: int = 0,
    weights: bool = True,
) -> Path:
    """Write a prepared model and its optimizer as checkpoint `step` under `root`; all ranks call it together.

    >>> save_checkpoint("runs/mine", model, optimizer, world, step=100, state={"epoch": 2}, keep=3)
    PosixPath('runs/mine/step-000100')

    `root` is on storage that all machines share. `state` is whatever else a resumed run wants to see, as JSON. The
    newest `keep` good checkpoints stay (0: all), and that of step `best`. Without `weights` the optimizer alone is
    written, for who keeps the weights in a folder of `save_model`. Returns the checkpoint's folder; `CheckpointSaver`
    writes while training goes on. Raises CheckpointError on every rank if any could not write, and CommError with the
    rank that is lost; an older checkpoint is never damaged.
    """
    root = as_root(root)
    path = checkpoint_path(root, step)
    folder = partial_path(path)
    run_on_first_rank(world, lambda: create_partial(folder), CheckpointError)
    try:
        tensors = tensors_to_save(model, optimizer)
        if not weights:
            del tensors["model"]
        digests = _write_tensors(folder, tensors, world)
        run_on_first_rank(
            world, lambda: publish_checkpoint(folder, path, {"step": step, **(state or {})}, digests), CheckpointError
        )
    except (CheckpointError, CommError) as error:
        if is_first_rank(world) or world.watch.has_died(world.home.ranks[0]):  # then every other rank removes it
            remove_folder(folder)  # what it takes may be what the disk lacks
        if isinstance(error, CommError):
            raise
        raise CheckpointError(f"checkpoint {path} could not be written: {error}") from error
    run_on_first_rank(world, lambda: remove_old_checkpoints(root, keep, best=best), CheckpointError)
    return path


def find_checkpoint(root: str | Path, world: World, log: LogLine = print, *, note: bool = False) -> Path | None:
    """Return the newest good checkpoint under `root`, None if none was saved to the end; the same on every rank.

    >>> checkpoint = find_checkpoint("runs/mine", world)
    >>> done = load_checkpoint(checkpoint, model, optimizer, world)["step"] if checkpoint else 0

    All ranks call it together; each compares the hashes of a part of the files with those written. What is unfinished
    or damaged is skipped and logged on the first rank; with `note`, damage is written down in the checkpoint too, which
    `save_checkpoint` then counts as no good one. Raises CheckpointError if some were saved to the end, all damaged now.
    """
    root = as_root(root)
    paths = run_on_first_rank(world, lambda: complete_checkpoints(root, log), CheckpointError)
    newest, damage = newest_good_checkpoint(
        paths, partial(check_checkpoint, world=world), log if is_first_rank(world) else _log_nothing
    )
    if note:
        run_on_first_rank(world, lambda: note_damage(damage, newest), CheckpointError)
    return newest


def check_checkpoint(path: Path, world: World) -> None:
    """Raise CheckpointError on every rank unless every file of a checkpoint is as it was written.

    All ranks call it together: each reads a part of the files.
    """
    files = run_on_first_rank(world, lambda: check_sizes(path), CheckpointError)
    local_files = files_by_rank(files, len(world.home.ranks))[world.home.ranks.index(world.rank)]
    run_on_every_rank(world, lambda: check_contents(path, local_files), CheckpointError)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Optimizer | None, world: World, *, weights: bool = True
) -> dict[str, Any]:
    """Load a checkpoint into a prepared model and an optimizer (None: only the model); returns its step and state.

    >>> load_checkpoint("runs/mine/step-000100", model, optimizer, world)
    {'step': 100, 'epoch': 2}

    All ranks call it together. The home may be another one than that which saved it: any number of ranks, in any
    division, of each module of a MultimodalModel. Moments and step counts come from the checkpoint; a parameter that
    never had a gradient keeps none. Gradients are dropped. The optimizer keeps its own hyperparameters (lr, weight
    decay, betas, eps): a resumed run follows its own configuration, and sets the learning rate of each step. Files are
    not compared with their hashes here (`find_checkpoint` does). Without `weights` the model stays as it is. Raises
    CheckpointError where the folder is missing, belongs to another model, holds no weights that are asked for, or lacks
    moments of parameters that were frozen, and CommError where a rank is lost.
    """
    path = as_root(path)
    state, metadata = run_on_first_rank(world, lambda: (read_state(path), read_metadata(path)), CheckpointError)
    stored = list[str](metadata.state_dict_metadata)
    tensors = make_tensors_to_fill(model, optimizer)
    local_names = set[str](tensors["model"])
    names = world.control.reduce_object(local_names, set[str].union, "gather of host values") or set[str]()
    if weights:
        _check_weight_names(path, _names_under("model.", stored), names)
    else:
        tensors["model"] = {}
    if optimizer is not None:
        moments = StoredMoments.of(_names_under("optimizer.", stored))
        drop_absent_moments(path, moments, model, optimizer, tensors, world)
    # These are not read, and go back into the optimizer as they are.
    settings = [name for name in tensors.get("optimizer", {}) if name.startswith(SETTINGS)]
    hyperparameters = {name: tensors["optimizer"].pop(name) for name in settings}
    try:
        with world.watch.during(f"reading of checkpoint {path.name}", world.home.ranks, is_work=True):
            reader = PatientReader(path, metadata, world)
            dcp.load(tensors, storage_reader=reader, planner=DataPlanner(), process_group=world.control.group)
    except CommError:
        raise
    except (Exception, CheckpointException) as error:  # other shapes and unreadable files alike
        raise CheckpointError(f"checkpoint {path} does not fit this model: {first_failure_text(error)}") from error
    # For an optimizer without moments torch would make some (see the module), and nothing else is to be set.
    optimizers = [optimizer] if optimizer is not None and optimizer.state else []
    moments = tensors["optimizer"] | hyperparameters if optimizers else {}
    options = BY_NAME if model_adapter(model) is None else SOME_BY_NAME
    if weights:
        set_model_state_dict(model, tensors["model"], options=options)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, optim_state_dict=moments, options=options)
    return state


def holds_encoders(path: Path) -> bool:
    """Return whether a checkpoint is of a model with encoders. Raises CheckpointError where it cannot be read."""
    weights = _names_under("model.", read_metadata(path).state_dict_metadata)
    return are_multimodal(weights) or any(name.startswith("encoders.") for name in weights)


def tensors_to_save(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return weights and moments by name; without moments, which torch would make, if the optimizer has no state yet.

    Of an adapted model only the adapter is returned, here and in `make_tensors_to_fill`: the base is not trained.
    """
    fresh = not optimizer.state
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    if fresh:
        optimizer.state.clear()
        moments = {name: value for name, value in moments.items() if not name.startswith(STATE)}
    return {"model": adapter_entries(model, weights), "optimizer": moments}


def make_tensors_to_fill(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return weights, and moments for every parameter, which a checkpoint is loaded into; gradients are dropped.

    The optimizer's states are cleared first, so that torch makes moments for every parameter, trained so far or not.
    """
    if optimizer is None:
        return {"model": adapter_entries(model, get_state_dict(model, [], options=BY_NAME)[0])}
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": adapter_entries(model, weights), "optimizer": moments}


class StoredMoments(NamedTuple):
    """Which parameters have moments in a checkpoint, and which settings the optimizer had for each parameter.

    `moments` are the names of moments cut at each of their dots: nothing marks where a parameter's name ends in them.
    """

    moments: frozenset[str]
    settings: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, names: Iterable[str]) -> "StoredMoments":
        """Read which moments a checkpoint holds from its names under "optimizer."."""
        moments, settings = set[str](), dict[str, set[str]]()
        for name in names:
            if name.startswith(STATE):
                parts = name.removeprefix(STATE).split(".")
                moments.update(".".join(parts[:count]) for count in range(1, len(parts)))
            elif name.startswith(SETTINGS):
                parameter, _, key = name.removeprefix(SETTINGS).rpartition(".")
                settings.setdefault(parameter, set()).update({key} - {"initial_lr"})  # which schedulers add
        return cls(frozenset(moments), {name: frozenset(keys) for name, keys in settings.items()})


def drop_absent_moments(
    path: Path, stored: StoredMoments, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Any], world: World
) -> None:
    """Drop the moments of parameters that have none in the checkpoint: they had no gradient before it was saved.

    The optimizer loses them, and so does `tensors`, into which the checkpoint is read. The saved optimizer must have
    had settings for these parameters. Without any moments only the settings' names tell the optimizer's class, so they
    must be those of this one. All ranks call it together. Raises CheckpointError, on every rank, for other checkpoints.
    """
    stored_here = StoredMoments.of(tensors["optimizer"])
    updated = {name: p for name, p in model.named_parameters() if name in stored_here.moments}
    absent = [name for name in updated if name not in stored.moments]
    lacking = [name for name in absent if name not in stored.settings]
    other_settings = [
        name
        for name in absent
        if not stored.moments and name not in lacking and stored.settings[name] != stored_here.settings[name]
    ]
    reports = world.control.gather_objects((lacking, other_settings), "moments of a checkpoint")
    if lacking := sorted({name for names, _ in reports for name in names}):
        raise CheckpointError(
            f"checkpoint {path} has no moments of {plural(len(lacking), 'parameter')} that this optimizer updates "
            f"({', '.join(lacking[:2])}), which were frozen, or in no optimizer, when it was saved; freeze them here, "
            "or load the weights alone, load_checkpoint(path, model, None, world), and begin with a new optimizer"
        )
    if any(names for _, names in reports):
        raise CheckpointError(
            f"checkpoint {path} has no moments for {type(optimizer).__name__}: it was saved with another optimizer; "
            "use that one, or load the weights alone, load_checkpoint(path, model, None, world)"
        )
    for name in absent:
        del optimizer.state[updated[name]]
    moments = tensors["optimizer"]
    prefixes = tuple(f"{STATE}{parameter}." for parameter in absent)
    for name in [name for name in moments if name.startswith(prefixes)]:
        del moments[name]


def _write_tensors(folder: Path, tensors: dict[str, Any], world: World) -> list[dict[str, Digest]]:
    """Write the files of all ranks; returns the size and hash of each rank's."""
    writer = HashingWriter(folder, world)
    try:
        with world.watch.during(
            f"writing of checkpoint {folder.name.removesuffix(PARTIAL)}", world.home.ranks, is_work=True
        ):
            dcp.save(tensors, storage_writer=writer, process_group=world.control.group)
    except CommError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(first_failure_text(error)) from error
    return world.control.gather_objects(writer.digests)


def _names_under(prefix: str, names: Iterable[str]) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _check_weight_names(path: Path, saved: set[str], weights: set[str]) -> None:
    """torch refuses weights that the checkpoint lacks, and passes over those that the model lacks. `weights` are those
    of all ranks.
    """
    if weights and not saved:
        raise CheckpointError(
            f"checkpoint {path} holds an optimizer without weights (save_checkpoint(…, weights=False)): read weights "
            "from the folder that save_model wrote, and the rest by load_checkpoint(…, weights=False)"
        )
    if saved != weights:
        lacks, extra = sorted(weights - saved), sorted(saved - weights)
        raise CheckpointError(
            f"checkpoint {path} is of another model: it lacks {len(lacks)} of this model's weights "
            f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} that this model has not "
            f"({', '.join(extra[:2]) or 'none'}); load it with the model that it was saved from"
        )


def _log_nothing(_: str) -> None:
    pass
