"""What a Trainer's model keeps and computes in: its arguments, and a plan of memory, as options of `prepare`."""

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from longspan.config.keys import AUTO
from longspan.config.sections import LoraSection, RunConfig
from longspan.model.adapters import find_adapter, unwrap_model
from longspan.model.prepared import PrepareOptions
from longspan.plan import MemoryPlan
from longspan.train.plans import query_heads
from longspan.train.run_memory import ComingSteps, RunMemory, choose_memory_on_ranks
from longspan.train.training import memory_options

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the second is the older name
OPTIMIZERS = {"sgd": "torch.optim.SGD", "adagrad": "torch.optim.Adagrad", "rmsprop": "torch.optim.RMSprop"}
MOST_ROWS = 4096  # of a dataset with columns, whose lengths are looked at: the first
FEW_ROWS = 256  # of another one, which may read files: at equal distances
_log = logging.getLogger(__name__)


def asks_recomputation(args: Any) -> bool:
    """Whether arguments ask for recomputation."""
    return any(getattr(args, name, None) for name in CHECKPOINTING)


def choose_memory(trainer: Any) -> tuple[RunConfig, MemoryPlan | None]:
    """Return the configuration of a trainer's plans, and the plan of memory (None: none is made); entered by all ranks.

    A plan of memory is made on GPUs, and on CPUs if `memory_bytes` is set, but not if `memory` is "none", no length of
    a document is known, or the user asked for recomputation. TRL's arguments ask for recomputation by default, so only
    arguments that differ from their class's default count as the user's. Rows of a slot that are "auto" become the
    plan's, or 0, which is no limit, without one.
    """
    config, args = _run_config(trainer), trainer._stock_arguments
    default = {key.name: key.default for key in fields(args)}
    if asks_recomputation(args) and any(getattr(args, name, None) != default.get(name) for name in CHECKPOINTING):
        config = replace(config, train=replace(config.train, memory="none", activation_checkpointing="full"))
    lengths, rows, memory = _document_lengths(trainer), 0, None
    if lengths:
        model, home = unwrap_model(trainer.model).config, trainer.world.home
        # Steps 0 to 63, with lengths drawn at random, stand for all steps.
        batch = trainer.args  # of all ranks
        rows_of_step = batch.per_device_train_batch_size * batch.gradient_accumulation_steps

        def lengths_of_step(step: int) -> list[int]:
            return np.random.default_rng(step).choice(np.asarray(lengths), rows_of_step).tolist()

        steps = ComingSteps(lengths_of_step, home, query_heads(model), 0, 64)
        run = RunMemory(config=config, model=model, ahead=steps, gpu=trainer.world.device.type == "cuda")
        rows, memory = choose_memory_on_ranks(run, trainer.world, _log.info)
    if config.context.max_tokens_per_slot == AUTO:
        limit = rows if memory is not None else 0
        config = replace(config, context=replace(config.context, max_tokens_per_slot=limit))
    return config, memory


def prepare_options(trainer: Any, model: Any, memory: MemoryPlan | None, *, training: bool) -> PrepareOptions:
    """Return the options of `prepare` for a trainer's model, or without `training` for a reference: it takes no step.

    A plan of memory was made by the same keys, such as `reshard_after_forward`; for the model that is trained its
    choices take their place.
    """
    args, config = trainer._stock_arguments, trainer.longspan.config()
    computes_in = torch.bfloat16 if args.mixed_precision == "bf16" else None  # of `accelerate launch` too
    options = PrepareOptions(
        reshard_after_forward=config.parallel.reshard_after_forward,
        sequence_parallel=config.parallel.sequence_parallel,
        attention_kernel=config.context.attention_kernel or None,
        compute_dtype=None if unwrap_model(model).dtype == computes_in else computes_in,
    )
    if not training:
        return options
    by_arguments = replace(config.train, activation_checkpointing="full" if asks_recomputation(args) else "none")
    measures = memory_options(replace(config, train=by_arguments), memory, training=True)
    return replace(options, compiled=config.train.compiled, **measures)


def _run_config(trainer: Any) -> RunConfig:
    # An optimizer that only `optimizer_cls_and_kwargs` names is not read: that of args.optim stands for it. A plan of
    # memory does not depend on the learning rate.
    config, args, model = trainer.longspan.config(), trainer._stock_arguments, unwrap_model(trainer.model)
    dtype = str(model.dtype).removeprefix("torch.")
    computes_in = "bfloat16" if args.mixed_precision == "bf16" else dtype
    model_keys = replace(config.model, dtype=dtype, compute_dtype=computes_in)
    name = OPTIMIZERS.get(getattr(args.optim, "value", args.optim), "torch.optim.AdamW")
    lora = LoraSection()
    if (adapter := find_adapter(model)) is not None:
        targets = getattr(adapter.config, "target_modules", None)  # a string is a pattern; () is the default
        lora = replace(lora, rank=adapter.config.r, targets=() if isinstance(targets, str) else tuple(targets or ()))
    return replace(config, model=model_keys, train=replace(config.train, optimizer=name, lr=1e-3), lora=lora)


def _document_lengths(trainer: Any) -> list[int]:
    """List the lengths of documents of the trainer's data, or the longest that its arguments allow; [] for neither."""
    data, args = trainer.train_dataset, trainer.args
    if "input_ids" in (getattr(data, "column_names", None) or ()) and hasattr(data, "select"):
        rows = data.select(range(min(len(data), MOST_ROWS)))
        if "seq_lengths" in data.column_names:  # of packed rows
            return [int(n) for lengths in rows["seq_lengths"] for n in lengths]
        return [len(ids) for ids in rows["input_ids"]]
    if data is not None and hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        numbers = np.linspace(0, len(data) - 1, min(len(data), FEW_ROWS)).astype(int).tolist()
        rows = [data[number] for number in numbers]
        if all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
            return [len(row["input_ids"]) for row in rows]
    longest_allowed = getattr(args, "max_length", None)
    if (answer := getattr(args, "max_completion_length", None)) is not None:
        # Prompts without a limit are taken to be as long as answers.
        longest_allowed = answer + (getattr(args, "max_prompt_length", None) or answer)
    return [int(longest_allowed)] if longest_allowed else []
