"""The whole weights of a prepared model by name, one at a time on every rank: for an inference engine, say.

    for name, weight in weights_by_name(model, world, merge_adapter=True):
        engine.load_weights([(name, weight)])

Folders are written by `save.py`; encoders of a MultimodalModel are not read.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapters import (
    adapter_entries,
    belongs_to_adapter,
    is_adapted,
    model_adapter,
    plain_name,
    unwrap_model,
)
from longspan.model.lora.save import stock_name
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import refuse_unprepared_model
from longspan.model.weights.local_tensors import tied_names

_BASE = ".base_layer."


def weights_by_name(
    model: PreTrainedModel | PipelineModel, world: World, merge_adapter: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights of a prepared model: pairs of a name and a tensor on this rank's device.

    >>> for name, weight in weights_by_name(model, world): ...

    All ranks call it together and go through to the end; each gets every weight, in one order. Names are those of the
    stock model's `state_dict`, with fused experts where transformers has them; a tied weight comes once. One weight is
    whole at a time, and with it the adapter of its linear, if it has one. Do not write to the tensors: one that is not
    sharded is the parameter itself.

    If the model has an adapter, `merge_adapter` adds it to the weights, as `merge_and_unload` of peft does: sums are in
    float32 at least, and come in the weight's dtype. Otherwise weights are the base model's, and the adapter's come
    under peft's names as well ("base_model.model.….lora_A.weight").

    Raises ModelError for a model that was not prepared, for a MultimodalModel, and where an adapter cannot be merged.
    """
    if isinstance(model, MultimodalModel):
        raise ModelError(
            "weights_by_name got a MultimodalModel, whose encoders it does not read; give it model.language_model, or "
            "write all of it: longspan.save_model(model, folder, world)"
        )
    inside: Any = unwrap_model(model)
    refuse_unprepared_model(inside)
    world.check_open()
    weights = WholeWeights(inside, world)
    if merge_adapter:
        weights.check_merge()
    return weights.iterate_merged_weights() if merge_adapter else weights.iterate_separately()


