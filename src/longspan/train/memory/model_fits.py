"""Whether shards of weights, gradients and optimizer states fit on each rank, before any is made.

These bytes follow from the shapes of the parameters, and no run needs fewer. Gathered layers and activations come on
top: a plan of memory counts them.
"""

import math

import torch
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural
from longspan.host_memory import free_host_bytes
from longspan.layout import Layout
from longspan.plan.memory.bytes import gib_text
from longspan.plan.memory.settings import MOMENTS


def check_model_fits(config: RunConfig, model: PreTrainedModel, world: World, *, training: bool) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared, and may be on the meta device. Without `training` only weights count.
    """

    def check_rank() -> None:
        free, where = free_room(world)
        parts = shard_bytes(config, model, world.home, training=training)
        needed = sum(parts.values())
        if free is None or needed <= free:
            return
        figures = ", ".join(f"{name} {gib_text(size)}" for name, size in parts.items() if size)
        gpus = math.ceil(needed / max(1, free)) * len(world.home.ranks)
        advice = f"use at least {plural(gpus, 'such GPU')}, parameters of fewer bytes (model.dtype), or a smaller model"
        if world.device.type != "cuda":
            advice = "use GPUs, hosts with more memory, or a smaller model (are all sizes in its configuration?)"
        raise ConfigError(
            f"the model does not fit: a rank needs at least {gib_text(needed)} before any activation ({figures}), and "
            f"{where} has {gib_text(free)} free; {advice}"
        )

    run_on_every_rank(world, check_rank, ConfigError)


def free_room(world: World) -> tuple[int | None, str]:
    """Return the free bytes of this rank's GPU, or on a CPU of its part of the host, free swap included; and where.

    The bytes are None on hosts without the figure (macOS).
    """
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0], f"the GPU of rank {world.rank}"
    ranks_here, free = count_ranks_of_host(world), free_host_bytes(swap=True)
    where = f"rank {world.rank}, one of {ranks_here} on its host,"
    return None if free is None else free // ranks_here, where


def count_ranks_of_host(world: World) -> int:
    """Return how many ranks share a host."""
    return min(len(world.home.ranks), world.node_size * world.home.tp)


def shard_bytes(config: RunConfig, model: PreTrainedModel, home: Layout, *, training: bool) -> dict[str, int]:
    """Count the bytes of this model's shards on a rank of a home, by what they are, from the shapes of its parameters.

    Everything is taken as split over tensor-parallel ranks and stages: more is needed, never less. What is frozen has
    neither gradients nor states.
    """
    moments = 0 if config.train.offload_states else MOMENTS.get(config.train.optimizer, 0)
    shards = home.tp * home.pp * home.slots // home.dp_replicate
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / shards
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad and training) / shards
    return {"weights": int(weights), "gradients": int(trained), "optimizer states": int(moments * trained)}
