"""A prepared model, whole, to a folder that stock transformers loads.

The home's first rank (of the model's layout) is given one whole layer at a time, under a pipeline stage after stage.
Training checkpoints, which hold optimizer state and stay sharded, are not in this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from functools import partial as partial_of
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapters import Adapter, adapter_entries, belongs_to_adapter, model_adapter, unwrap_model
from longspan.model.add_depths import add_mtp
from longspan.model.load import compare_weights, torch_dtype
from longspan.model.lora.save import WEIGHTS, largest_trained_modules, select_entries, stock_name, write_adapter
from longspan.model.mtp.depths import model_depths
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.saving.whole_weights import WholeWeights
from longspan.model.weights.fill import DeferredWeights, empty_model, persistent_buffers
from longspan.model.weights.folder import check_type
from longspan.model.weights.hf_folder import no_progress_bars, plain_configuration
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.model.weights.write import (
    OF_ADAPTER,
    OF_MODEL,
    WeightWriter,
    make_partial_folder,
    replace_files,
    weight_unit,
)


def save_model(
    model: PreTrainedModel | PipelineModel | MultimodalModel,
    folder: str | Path,
    world: World,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write the full weights to a folder that stock transformers loads; all ranks call it together.

    The home's first rank writes safetensors, configuration and tokenizer next to `folder`. Once all are written they
    replace the files of an older model or adapter (a saved adapter only those of an older adapter), so an interrupted
    save leaves what was there. Other files of the folder stay. The first rank is sent a decoder layer at a time, so no
    rank holds the whole model. `dtype` is that of the files, the parameters' own by default. If the model has an
    adapter the adapter only is written, as stock peft loads it, with what is trained of an encoder as its
    `modules_to_save`. A vision-language model (`prepare(…, encoder=…)`) is written whole, under its own class and
    names. Raises ModelError on every rank where writing failed, CommError where a rank is lost.
    """
    encoders = _find_encoders(model)
    model = model.language_model if isinstance(model, MultimodalModel) else model
    model, target = _find_prepared_model(model), Path(folder)
    file_dtype = None if dtype is None else torch_dtype(dtype)
    with world.watch.naming(f"writing of {target}", world.home.ranks):  # for DTensor's gathers, which name nothing
        _save_weights(model, encoders, target, world, tokenizer, file_dtype)


def _save_weights(
    model: PreTrainedModel | PipelineModel,
    encoders: Sequence[Encoder],
    target: Path,
    world: World,
    tokenizer: Any,
    file_dtype: torch.dtype | None,
) -> None:
    """Write the weights in files of dtype `file_dtype` (None: their own), on the first rank; entered by all ranks.

    All ranks gather one unit of weights (a layer) after another, and learn at once if the first rank could not write.
    If the model has an adapter, only the adapter is written, with modules of encoders that are trained whole.
    """
    writes = world.rank == world.home.ranks[0]
    if (adapter := model_adapter(model)) is not None:
        trained = _find_trained_modules(encoders)
        units = chain(_weight_units(model, world), *(_state_units(state, writes=writes) for state in trained.states))
        cast = ({name: x.to(dtype=file_dtype) for name, x in unit.items()} for unit in units)
        _save_adapter(adapter, target, world, tokenizer, cast, trained.modules)
        return
    as_save_error = partial_of(_make_save_error, target)
    folder_and_model = result_or_first_error(
        world, lambda: _make_folder_and_empty_model(model, target, file_dtype) if writes else None, as_save_error
    )
    writer = None if folder_and_model is None else WeightWriter(*folder_and_model, cast=file_dtype is not None)
    for unit in chain(
        _weight_units(model, world), *(_state_units(e.module.state_dict(), writes=writes) for e in encoders)
    ):
        result_or_first_error(
            world, lambda unit=unit: None if writer is None else writer.write_unit(unit), as_save_error
        )

    def finish_files() -> None:
        if writer is not None and folder_and_model is not None:
            writer.finish()
            partial, empty = folder_and_model
            write_configuration(empty, partial, tokenizer)
            replace_files(partial, target, OF_MODEL)

    result_or_first_error(world, finish_files, as_save_error)


