"""What a run's plans are priced by: a file of `longspan bench calibrate`, or the model on H200s or on CPUs."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from longspan.config.sections import ContextConfig, RunConfig
from longspan.errors import PlanError
from longspan.plan import Cost
from longspan.plan.cost.model_cost import cost_on_cpus, cost_on_h200, read_cost, with_recomputation


def cost_of(context: ContextConfig) -> Cost:
    """The cost in the file that `context.cost` names, or the default. Raises ConfigError for a file that holds none."""
    return _cost_in(context.cost)


def cost_of_run(config: RunConfig, model_config: Any, say: Callable[[str], None], *, gpu: bool) -> Cost:
    """What a run's plans are priced by: the file of `context.cost`; without one, its model on H200s or on CPUs.

    >>> cost = cost_of_run(config, model.config, print, gpu=world.device.type == "cuda")  # doctest: +SKIP

    What is recomputed counts. The cost on CPUs is of no machine (`Cost.source` is ""): plans are compared by it, and no
    time is told. A model that its configuration does not price is planned for as a Qwen3-8B, which is said.
    """
    context, train = config.context, config.train
    if context.cost:
        return cost_of(context)
    try:
        on_device = cost_on_h200 if gpu else cost_on_cpus
        cost = on_device(model_config, depths=config.mtp.depths)
        layers = train.recompute_layers * config.parallel.pp  # of each stage
        frozen, depths = config.lora.rank > 0, config.mtp.depths
        kind = train.activation_checkpointing
        return with_recomputation(cost, model_config, kind, layers, frozen=frozen, depths=depths)
    except PlanError as error:
        say(f"plans are priced as for a Qwen3-8B: {error}; name a file in context.cost")
        return cost_of(context) if gpu else replace(cost_of(context), source="")


@cache
def _cost_in(file: str) -> Cost:
    """Read once: a run keeps its cost, whatever becomes of the file before the next evaluation."""
    return read_cost(file, "context.cost")
