"""A prepared model, whole: to a folder that stock transformers loads, one layer at a time, or by name on every rank.

Training checkpoints, with optimizer state, and encoders of one's own are not saved here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
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
from longspan.comm.all_ranks import is_first_rank
from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter, name_without_adapter, unwrap_peft_model
from longspan.model.adapters import Adapter, entries_trained_with_adapter
from longspan.model.add_depths import add_mtp
from longspan.model.layers import mtp_depths
from longspan.model.load import checked_folder_weights, torch_dtype
from longspan.model.lora import (
    WEIGHTS,
    AdaptedWeight,
    adapted_weights,
    entries_inside_modules,
    largest_trained_modules,
    name_in_peft_files,
    write_adapter,
)
from longspan.model.marks import adapter_of_prepared_model, find_language_model, packed_weights
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import refuse_unprepared_model
from longspan.model.weights.fill import DeferredWeights, empty_model, persistent_buffers
from longspan.model.weights.folder import refuse_quantized_tensor
from longspan.model.weights.hf_folder import no_progress_bars, remove_code_and_quantization
from longspan.model.weights.local_tensors import LocalPart, local_tensor, tied_names
from longspan.model.weights.write import (
    OF_ADAPTER,
    OF_MODEL,
    WeightWriter,
    make_partial_folder,
    replace_files,
    weight_unit,
)


def weights_by_name(
    model: PreTrainedModel | PipelineModel | MultimodalModel, world: World, merge_adapter: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights of a prepared model: pairs of a name and a tensor on this rank's device.

    >>> for name, weight in weights_by_name(model, world): ...

    All ranks call it together and go through to the end. Names are those of the stock model's `state_dict`; a tied
    weight comes once. One weight is whole at a time; do not write to it. `merge_adapter` adds an adapter to the
    weights, as peft's `merge_and_unload`, with sums in float32 at least: plain LoRA of linears; otherwise its own come
    under peft's names as well. Weights of encoders come last. Raises ModelError for a model that was not prepared, for
    an adapter in an encoder, and where an adapter cannot be merged.
    """
    encoders = _find_savable_encoders(model)
    inside: Any = unwrap_peft_model(find_language_model(model))
    refuse_unprepared_model(inside)
    world.check_open()
    weights = WholeWeights(inside, world)
    states = [encoder.module.state_dict() for encoder in encoders]
    if adapted := [name for state in states for name in state if belongs_to_adapter(name)]:
        raise ModelError(f"{adapted[0]} is of an adapter in an encoder; write it by longspan.save_model")
    if merge_adapter:
        weights.check_mergeable()
        of_language = ((stock, weights.gather_merged(name)) for stock, name in weights.merged_names().items())
    else:
        of_language = weights.iterate_base_and_adapter()
    return chain(of_language, ((name, _whole(x)) for state in states for name, x in state.items()))


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


