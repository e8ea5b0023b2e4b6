"""The whole weights of a prepared model, gathered one at a time: by name on every rank, or for the rank that saves."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter, unwrap_peft_model
from longspan.model.adapters.adapter import AdaptedWeight, adapted_weights, entries_trained_with_adapter
from longspan.model.adapters.adapter_files import name_in_peft_files
from longspan.model.kinds import name_without_adapter
from longspan.model.marks import adapter_of_prepared_model, find_language_model, packed_weights
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import refuse_unprepared_model
from longspan.model.weights.tied_names import tied_names


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
    encoders = find_savable_encoders(model)
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
    return chain(of_language, ((name, gather_whole(x)) for state in states for name, x in state.items()))


def gather_whole(x: Tensor) -> Tensor:
    """Return a whole tensor without a graph; of a DTensor all ranks that hold it must enter."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


class _WeightEntry(NamedTuple):
    """What other ranks must know of a weight to receive it; `name` is the prepared model's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    tied: bool  # whether it has a second name
    adapted: AdaptedWeight | None


class WholeWeights:
    """Gathers the weights of a model one at a time; entered by all ranks in one order. `names` lists them.

    With `saved`, only the adapter and what is trained beside it of a model that has one.
    """

    def __init__(self, model: PreTrainedModel | PipelineModel, world: World, *, saved: bool = False) -> None:
        """List the weights of all stages by the prepared model's names; all ranks enter together.

        A tensor with several names is listed once, under the first, as tied; a weight that several stages have is
        listed once too, for the first of them, which will send it.
        """
        self._world = world
        self._adapter = adapter_of_prepared_model(model)
        stages = models_of_stages(model)
        self._local: dict[str, Tensor] = {}
        # Frozen weights in 4 or 8 bits are given out as they are computed with.
        self._packed = dict[str, Any]()
        entries = list[_WeightEntry]()
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
                    # A copy that is trained counts as tied if its original is: merged, it would change the other end.
                    # If embedding and head share the copy, it would not.
                    original = re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", name)
                    both_ends = original != name and name in tied.values()
                    is_tied = original in {*tied, *tied.values()} and not both_ends
                    shape, dtype = tuple(value.shape), value.dtype
                    if (packed := self._packed.get(name)) is not None:
                        shape, dtype = packed.whole_shape(value.shape), packed.dtype
                    entries.append(_WeightEntry(name, shape, dtype, position, is_tied, adapted.get(name)))
        if world.home.pp > 1:
            entries = self._gather_entries(entries)
        self._tied = {entry.name for entry in entries if entry.tied}
        self._entries = dict[str, _WeightEntry]()
        for entry in entries:
            self._entries.setdefault(entry.name, entry)
        self.names: list[str] = [*self._entries]

    def _gather_entries(self, entries: list[_WeightEntry]) -> list[_WeightEntry]:
        """All ranks enter with their own; the result is in the order of stages."""
        world = self._world
        # One rank of each stage reports its names, which all of the stage have.
        is_reporter = (world.slot, world.coordinates.tp) == (0, 0)
        stage_entries = {world.coordinates.pp: entries} if is_reporter else None
        join = dict[int, list[_WeightEntry]].__or__
        by_stage = world.control.reduce_object(stage_entries, join, "names of weights") or {}
        return [entry for stage in range(world.home.pp) for entry in by_stage[stage]]

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
        """Gather a weight as `gather_tensor` does, with what the adapter adds to it, summed in float32 at least."""
        weight = self.gather_tensor(name, first_only=first_only)
        adapted = self._entries[name].adapted
        if adapted is not None and (names := self._adapter_matrices(name)):
            wide = torch.promote_types(weight.dtype, torch.float32)
            matrix_a, matrix_b = (self.gather_tensor(matrix, first_only=first_only).to(wide) for matrix in names)
            if weight.numel():  # empty on a rank that got nothing
                weight = (weight.to(wide) + adapted.added_matrix(matrix_a, matrix_b)).to(weight.dtype)
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
        adapted = self._entries[name].adapted
        if self._adapter is None or adapted is None:
            return []
        names = [f"{adapted.module}.lora_{matrix}.{self._adapter.name}.weight" for matrix in "AB"]
        return [name for name in names if name in self._entries]

    def gather_tensor(self, name: str, *, first_only: bool = False) -> Tensor:
        """Gather a whole tensor on the ranks of its stage, which send it to those of the other stages; all ranks enter.

        With `first_only` it is sent to the home's first rank alone. Returns the whole tensor, on the device; on a rank
        that neither has nor gets it, an empty one of shape (0,).
        """
        entry = self._entries[name]
        world = self._world
        position = world.coordinates.pp
        receivers = [  # stages that get it from this rank's place in `entry.stage`, at the same slot and tp
            stage
            for stage in range(world.home.pp)
            if stage != entry.stage and (not first_only or (stage, world.slot, world.coordinates.tp) == (0, 0, 0))
        ]
        sends = list[tuple[int, Tensor]]()
        receives = list[tuple[int, Tensor]]()
        with world.watch.name_collectives(f"gathering of {name}", world.home.ranks):
            if position == entry.stage:
                value = self._local[name]
                # The value may be on the host.
                whole_tensor = gather_whole(value.to(world.device))
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


def find_savable_encoders(model: Any) -> list[Encoder]:
    """Return the encoders of a MultimodalModel; ModelError for one that is no encoder of transformers'."""
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


def models_of_stages(model: PreTrainedModel | PipelineModel) -> list[PreTrainedModel]:
    if isinstance(model, PipelineModel):
        return [stage.model for stage in model.stages]
    return [model]
