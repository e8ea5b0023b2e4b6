"""Where the Cost of a model comes from: a machine that was measured, a GPU by name, CPUs by orders of magnitude."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, LongspanError, plural
from longspan.files import read_json
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.cost_changes import CostSettings
from longspan.plan.cost.machine import Machine, is_known


def cost_on_h200(config: Any, *, depths: int = 0) -> Cost:
    """Price a model on H200s, as they were measured.

    >>> plan = plan_dynamic(lengths, home, cost=cost_on_h200("Qwen3-8B/config.json"))  # doctest: +SKIP
    """
    return Machine.known("H200").cost(config, CostSettings(depths=depths))


def cost_on_cpus(config: Any, *, depths: int = 0) -> Cost:
    """Price a model on CPUs by orders of magnitude, to compare the parts of its plans.

    `source` is "", as no CPU was measured.

    >>> cost_on_cpus("Qwen3-8B/config.json").source  # doctest: +SKIP
    ''
    """
    return Machine.cpus().cost(config, CostSettings(depths=depths))


def read_machine(file: str, key: str) -> Machine:
    """Read the machine in a JSON file, which becomes its `source`, or of a known name such as "h200".

    >>> read_machine("h200", "--machine") == Machine.known("H200")
    True

    A file that is there is read even if it has the name of a known machine. `key` is the option or key that names the
    file, for messages. Raises ConfigError for a folder, and for a file that holds no machine.
    """
    if is_known(file) and not Path(file).is_file():
        return Machine.known(file)
    try:
        return replace(Machine.from_json(read_json(Path(file))), source=file)
    except (OSError, ValueError, TypeError, LongspanError) as error:
        fault = f"holds no machine: {error.strerror if isinstance(error, OSError) else error}"
        raise ConfigError(
            f"{key} {file} {'is a folder' if isinstance(error, IsADirectoryError) else fault}; give the file that "
            "`longspan bench calibrate --out FILE.json` writes for this machine"
        ) from error


def check_measured_machine(machine: Machine, key: str, *, device: str, ranks_of_host: int, hosts: int) -> str:
    """Refuse a measured machine of another device or hosts of another size; returns what is assumed ("": nothing).

    >>> check_measured_machine(Machine(), "run.machine", device="cpu", ranks_of_host=2, hosts=1)  # not measured
    ''

    A file of fewer hosts than a run has is taken if its hosts are as large: links between hosts are assumed then.
    Raises ConfigError.
    """
    if not machine.world:
        return ""
    file, again = f"{key} {machine.source}", "measure again with longspan bench calibrate"
    if machine.device != device:
        raise ConfigError(f"{file} was measured on {machine.device}, and this run is on {device}; {again}")
    measured_ranks = min(machine.world, machine.node_size)  # of a host
    if measured_ranks != ranks_of_host:
        raise ConfigError(
            f"{file} was measured with {plural(measured_ranks, 'rank')} on a host, and this run has {ranks_of_host}; "
            f"{again}"
        )
    measured_hosts = -(-machine.world // machine.node_size)
    if hosts > measured_hosts and "across" in machine.assumed_parts:
        speed = machine.across.point.bytes_per_second / 1e9
        return (
            f"{file} was measured on {plural(measured_hosts, 'host')}, and this run has {hosts}: the links between "
            f"hosts are assumed, {speed:.3g} GB/s"
        )
    return ""
