"""A checkpoint as a Hugging Face folder, in one process on the CPU: a decoder layer at a time, never the whole model.

Weights are stored by the names and shapes of the whole model, whatever home saved them. The other files of the folder
are kept in the run's folder (`run/set_up.py`).
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.checkpoint.export_adapter import (
    ExportedDepths,
    MtpNames,
    make_saved_adapter,
    merge_weights_by_layer,
    refuse_merge,
    write_saved_adapter,
)
from longspan.checkpoint.files import (
    check_contents,
    check_sizes,
    complete_checkpoints,
    newest_good_checkpoint,
    read_state,
)
from longspan.checkpoint.storage import SafetensorsReader, first_failure_text, read_metadata
from longspan.checkpoint.store_path import checkpoints_root
from longspan.comm.all_ranks import LogLine
from longspan.config.file import load_config
from longspan.corpus.tokenizer import RunFolderFiles
from longspan.errors import CheckpointError, ModelError
from longspan.model.load import torch_dtype
from longspan.model.lora.save import CONFIGURATION
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.saving.save import stock_configuration, write_configuration
from longspan.model.weights.file_names import PROCESSOR_FILES
from longspan.model.weights.fill import empty_model, find_images_class
from longspan.model.weights.hf_folder import read_configuration
from longspan.model.weights.write import (
    FILE_BYTES,
    OF_MODEL,
    WeightTotals,
    WeightWriter,
    make_partial_folder,
    replace_files,
    weight_unit,
)

_REPLACED = "|".join(
    [OF_MODEL, r"pytorch_model.*\.(bin|json)", r"generation_config\.json", *map(re.escape, PROCESSOR_FILES)]
)
_LOGGED_EVERY = 5 * 10**9  # bytes from one line of progress to the next


@dataclass(frozen=True)
class Exported:
    """What was written: the `folder`, from which `checkpoint`, and how many tensors, weights, bytes and files."""

    folder: str
    checkpoint: str
    step: int
    dtype: str
    tensors: int
    parameters: int
    bytes: int
    files: int

    def row(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)


def export_checkpoint(
    run_dir: Path,
    checkpoint: Path | None,
    folder: Path,
    log: LogLine,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    merge: bool = False,
    mtp: MtpNames = "published",
) -> Exported:
    """Write a checkpoint (None: the run's newest good one) to a folder that stock transformers loads.

    An adapter ([lora]) is written to a folder that stock peft loads, or with `merge` added to the weights of its base
    model. `mtp` says whether depths of multi-token prediction are written, and under which names (`MtpNames`). `dtype`
    is the name of the files' dtype; "auto" is the model's own, and for an adapter the dtype in which it was trained.

    Raises CheckpointError for a checkpoint that is missing, damaged or of another model, and ModelError for a folder
    that is not empty. With `overwrite` a folder may hold a model, whose weights, configuration and tokenizer are
    replaced.
    """
    check_export_folder(folder, overwrite=overwrite)
    config, run = _read_stock_configuration(run_dir), load_config(run_dir / "config.toml")
    if merge and not run.lora.rank:
        refuse_merge(run_dir)
    checkpoint = _choose_good_checkpoint(checkpoints_root(run_dir, run.run.checkpoints), checkpoint, log)
    file_dtype = torch_dtype(config.dtype or "float32") if dtype == "auto" else torch_dtype(dtype)
    empty = empty_model(config, file_dtype, find_images_class(config))
    as_adapter = bool(run.lora.rank) and not merge  # its names are those of the model that it was trained in
    depths = ExportedDepths.of(run, empty, "own" if as_adapter and mtp == "published" else mtp, log)
    try:
        with staging_folder(folder) as partial:
            saved = make_saved_adapter(run, config, _read_adapter_tensors(checkpoint)) if run.lora.rank else None
            if saved is not None and as_adapter:
                saved = saved._replace(tensors=depths.select_weights(saved.tensors))
                if dtype == "auto":  # as adapters are trained
                    file_dtype = torch.float64 if run.model.dtype == "float64" else torch.float32
                written = write_saved_adapter(saved, partial, run_dir, file_dtype)
            else:
                file_dtype, groups = empty.dtype, _weight_groups(checkpoint, empty, depths)
                if saved is not None:
                    groups = map(depths.select_weights, merge_weights_by_layer(saved, run, config, run_dir))
                written = _write_weights(partial, empty, _log_progress(groups, log), run_dir, depths)
    except ModelError as error:
        raise CheckpointError(f"checkpoint {checkpoint} does not fit the run's model: {error}") from error
    step, name = int(read_state(checkpoint)["step"]), str(file_dtype).removeprefix("torch.")
    return Exported(str(folder), str(checkpoint), step, name, **written._asdict())


def check_export_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ModelError where a model cannot be written to `folder`: a file, or a folder with files in it.

    With `overwrite` a folder may hold a model, which is replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; name a folder to write the model to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ModelError(f"{folder} is not empty; name another folder, or replace the model in it with --overwrite")
    if not any((folder / name).is_file() for name in ("config.json", CONFIGURATION)):
        raise ModelError(f"{folder} is not empty and holds no model (no config.json), so nothing in it is replaced")


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, whose files then replace a model's in `folder`; an error leaves nothing."""
    partial = make_partial_folder(folder)
    try:
        yield partial
        replace_files(partial, folder, _REPLACED)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_stock_configuration(run_dir: Path) -> PreTrainedConfig:
    if not (run_dir / "config.json").is_file():
        raise CheckpointError(
            f"{run_dir} has no config.json, which describes its model: the run did not begin, or was begun before "
            "longspan 0.1; name the folder of a run that has written a checkpoint"
        )
    return stock_configuration(read_configuration(run_dir))


def _choose_good_checkpoint(root: Path, checkpoint: Path | None, log: LogLine) -> Path:

    def check_files(path: Path) -> None:
        check_contents(path, check_sizes(path))

    if checkpoint is not None:
        check_files(checkpoint)
        return checkpoint
    newest, _ = newest_good_checkpoint(complete_checkpoints(root, log), check_files, log)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {root}; train the run first")
    return newest


def _write_weights(
    partial: Path, empty: PreTrainedModel, groups: Iterator[dict[str, Tensor]], run_dir: Path, depths: ExportedDepths
) -> WeightTotals:
    writer = WeightWriter(partial, empty, file_bytes=FILE_BYTES, rename=depths.rename)
    for group in groups:
        writer.write_unit(group)
    written = writer.finish()
    write_configuration(empty, partial, RunFolderFiles(run_dir))
    return written


def _weight_groups(checkpoint: Path, empty: PreTrainedModel, depths: ExportedDepths) -> Iterator[dict[str, Tensor]]:
    """Layers come in the order of the `empty` model, and weights in their stored dtype. Raises ModelError for a weight
    that the model has not.
    """
    metadata = read_metadata(checkpoint)
    entries = depths.select_weights(_weights_in(metadata))
    # Weights of a vision-language model are stored under the names of its two modules.
    stored_names = map_stock_names(entries)
    stored = {name: entries[stored_name] for name, stored_name in stored_names.items()}
    weights = dict(empty.state_dict())
    if unknown := sorted(stored.keys() - weights.keys()):
        raise ModelError(f"it has {len(unknown)} weights that the model has not: {', '.join(unknown[:4])}")
    unit_order = {unit: i for i, unit in enumerate(dict.fromkeys(map(weight_unit, weights)))}
    for _, group in groupby(sorted(stored, key=lambda name: (unit_order[weight_unit(name)], name)), weight_unit):
        names = {stored_names[name]: name for name in group}
        group_entries = {stored_name: stored[name] for stored_name, name in names.items()}
        tensors = _read_tensors(checkpoint, metadata, group_entries)
        yield {name: tensors[stored_name] for stored_name, name in names.items()}


def _read_adapter_tensors(checkpoint: Path) -> dict[str, Tensor]:
    metadata = read_metadata(checkpoint)
    return _read_tensors(checkpoint, metadata, _weights_in(metadata))


def _read_tensors(
    checkpoint: Path, metadata: Metadata, stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            dcp.load({"model": tensors}, storage_reader=SafetensorsReader(checkpoint, metadata), no_dist=True)
    except (Exception, CheckpointException) as error:  # an unreadable file raises anything
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {first_failure_text(error)}") from error
    return tensors


def _weights_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        name.removeprefix("model."): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _log_progress(groups: Iterator[dict[str, Tensor]], log: Callable[[str], None]) -> Iterator[dict[str, Tensor]]:
    read = logged = 0
    for group in groups:
        yield group
        read += sum(tensor.nbytes for tensor in group.values())
        if read - logged >= _LOGGED_EVERY:
            logged = read
            log(f"exported {read / 1e9:,.0f} GB of the checkpoint")
