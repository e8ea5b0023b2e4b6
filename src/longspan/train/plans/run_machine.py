"""The key `run.machine` in a world: whether the file was measured on such hosts, and what "auto" is resolved by."""

import json
from collections.abc import Callable
from hashlib import sha256

import torch

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.plan import Cost
from longspan.plan.cost.model_cost import FORMER_FILE, check_measured_machine
from longspan.train.plans.run_cost import KEY, read_run_machine


def use_machine(config: RunConfig, world: World, log: Callable[[str], None]) -> None:
    """Let a world resolve "auto" by the machine that `run.machine` names; entered by all ranks.

    >>> use_machine(config, world, print)  # doctest: +SKIP

    Raises ConfigError, on every rank, for a file of another device or of hosts of another size, and CommError if ranks
    read different files. An older file, of the cost of one model, leaves the world's machine as it is.
    """
    if not config.run.machine:
        return
    machine = run_on_every_rank(world, lambda: read_run_machine(config), ConfigError)
    assert machine is not None
    digest = sha256(json.dumps(machine.to_json(), sort_keys=True).encode()).hexdigest()
    hint = f"{KEY} names a file that differs between hosts; copy one file to all of them"
    world.control.agree(digest, what="machines", hint=hint)
    if isinstance(machine, Cost):  # an older file
        log(f"{KEY} {machine.source} {FORMER_FILE}")
        return
    ranks = len(world.home.ranks)
    ranks_of_host = min(ranks, world.node_size * world.home.tp)  # node_size counts slots, each of tp ranks
    name = device_name(world.device)
    line = check_measured_machine(
        machine, KEY, device=name, ranks_of_host=ranks_of_host, hosts=-(-ranks // ranks_of_host)
    )
    if line:
        log(line)
    world.machine = machine


def device_name(device: torch.device) -> str:
    """Return the name of a device in a machine's file: that of a GPU as its driver gives it, "cpu" for all others."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
