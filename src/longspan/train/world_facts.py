"""What a world knows for `resolve`: slots of a host, its machine, free bytes; and `resolve` on all ranks together."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_memory_keys, chooses_measures
from longspan.errors import ConfigError, PlanError, plural
from longspan.resolve.facts import Facts
from longspan.resolve.memory import KEY, read_run_machine, run_machine
from longspan.resolve.resolved import Resolved, resolve
from longspan.ssm.kernels.packages import fla_unsupported_reason
from longspan.train.device_memory import memory_budget
from longspan.train.optim.state_numbers import optimizer_state_numbers


def gather_facts(
    config: RunConfig,
    world: World,
    model: Any,
    lengths_of_step: Callable[[int], Sequence[int]],
    steps: int,
    **more: Any,
) -> Facts:
    """Gather what a configuration is resolved by on these ranks, `more` of it by name; entered by all ranks.

    Raises ConfigError for keys of memory that contradict the devices. Bytes are known on GPUs, on CPUs with
    `train.device_memory_limit`, and where rows of a slot are to be chosen; of a run that is over none are needed.
    """
    gpu = world.device.type == "cuda"
    train = config.train
    budget = None
    if more.get("done", 0) < steps:
        check_memory_keys(train, gpu=gpu)
        if chooses_measures(train, gpu=gpu) or config.context.max_tokens_per_slot == AUTO:
            budget = memory_budget(config, world)
    return Facts(
        home=world.home,
        machine=run_machine(config, gpu=gpu),
        model=model,
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
    """Decide on the first rank what the configuration leaves open, as hosts may round times differently; all enter it.

    The plan of memory is None where train.plan_memory and rows leave nothing to choose, and on CPUs without
    `device_memory_limit`. Raises ConfigError, on every rank, where nothing fits.
    """

    def work() -> Resolved:
        try:
            return decide(config, facts)
        except PlanError as error:
            raise ConfigError(str(error)) from error

    resolved = run_on_first_rank(world, work, ConfigError)
    for note in resolved.reasons.notes:
        log(note)
    if resolved.memory is not None and facts.budget and chooses_measures(config.train, gpu=facts.gpu):
        log(resolved.memory.summary_line(facts.budget))
    return resolved if facts.gpu or config.train.device_memory_limit else replace(resolved, memory=None)


def set_node_size(config: RunConfig, world: World) -> RunConfig:
    """Set how many slots a host of this world has, in place of "auto"; ConfigError, on all ranks, for another one."""
    number = config.context.node_size
    slots = world.node_size
    if number not in (AUTO, slots):
        raise ConfigError(
            f"context.node_size is {number}, and this world has {plural(slots, 'slot')} a host "
            f'(LOCAL_WORLD_SIZE / tp); use {slots}, or "{AUTO}", its default'
        )
    return replace(config, context=replace(config.context, node_size=slots))


def set_world_machine(config: RunConfig, world: World) -> None:
    """Let a world resolve "auto" by the machine of `run.machine`; entered by all ranks.

    Raises ConfigError, on every rank, for a file of another device or of hosts of another size, CommError if files
    differ.
    """
    if not config.run.machine:
        return
    machine = run_on_every_rank(world, partial(read_run_machine, config), ConfigError)
    assert machine is not None
    digest = sha256(json.dumps(machine.to_json(), sort_keys=True).encode()).hexdigest()
    hint = f"{KEY} names a file that differs between hosts; copy one file to all of them"
    world.control.compare_digests(digest, what="machines", hint=hint)
    ranks = len(world.home.ranks)
    ranks_of_host = min(ranks, world.node_size * world.home.tp)  # node_size counts slots, each of tp ranks
    measured = machine.device, min(machine.world, machine.node_size)
    if machine.world and measured != (device_name(world.device), ranks_of_host):
        raise ConfigError(
            f"{KEY} {machine.source} was measured on {measured[0]} with {plural(measured[1], 'rank')} on a host, and "
            f"this run is on {device_name(world.device)} with {ranks_of_host}; measure again: longspan bench calibrate"
        )
    world.machine = machine


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
