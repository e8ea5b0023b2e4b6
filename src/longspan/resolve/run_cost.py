"""What the plans of a run are priced by: its machine, and the cost of its model there under its keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from longspan.config.dtypes import DTYPE_BYTES, compute_dtype_name
from longspan.config.keys import AUTO
from longspan.config.memory_keys import given_checkpointing
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, PlanError, plural
from longspan.plan import Cost, MemoryPlan
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.cost.machine import CostSettings, Machine, read_machine
from longspan.plan.shape.model_shape import QWEN3_8B

KEY = "run.machine"
_read_machine_once = cache(read_machine)


def cost_without_model(config: RunConfig) -> Cost:
    """Return the cost of a Qwen3-8B, as no model is known here, on the machine of `run.machine`, or the default."""
    machine = read_run_machine(config)
    return machine.cost(QWEN3_8B) if machine else DEFAULT_COST


def read_run_machine(config: RunConfig) -> Machine | None:
    """Return the machine that `run.machine` names; None if it is empty.

    A file is read once: a run keeps its prices, whatever becomes of the file before the next evaluation. Raises
    ConfigError for a file that holds no machine.
    """
    return _read_machine_once(config.run.machine, KEY) if config.run.machine else None


def run_machine(config: RunConfig, *, gpu: bool) -> Machine:
    """Return the machine that prices a run: `run.machine`, else H200s or CPUs."""
    return read_run_machine(config) or (Machine.known("H200") if gpu else Machine.cpus())


def set_node_size(config: RunConfig, slots: int) -> RunConfig:
    """Return the configuration with the slots that a host of the world has in place of "auto". Raises ConfigError for a
    key with another number.
    """
    number = config.context.node_size
    if number not in (AUTO, slots):
        raise ConfigError(
            f"context.node_size is {number}, and this world has {plural(slots, 'slot')} a host "
            f'(LOCAL_WORLD_SIZE / tp); use {slots}, or "{AUTO}", its default'
        )
    return config.with_keys("context", node_size=slots)


def find_run_cost(
    config: RunConfig,
    model_config: Any,
    log: Callable[[str], None],
    *,
    gpu: bool,
    machine: Machine | None = None,
    slots: int = 0,
    target_share: float = 1.0,
    memory: MemoryPlan | None = None,
) -> Cost:
    """Return what plans are priced by: the model on a machine (None: that of `run.machine`, else H200s or CPUs).

    The cost includes recomputation, and what FSDP2 gathers and sums over so many `slots` (0: nothing), as a
    plan of `memory` chose if given. `target_share` of rows predict. On CPUs `Cost.source` is "": no time is shown. A
    model whose configuration gives no price is planned for as a Qwen3-8B, with a line in the log. Without `run.machine`
    a number counts two bytes, those of bfloat16, whatever the run computes in.
    """
    train = config.train
    parallel = config.parallel
    compute_dtype = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    settings = CostSettings(
        recomputation=given_checkpointing(train) or "none",
        frozen=config.lora.rank > 0,
        frozen_weights=config.model.frozen if config.lora.rank else "whole",
        depths=config.mtp.num_layers,
        bytes_per_number=DTYPE_BYTES[compute_dtype] if config.run.machine else 2,
        shards=slots // parallel.dp_replicate,
        free=config.context.mode == "free",
        ep=parallel.ep,
        weight_ranks=parallel.tp,  # ranks that share a slot's weights; plans divide a slot's cost by them later
        dp_replicate=parallel.dp_replicate,
        gathered_once=not parallel.reshard_after_forward,
        summed_once=not parallel.sync_each_batch,
        target_share=target_share,
        float8=bool(train.float8),
        compiled=train.compile if gpu else "none",
    )
    try:
        settings = memory.cost_settings(settings) if memory else settings
        return (machine or run_machine(config, gpu=gpu)).cost(model_config, settings)
    except PlanError as error:
        log(f"plans are priced as for a Qwen3-8B: {error}")
        return Cost() if gpu else replace(Cost(), source="")
