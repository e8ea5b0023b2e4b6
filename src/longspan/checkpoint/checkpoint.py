"""Checkpoints: saved by all ranks with torch's distributed checkpoint, complete or not there at all.

A folder `step-000100` has a safetensors file from each rank (`storage.py`), `state.json` (step, configuration),
`optimizer.json` (what of the optimizer is no tensor) and, written last, `manifest.json` with the SHA-256 of every file.
It is written as `step-000100.partial`, synced and renamed. Weights and moments are stored by name and global shape, as
in the whole model: any number of ranks load them, in any division. Of a model with an adapter only the adapter is
stored, and what is trained of an encoder. Data position and dropout follow from the step and the run's seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from longspan.checkpoint.files import (
    OPTIMIZER,
    STATE,
    Digest,
    check_file_hashes,
    checkpoint_path,
    complete_checkpoints,
    create_partial_folder,
    newest_good_checkpoint,
    partial_path,
    publish_checkpoint,
    read_checked_manifest,
    read_checkpoint_json,
    read_state,
    remove_folder,
    remove_old_checkpoints,
    require_local_root,
    write_damage_notes,
)
from longspan.checkpoint.storage import (
    DTYPES,
    SafetensorsReader,
    SafetensorsWriter,
    first_failure_text,
    read_metadata,
)
from longspan.comm import World, leave_together
from longspan.comm.all_ranks import is_first_rank, raise_first_error, run_on_every_rank, run_on_first_rank
from longspan.errors import CheckpointError, CommError, plural
from longspan.model.adapters.adapter import entries_trained_with_adapter
from longspan.model.marks import adapter_of_prepared_model, refuse_other_parameters
from longspan.plain_text import LogLine
from longspan.train.optim.offload_states import OffloadedStates

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # no list of parameters, which differs between stages
SOME_BY_NAME = replace(BY_NAME, strict=False)  # weights that are not named stay as they are
# torch names an entry of an optimizer `state.PARAMETER.MOMENT` or `param_groups.PARAMETER.SETTING`
MOMENTS = "state."
SETTINGS = "param_groups."


class OptimizerValues(NamedTuple):
    """What of an optimizer is no tensor: `optimizer.json` of a checkpoint.

    `numbers` are counts of its state by name, of optimizers that keep them as numbers. `settings` are the names of the
    settings of each parameter that has no state yet: of the others the names of moments say that they were updated.
    """

    numbers: dict[str, int | float]
    settings: dict[str, list[str]]

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "OptimizerValues":
        """Return the numbers and settings among the entries of an optimizer that torch gives, by their names."""
        updated = names_with_moments(entries)
        return cls(
            numbers={n: x for n, x in entries.items() if isinstance(x, int | float) and not n.startswith(SETTINGS)},
            settings={
                name: keys for name, keys in setting_names_by_parameter(entries).items() if name not in updated
            },
        )


def read_optimizer_values(path: Path) -> OptimizerValues:
    """Read `optimizer.json` of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    values = read_checkpoint_json(path / OPTIMIZER)
    try:
        numbers = values["numbers"]
        settings = values["settings"]
        whole = all(isinstance(x, int | float) for x in numbers.values())
        if not whole or not all(isinstance(key, str) for keys in settings.values() for key in keys):
            raise ValueError("a value that is no number, or a setting without a name")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path}: {OPTIMIZER} is damaged ({error})") from error
    return OptimizerValues(numbers, settings)


def names_with_moments(names: Iterable[str]) -> set[str]:
    """Return a set in which every parameter with moments is, from names "state.PARAMETER.MOMENT".

    It has the names cut at each dot, as nothing marks where a parameter's name ends.
    """
    moments = (name.removeprefix(MOMENTS).split(".") for name in names if name.startswith(MOMENTS))
    return {".".join(parts[:count]) for parts in moments for count in range(1, len(parts))}


