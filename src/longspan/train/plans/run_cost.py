"""What a run's plans are priced by: the cost of its model on the machine of `run.machine`, or `context.cost_model`.

Whether the machine suits the hosts of a world is checked in `resolve.py`. No torch and no process group.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from longspan.config.defaults import DTYPE_BYTES, compute_dtype_name
from longspan.config.sections import RunConfig, key_checkpointing
from longspan.errors import PlanError
from longspan.plan import Cost
from longspan.plan.cost.machine import CostSettings, Machine, read_machine
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.train.plans.own import own_cost

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan

KEY = "run.machine"


def read_cost(config: RunConfig) -> Cost:
    """Return the cost of a Qwen3-8B, as no model is known here, on the machine of `run.machine`, or the default."""
    machine = read_run_machine(config)
    return machine.cost(QWEN3_8B) if machine else Cost()


def read_run_machine(config: RunConfig) -> Machine | None:
    """Return the machine that `run.machine` names; None if it is empty.

    A file is read once: a run keeps its prices, whatever becomes of the file before the next evaluation. Raises
    ConfigError for a file that holds no machine.
    """
    return _read_once(config.run.machine) if config.run.machine else None


def find_run_cost(
    config: RunConfig,
    model_config: Any,
    log: Callable[[str], None],
    *,
    gpu: bool,
    slots: int = 0,
    target_share: float = 1.0,
    memory: "MemoryPlan | None" = None,
) -> Cost:
    """Return what plans are priced by: `context.cost_model`, else the model on `run.machine`, else on H200s or on CPUs.

    >>> cost = find_run_cost(config, model.config, print, gpu=world.device.type == "cuda")  # doctest: +SKIP

    The cost of a model on a machine includes recomputation, and in lockstep what FSDP2 gathers and sums over so many
    `slots` (0: nothing), both as a plan of `memory` chose if one is given. `target_share` of the rows predict a token.
    The cost on CPUs is of no machine (`Cost.source` is ""): plans are compared by it, and no time is shown. A model
    whose configuration gives no price is planned for as a Qwen3-8B, with a line in the log.
    """
    if config.context.cost_model:
        return own_cost(config.context.cost_model, model_config)
    machine = read_run_machine(config) or (Machine.known("H200") if gpu else Machine.cpus())
    try:
        settings = run_cost_settings(config, slots=slots, gpu=gpu, target_share=target_share, memory=memory)
        return machine.cost(model_config, settings)
    except PlanError as error:
        log(f"plans are priced as for a Qwen3-8B: {error}")
        return Cost() if gpu else replace(Cost(), source="")


def run_cost_settings(
    config: RunConfig, *, slots: int, gpu: bool = True, target_share: float = 1.0, memory: "MemoryPlan | None" = None
) -> CostSettings:
    """Return the settings of a run over `slots` slots that change its model's time; arguments as of `find_run_cost`.

    >>> run_cost_settings(RunConfig(), slots=4).shards
    4

    Without `run.machine` a number counts two bytes, those of bfloat16, whatever the run computes in.
    """
    train, parallel = config.train, config.parallel
    compute_dtype = compute_dtype_name(config.model, "cuda" if gpu else "cpu")
    settings = CostSettings(
        recomputation=key_checkpointing(train) or "none",
        frozen=config.lora.rank > 0,
        depths=config.mtp.depths,
        bytes_per_number=DTYPE_BYTES[compute_dtype] if config.run.machine else 2,
        shards=slots // parallel.dp_replicate,
        free=config.context.mode == "free",
        ep=parallel.ep,
        weight_ranks=parallel.tp,  # ranks that share a slot's weights; plans divide a slot's cost by them later
        dp_replicate=parallel.dp_replicate,
        gathered_once=not parallel.reshard_after_forward,
        target_share=target_share,
        float8=bool(train.float8),
        compiled=train.compiled if gpu else "none",
    )
    return settings if memory is None else memory.cost_settings(settings)


@cache
def _read_once(file: str) -> Machine:
    return read_machine(file, KEY)
