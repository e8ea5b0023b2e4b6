"""The machine by which a world chooses communication types: one of a file, equal on all ranks, and of their devices."""

import json
from collections.abc import Callable
from hashlib import sha256

from longspan.comm.all_ranks import run_on_every_rank
from longspan.comm.device import device_name
from longspan.comm.world import World
from longspan.errors import ConfigError, plural
from longspan.plan.cost.machine import Machine


def set_world_machine(world: World, read: Callable[[], Machine | None], key: str) -> None:
    """Let a world resolve "auto" by the machine of the file that `key` names, which `read` reads; entered by all ranks.

    Where `read` returns None (there is no file) the world keeps its machine. Raises ConfigError, on every rank, for a
    file of another device or of hosts of another size, CommError if files differ.
    """
    machine = run_on_every_rank(world, read, ConfigError)
    if machine is None:
        return
    digest = sha256(json.dumps(machine.to_json(), sort_keys=True).encode()).hexdigest()
    hint = f"{key} names a file that differs between hosts; copy one file to all of them"
    world.control.compare_digests(digest, what="machines", hint=hint)
    measured_ranks = min(machine.world, machine.node_size)
    if machine.world and (machine.device, measured_ranks) != (device_name(world.device), world.ranks_of_host):
        raise ConfigError(
            f"{key} {machine.source} was measured on {machine.device} with {plural(measured_ranks, 'rank')} on a host, "
            f"and this run is on {device_name(world.device)} with {world.ranks_of_host}; measure again: longspan bench "
            "calibrate"
        )
    world.machine = machine
