"""The weights of all pipeline stages, whole, on one rank: what a saved Hugging Face folder is written from."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.model.pipeline.pipeline import PipelineModel


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def state_of_all_stages(model: PipelineModel, world: World) -> dict[str, Tensor]:
    """Every entry of the whole model's `state_dict` on the CPU of the home's first rank; empty on the others.

    Entered by all ranks. One tensor at a time is whole on a rank that sends it.
    """
    local_state = model.state_dict()
    entries = [_Entry(name, tuple(value.shape), value.dtype) for name, value in local_state.items()]
    entries_of = dict(zip(world.home.ranks, world.control.gather_objects(entries, "names of weights"), strict=True))
    first = world.home.ranks[0]
    state: dict[str, Tensor] = {}
    for value, entry in zip(local_state.values(), entries, strict=True):
        full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        if world.rank == first:
            state[entry.name] = full.cpu()
        elif world.coordinates.pp > 0 and (world.slot, world.coordinates.tp) == (0, 0):
            world.channels.pipeline.exchange([(0, full.contiguous())], [], "weights of a stage").wait()
    if world.rank == first:
        for stage in range(1, world.home.pp):
            for entry in entries_of[world.home.rank_at(0, pp=stage)]:
                arriving = torch.empty(entry.shape, dtype=entry.dtype, device=world.device)
                world.channels.pipeline.exchange([], [(stage, arriving)], "weights of a stage").wait()
                state.setdefault(entry.name, arriving.cpu())
    return state
