"""What a trainer's arguments leave open, decided by the lengths of its documents, and the options of `prepare`."""

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from longspan.config.keys import AUTO
from longspan.config.memory_keys import form_of_config
from longspan.config.sections import LoraSection, OptimizerSection, RunConfig
from longspan.hf.refusals import ONE_PASS_OPTIMIZERS, PAGED, optimizer_name
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.adapters.adapter import find_adapter
from longspan.model.frozen.formats.loaded_linears import holds_codes
from longspan.model.prepared import PrepareOptions
from longspan.model.weights.fill import find_folder, stored_formats
from longspan.model.weights.hf_folder import planned_configuration
from longspan.plan import MemoryPlan
from longspan.resolve.resolved import Resolved, set_default_mode
from longspan.resolve.run_cost import find_run_cost
from longspan.run.world_facts import gather_facts, resolve_on_ranks

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the second is the older name
CLASS_OF_OPTIM = {"sgd": "torch.optim.SGD", "adagrad": "torch.optim.Adagrad", "rmsprop": "torch.optim.RMSprop"}
# The first rows of a dataset with columns, at most so many, tell its lengths.
MOST_ROWS = 4096
DRAWN_STEPS = 64
# Of another dataset, which may read files, so many rows at equal distances tell them.
FEW_ROWS = 256
_log = logging.getLogger(__name__)


def asks_for_recomputation(args: Any) -> bool:
    """Return whether arguments ask for activation checkpointing, by either of its names."""
    return any(getattr(args, name, None) for name in CHECKPOINTING)


def resolve_trainer(trainer: Any) -> Resolved:
    """Decide what the keys of a trainer leave open, by the lengths of its documents; entered by all ranks.

    A plan of memory is made on GPUs, and on CPUs if `device_memory_limit` is set; not if `plan_memory` is false or the
    user asked for recomputation. TRL asks for it by default, so only arguments that differ from their class's default
    count as the user's. Without a plan of memory rows of a slot that are "auto" become 0 (no limit). If no length of a
    document is known, planner and degree stay open: each step gets a dynamic plan, or the fewest slots that hold its
    documents.
    """
    config = _config_with_arguments(trainer)
    args = trainer._stock_arguments
    defaults = {key.name: key.default for key in fields(args)}
    if asks_for_recomputation(args) and any(
        getattr(args, name, None) != defaults.get(name) for name in CHECKPOINTING
    ):
        config = config.with_keys("train", plan_memory=False, activation_checkpointing="full")
    world = trainer.world
    base: Any = unwrap_peft_model(trainer.model)
    model = planned_configuration(base.config, find_folder(base))
    lengths = _lengths_of_documents(trainer)
    gpu = world.device.type == "cuda"
    if config.context.max_tokens_per_slot == AUTO and not (lengths and (gpu or config.train.device_memory_limit)):
        config = config.with_keys("context", max_tokens_per_slot=0)
    if not lengths:
        cost = find_run_cost(config, model, _log.info, gpu=gpu, slots=world.home.slots)
        return Resolved(set_default_mode(config), None, cost)
    # Steps with lengths drawn at random stand for all steps. `trainer.args` has the batch of all ranks.
    rows_of_step = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps

    def lengths_of_step(step: int) -> list[int]:
        return np.random.default_rng(step).choice(np.asarray(lengths), rows_of_step).tolist()

    facts = gather_facts(config, world, model, lengths_of_step, DRAWN_STEPS, longest=max(lengths))
    return resolve_on_ranks(config, facts, world, _log.info)