def _find_encoders(model: Any) -> list[Encoder]:
    if not isinstance(model, MultimodalModel):
        return []
    from longspan.model.vision.image_encoder import ImageEncoder

    encoders = [*model.encoder_settings.values()]
    if others := [name for name, e in model.encoder_settings.items() if not isinstance(e.module, ImageEncoder)]:
        raise ModelError(
            f"a MultimodalModel with an encoder of one's own ({', '.join(others)}) is no model of transformers'; save "
            "model.language_model, and encoders by save_checkpoint(folder, model, …)"
        )
    return encoders


class _TrainedModules(NamedTuple):
    modules: tuple[str, ...]
    states: tuple[Mapping[str, Tensor], ...]


def _find_trained_modules(encoders: Sequence[Encoder]) -> _TrainedModules:
    names, states = tuple[str, ...](), list[Mapping[str, Tensor]]()
    for encoder in encoders:
        parameters = encoder.module.named_parameters()
        trained = {name for name, p in parameters if p.requires_grad and not belongs_to_adapter(name)}
        modules = largest_trained_modules(encoder.module, trained, inside=str(encoder.module.base_name))
        names += modules
        state = encoder.module.state_dict()
        adapter = {name: x for name, x in state.items() if belongs_to_adapter(name)}
        states.append(adapter | select_entries(modules, state))
    return _TrainedModules(names, tuple(states))


def _find_prepared_model(model: Any) -> PreTrainedModel | PipelineModel:
    """Return the model itself; of a PeftModel the prepared model inside, whose parameters have other names."""
    inside: Any = unwrap_model(model)
    if inside is not model and model_adapter(inside) is None:
        raise ModelError(
            f"save_model got a {type(model).__name__} with no prepared model in it; give it the model that "
            "longspan.prepare returned, which under pipeline stages is a PipelineModel"
        )
    return inside


def _save_adapter(
    adapter: Adapter,
    target: Path,
    world: World,
    tokenizer: Any,
    units: Iterator[dict[str, Tensor]],
    modules: tuple[str, ...],
) -> None:
    tensors = {name: x for unit in units for name, x in unit.items()}

    def write_files() -> None:
        partial = make_partial_folder(target)
        write_adapter(partial, adapter, tensors, tokenizer, modules)
        replace_files(partial, target, OF_ADAPTER)

    writes = world.rank == world.home.ranks[0]
    result_or_first_error(world, lambda: write_files() if writes else None, partial_of(_make_save_error, target))


def _make_save_error(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"the model could not be saved to {folder}: {type(error).__name__}: {error}")


def _weight_units(model: PreTrainedModel | PipelineModel, world: World) -> Iterator[dict[str, Tensor]]:
    """If the model has an adapter, only the adapter's tensors. Of stages, a rank that sends holds one whole tensor."""
    writes = world.rank == world.home.ranks[0]
    if not isinstance(model, PipelineModel):
        yield from _state_units(adapter_entries(model, model.state_dict()), writes=writes)
        return
    weights = WholeWeights(model, world, saved=True)
    for _, unit in groupby(weights.names, weight_unit):
        whole = ((name, weights.gather_tensor(name, first_only=True)) for name in unit)
        yield {name: x.cpu() for name, x in whole if writes}


