"""A prepared model to a folder that stock transformers loads, or its adapter to one that stock peft loads; and back.

Training checkpoints, with optimizer state, and encoders of one's own are not saved here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from longspan.comm import World, result_or_first_error
from longspan.comm.all_ranks import is_first_rank
from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter, unwrap_peft_model
from longspan.model.adapters.adapter import Adapter, entries_trained_with_adapter
from longspan.model.adapters.adapter_files import (
    WEIGHTS,
    entries_inside_modules,
    largest_trained_modules,
    name_in_peft_files,
    write_adapter,
)
from longspan.model.add_depths import add_mtp
from longspan.model.layers import mtp_depths
from longspan.model.load import checked_folder_weights, torch_dtype
from longspan.model.marks import adapter_of_prepared_model, find_language_model
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.saving.whole_weights import WholeWeights, find_savable_encoders, gather_whole, models_of_stages
from longspan.model.seams.call_rules import refuse_unprepared_model
from longspan.model.weights.empty_model import empty_model, persistent_buffers
from longspan.model.weights.fill import DeferredWeights
from longspan.model.weights.folder_weights import refuse_quantized_tensor
from longspan.model.weights.hf_folder import no_progress_bars, remove_code_and_quantization
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.model.weights.tied_names import tied_names
from longspan.model.weights.write import (
    ADAPTER_PATTERN,
    MODEL_PATTERN,
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

    The home's first rank, sent a decoder layer at a time, writes safetensors, configuration and tokenizer next to
    `folder`; once all are written they replace the files of an older model or adapter, and other files stay. `dtype` is
    that of the files, the parameters' own by default. With an adapter it alone is written, as stock peft loads it, with
    what is trained of an encoder as its `modules_to_save`; a vision-language model is written whole. Raises ModelError
    on every rank where writing failed, CommError where a rank is lost.
    """
    encoders = find_savable_encoders(model)
    target = Path(folder)
    language_model: Any = find_language_model(model)
    inside: Any = unwrap_peft_model(language_model)
    if inside is not language_model:  # a PeftModel: the parameters of the model inside have other names
        refuse_unprepared_model(inside)
    file_dtype = None if dtype is None else torch_dtype(dtype)
    # DTensor's gathers name nothing themselves.
    with world.watch.name_collectives(f"writing of {target}", world.home.ranks):
        adapter = adapter_of_prepared_model(inside)
        if adapter is None:
            _save_weights(inside, encoders, target, world, tokenizer, file_dtype)
        else:
            _save_adapter(inside, adapter, encoders, target, world, tokenizer, file_dtype)


def _save_weights(
    model: PreTrainedModel | PipelineModel,
    encoders: Sequence[Encoder],
    target: Path,
    world: World,
    tokenizer: Any,
    file_dtype: torch.dtype | None,
) -> None:
    """Every rank gathers a unit of weights (a decoder layer) after another, and the first writes it. After each unit
    all ranks raise the error if the first could not write."""

    def begin_files() -> WeightWriter:
        unfinished = make_partial_folder(target)
        empty = empty_stock_model(model, file_dtype)
        if getattr(model, "generation_config", None) is not None:  # a model that scores has none
            empty.generation_config = model.generation_config  # pyright: ignore[reportAttributeAccessIssue]
        return WeightWriter(unfinished, empty, cast=file_dtype is not None)

    writer: Any = _run_on_saving_rank(world, target, begin_files)
    for unit in _gathered_units(model, [encoder.module.state_dict() for encoder in encoders], world):
        _run_on_saving_rank(world, target, partial(WeightWriter.write_unit, writer, unit))

    def finish_files() -> None:
        writer.finish()
        write_all_but_weights(writer.empty, writer.folder, tokenizer)
        replace_files(writer.folder, target, MODEL_PATTERN)

    _run_on_saving_rank(world, target, finish_files)


def _run_on_saving_rank(world: World, target: Path, work: Callable[[], object]) -> object:
    """None on the other ranks; all ranks raise the first one's error."""
    return result_or_first_error(
        world,
        lambda: work() if is_first_rank(world) else None,
        lambda error: ModelError(f"the model could not be saved to {target}: {type(error).__name__}: {error}"),
    )


def _save_adapter(
    model: PreTrainedModel | PipelineModel,
    adapter: Adapter,
    encoders: Sequence[Encoder],
    target: Path,
    world: World,
    tokenizer: Any,
    file_dtype: torch.dtype | None,
) -> None:
    """The first rank has all of it whole in memory."""
    # These modules of encoders are trained whole.
    modules = list[str]()
    states = list[Mapping[str, Tensor]]()
    for encoder in encoders:
        parameters = encoder.module.named_parameters()
        trained = {name for name, p in parameters if p.requires_grad and not belongs_to_adapter(name)}
        trained_modules = largest_trained_modules(
            encoder.module, trained, inside=str(encoder.module.base_model_name)
        )
        modules += trained_modules
        state = encoder.module.state_dict()
        adapter_entries = {name: x for name, x in state.items() if belongs_to_adapter(name)}
        states.append(adapter_entries | entries_inside_modules(trained_modules, state))
    units = _gathered_units(model, states, world)
    tensors = {name: x.to(dtype=file_dtype) for unit in units for name, x in unit.items()}
    for stage in models_of_stages(model):
        # a copy that embedding and head share is gathered under one name, and peft reads it under both
        for name, first_name in tied_names(stage).items():
            if first_name in tensors and belongs_to_adapter(name):
                tensors[name] = tensors[first_name].clone()

    def write_files() -> None:
        unfinished = make_partial_folder(target)
        write_adapter(unfinished, adapter, tensors, tokenizer, modules)
        replace_files(unfinished, target, ADAPTER_PATTERN)

    _run_on_saving_rank(world, target, write_files)


