"""What a world knows for `resolve`: slots of a host, its machine, free bytes; and `resolve` on all ranks together."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.memory_keys import check_gpu_memory_limit, chooses_memory
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, PlanError
from longspan.host import free_host_bytes
from longspan.model.weights.hf_folder import planned_configuration
from longspan.plan import MemoryBudget
from longspan.plan.memory.settings import GPU_SHARE, HOST_SHARE
from longspan.plan.memory.stage_bytes import CONTEXT_BYTES
from longspan.resolve.facts import Facts
from longspan.resolve.resolved import Resolved, resolve
from longspan.resolve.run_cost import run_machine
from longspan.ssm.kernels.fla import fla_unsupported_reason
from longspan.train.optim.state_numbers import optimizer_state_numbers


def gather_facts(
    config: RunConfig,
    world: World,
    model: Any,
    lengths_of_step: Callable[[int], Sequence[int]],
    steps: int,
    **more: Any,
) -> Facts:
    """Gather the facts by which a configuration is resolved on these ranks; `more` are further fields of Facts, by
    name. Entered by all ranks.

    The budget of bytes is the least of any rank. It is None where nothing is chosen by it: neither policies nor rows of
    a slot are open, or no step is left (the field `done` of `more`). Raises ConfigError for keys of memory that
    contradict the devices.
    """
    gpu = world.device.type == "cuda"
    train = config.train
    budget = None
    if more.get("done", 0) < steps:
        if gpu:
            check_gpu_memory_limit(train)
        if chooses_memory(train, gpu=gpu) or config.context.max_tokens_per_slot == AUTO:
            host = int(HOST_SHARE * (free_host_bytes() or 0) / world.ranks_of_host)  # 0: not known
            device = train.device_memory_limit or host or sys.maxsize
            if gpu and not train.device_memory_limit:
                # The CUDA context exists by now, and a plan of memory counts its bytes too, CONTEXT_BYTES at most.
                free, all_bytes = torch.cuda.mem_get_info(world.device)
                device = int(GPU_SHARE * min(all_bytes, free + CONTEXT_BYTES))
            # the least of all ranks; the control group has only a maximum
            least = world.control.largest_over_ranks([-float(device), -float(host)], "the least free memory")
            budget = MemoryBudget(device=int(-least[0]), host=int(-least[1]))
    return Facts(
        home=world.home,
        machine=run_machine(config, gpu=gpu),
        model=planned_configuration(model, config.model.path),
        lengths_of_step=lengths_of_step,
        steps=steps,
        budget=budget,
        gpu=gpu,
        state_numbers=optimizer_state_numbers(
            config.optimizer, lora=config.lora.rank > 0, dtype=config.model.dtype
        ),
        scan_kernels=not (torch.cuda.is_available() and fla_unsupported_reason(torch.device("cuda"))),
        **more,
    )


def resolve_on_ranks(
    config: RunConfig,
    facts: Facts,
    world: World,
    log: LogLine,
    decide: Callable[[RunConfig, Facts], Resolved] = resolve,
) -> Resolved:
    """Decide on the first rank what the configuration leaves open, as hosts may round times differently, and log the
    notes and choices; entered by all ranks, which get the same.

    The plan of memory is None where train.plan_memory and rows leave nothing to choose, and on CPUs without
    `device_memory_limit`. Raises ConfigError, on every rank, where nothing fits.
    """

    def decide_on_first_rank() -> Resolved:
        try:
            # The ranking stays here: its facts have all documents.
            return replace(decide(config, facts), ranking=None)
        except PlanError as error:
            raise ConfigError(str(error)) from error

    resolved = run_on_first_rank(world, decide_on_first_rank, ConfigError)
    for note in resolved.reasons.notes:
        log(note)
    if resolved.memory is not None and facts.budget and chooses_memory(config.train, gpu=facts.gpu):
        log(resolved.memory.summary_line(facts.budget))
    if resolved.rows_line:
        log(resolved.rows_line)
    if facts.gpu or config.train.device_memory_limit:
        return resolved
    # The plan of memory chose rows; without a limit nothing holds a CPU to it.
    return replace(resolved, memory=None)
