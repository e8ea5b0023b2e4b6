"""The weights of all pipeline stages, whole, on one rank: what a saved Hugging Face folder is written from."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.model.adapters import adapter_entries
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.weights.write import unit_of


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def groups_of_all_stages(model: PipelineModel, world: World) -> Iterator[dict[str, Tensor]]:
    """The whole model's `state_dict`, a layer at a time, stage after stage, on the CPU of the home's first rank.

    Empty groups on the others, as many. Entered by all ranks; one layer at a time is whole on a rank that sends it. Of
    a model with an adapter, the adapter's tensors.
    """
    in_stages = {name for stage in model.stages for name in stage.model.state_dict()}  # each layer whole in one group
    local_state = {name: x for name, x in adapter_entries(model, model.state_dict()).items() if name in in_stages}
    entries = [_Entry(name, tuple(value.shape), value.dtype) for name, value in local_state.items()]
    entries_of = dict(zip(world.home.ranks, world.control.gather_objects(entries, "names of weights"), strict=True))
    for stage in range(world.home.pp):
        theirs = entries_of[world.home.rank_at(0, pp=stage)]
        for _, group in groupby(theirs, lambda entry: unit_of(entry.name)):
            yield _group(list(group), local_state, world, stage)


def _group(entries: list[_Entry], local_state: dict[str, Tensor], world: World, stage: int) -> dict[str, Tensor]:
    """The whole tensors of one group of a stage, where they are written."""
    first, whole = world.home.ranks[0], dict[str, Tensor]()
    for entry in entries:
        if world.coordinates.pp == stage:
            value = local_state[entry.name]
            full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            if world.rank == first:
                whole[entry.name] = full.cpu()
            elif stage > 0 and (world.slot, world.coordinates.tp) == (0, 0):
                world.channels.pipeline.exchange([(0, full.contiguous())], [], "weights of a stage").wait()
        elif world.rank == first:
            arriving = torch.empty(entry.shape, dtype=entry.dtype, device=world.device)
            world.channels.pipeline.exchange([], [(stage, arriving)], "weights of a stage").wait()
            whole[entry.name] = arriving.cpu()
    return whole