class _SavedEntry(NamedTuple):
    """What other ranks must know of a weight to receive it; `name` is the prepared model's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    tied: bool  # whether it has a second name
    adapted: AdaptedWeight | None


class WholeWeights:
    """Gathers the weights of a model one at a time; entered by all ranks in one order.

    With `saved`, of a model with an adapter only the adapter and what is trained beside it.
    """

    def __init__(self, model: PreTrainedModel | PipelineModel, world: World, *, saved: bool = False) -> None:
        """Of names that share a tensor the first is given out, noted as tied; of several stages, the first one's."""
        self._world = world
        self._adapter = adapter_of_prepared_model(model)
        stages = _models_of_stages(model)
        self._local: dict[str, Tensor] = {}
        # of frozen weights in 4 or 8 bits, which are given out as they are computed with
        self._packed = dict[str, Any]()
        entries = list[_SavedEntry]()
        position = world.coordinates.pp
        for stage in stages:
            state = stage.state_dict()
            tied = tied_names(stage)
            self._packed |= packed_weights(stage)
            adapted = adapted_weights(stage)
            state = entries_trained_with_adapter(model, state) if saved else state
            for name, value in state.items():
                if name not in tied and name not in self._local:
                    self._local[name] = value
                    # a copy that is trained counts as tied if its original is, unless both ends have the one copy
                    original = re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", name)
                    both_ends = original != name and name in tied.values()
                    is_tied = original in {*tied, *tied.values()} and not both_ends
                    shape, dtype = tuple(value.shape), value.dtype
                    if (packed := self._packed.get(name)) is not None:
                        shape, dtype = packed.whole_shape(value), packed.dtype
                    entries.append(_SavedEntry(name, shape, dtype, position, is_tied, adapted.get(name)))
        if world.home.pp > 1:
            local_entries = {position: entries} if (world.slot, world.coordinates.tp) == (0, 0) else None
            join = dict[int, list[_SavedEntry]].__or__
            by_stage = world.control.reduce_object(local_entries, join, "names of weights") or {}
            entries = [entry for stage in range(world.home.pp) for entry in by_stage[stage]]
        self._tied = {entry.name for entry in entries if entry.tied}
        self._entries = dict[str, _SavedEntry]()
        for entry in entries:  # a weight that several stages have is sent by the first of them
            self._entries.setdefault(entry.name, entry)
        self.names = [*self._entries]

    def iterate_base_and_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's weights, and the adapter's under peft's names."""
        for name in self.names:
            stock = name_without_adapter(name)
            if self._adapter is not None and belongs_to_adapter(name):
                stock = name_in_peft_files(name, self._adapter.name)
            yield stock, self.gather_tensor(name)

    def merged_names(self) -> dict[str, str]:
        """Return the prepared model's names of the base model's weights, by those of the stock model."""
        # a module that is trained whole has its trained copy beside `original_module`
        names = (name for name in self.names if ".lora_" not in name and ".original_module." not in name)
        return {name_without_adapter(name): name for name in names}

    def gather_merged(self, name: str, *, first_only: bool = False) -> Tensor:
        """Gather a weight with the adapter added, as `gather_tensor`."""
        weight = self.gather_tensor(name, first_only=first_only)
        adapted = self._entries[name].adapted
        if adapted is not None and (matrices := self._adapter_matrices(name)):
            wide = torch.promote_types(weight.dtype, torch.float32)
            a, b = (self.gather_tensor(matrix, first_only=first_only).to(wide) for matrix in matrices)
            if weight.numel():  # it is empty on a rank that only sends
                weight = (weight.to(wide) + adapted.sum_of(a, b)).to(weight.dtype)
        return weight

    def check_mergeable(self) -> None:
        """Raise ModelError for adapters that cannot be merged: on a tied weight, or of another kind than plain LoRA."""
        changed = (name for name in self._tied if ".modules_to_save." in name or self._adapter_matrices(name))
        if tied := sorted(changed):
            raise ModelError(
                f"merge_adapter: {tied[0]} is trained, and is the weight of the other end of the model as well "
                "(tie_word_embeddings), which must not change; leave merge_adapter out, which gives base and adapter"
            )
        mergeable = {matrix for name in self.names for matrix in self._adapter_matrices(name)}
        if others := [name for name in self.names if ".lora_" in name and name not in mergeable]:
            raise ModelError(
                f"merge_adapter does not know what {', '.join(others[:3])} add to the model's weights; leave it out, "
                "which gives base and adapter, or merge what longspan.save_model(model, folder, world) saved with peft"
            )

    def _adapter_matrices(self, name: str) -> list[str]:
        """The names of A and B of plain LoRA if this is a linear's weight, or experts'."""
        adapted = self._entries[name].adapted
        if self._adapter is None or adapted is None:
            return []
        names = [f"{adapted.module}.lora_{matrix}.{self._adapter.name}.weight" for matrix in "AB"]
        return [name for name in names if name in self._entries]

    def gather_tensor(self, name: str, *, first_only: bool = False) -> Tensor:
        """Gather a whole tensor on every rank, or the home's first alone; its stage sends it to the others."""
        entry = self._entries[name]
        world = self._world
        position = self._world.coordinates.pp
        receivers = [stage for stage in range(world.home.pp) if stage != entry.stage]
        if first_only:
            receivers = [0] if entry.stage and (world.slot, world.coordinates.tp) == (0, 0) else []
        sends = list[tuple[int, Tensor]]()
        receives = list[tuple[int, Tensor]]()
        with world.watch.name_collectives(f"gathering of {name}", world.home.ranks):
            if position == entry.stage:
                value = self._local[name]
                whole_tensor = _whole(value.to(world.device))  # it may wait on the host
                if (packed := self._packed.get(name)) is not None:
                    whole_tensor = packed.unpack_whole(whole_tensor)
                sends = [(stage, whole_tensor.contiguous()) for stage in receivers]
            else:
                shape = entry.shape if position in receivers else (0,)
                whole_tensor = torch.empty(shape, dtype=entry.dtype, device=world.device)
                receives = [(entry.stage, whole_tensor)] if position in receivers else []
            if sends or receives:
                world.channels.pipeline.exchange(sends, receives, "weights of a stage").wait()
        return whole_tensor


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
    encoders = _find_savable_encoders(model)
    target = Path(folder)
    language_model: Any = find_language_model(model)
    inside: Any = unwrap_peft_model(language_model)
    if inside is not language_model:  # a PeftModel: the parameters of the model inside have other names
        refuse_unprepared_model(inside)
    file_dtype = None if dtype is None else torch_dtype(dtype)
    with world.watch.name_collectives(
        f"writing of {target}", world.home.ranks
    ):  # for DTensor's gathers, which name nothing
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
    """All ranks gather a unit of weights (a layer) after another, and learn at once if the first cannot write."""
    writer: Any = _on_first_rank(world, target, lambda: _begin_files(model, target, file_dtype))
    for unit in _gathered_units(model, [encoder.module.state_dict() for encoder in encoders], world):
        _on_first_rank(world, target, partial(WeightWriter.write_unit, writer, unit))

    def finish_files() -> None:
        writer.finish()
        write_all_but_weights(writer.empty, writer.folder, tokenizer)
        replace_files(writer.folder, target, OF_MODEL)

    _on_first_rank(world, target, finish_files)


