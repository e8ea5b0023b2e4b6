"""A checkpoint as a Hugging Face folder, in one process on the CPU: a decoder layer at a time, never the whole model.

An adapter becomes a folder that stock peft loads, or is merged into its base model. The other files of the folder are
kept in the run's folder (`run/set_up.py`).
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.adapter_folder import ADAPTER_CONFIGURATION
from longspan.checkpoint.base import check_base_unchanged
from longspan.checkpoint.best import RunCheckpoints
from longspan.checkpoint.files import (
    check_file_hashes,
    read_checked_manifest,
    read_state,
)
from longspan.checkpoint.storage import SafetensorsReader, first_failure_text, read_metadata
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import load_tokenizer
from longspan.errors import CheckpointError, ConfigError, ModelError, plural
from longspan.model.adapted_modules import belongs_to_adapter
from longspan.model.adapters.adapter import AdaptedWeight, Adapter, adapted_weights, find_adapter
from longspan.model.adapters.adapter_files import (
    WEIGHTS,
    entries_inside_modules,
    largest_trained_modules,
    write_adapter,
)
from longspan.model.add_depths import add_mtp
from longspan.model.kinds import name_without_adapter
from longspan.model.layers import MTP, mtp_blocks
from longspan.model.load import find_score_class, torch_dtype
from longspan.model.mtp.published_names import find_published_naming
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.parts import is_tied
from longspan.model.presets import PRESETS
from longspan.model.saving.stock_folders import stock_configuration, write_all_but_weights
from longspan.model.weights.empty_model import empty_model, image_text_class_of_architectures
from longspan.model.weights.fill import pop_deferred_weights, stored_formats
from longspan.model.weights.hf_folder import raise_model_error, read_configuration, read_generation_settings
from longspan.model.weights.local_tensors import LocalPart
from longspan.model.weights.tokenizer_files import PROCESSOR_FILES, RunFolderFiles, vocabulary_files
from longspan.model.weights.write import (
    MODEL_PATTERN,
    WeightTotals,
    WeightWriter,
    make_partial_folder,
    replace_files,
    weight_unit,
)
from longspan.plain_text import LogLine
from longspan.train.run_model.load import (
    add_configured_adapter,
    add_configured_mtp,
    find_depth_weights,
    load_run_model,
)


def add_run_depths(
    run: RunConfig, empty: PreTrainedModel, log: LogLine, *, published: bool
) -> Callable[[str], str]:
    """Add a run's depths to the stock model `empty`; return what turns our name of a weight into its name in the files:
    `str` where the names are the same.

    With `published` the weights of depths get the names of published models of the family, where it has them: then the
    model's configuration also describes its depths, as published configurations do.
    """
    depths = run.mtp.num_layers
    text = empty.config.get_text_config()
    if not depths:
        return str
    blocks: list[Any] = [*mtp_blocks(add_mtp(empty, depths)).values()]
    # Every depth has blocks of the same types, so those of the first depth are enough.
    blocks = blocks[: len(blocks) // depths]
    rename = (
        find_published_naming(text.model_type, text.num_hidden_layers, depths, len(blocks)) if published else None
    )
    title = f"{plural(depths, 'depth')} of multi-token prediction"
    if rename is None:
        log(f"{title}: under {MTP}.layers.0.… and so on, which longspan reads and stock transformers leaves out")
        return str
    config: Any = text  # gets the keys with which published configurations describe depths
    config.num_nextn_predict_layers = depths
    if len(blocks) > 1:
        config.mtp_layers_block_type = [block.block_type for block in blocks]
    log(f"{title}: under the names of published {text.model_type} models, {rename(f'{MTP}.layers.0.eh_proj.…')}")
    return rename


_REPLACED = "|".join(
    [MODEL_PATTERN, r"pytorch_model.*\.(bin|json)", r"generation_config\.json", *map(re.escape, PROCESSOR_FILES)]
)


class Exported(NamedTuple):
    """What was written: the `folder`, from which `checkpoint` of which `step`, the `dtype` of the files, and how many
    tensors, weights (`parameters`), bytes and files.
    """

    folder: str
    checkpoint: str
    step: int
    dtype: str
    tensors: int
    parameters: int
    bytes: int
    files: int


def export_checkpoint(
    run_dir: Path,
    checkpoint: Path | None,
    folder: Path,
    log: LogLine,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    merge: bool = False,
) -> Exported:
    """Write a checkpoint (None: the one that a run hands out) to a folder that stock transformers loads.

    An adapter ([lora]) is written to a folder that stock peft loads, or with `merge` added to the weights of its base
    model. `dtype` is the name of the files' dtype; "auto" is the model's own, and for an adapter the dtype in which it
    was trained.

    Raises CheckpointError for a checkpoint that is missing, damaged or of another model, DataError for a damaged
    tokenizer, template or processor, and ModelError for damaged settings of generation, for a folder that is not empty
    and for another base model than the run began with. With `overwrite` the weights, configuration and tokenizer of a
    model in it are replaced.
    """
    check_export_folder(folder, overwrite=overwrite)
    config = _read_stock_configuration(run_dir)
    files = _checked_files(run_dir)
    run = load_config(run_dir / "config.toml")
    if merge and not run.lora.rank:
        raise ConfigError(f"--merge is given, and {run_dir} trained all weights (lora.rank is 0); leave it out")
    if merge:
        check_base_unchanged(run_dir, run, "cpu")
    checkpoint = _choose_good_checkpoint(run_dir, checkpoint, log)
    file_dtype = torch_dtype(config.dtype or "float32") if dtype == "auto" else torch_dtype(dtype)
    empty = _make_empty_model(run_dir, config, file_dtype)
    # An adapter's names are those of the model that it was trained in.
    as_adapter = bool(run.lora.rank) and not merge
    rename = add_run_depths(run, empty, log, published=not as_adapter)
    partial = make_partial_folder(folder)
    try:
        saved = None
        if run.lora.rank:
            metadata = read_metadata(checkpoint)
            saved = make_saved_adapter(run, config, _read_tensors(checkpoint, metadata, _stored_weights(metadata)))
        if saved is not None and as_adapter:
            if dtype == "auto":
                file_dtype = _dtype_of_adapters(run)
            written = _write_saved_adapter(partial, saved, file_dtype, files)
        else:
            file_dtype = empty.dtype
            groups = _weight_groups(checkpoint, empty)
            if saved is not None:
                groups = merge_weights_by_layer(saved, run, config, log)
            writer = WeightWriter(partial, empty, rename=rename)
            for group in groups:
                writer.write_unit(group)
            written = writer.finish()
            write_all_but_weights(empty, partial, files)
        replace_files(partial, folder, _REPLACED)
    except ModelError as error:
        raise CheckpointError(f"checkpoint {checkpoint} does not fit the run's model: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # files that took no place: an error leaves nothing
    step = int(read_state(checkpoint)["step"])
    name = str(file_dtype).removeprefix("torch.")
    return Exported(str(folder), str(checkpoint), step, name, **written._asdict())


def _checked_files(run_dir: Path) -> RunFolderFiles:
    files = RunFolderFiles(run_dir)
    files.check()
    if vocabulary_files(run_dir):
        load_tokenizer(run_dir)
    read_generation_settings(run_dir)
    return files


def _dtype_of_adapters(run: RunConfig) -> torch.dtype:
    """Adapters are merged in the dtype in which the run trains them."""
    return torch.float64 if run.model.dtype == "float64" else torch.float32


def _write_saved_adapter(
    folder: Path, saved: "SavedAdapter", dtype: torch.dtype, files: RunFolderFiles
) -> WeightTotals:
    tensors = {name: x.to(dtype=dtype) for name, x in saved.tensors.items()}
    write_adapter(folder, saved.adapter, tensors, files, saved.modules)
    weights = sum(x.numel() for x in tensors.values())
    return WeightTotals(len(tensors), weights, (folder / WEIGHTS).stat().st_size, 1)


def check_export_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ModelError where a model cannot be written to `folder`."""
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; name a folder to write the model to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ModelError(f"{folder} is not empty; name another folder, or replace the model in it with --overwrite")
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIGURATION)):
        raise ModelError(f"{folder} is not empty and holds no model (no config.json), so nothing in it is replaced")


