"""Whether a rank has room for its shards of a run's model, before any activation."""

import math

import torch
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural
from longspan.host import free_host_bytes
from longspan.plain_text import gib_text
from longspan.plan.memory.settings import known_state_numbers


def check_model_fits(
    config: RunConfig, model: PreTrainedModel, world: World, *, training: bool, saved: int = 0
) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared, which packs its frozen weights and `saved` bytes of them. Without `training` only
    weights count. All is taken as split: more is needed, never less.
    """

    def check_rank_has_room() -> None:
        """Raise ConfigError, with the bytes of each part, where this rank's GPU, or its share of the host, is too
        small.
        """
        home = world.home
        train = config.train
        gpu = world.device.type == "cuda"
        shards = home.tp * home.pp * home.slots // home.dp_replicate
        weights = (sum(p.nbytes for p in model.parameters()) - saved) // shards
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and training) // shards
        moments = 0.0
        if trained and not train.offload_optimizer_states:
            size = max(p.dtype.itemsize for p in model.parameters() if p.requires_grad)
            moments = known_state_numbers(config.optimizer.class_, config.optimizer.moments, size) or 0.0
        if gpu and training and train.offload_weights:  # `prepare` checks the host
            weights, trained = (trained, trained) if config.lora.rank else (0, 0)
        parts = {"weights": weights, "gradients": trained, "optimizer states": int(moments * trained)}
        needed = sum(parts.values())
        ranks = world.ranks_of_host
        free = torch.cuda.mem_get_info(world.device)[0] if gpu else free_host_bytes(swap=True)
        if free is not None and not gpu:
            free //= ranks
        if free is None or needed <= free:
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

    run_on_every_rank(world, check_rank_has_room, ConfigError)
