"""Whether shards of weights, gradients and optimizer states, which no run can do without, fit on each rank."""

import math

import torch
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural
from longspan.host_memory import free_host_bytes
from longspan.plan.memory.bytes import gib_text
from longspan.plan.memory.settings import MOMENTS


def count_ranks_of_host(world: World) -> int:
    """How many ranks share a host."""
    return min(len(world.home.ranks), world.node_size * world.home.tp)


def check_model_fits(config: RunConfig, model: PreTrainedModel, world: World, *, training: bool) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared, and may be on the meta device. Without `training` only weights count. Everything is
    taken as split over tensor-parallel ranks and stages: more is needed, never less. A host's free swap counts; hosts
    without the figure (macOS) are not checked.
    """

    def check_rank() -> None:
        home, train, gpu = world.home, config.train, world.device.type == "cuda"
        shards = home.tp * home.pp * home.slots // home.dp_replicate
        weights = sum(p.nbytes for p in model.parameters()) // shards
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and training) // shards
        moments = 0 if train.offload_states else MOMENTS.get(train.optimizer, 0)
        parts = {"weights": weights, "gradients": trained, "optimizer states": int(moments * trained)}
        needed, ranks = sum(parts.values()), count_ranks_of_host(world)
        free = torch.cuda.mem_get_info(world.device)[0] if gpu else free_host_bytes(swap=True)
        if free is None or needed <= (free := free if gpu else free // ranks):
            return
        figures = ", ".join(f"{name} {gib_text(size)}" for name, size in parts.items() if size)
        gpus = plural(math.ceil(needed / max(1, free)) * len(home.ranks), "such GPU")
        where = f"rank {world.rank}, one of {ranks} on its host,"
        advice = "use GPUs, hosts with more memory, or a smaller model (are all sizes in its configuration?)"
        if gpu:
            where = f"the GPU of rank {world.rank}"
            advice = f"use at least {gpus}, parameters of fewer bytes (model.dtype), or a smaller model"
        raise ConfigError(
            f"the model does not fit: a rank needs at least {gib_text(needed)} before any activation ({figures}), and "
            f"{where} has {gib_text(free)} free; {advice}"
        )

    run_on_every_rank(world, check_rank, ConfigError)
