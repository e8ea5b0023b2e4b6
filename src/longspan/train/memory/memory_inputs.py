"""What of a run decides its plan of memory besides model and plans: the settings, the budget, and the keys by hand.

Everything is known before the model is made. What fits, and what it costs, is decided in `longspan.plan.memory`.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longspan.comm import World
from longspan.config.defaults import compute_dtype, encoder_default
from longspan.config.memory_keys import checkpointing_by_hand
from longspan.config.sections import RunConfig
from longspan.model.host_arena import free_host_bytes
from longspan.model.load import torch_dtype
from longspan.plan import FixedMemory, MemoryBudget, MemorySettings
from longspan.plan.memory.memory_plan import MemoryNeeds
from longspan.plan.memory.step_peak import CONTEXT_BYTES
from longspan.train.memory.model_fits import ranks_on_host
from longspan.train.optim.optimizer import OPTIMIZERS, OptimizerChoice

HOST_SHARE = 0.85  # of the host's free memory: the rest is for reading documents, and for saving
_SIDE = 128  # of the matrix by which an optimizer's states are counted


def memory_settings(
    config: RunConfig, *, gpu: bool, target_share: float = 1.0, encoder_rows: int = 0
) -> MemorySettings:
    """The settings of a run's plan of memory; what the plan may choose has the value that is given by hand.

    `encoder_rows` of images are encoded at once on a slot, and `target_share` of all rows predict a token.
    """
    train, parallel, lora = config.train, config.parallel, config.lora
    parameters = torch_dtype(config.model.dtype)
    return MemorySettings(
        parameter_bytes=parameters.itemsize,
        compute_bytes=compute_dtype(config.model, "cuda" if gpu else "cpu").itemsize,
        state_numbers=count_states(OptimizerChoice.of(train), torch.float32 if lora.rank else parameters),
        lora_rank=lora.rank,
        lora_targets=lora.targets,
        adapter_bytes=8 if parameters == torch.float64 else 4,
        depths=config.mtp.depths,
        gathered_once=not parallel.reshard_after_forward,
        offload_states=train.offload_states,
        loss_chunk_rows=train.loss_chunk_rows,
        target_share=target_share,
        fused_norms=train.fused_norms == "on" or (train.fused_norms == "auto" and gpu),
        schedule=parallel.pipeline_schedule,
        vpp=parallel.vpp,
        free=config.context.mode == "free",
        sequence_parallel=parallel.sequence_parallel,
        gpu=gpu,
        encoder_rows=encoder_rows,
        encoder_recomputed=config.encoder.recompute,
        encoder_trained=config.encoder.train or encoder_default(config),
    )


def count_states(choice: OptimizerChoice, dtype: torch.dtype) -> float:
    """Numbers of state that an optimizer keeps of each number of a matrix, counted on one.

    >>> count_states(OptimizerChoice.of(TrainConfig()), torch.float32)
    2.0
    """
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = choice.build([parameter])
    optimizer.step()
    states = [x for x in tree_leaves(optimizer.state[parameter]) if isinstance(x, Tensor) and x.numel() > 1]
    return sum(x.numel() * x.element_size() for x in states) / (parameter.numel() * dtype.itemsize)


def memory_budget(config: RunConfig, world: World) -> MemoryBudget:
    """The bytes that a rank may fill of its device and of its host: the least of all ranks, which call it together."""
    device, host = _budget_here(config, world)
    least = world.control.largest_of([-float(device), -float(host)], "the least free memory")
    return MemoryBudget(device=int(-least[0]), host=int(-least[1]))


def _budget_here(config: RunConfig, world: World) -> tuple[int, int]:
    host = int(HOST_SHARE * (free_host_bytes() or 0) / ranks_on_host(world))
    if config.train.memory_bytes:
        return config.train.memory_bytes, host
    free, all_bytes = torch.cuda.mem_get_info(world.device)
    return int(config.train.memory_fraction * min(all_bytes, free + CONTEXT_BYTES)), host


def fixed_memory(config: RunConfig) -> FixedMemory:
    """The keys of memory that are given by hand, which a plan of memory follows; it chooses the others.

    Only states of known optimizers are moved to the host without a key.
    """
    train, kind = config.train, checkpointing_by_hand(config.train)
    states = None if train.optimizer in OPTIMIZERS else False
    return FixedMemory(
        measure=kind,
        layers=None if kind is None else train.recompute_layers,
        offload=train.offload_activations or None,
        gathered_once=not config.parallel.reshard_after_forward or None,
        offload_states=train.offload_states or states,
    )


def measures_by_hand(config: RunConfig, needs: MemoryNeeds) -> tuple[str, ...]:
    """What each layer keeps by the keys: the first `recompute_layers` of a stage (0: each) are recomputed."""
    train, kind = config.train, checkpointing_by_hand(config.train) or "none"
    word = f"{kind}+host" if train.offload_activations and kind != "none" else kind
    words = ["none"] * needs.layers
    for place in needs.places:
        for layer in place.stage.layers[: train.recompute_layers or None]:
            words[layer] = word
    return tuple(words)
