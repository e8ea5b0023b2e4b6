"""Whether weights, gradients, optimizer states and the largest gathered layer fit on each rank, before any is made.

These bytes follow from the shapes of the parameters, and no run needs fewer. Activations come on top; they depend on
`max_tokens_per_slot`, and show in the warm-up.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, ModelError, plural
from longspan.host_memory import free_host_bytes
from longspan.layout import Layout
from longspan.model.layers import decoder_layers, stage_layers
from longspan.model.mtp.depths import mtp_blocks
from longspan.model.parts import find_parts
from longspan.model.pipeline.settings import PipelineSettings
from longspan.model.pipeline.stages import stage_models
from longspan.plan.memory.settings import MOMENTS


@dataclass(frozen=True)
class NeededBytes:
    """The least bytes of a model on one rank: `weights`, `gradients` and `states` are sharded, `gathered` is not."""

    weights: int
    gradients: int
    states: int
    gathered: int
    shards: int

    @property
    def total(self) -> int:
        """The sum, sharded and gathered."""
        return self.weights + self.gradients + self.states + self.gathered

    def shards_that_fit(self, room: int) -> int:
        """Return over how many shards the model would fit in `room` bytes; 0 where what is gathered alone does not."""
        room_left = room - self.gathered
        return 0 if room_left <= 0 else math.ceil((self.total - self.gathered) * self.shards / room_left)


def check_model_fits(
    config: RunConfig, model: PreTrainedModel, world: World, compute_dtype: torch.dtype, *, training: bool
) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than the model needs, on its GPU or its host.

    `model` is not yet prepared, and may be on the meta device. Without `training` only weights and a gathered layer
    count.
    """

    def check_rank() -> None:
        """Raise ConfigError where this rank has no room for what the model needs."""
        room = free_room(world)
        if room is not None:
            _check_room(
                config, needed_bytes(config, model, world.home, compute_dtype, training=training), room, world.home
            )

    run_on_every_rank(world, check_rank, ConfigError)


@dataclass(frozen=True)
class Room:
    """The bytes that a rank has for a model, where, and whether more of the same GPUs would give it more."""

    size: int
    where: str
    of_gpu: bool


