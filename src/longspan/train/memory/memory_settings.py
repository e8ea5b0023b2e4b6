"""What of a configuration decides its plan of memory, before there is a model: settings, and the keys given by hand."""

from longspan.config.defaults import DTYPE_BYTES, compute_dtype_name, encoder_default
from longspan.config.sections import RunConfig, TrainConfig, chooses_measures, key_checkpointing
from longspan.plan import FixedMemory, MemorySettings
from longspan.plan.memory.settings import MOMENTS


def run_memory_settings(config: RunConfig, *, gpu: bool = True, encoder_rows: int = 0) -> MemorySettings:
    """Read the settings of a run's plan of memory; those that the plan may choose have the values of their keys.

    >>> run_memory_settings(RunConfig()).state_numbers
    2.0

    `encoder_rows` of images are encoded at once on a slot.
    """
    train, parallel = config.train, config.parallel
    computed = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    return MemorySettings(
        parameter_bytes=DTYPE_BYTES[config.model.dtype],
        compute_bytes=DTYPE_BYTES[computed],
        state_numbers=state_numbers(train, lora=config.lora.rank > 0, dtype=config.model.dtype),
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
        adapter_bytes=max(4, DTYPE_BYTES[config.model.dtype]),  # adapters are in float32 at least
        depths=config.mtp.depths,
        gathered_once=not parallel.reshard_after_forward,
        offload_states=train.offload_states,
        mlp_tile_rows=train.mlp_tile_rows,
        loss_chunk_rows=train.loss_chunk_rows,
        fused_norms=train.fused_norms == "on" or (train.fused_norms == "auto" and gpu),
        float8=bool(train.float8),
        compiled=train.compiled,
        schedule=parallel.pipeline_schedule,
        vpp=parallel.vpp,
        free=config.context.mode == "free",
        sequence_parallel=parallel.sequence_parallel,
        gpu=gpu,
        scan_kernels=computed == "bfloat16",
        encoder_rows=encoder_rows,
        encoder_recomputed=config.encoder.recompute,
        encoder_trained=config.encoder.train or encoder_default(config),
    )


def state_numbers(train: TrainConfig, *, lora: bool = False, dtype: str = "float32") -> float:
    """Return how many numbers of state the optimizer keeps for each weight.

    Those of a class that is not of MOMENTS are counted on a small matrix, in the dtype of trained weights: float32 for
    adapters. Only that imports torch.
    """
    if train.optimizer == "sgd" and any(argument.startswith("momentum") for argument in train.optimizer_arguments):
        return 1.0
    if train.optimizer in MOMENTS:
        return MOMENTS[train.optimizer]
    import torch

    from longspan.model.load import torch_dtype
    from longspan.train.optim.optimizer import OptimizerChoice

    matrix = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch_dtype("float32" if lora else dtype)))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = OptimizerChoice.of(train).build([matrix])
    optimizer.step()
    size = sum(x.nbytes for x in optimizer.state[matrix].values() if isinstance(x, torch.Tensor))
    return round(size / matrix.nbytes, 3)  # rounded: the count of steps does not show


def fixed_keys(config: RunConfig, *, gpu: bool = True) -> FixedMemory:
    """Read the keys of memory that are given by hand; None is what the plan of memory may choose.

    Where train.memory chooses nothing, keys that are not set are off. The plan may move states to the host only for
    optimizers of MOMENTS; for others that takes the key.
    """
    train, by_hand = config.train, not chooses_measures(config.train, gpu=gpu)
    off = False if by_hand else None  # of a key that is not set
    return FixedMemory(
        measure=key_checkpointing(train) or ("none" if by_hand else None),
        offload=train.offload_activations or off,
        gathered_once=not config.parallel.reshard_after_forward or off,
        offload_states=train.offload_states or (off if train.optimizer in MOMENTS else False),
        segment_layers=0 if by_hand else None,
        mlp_tile_rows=train.mlp_tile_rows or (0 if by_hand else None),
    )