def _gathered_units(
    model: PreTrainedModel | PipelineModel, encoder_states: Sequence[Mapping[str, Tensor]], world: World
) -> Iterator[dict[str, Tensor]]:
    """All ranks go through it together to the end, as each unit is gathered when it is asked for. With an adapter,
    only what is trained comes. Weights of encoders come last; ranks but the first get empty tables."""
    weights = WholeWeights(model, world, saved=True)
    of_language = ((name, weights.gather_tensor(name, first_only=True)) for name in weights.names)
    of_encoders = ((name, gather_whole(x)) for state in encoder_states for name, x in state.items())
    for _, unit in groupby(chain(of_language, of_encoders), lambda entry: weight_unit(entry[0])):
        yield {name: x.cpu() for name, x in unit if is_first_rank(world)}


def write_all_but_weights(empty: PreTrainedModel, folder: Path, tokenizer: Any) -> None:
    """Write a model's configurations and what a tokenizer or processor writes by `save_pretrained`.

    `empty` is changed: its configuration names its class. A generation configuration that is in the folder already, as
    an export copies it from the run, is not replaced.
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
            # As it is: `save_pretrained` refuses settings that a folder may have, once a Trainer has set token ids.
            generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


# ---- weights of a folder into a prepared model


def load_weights(model: PreTrainedModel | PipelineModel, folder: str | Path, world: World) -> None:
    """Read a folder's weights into a prepared model; all ranks call it together.

    >>> load_weights(model, "best", world)                     # bit for bit, under any layout

    If the model has an adapter, the adapter only is read. Raises ModelError, on every rank, for a folder that lacks
    weights of the model, has them in other shapes, or cannot be read; the model's weights are then undefined.
    """
    folder = Path(folder)

    def as_error(error: Exception) -> ModelError:
        text = f"the weights in {folder} cannot be read: {type(error).__name__}: {error}"
        return error if isinstance(error, ModelError) else ModelError(text)

    if (adapter := adapter_of_prepared_model(model)) is not None:
        result_or_first_error(world, lambda: _read_adapter(model, adapter, folder), as_error)
        return
    empty = empty_stock_model(model)
    source = result_or_first_error(world, lambda: checked_folder_weights(folder, empty), as_error)
    DeferredWeights(empty, source).fill_weights(models_of_stages(model), world)


@torch.no_grad()
def _read_adapter(model: PreTrainedModel | PipelineModel, adapter: Adapter, folder: Path) -> None:
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}, and the model has an adapter; give a folder of its adapter")
    # a tied copy is in the file under each of its names
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = entries_trained_with_adapter(model, dict((*parameters, *persistent_buffers(model))))
    with safe_open(file, framework="pt", device="cpu") as stored:
        expected: Mapping[str, Tensor] = {
            name_in_peft_files(name, adapter.name): tensor for name, tensor in tensors.items()
        }
        if expected.keys() != (names := set(stored.keys())):
            lacks = sorted(expected.keys() - names)
            extra = sorted(names - expected.keys())
            raise ModelError(
                f"{file} is of another adapter: it lacks {len(lacks)} of this one's tensors "
                f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} others ({', '.join(extra[:2]) or 'none'})"
            )
        for name, tensor in expected.items():
            values = stored.get_slice(name)
            if tuple(values.get_shape()) != tuple(tensor.shape):
                raise ModelError(f"{name} is {tuple(values.get_shape())} in {file}, and {tuple(tensor.shape)} here")
            refuse_quantized_tensor(name, values, tensor.dtype, folder)
            local_tensor(tensor).copy_(values[LocalPart.from_parameter(tensor).block])


# ---- the stock model: class, configuration, and names without values


def empty_stock_model(model: PreTrainedModel | PipelineModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make the whole stock model from which a model was prepared, with its depths, on the meta device."""
    dtype = dtype or next(model.parameters()).dtype
    empty = empty_model(stock_configuration(model.config), dtype, stock_class(model))
    depths = model.depths if isinstance(model, PipelineModel) else len(mtp_depths(model))
    if depths:
        add_mtp(empty, depths)
    return empty


def stock_class(model: PreTrainedModel | PipelineModel) -> type[PreTrainedModel]:
    """Return the class of transformers of which a prepared model is."""
    architecture = model.architecture if isinstance(model, PipelineModel) else type(model)
    return next(kind for kind in architecture.__mro__ if not issubclass(kind, FSDPModule))


def stock_configuration(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a prepared model's configuration with transformers' own attention and cache, to be saved."""
    config = remove_code_and_quantization(deepcopy(config))
    config._attn_implementation = "eager"
    config.use_cache = True
    return config