def _state_units(state: Mapping[str, Tensor], *, writes: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the whole tensors of a `state_dict` without stages, a unit at a time; empty units without `writes`.

    Every rank gathers all of it.
    """
    for _, unit in groupby(state.items(), lambda entry: weight_unit(entry[0])):
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in unit}
        yield {name: x.detach().cpu() for name, x in whole.items()} if writes else {}


def _make_folder_and_empty_model(
    model: PreTrainedModel | PipelineModel, target: Path, dtype: torch.dtype | None
) -> tuple[Path, PreTrainedModel]:
    partial = make_partial_folder(target)
    empty = empty_stock_model(model, dtype)
    empty.generation_config = model.generation_config
    return partial, empty


def empty_stock_model(model: PreTrainedModel | PipelineModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make the whole stock model from which a model was prepared, on the meta device, in its own dtype by default.

    It has the depths of multi-token prediction that the prepared model has.
    """
    architecture = model.architecture if isinstance(model, PipelineModel) else type(model)
    stock = next(kind for kind in architecture.__mro__ if not issubclass(kind, FSDPModule))
    empty = empty_model(stock_configuration(model.config), dtype or next(model.parameters()).dtype, stock)
    if depths := model.depths if isinstance(model, PipelineModel) else len(model_depths(model)):
        add_mtp(empty, depths)
    return empty


def stock_configuration(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a prepared model's configuration with transformers' own attention and cache, to be saved."""
    config = plain_configuration(deepcopy(config))
    config._attn_implementation = "eager"
    config.use_cache = True
    return config


def write_configuration(empty: PreTrainedModel, folder: Path, tokenizer: Any) -> None:
    """Write a model's configurations and what a tokenizer or processor writes by `save_pretrained`.

    An export passes the copied files of a run in its place: a generation configuration among them is not replaced.
    """
    config: Any = empty.config
    config.architectures = [type(empty).__name__]
    with no_progress_bars():
        config.save_pretrained(folder)
        if empty._auto_class is not None:  # a model whose code is not transformers' own
            custom_object_save(empty, folder, config=config)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        generation = empty.generation_config if empty.can_generate() else None
        if generation is not None and not (folder / "generation_config.json").is_file():
            generation.save_pretrained(folder)


# ---- weights of a folder into a prepared model


def load_weights(model: PreTrainedModel | PipelineModel, folder: str | Path, world: World) -> None:
    """Read a folder's weights into a prepared model; all ranks call it together.

    >>> save_model(model, "best", world)
    >>> load_weights(model, "best", world)                     # bit for bit, under any layout

    If the model has an adapter, the adapter only is read. Raises ModelError, on every rank, for a folder that lacks
    weights of the model, has them in other shapes, or cannot be read; the model's weights are then undefined.
    """
    folder = Path(folder)
    as_error = partial(_make_load_error, folder)
    if (adapter := model_adapter(model)) is not None:
        result_or_first_error(world, lambda: _read_adapter(model, adapter, folder), as_error)
        return
    empty = empty_stock_model(model)
    source = result_or_first_error(world, lambda: compare_weights(folder, empty), as_error)
    stages = [stage.model for stage in model.stages] if isinstance(model, PipelineModel) else [model]
    DeferredWeights(empty, source).fill_weights(stages, world)


@torch.no_grad()
def _read_adapter(model: PreTrainedModel | PipelineModel, adapter: Adapter, folder: Path) -> None:
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}, and the model has an adapter; give a folder of its adapter")
    tensors = adapter_entries(model, dict((*model.named_parameters(), *persistent_buffers(model))))
    with safe_open(file, framework="pt", device="cpu") as stored:
        by_name: Mapping[str, Tensor] = {stock_name(name, adapter.name): tensor for name, tensor in tensors.items()}
        if by_name.keys() != (names := set(stored.keys())):
            lacks, extra = sorted(by_name.keys() - names), sorted(names - by_name.keys())
            raise ModelError(
                f"{file} is of another adapter: it lacks {len(lacks)} of this one's tensors "
                f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} others ({', '.join(extra[:2]) or 'none'})"
            )
        for name, tensor in by_name.items():
            values = stored.get_slice(name)
            if tuple(values.get_shape()) != tuple(tensor.shape):
                raise ModelError(f"{name} is {tuple(values.get_shape())} in {file}, and {tuple(tensor.shape)} here")
            check_type(name, values, tensor.dtype, folder)
            local_tensor(tensor).copy_(values[LocalPart.of(tensor).block])


def _make_load_error(folder: Path, error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    return ModelError(f"the weights in {folder} cannot be read: {type(error).__name__}: {error}")