def _on_first_rank(world: World, target: Path, work: Callable[[], object]) -> object:
    """Return what the work on the first rank gives, None elsewhere; all ranks raise its error."""
    return result_or_first_error(
        world,
        lambda: work() if is_first_rank(world) else None,
        lambda error: ModelError(f"the model could not be saved to {target}: {type(error).__name__}: {error}"),
    )


def _find_savable_encoders(model: Any) -> list[Encoder]:
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


def _save_adapter(
    model: PreTrainedModel | PipelineModel,
    adapter: Adapter,
    encoders: Sequence[Encoder],
    target: Path,
    world: World,
    tokenizer: Any,
    file_dtype: torch.dtype | None,
) -> None:
    modules = list[str]()  # of encoders, trained whole
    states = list[Mapping[str, Tensor]]()
    for encoder in encoders:
        parameters = encoder.module.named_parameters()
        trained = {name for name, p in parameters if p.requires_grad and not belongs_to_adapter(name)}
        trained_modules = largest_trained_modules(
            encoder.module, trained, inside=str(encoder.module.base_model_name)
        )
        modules += trained_modules
        state = encoder.module.state_dict()
        of_adapter = {name: x for name, x in state.items() if belongs_to_adapter(name)}
        states.append(of_adapter | entries_inside_modules(trained_modules, state))
    units = _gathered_units(model, states, world)
    tensors = {name: x.to(dtype=file_dtype) for unit in units for name, x in unit.items()}
    for stage in _models_of_stages(model):
        # of one copy that is trained at both ends peft reads both
        for name, first_name in tied_names(stage).items():
            if first_name in tensors and belongs_to_adapter(name):
                tensors[name] = tensors[first_name].clone()

    def write_files() -> None:
        unfinished = make_partial_folder(target)
        write_adapter(unfinished, adapter, tensors, tokenizer, modules)
        replace_files(unfinished, target, OF_ADAPTER)

    _on_first_rank(world, target, write_files)