def setting_names_by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each parameter's settings, without what schedulers add."""
    settings = dict[str, list[str]]()
    for name in sorted(name.removeprefix(SETTINGS) for name in names if name.startswith(SETTINGS)):
        parameter, _, key = name.rpartition(".")
        settings.setdefault(parameter, []).extend({key} - {"initial_lr"})
    return settings


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
    written, beside weights of `save_model`. Returns the checkpoint's folder. Raises CheckpointError on every rank if
    any could not write, and CommError with the rank that is lost; an older checkpoint is never damaged.
    """
    root = require_local_root(root)
    path = checkpoint_path(root, step)
    folder = partial_path(path)
    tensors, values = contents_to_save(model, optimizer, world, weights=weights)
    run_on_first_rank(world, lambda: create_partial_folder(folder), CheckpointError)
    try:
        writer = SafetensorsWriter(folder, leave_together(world))
        with world.watch.enter_operation(f"writing of checkpoint {path.name}", world.home.ranks, is_work=True):
            dcp.save(tensors, storage_writer=writer, process_group=world.control.group)
        written = world.control.gather_objects((writer.digests, values))
        contents = join_contents_of_ranks({"step": step, **(state or {})}, written)
        run_on_first_rank(world, lambda: publish_checkpoint(folder, path, *contents), CheckpointError)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if is_first_rank(world) or world.watch.has_died(world.home.ranks[0]):  # then every other rank removes it
            # The disk may lack just the room that the folder takes.
            remove_folder(folder)
        if isinstance(error, CommError):
            raise
        raise CheckpointError(f"checkpoint {path} could not be written: {first_failure_text(error)}") from error
    run_on_first_rank(world, lambda: remove_old_checkpoints(root, keep, best=best), CheckpointError)
    return path


def find_checkpoint(root: str | Path, world: World, log: LogLine = print, *, note: bool = False) -> Path | None:
    """Return the newest good checkpoint under `root`, None if none was saved to the end; the same on every rank.

    >>> checkpoint = find_checkpoint("runs/mine", world)
    >>> done = load_checkpoint(checkpoint, model, optimizer, world)["step"] if checkpoint else 0

    All ranks call it together; each compares a part of the files with their hashes. What is unfinished or damaged is
    skipped and logged on the first rank; with `note`, damage is also written into the checkpoint, which
    `save_checkpoint` then counts as no good one. Raises CheckpointError if some were saved to the end, all damaged now.
    """
    root = require_local_root(root)
    paths = run_on_first_rank(world, lambda: complete_checkpoints(root, log), CheckpointError)
    if not paths:
        return None
    local_log = log if is_first_rank(world) else lambda _: None
    newest, damage = newest_good_checkpoint(paths, partial(check_checkpoint, world=world), local_log)
    if note:
        run_on_first_rank(world, lambda: write_damage_notes(damage, newest), CheckpointError)
    return newest


def check_checkpoint(path: Path, world: World) -> None:
    """Raise CheckpointError on every rank unless every file of a checkpoint is as it was written.

    All ranks call it together: each reads a part of the files.
    """
    files = run_on_first_rank(world, lambda: read_checked_manifest(path), CheckpointError)
    by_size = sorted(files, key=lambda name: files[name], reverse=True)
    ranks = world.home.ranks
    local_files = {name: files[name] for name in by_size[ranks.index(world.rank) :: len(ranks)]}
    run_on_every_rank(world, lambda: check_file_hashes(path, local_files), CheckpointError)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Optimizer | None, world: World, *, weights: bool = True
) -> dict[str, Any]:
    """Load a checkpoint into a prepared model and an optimizer (None: only the model); returns its step and state.

    >>> load_checkpoint("runs/mine/step-000100", model, optimizer, world)
    {'step': 100, 'epoch': 2}

    All ranks call it together, of any number and in any division. Moments and step counts come from the checkpoint; a
    parameter that never had a gradient keeps none. Gradients are dropped. The optimizer keeps its own hyperparameters
    (lr, weight decay, betas, eps). Files are not compared with their hashes here (`find_checkpoint` does). Without
    `weights` the model stays as it is. Raises CheckpointError where the folder is missing, belongs to another model, or
    lacks weights or moments that are asked for, and CommError where a rank is lost.
    """
    path = require_local_root(path)
    state, stored, metadata = run_on_first_rank(
        world, lambda: (read_state(path), read_optimizer_values(path), read_metadata(path)), CheckpointError
    )
    tensors = make_entries_to_fill(model, optimizer)
    local_names = {*tensors["model"]}
    weight_names = world.control.reduce_object(local_names, set[str].union, "gather of host values") or set[str]()
    if weights:
        _check_weight_names(path, _names_with_prefix("model.", metadata), weight_names)
    else:
        tensors["model"] = {}
    plain_values = dict[str, Any]()
    if optimizer is not None:
        saved = _names_with_prefix("optimizer.", metadata) | stored.numbers.keys()
        drop_absent_moments(path, saved, stored.settings, model, optimizer, tensors, world)
        plain_values = _take_plain_values(path, tensors["optimizer"], stored.numbers, world)
    try:
        with world.watch.enter_operation(f"reading of checkpoint {path.name}", world.home.ranks, is_work=True):
            reader = SafetensorsReader(path, metadata, leave_together(world))
            dcp.load(tensors, storage_reader=reader, process_group=world.control.group)
    except CommError:
        raise
    except (Exception, CheckpointException) as error:
        # Other shapes and unreadable files raise alike.
        raise CheckpointError(f"checkpoint {path} does not fit this model: {first_failure_text(error)}") from error
    options = BY_NAME if adapter_of_prepared_model(model) is None else SOME_BY_NAME
    if weights:
        set_model_state_dict(model, tensors["model"], options=options)
    # For an optimizer without moments torch would make some (`make_entries_to_fill`), and nothing else is to be set.
    if optimizer is not None and optimizer.state:
        entries = tensors["optimizer"] | plain_values
        set_optimizer_state_dict(model, [optimizer], optim_state_dict=entries, options=options)
    return state


def _take_plain_values(
    path: Path, entries: dict[str, Any], saved_numbers: Mapping[str, int | float], world: World
) -> dict[str, Any]:
    """Entered by all ranks. Settings are returned as the optimizer has them, numbers as they were saved."""
    plain_values = {name: x for name, x in entries.items() if not isinstance(x, Tensor)}
    for name in plain_values:
        del entries[name]
    numbers = OptimizerValues.from_entries(plain_values).numbers
    lacking = next((name for name in numbers if name not in saved_numbers), "")
    text = f"checkpoint {path} has no number {lacking}: it was saved with another optimizer; use that one"
    raise_first_error(world, CheckpointError(text) if lacking else None)
    return plain_values | {name: saved_numbers[name] for name in numbers}


def join_contents_of_ranks(
    state: dict[str, Any], written: Sequence[tuple[dict[str, Digest], OptimizerValues]]
) -> tuple[dict[str, Any], list[dict[str, Digest]]]:
    """Return the JSON files of a checkpoint, and the digests of its other files, from what each rank has written."""
    numbers = {name: x for _, values in written for name, x in values.numbers.items()}
    settings = {name: keys for _, values in written for name, keys in values.settings.items()}
    return {STATE: state, OPTIMIZER: OptimizerValues(numbers, settings)._asdict()}, [
        digests for digests, _ in written
    ]


def contents_to_save(
    model: nn.Module, optimizer: Optimizer, world: World, *, weights: bool = True
) -> tuple[dict[str, dict[str, Tensor]], OptimizerValues]:
    """Return tensors of the "model" and the "optimizer" by name, and what of the optimizer is no tensor.

    Moments are left out if the optimizer has no state yet: torch would make some, which are cleared. Raises
    CheckpointError, on every rank, with the name of what a checkpoint cannot hold: torch would write it without an
    error into a file that nothing reads.
    """
    refuse_other_parameters(model, optimizer)
    had_no_state = not optimizer.state
    model_entries, entries = get_state_dict(model, optimizer, options=BY_NAME)
    if had_no_state:
        optimizer.state.clear()
        entries = {name: value for name, value in entries.items() if not name.startswith(MOMENTS)}
    values = OptimizerValues.from_entries(entries)
    moments = {
        name: x for name, x in entries.items() if not name.startswith(SETTINGS) and name not in values.numbers
    }
    trained = entries_trained_with_adapter(model, model_entries) if weights else {}
    tensors: Any = {"model": trained, "optimizer": moments}
    # This is the error of the last entry that a checkpoint cannot hold.
    error = None
    for group, name, value in ((group, *entry) for group, named in tensors.items() for entry in named.items()):
        if getattr(value, "dtype", None) not in DTYPES.values():
            kind = f"of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            error = CheckpointError(
                f"{group} entry {name} is {kind}, and a checkpoint holds tensors of {', '.join(DTYPES)}, and numbers "
                "of an optimizer's state; leave it out of state_dict, or make it one of these"
            )
    raise_first_error(world, error)
    return tensors, values


def make_entries_to_fill(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return weights, and moments for every parameter, which a checkpoint is loaded into; gradients are dropped.

    torch (2.11 to 2.15) makes moments by a step with zero gradients if an optimizer has no states, so its states are
    cleared here; with gradients it would silently make and load none.
    """
    if optimizer is None:
        return {
            "model": entries_trained_with_adapter(model, get_state_dict(model, [], options=BY_NAME)[0]),
            "optimizer": {},
        }
    refuse_other_parameters(model, optimizer)
    if isinstance(optimizer, OffloadedStates):
        optimizer.drop_failed_update()
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": entries_trained_with_adapter(model, weights), "optimizer": moments}