class _Entry(NamedTuple):
    """What other ranks must know of a weight to receive it; `name` is the prepared model's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    tied: bool  # whether it has a second name
    scaling: float | None  # of the adapter, if the weight is in an adapted module


class WholeWeights:
    """Gathers the weights of a model one at a time; entered by all ranks in one order.

    With `saved`, of a model with an adapter only what is saved: the adapter and what is trained beside it.
    """

    def __init__(self, model: PreTrainedModel | PipelineModel, world: World, *, saved: bool = False) -> None:
        """Collect which weights there are, over all pipeline stages, under their names in the whole model.

        Of names that share a tensor only the first is given out, and is noted as tied. A weight that several stages of
        this rank have is the first one's. A weight in an adapted module has the scaling with which the adapter is added
        to it.
        """
        self._world, self._adapter = world, model_adapter(model)
        stages = [stage.model for stage in model.stages] if isinstance(model, PipelineModel) else [model]
        self._local: dict[str, Tensor] = {}
        entries = list[_Entry]()
        position = world.coordinates.pp
        for stage in stages:
            state, scalings, tied = stage.state_dict(), self._adapter_scalings(stage), tied_names(stage)
            state = adapter_entries(model, state) if saved else state
            for name, value in state.items():
                if name not in tied and name not in self._local:
                    self._local[name] = value
                    scaling = scalings.get(name.partition(_BASE)[0]) if _BASE in name else None
                    # a copy that is trained counts as tied if its original is, unless both ends have the one copy
                    original = re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", name)
                    both_ends = original != name and name in tied.values()
                    is_tied = original in {*tied, *tied.values()} and not both_ends
                    entries.append(_Entry(name, tuple(value.shape), value.dtype, position, is_tied, scaling))
        entries = self._collect_entries(entries)
        self._tied = {entry.name for entry in entries if entry.tied}
        self._entries = dict[str, _Entry]()
        for entry in entries:  # a weight that several stages have is sent by the first of them
            self._entries.setdefault(entry.name, entry)
        self.names = [*self._entries]

    def _collect_entries(self, entries: list[_Entry]) -> list[_Entry]:
        if self._world.home.pp == 1:
            return entries
        is_reporter = (self._world.slot, self._world.coordinates.tp) == (0, 0)
        local_entries = {self._world.coordinates.pp: entries} if is_reporter else None
        by_stage = (
            self._world.control.reduce_object(local_entries, dict[int, list[_Entry]].__or__, "names of weights") or {}
        )
        return [entry for stage in range(self._world.home.pp) for entry in by_stage[stage]]

    def _adapter_scalings(self, stage: nn.Module) -> Mapping[str, float]:
        if self._adapter is None:
            return {}
        modules: dict[str, Any] = {name: module for name, module in stage.named_modules() if is_adapted(module)}
        return {name: float(module.scaling[self._adapter.name]) for name, module in modules.items()}

    def iterate_separately(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's weights, and the adapter's under peft's names."""
        for name in self.names:
            stock = plain_name(name)
            if self._adapter is not None and belongs_to_adapter(name):
                stock = stock_name(name, self._adapter.name)
            yield stock, self.gather_tensor(name)

    def iterate_merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's weights with the adapter added, and none of the adapter's own."""
        for name in self.names:
            # a module that is trained whole has its trained copy beside `original_module`
            if ".lora_" in name or ".original_module." in name:
                continue
            parts = self._adapter_tensor_names(name)
            weight = self.gather_tensor(name)
            if parts:
                tensors = {role: self.gather_tensor(tensor_name) for role, tensor_name in parts.items()}
                weight = _merge_adapter(weight, tensors, self._entries[name].scaling or 0.0)
            yield plain_name(name), weight

    def check_merge(self) -> None:
        """Raise ModelError for adapters that cannot be merged: on a tied weight, or of a kind not known here."""
        changed = (name for name in self._tied if ".modules_to_save." in name or self._adapter_tensor_names(name))
        if tied := sorted(changed):
            raise ModelError(
                f"merge_adapter: {tied[0]} is trained, and is the weight of the other end of the model as well "
                "(tie_word_embeddings), which must not change; leave merge_adapter out, which gives base and adapter"
            )
        mergeable = {part for name in self.names for part in self._adapter_tensor_names(name).values()}
        if others := [name for name in self.names if ".lora_" in name and name not in mergeable]:
            raise ModelError(
                f"merge_adapter does not know what {', '.join(others[:3])} add to the model's weights; leave it out, "
                "which gives base and adapter, or merge what longspan.save_model(model, folder, world) saved with peft"
            )

    def _adapter_tensor_names(self, name: str) -> dict[str, str]:
        """Return the names of the adapter's tensors that change this weight or bias, by role ("A", "B", "bias" …).

        It is empty for a weight outside adapted modules. `_BASE` stands in names between an adapted module and the
        weights of the module that it adapts.
        """
        if self._adapter is None or _BASE not in name:
            return {}
        module, _, kind = name.rpartition(_BASE)
        adapter = self._adapter.name
        suffixes = {"bias": f"lora_B.{adapter}.bias"}
        if kind == "weight":
            suffixes = {"A": f"lora_A.{adapter}.weight", "B": f"lora_B.{adapter}.weight"}
            suffixes |= {"embedding_A": f"lora_embedding_A.{adapter}", "embedding_B": f"lora_embedding_B.{adapter}"}
            if f"{module}.lora_A.{adapter}.weight" in self._entries:  # an embedding's DoRA is refused by check_merge
                suffixes |= {"magnitude": f"lora_magnitude_vector.{adapter}.weight"}
        names = {role: f"{module}.{tensor_name}" for role, tensor_name in suffixes.items()}
        return {role: tensor_name for role, tensor_name in names.items() if tensor_name in self._entries}

    def gather_tensor(self, name: str, *, first_only: bool = False) -> Tensor:
        """Gather a whole tensor on the device of every rank: its stage gathers it and sends it to the other stages.

        With `first_only` the home's first rank gets it, and ranks of other stages an empty tensor.
        """
        entry, world, position = self._entries[name], self._world, self._world.coordinates.pp
        receivers = [stage for stage in range(world.home.pp) if stage != entry.stage]
        if first_only:
            receivers = [0] if entry.stage and (world.slot, world.coordinates.tp) == (0, 0) else []
        sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        with world.watch.naming(f"gathering of {name}", world.home.ranks):
            if position == entry.stage:
                value = self._local[name]
                whole_tensor = (value.full_tensor() if isinstance(value, DTensor) else value).detach().to(world.device)
                sends = [(stage, whole_tensor.contiguous()) for stage in receivers]
            else:
                shape = entry.shape if position in receivers else (0,)
                whole_tensor = torch.empty(shape, dtype=entry.dtype, device=world.device)
                receives = [(entry.stage, whole_tensor)] if position in receivers else []
            if sends or receives:
                world.channels.pipeline.exchange(sends, receives, "weights of a stage").wait()
        return whole_tensor


def _merge_adapter(weight: Tensor, parts: Mapping[str, Tensor], scaling: float) -> Tensor:
    """The change is scaling · B A, for an embedding its transpose, for a bias scaling times the adapter's bias. DoRA
    also sets the length of each row.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    wide = {role: x.to(dtype) for role, x in parts.items()}
    total = weight.to(dtype)
    if "bias" in wide:
        total = total + scaling * wide["bias"]
    elif "embedding_A" in wide:
        total = total + scaling * (wide["embedding_B"] @ wide["embedding_A"]).T
    else:
        total = total + scaling * (wide["B"] @ wide["A"])
    if "magnitude" in wide:  # DoRA: the directions of rows, times lengths that are trained
        total = total * (wide["magnitude"] / total.norm(dim=1)).unsqueeze(1)
    return total.to(weight.dtype)
