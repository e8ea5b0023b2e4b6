"""What a prepared model of a Trainer keeps and computes in: its arguments as options of `prepare`."""

from dataclasses import fields
from typing import Any

import torch

from longspan.model.adapters import model_inside
from longspan.model.prepared import PrepareOptions

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def prepare_options(trainer: Any, model: Any, *, training: bool) -> PrepareOptions:
    """The options of `prepare` for a trainer's model, or, not in `training`, for a reference."""
    args, config = trainer._stock_arguments, trainer.longspan.config()
    kind = model_inside(model).dtype
    compute = torch.bfloat16 if args.bf16 and kind != torch.bfloat16 else None
    return PrepareOptions(
        reshard_after_forward=config.parallel.reshard_after_forward,
        sequence_parallel=config.parallel.sequence_parallel,
        attention_kernel=config.context.attention_kernel or None,
        mixer_kernels=config.context.mixer_kernels,
        compute_dtype=compute,
        activation_checkpointing="full" if training and checkpoints(args) else False,
    )


def checkpoints(args: Any) -> bool:
    """Whether arguments ask for recomputation."""
    return any(getattr(args, name, None) for name in CHECKPOINTING)


def is_default(args: Any) -> bool:
    """Whether recomputation is as the arguments' class has it: then memory may choose."""
    default = {key.name: key.default for key in fields(args)}
    return all(getattr(args, name, None) == default.get(name) for name in CHECKPOINTING)