def drop_absent_moments(
    path: Path,
    saved: set[str],
    settings: Mapping[str, list[str]],
    model: nn.Module,
    optimizer: Optimizer,
    tensors: dict[str, Any],
    world: World,
) -> None:
    """Drop the moments of parameters that have none in the checkpoint: they had no gradient before it was saved.

    The optimizer loses them, and so does `tensors`, into which the checkpoint is read. `saved` are the names of the
    checkpoint's moments, and `settings` its names of settings by parameter without moments. All ranks call it together.
    Raises CheckpointError, on every rank, where the saved optimizer had no settings for such a parameter, so that it
    was frozen; and where a checkpoint without any moments has settings of other names, so that the class differs.
    """
    local_moments = names_with_moments(tensors["optimizer"])
    saved_moments = names_with_moments(saved)
    updated = {name: p for name, p in model.named_parameters() if name in local_moments}
    absent = [name for name in updated if name not in saved_moments]
    not_updated = [name for name in absent if name not in settings]
    local_settings = setting_names_by_parameter(tensors["optimizer"])
    other_settings = [
        name for name in absent if not saved_moments and name in settings and settings[name] != local_settings[name]
    ]
    reports = world.control.gather_objects((not_updated, other_settings), "moments of a checkpoint")
    if all_frozen := sorted({name for names, _ in reports for name in names}):
        raise CheckpointError(
            f"checkpoint {path} has no moments of {plural(len(all_frozen), 'parameter')} that this optimizer updates "
            f"({', '.join(all_frozen[:2])}), which were frozen, or in no optimizer, when it was saved; freeze them "
            "here, or load the weights alone, load_checkpoint(path, model, None, world), and begin with a new optimizer"
        )
    if any(names for _, names in reports):
        raise CheckpointError(
            f"checkpoint {path} has no moments for {type(optimizer).__name__}: it was saved with another optimizer; "
            "use that one, or load the weights alone, load_checkpoint(path, model, None, world)"
        )
    for name in absent:
        del optimizer.state[updated[name]]
    moments = tensors["optimizer"]
    prefixes = tuple(f"{MOMENTS}{parameter}." for parameter in absent)
    for name in [name for name in moments if name.startswith(prefixes)]:
        del moments[name]


def _names_with_prefix(prefix: str, metadata: Metadata) -> set[str]:
    return {name.removeprefix(prefix) for name in metadata.state_dict_metadata if name.startswith(prefix)}


def _check_weight_names(path: Path, saved: set[str], weights: set[str]) -> None:
    """torch passes over weights that the model lacks."""
    if weights and not saved:
        raise CheckpointError(
            f"checkpoint {path} holds an optimizer without weights (save_checkpoint(…, weights=False)): read weights "
            "from the folder that save_model wrote, and the rest by load_checkpoint(…, weights=False)"
        )
    if saved != weights:
        lacks = sorted(weights - saved)
        extra = sorted(saved - weights)
        raise CheckpointError(
            f"checkpoint {path} is of another model: it lacks {len(lacks)} of this model's weights "
            f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} that this model has not "
            f"({', '.join(extra[:2]) or 'none'}); load it with the model that it was saved from"
        )