def options_of_prepare(trainer: Any, model: Any, memory: MemoryPlan | None, *, training: bool) -> PrepareOptions:
    """Return the options of `prepare` by a Trainer's arguments; without `training` those of a reference, which takes no
    step. What the plan `memory` chose (None: there is none) takes the place of the keys of memory.
    """
    args = trainer._stock_arguments
    config = trainer.longspan.config()
    # `accelerate launch` sets this, too.
    computes_in = torch.bfloat16 if args.mixed_precision == "bf16" else None
    options = PrepareOptions(
        offload_bytes=memory.host.kept if memory and training else 0,
        attention_kernel=config.context.attention_kernel or None,
        compute_dtype=None if unwrap_peft_model(model).dtype == computes_in else computes_in,
    )
    form = form_of_config(config)
    if not training:
        return options.with_form(replace(form.for_prepare(training=False), compiled="none", frozen="whole"))
    frozen = form.frozen
    if frozen == AUTO:
        frozen = "stored" if holds_codes(model) or _is_filled_with_codes(unwrap_peft_model(model)) else "whole"
    by_arguments = replace(form, checkpoint_policies="full" if asks_for_recomputation(args) else None)
    form = (memory or by_arguments).for_prepare(training=True)
    return options.with_form(replace(form, frozen=frozen))


def _is_filled_with_codes(model: Any) -> bool:
    """The folder of a tiny model may have no weight that is large enough to stay packed."""
    if not stored_formats(model):
        return False
    from longspan.model.frozen.frozen_weights import choose_formats

    return bool(choose_formats(model, "stored"))


def _config_with_arguments(trainer: Any) -> RunConfig:
    config = trainer.longspan.config()
    args = trainer._stock_arguments
    model = unwrap_peft_model(trainer.model)
    dtype = str(model.dtype).removeprefix("torch.")
    computes_in = "bfloat16" if args.mixed_precision == "bf16" else dtype
    model_keys = replace(config.model, dtype=dtype, compute_dtype=computes_in)
    # An optimizer that only `optimizer_cls_and_kwargs` names is not read: that of args.optim stands for it.
    optim = optimizer_name(args)
    class_name = "adamw" if optim in ONE_PASS_OPTIMIZERS else CLASS_OF_OPTIM.get(optim, "torch.optim.AdamW")
    config = config.with_keys("train", offload_optimizer_states=optim == PAGED)
    # Any rate will do: a plan of memory does not depend on it.
    optimizer = OptimizerSection(class_=class_name, lr=1e-3)
    if optim in ONE_PASS_OPTIMIZERS and optim != PAGED:
        optimizer = replace(optimizer, moments="8bit")
    lora = LoraSection()
    if (adapter := find_adapter(model)) is not None:
        modules = getattr(adapter.config, "target_modules", None)  # a string is a pattern; () is the default
        targets = [] if isinstance(modules, str) else [*(modules or ())]
        if targets:
            parameters = getattr(adapter.config, "target_parameters", None) or ()
            targets += [f"experts.{name.rpartition('.')[2]}" for name in parameters]
        lora = replace(lora, rank=adapter.config.r, target_modules=tuple(targets))
    return replace(config, model=model_keys, optimizer=optimizer, lora=lora)


def _lengths_of_documents(trainer: Any) -> list[int]:
    """[] without documents or a limit. Of a data set with a column of ids these are the first MOST_ROWS rows. Of
    another one FEW_ROWS rows at equal distances are made, which may read files."""
    data = trainer.train_dataset
    args = trainer.args
    if "input_ids" in (getattr(data, "column_names", None) or ()) and hasattr(data, "select"):
        rows = data.select(range(min(len(data), MOST_ROWS)))
        # Packed rows have this column.
        if "seq_lengths" in data.column_names:
            return [int(n) for lengths in rows["seq_lengths"] for n in lengths]
        return [len(ids) for ids in rows["input_ids"]]
    if data is not None and hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        numbers = np.linspace(0, len(data) - 1, min(len(data), FEW_ROWS)).astype(int).tolist()
        rows = [data[number] for number in numbers]
        if all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
            return [len(row["input_ids"]) for row in rows]
    longest_allowed = getattr(args, "max_length", None)
    if (longest_answer := getattr(args, "max_completion_length", None)) is not None:
        # Prompts without a limit are taken to be as long as answers.
        longest_allowed = longest_answer + (getattr(args, "max_prompt_length", None) or longest_answer)
    return [int(longest_allowed)] if longest_allowed else []