def _gathered_units(
    model: PreTrainedModel | PipelineModel, encoder_states: Sequence[Mapping[str, Tensor]], world: World
) -> Iterator[dict[str, Tensor]]:
    """Yield on the first rank weights of a layer after another, and nothing in them elsewhere; all ranks enter."""
    weights = WholeWeights(model, world, saved=True)
    of_language = ((name, weights.gather_tensor(name, first_only=True)) for name in weights.names)
    of_encoders = ((name, _whole(x)) for state in encoder_states for name, x in state.items())
    for _, unit in groupby(chain(of_language, of_encoders), lambda entry: weight_unit(entry[0])):
        yield {name: x.cpu() for name, x in unit if is_first_rank(world)}


def _begin_files(model: PreTrainedModel | PipelineModel, target: Path, dtype: torch.dtype | None) -> WeightWriter:
    unfinished = make_partial_folder(target)
    empty = empty_stock_model(model, dtype)
    if getattr(model, "generation_config", None) is not None:  # a model that scores has none
        empty.generation_config = model.generation_config  # pyright: ignore[reportAttributeAccessIssue]
    return WeightWriter(unfinished, empty, cast=dtype is not None)


def empty_stock_model(model: PreTrainedModel | PipelineModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make the whole stock model from which a model was prepared, with its depths, on the meta device."""
    dtype = dtype or next(model.parameters()).dtype
    empty = empty_model(stock_configuration(model.config), dtype, stock_class(model))
    if depths := model.depths if isinstance(model, PipelineModel) else len(mtp_depths(model)):
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


def write_all_but_weights(empty: PreTrainedModel, folder: Path, tokenizer: Any) -> None:
    """Write a model's configurations and what a tokenizer or processor writes by `save_pretrained`.

    A generation configuration that is in the folder already, as an export copies it from the run, is not replaced.
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
        said = f"the weights in {folder} cannot be read: {type(error).__name__}: {error}"
        return error if isinstance(error, ModelError) else ModelError(said)

    if (adapter := adapter_of_prepared_model(model)) is not None:
        result_or_first_error(world, lambda: _read_adapter(model, adapter, folder), as_error)
        return
    empty = empty_stock_model(model)
    source = result_or_first_error(world, lambda: checked_folder_weights(folder, empty), as_error)
    DeferredWeights(empty, source).fill_weights(_models_of_stages(model), world)


def _models_of_stages(model: PreTrainedModel | PipelineModel) -> list[PreTrainedModel]:
    return [stage.model for stage in model.stages] if isinstance(model, PipelineModel) else [model]


@torch.no_grad()
def _read_adapter(model: PreTrainedModel | PipelineModel, adapter: Adapter, folder: Path) -> None:
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}, and the model has an adapter; give a folder of its adapter")
    # a tied copy is in the file under each of its names
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = entries_trained_with_adapter(model, dict((*parameters, *persistent_buffers(model))))
    with safe_open(file, framework="pt", device="cpu") as stored:
        by_name: Mapping[str, Tensor] = {
            name_in_peft_files(name, adapter.name): tensor for name, tensor in tensors.items()
        }
        if by_name.keys() != (names := set(stored.keys())):
            lacks = sorted(by_name.keys() - names)
            extra = sorted(names - by_name.keys())
            raise ModelError(
                f"{file} is of another adapter: it lacks {len(lacks)} of this one's tensors "
                f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} others ({', '.join(extra[:2]) or 'none'})"
            )
        for name, tensor in by_name.items():
            values = stored.get_slice(name)
            if tuple(values.get_shape()) != tuple(tensor.shape):
                raise ModelError(f"{name} is {tuple(values.get_shape())} in {file}, and {tuple(tensor.shape)} here")
            refuse_quantized_tensor(name, values, tensor.dtype, folder)
            local_tensor(tensor).copy_(values[LocalPart.from_parameter(tensor).block])
