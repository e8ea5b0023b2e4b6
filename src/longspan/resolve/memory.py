"""What a run's keys say of its memory: the settings of its plan of memory, and the keys that the plan must keep."""

from longspan.config.defaults import encoder_default
from longspan.config.dtypes import DTYPE_BYTES, compute_dtype_name
from longspan.config.memory_keys import ON_HOST, chooses_measures, given_checkpointing
from longspan.config.sections import RunConfig
from longspan.plan import FixedMemory, MemorySettings
from longspan.plan.memory.settings import UPDATES_PARTS, known_state_numbers


def memory_settings_of_run(
    config: RunConfig, *, gpu: bool = True, encoder_rows: int = 0, state_numbers: float | None = None
) -> MemorySettings:
    """Read the settings of a run's plan of memory; those that the plan may choose have the values of their keys.

    The optimizer keeps `state_numbers` for each weight (None: those of its name).

    >>> memory_settings_of_run(RunConfig()).state_numbers
    2.0
    """
    train = config.train
    parallel = config.parallel
    computed = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    optimizer = config.optimizer
    parameter_bytes = DTYPE_BYTES[config.model.dtype]
    adapter_bytes = max(4, parameter_bytes)  # adapters are in float32 at least
    if state_numbers is None:
        weight_bytes = adapter_bytes if config.lora.rank else parameter_bytes
        state_numbers = known_state_numbers(optimizer.class_, optimizer.moments, weight_bytes)
    assert state_numbers is not None, optimizer.class_  # others are counted by `optimizer_state_numbers`
    return MemorySettings(
        parameter_bytes=parameter_bytes,
        compute_bytes=DTYPE_BYTES[computed],
        state_numbers=state_numbers,
        muon=optimizer.class_ == "muon",
        frozen_names=train.freeze,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.target_modules,
        adapter_bytes=adapter_bytes,
        frozen_weights=config.model.frozen,
        depths=config.mtp.num_layers,
        gathered_once=not parallel.reshard_after_forward,
        summed_once=not parallel.sync_each_batch,
        offload_optimizer_states=train.offload_optimizer_states,
        offload_weights=train.offload_weights,
        mlp_tile_tokens=train.mlp_tile_tokens,
        float8=bool(train.float8),
        compiled=train.compile,
        vpp=parallel.vpp,
        free=config.context.mode == "free",
        sequence_parallel=parallel.sequence_parallel,
        gpu=gpu,
        scan_kernels=computed == "bfloat16",
        encoder_rows=encoder_rows,
        encoder_recomputed=config.encoder.max_tokens > 0,
        encoder_trained=config.encoder.trainable or encoder_default(config),
    )


def fixed_memory_keys(config: RunConfig, *, gpu: bool = True) -> FixedMemory:
    """Read the keys of memory that are given by hand; None is what the plan of memory may choose."""
    train = config.train
    by_hand = not chooses_measures(train, gpu=gpu)
    off = False if by_hand else None  # of a key that is not set
    # A class of another package may update the parts of a parameter together; adapters stay on the device.
    name = config.optimizer.class_
    updates_parts = name in UPDATES_PARTS and not config.optimizer.moments
    can_offload = updates_parts and name in ("adamw", "sgd")
    return FixedMemory(
        measure=given_checkpointing(train) or ("none" if by_hand else None),
        offload=train.activation_checkpointing.endswith(ON_HOST) or off,
        gathered_once=not config.parallel.reshard_after_forward or off,
        summed_once=not config.parallel.sync_each_batch or off,
        offload_optimizer_states=train.offload_optimizer_states or (off if can_offload else False),
        offload_weights=train.offload_weights or (off if updates_parts or config.lora.rank else False),
        segment_layers=0 if by_hand else None,
        mlp_tile_tokens=train.mlp_tile_tokens or (0 if by_hand else None),
    )