def _read_stock_configuration(run_dir: Path) -> PreTrainedConfig:
    if not (run_dir / "config.json").is_file():
        raise CheckpointError(
            f"{run_dir} has no config.json, which describes its model: the run did not begin, or was begun before "
            "longspan 0.1; name the folder of a run that has written a checkpoint"
        )
    return stock_configuration(read_configuration(run_dir))


def _choose_good_checkpoint(run_dir: Path, checkpoint: Path | None, log: LogLine) -> Path:
    """With None, the checkpoint that the run hands out is taken."""

    def check_files(path: Path) -> None:
        check_file_hashes(path, read_checked_manifest(path))

    if checkpoint is not None:
        check_files(checkpoint)
        return checkpoint
    return RunCheckpoints.find(run_dir, log).take(check_files, log)


def _weight_groups(checkpoint: Path, empty: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Weights have their stock names, those of a layer together; layers come in the order of the `empty` model."""
    metadata = read_metadata(checkpoint)
    entries = _stored_weights(metadata)
    # Weights of a vision-language model are stored under the names of its two modules.
    stored_names = map_stock_names(entries)
    weights = dict(empty.state_dict())
    if unknown := sorted(stored_names.keys() - weights.keys()):
        raise ModelError(f"it has {len(unknown)} weights that the model has not: {', '.join(unknown[:4])}")
    unit_order = {unit: i for i, unit in enumerate(dict.fromkeys(map(weight_unit, weights)))}
    ordered = sorted(stored_names, key=lambda name: (unit_order[weight_unit(name)], name))
    for _, names in groupby(ordered, weight_unit):
        stored_names_of_layer = {name: stored_names[name] for name in names}
        layer_entries = {stored_name: entries[stored_name] for stored_name in stored_names_of_layer.values()}
        tensors = _read_tensors(checkpoint, metadata, layer_entries)
        yield {name: tensors[stored_name] for name, stored_name in stored_names_of_layer.items()}


def _read_tensors(
    checkpoint: Path, metadata: Metadata, stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    try:
        # torch warns that there is one process.
        with warnings.catch_warnings(action="ignore"):
            dcp.load({"model": tensors}, storage_reader=SafetensorsReader(checkpoint, metadata), no_dist=True)
    except (Exception, CheckpointException) as error:  # an unreadable file raises anything
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {first_failure_text(error)}") from error
    return tensors


def _stored_weights(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        name.removeprefix("model."): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


# ---- the adapter of a run, and its sum with the weights of the base model


class SavedAdapter(NamedTuple):
    """The adapter of a run, its whole tensors by name, and what it adds to which weights, by their stock names.

    The tensors of `modules`, a tower or a projector that was trained with it, are among them.
    """

    adapter: Adapter
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, AdaptedWeight]
    modules: tuple[str, ...] = ()


def _make_empty_model(run_dir: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    kind = find_score_class(config) or image_text_class_of_architectures(config)
    with raise_model_error(f"no model can be made of {run_dir / 'config.json'}"):
        return empty_model(config, dtype, kind)


def make_saved_adapter(
    run: RunConfig, configuration: PreTrainedConfig, stored: Mapping[str, Tensor]
) -> SavedAdapter:
    """Return a run's adapter with the tensors that its checkpoint has `stored`, by their names in the stock model.

    Names and scalings are found by adding what [lora] describes to a model without weights. Other tensors are of
    modules that were trained whole. Raises CheckpointError if the tensors have other names.
    """
    tensors = {name: stored[stored_name] for name, stored_name in map_stock_names(stored).items()}
    stock = _make_empty_model(Path(run.run.dir), configuration, torch.float32)
    empty = add_configured_mtp(run, stock, read=False)
    modules = largest_trained_modules(empty, {name for name in tensors if not belongs_to_adapter(name)})
    model = add_configured_adapter(run, empty).get_base_model()
    adapter = find_adapter(model)
    assert adapter is not None
    names = {name for name, _ in model.named_parameters() if belongs_to_adapter(name)}
    names |= entries_inside_modules(modules, dict(model.named_parameters())).keys()
    if names != tensors.keys():
        raise CheckpointError(
            f"the checkpoint has {len(tensors)} tensors, the adapter of [lora] in {run.run.dir}/config.toml "
            f"{len(names)}; different are {', '.join(sorted(names ^ tensors.keys())[:4])}"
        )
    weights = {name_without_adapter(name): adapted for name, adapted in adapted_weights(model).items()}
    return SavedAdapter(adapter, tensors, weights, modules)


def merge_weights_by_layer(
    saved: SavedAdapter, run: RunConfig, configuration: PreTrainedConfig, log: LogLine
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of the base model with the adapter added, those of a layer together.

    Those that the adapter changes are in float32, or in float64 if the run's model is. Where they were frozen in 4 or 8
    bits, a line says to what the adapter is added. Before the first layer, and not earlier, the base model is loaded;
    then CheckpointError is raised if it cannot be made again here, and for an adapter of a tied head.
    """
    _refuse_random_base(run, configuration)
    images = image_text_class_of_architectures(configuration) is not None
    model = load_run_model(run, configuration, images=images)
    _refuse_adapted_tie(saved, model)
    base = run.model.source or run.model.preset_name
    formats = sorted({packed.name for packed in stored_formats(model).values()})
    if run.model.frozen == "nf4":
        log(
            f"the adapter was trained over 4-bit values (model.frozen = nf4) of the weights of {base}, and "
            "is added to these weights themselves"
        )
    elif formats:
        log(f"{base} holds its weights in {' and '.join(formats)}: the adapter is added to their values")
    deferred = pop_deferred_weights(model)
    weights: Iterable[tuple[str, Tensor]] = model.state_dict().items()
    # Deferred weights are read a layer at a time.
    if deferred is not None:
        parts = {name: LocalPart.from_parameter(tensor) for name, tensor in weights}
        weights = deferred.source.read(parts, torch.device("cpu"))
    dtype = _dtype_of_adapters(run)
    for _, group in groupby(weights, lambda entry: weight_unit(entry[0])):
        yield {name: merge_weight(saved, name, tensor, dtype) for name, tensor in group}


def _refuse_random_base(run: RunConfig, configuration: PreTrainedConfig) -> None:
    preset = run.model.preset_name
    depths_are_frozen = run.mtp.num_layers > 0 and not run.mtp.train_whole
    drew_depths = depths_are_frozen and find_depth_weights(run, configuration) is None
    if preset and not PRESETS[preset].embedding_rows:
        return  # a tiny preset: its weights are drawn on the CPU, alike on every machine
    if not run.model.path or drew_depths:
        raise CheckpointError(
            f"{run.run.dir}: {'depths have' if run.model.path else 'the base model has'} random weights, of which each "
            "device draws others; export the adapter alone, without --merge"
        )


def merge_weight(saved: SavedAdapter, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight of the base model plus what the adapter adds to it, W + s B A, added in `dtype`.

    s is the adapter's scaling of this weight, A and B are its two matrices. A weight that was trained whole is returned
    as it was trained.
    """
    linear = name.removesuffix(".weight")
    adapter = saved.adapter.name
    for trained in (name, f"{linear}.modules_to_save.{adapter}.weight"):
        if trained in saved.tensors:
            return saved.tensors[trained]
    if (adapted := saved.weights.get(name)) is None:
        return weight
    matrix_a, matrix_b = (
        saved.tensors[f"{adapted.module}.lora_{matrix_name}.{adapter}.weight"].to(dtype) for matrix_name in "AB"
    )
    return weight.to(dtype) + adapted.added_matrix(matrix_a, matrix_b)


def _refuse_adapted_tie(saved: SavedAdapter, model: PreTrainedModel) -> None:
    """The sum would change both ends."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = [
        name for name, module in model.named_modules() if module in embeddings and f"{name}.weight" in saved.weights
    ]
    if adapted and is_tied(model):
        raise CheckpointError(
            f"--merge: {adapted[0]} has an adapter, and shares its weight with the other end of the "
            f"{type(model).__name__} (tie_word_embeddings), which must not change; export the adapter without --merge, "
            "which stock peft loads over the base model, or train one without it in lora.target_modules"
        )