def free_room(world: World) -> Room | None:
    """Return the free memory of this rank's GPU, or on a CPU its part of the host's, free swap included.

    It is None on hosts without the figure (macOS).
    """
    if world.device.type == "cuda":
        return Room(torch.cuda.mem_get_info(world.device)[0], f"the GPU of rank {world.rank}", of_gpu=True)
    ranks_here, free = count_ranks_of_host(world), free_host_bytes(swap=True)
    return (
        None
        if free is None
        else Room(free // ranks_here, f"rank {world.rank}, one of {ranks_here} on its host,", of_gpu=False)
    )


def count_ranks_of_host(world: World) -> int:
    """Return how many ranks share a host."""
    return min(len(world.home.ranks), world.node_size * world.home.tp)


def needed_bytes(
    config: RunConfig, model: PreTrainedModel, home: Layout, compute_dtype: torch.dtype, *, training: bool
) -> NeededBytes:
    """Count the least bytes of this model on the rank of a home that needs most, from the shapes of its parameters.

    Everything is taken as split over tensor-parallel ranks: more is needed, never less. What is frozen has neither
    gradients nor states. A parameter that several stages of a rank share (`copies`) has a copy and a gradient for each,
    and one state. Parameters are gathered if they are sharded, or if their dtype is not the one to compute in.
    """
    shards, ranks = home.slots // home.dp_replicate, _rank_models(config, model, home)
    gathers = shards > 1 or compute_dtype != getattr(torch, config.model.dtype)
    sharers = home.pp // len(ranks)  # ranks that share a stage whose parts are not known yet
    moments = 0 if config.train.offload_states else MOMENTS.get(config.train.optimizer, 0)
    needs = list[NeededBytes]()
    for models in ranks:
        copies = [p for stage in models for p in stage.parameters()]
        trained = [p for p in copies if p.requires_grad and training]
        sizes = (
            sum(map(_parameter_bytes, copies)),
            sum(map(_parameter_bytes, trained)),
            moments * sum(map(_parameter_bytes, dict.fromkeys(trained))),
        )
        weights, gradients, states = (int(x / home.tp / shards / sharers) for x in sizes)
        numbers = sum(_gathered_numbers(config, stage, home) for stage in models) / sharers if gathers else 0
        gathered = int(numbers * compute_dtype.itemsize)
        needs.append(NeededBytes(weights, gradients, states, gathered, shards))
    return max(needs, key=lambda needed: needed.total)


def _rank_models(config: RunConfig, model: PreTrainedModel, home: Layout) -> list[list[PreTrainedModel]]:
    """Return the stages of each pipeline rank; only the whole model without a pipeline, or if it cannot be cut yet."""
    if home.pp == 1:
        return [[model]]
    settings = PipelineSettings(config.parallel.pipeline_schedule, home.pp, config.parallel.vpp)
    try:
        layers = stage_layers(len(decoder_layers(model)), settings.stages)
        stages = stage_models(model, find_parts(model), layers)
    except ModelError:  # a model with encoders is cut only without them; `prepare` refuses what cannot be cut
        return [[model]]
    return [[stages[i] for i in settings.stages_at(place)] for place in range(home.pp)]


def _parameter_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return x.numel() * x.element_size()


def _parameter_numbers(model: nn.Module, home: Layout) -> dict[str, float]:
    """Count the numbers of each parameter on a tensor-parallel rank, before FSDP2 shards them."""
    return {name: parameter.numel() / home.tp for name, parameter in model.named_parameters()}


def _gathered_numbers(config: RunConfig, model: PreTrainedModel, home: Layout) -> float:
    """Count the numbers that a rank gathers at one time.

    They are the root's (embedding and head) and the largest layer's. All layers count where none is freed before the
    end of a step: in a pipeline, in free mode, or without parallel.reshard_after_forward. With a pipeline the root is
    left out, since some stages have neither embedding nor head. Of experts a rank gathers its own, one in `ep`.
    """
    layer_names = (*decoder_layers(model), *mtp_blocks(model))
    by_layer, root = dict.fromkeys(layer_names, 0.0), 0.0
    for name, numel in _parameter_numbers(model, home).items():
        layer = next((layer for layer in layer_names if name.startswith(f"{layer}.")), None)
        if layer is None:
            root += numel
        else:
            by_layer[layer] += numel / (home.ep if ".experts." in name else 1)
    all_stay = home.pp > 1 or not config.parallel.reshard_after_forward or config.context.mode == "free"
    layers_at_once = sum(by_layer.values()) if all_stay else max(by_layer.values())
    return layers_at_once + (0 if home.pp > 1 else root)


def _check_room(config: RunConfig, needed: NeededBytes, room: Room, home: Layout) -> None:
    """Raise ConfigError if the model needs more bytes than a rank has."""
    if needed.total <= room.size:
        return
    parts = [("weights", needed.weights), ("gradients", needed.gradients), ("optimizer states", needed.states)]
    parts.append(("gathered layers", needed.gathered))
    figures = ", ".join(f"{name} {_room_text(size)}" for name, size in parts if size)
    raise ConfigError(
        f"the model does not fit: a rank needs at least {_room_text(needed.total)} before any activation ({figures}; "
        f"parameters over {plural(needed.shards, 'shard')}), and {room.where} has {_room_text(room.size)} free; "
        + _advise_remedy(config, needed, room, home)
    )


def _advise_remedy(config: RunConfig, needed: NeededBytes, room: Room, home: Layout) -> str:
    """Return advice on what would make the model fit: keys, or a number of GPUs."""
    if not room.of_gpu:
        return "use GPUs, hosts with more memory, or a smaller model (does its configuration say all of its sizes?)"
    keys = ["a higher parallel.tp"]
    if config.model.dtype == "float32":
        keys.append('model.dtype = "bfloat16" (see its warning)')
    if config.context.mode == "free":
        keys.append('context.mode = "lockstep"')
    elif not config.parallel.reshard_after_forward and home.pp == 1:  # in a pipeline gathered layers stay anyway
        keys.append("parallel.reshard_after_forward = true")
    if shards := needed.shards_that_fit(room.size):
        gpus = shards * home.dp_replicate * home.tp * home.pp
        return f"at least {plural(gpus, 'such GPU')} would do, or try {' or '.join(keys)}"
    return f"no number of such GPUs would do with these keys, for what is gathered has no room; try {' or '.join(keys)}"


def _room_text(size: int) -> str:
    """Return bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"
