"""Where the Cost of a model comes from: a file that was measured, a GPU by name, CPUs by orders of magnitude.

`longspan bench calibrate` writes a `Machine`, which prices any model. Older versions wrote the `Cost` of one model, and
their files are still read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, LongspanError, plural
from longspan.files import read_json
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.cost.cost_changes import CostSettings
from longspan.plan.cost.machine import Machine, is_known

FORMER_FILE = (
    "holds the cost of one model, as older versions wrote it: no links by kind of message, no forward passes and no "
    "device; longspan bench calibrate measures them"
)


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


def read_machine(file: str, key: str) -> Machine | Cost:
    """Read the machine in a JSON file or of a known name such as "h200", or the cost of one model in an older file.

    >>> read_machine("h200", "--machine") == Machine.known("H200")
    True

    A file that is there is read even if it has the name of a known machine. `key` is the option or key that names the
    file, for messages. `source` of a machine or cost that was read is the file. Raises ConfigError for a file that
    holds neither a machine nor a cost, and for a folder.
    """
    if is_known(file) and not Path(file).is_file():
        return Machine.known(file)
    values: Any = None
    try:
        values = read_json(Path(file))
        if _is_machine(values):
            return replace(Machine.from_json(values), source=file)
        return replace(_fill_exchange_bytes(Cost.from_json(values), values), source=file)
    except (OSError, ValueError, TypeError, LongspanError) as error:
        raise ConfigError(
            f"{key} {file} {_fault_text(error, 'machine' if _is_machine(values) else 'cost')}; give the file that "
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


def _is_machine(values: Any) -> bool:
    """Return whether these values of a file are a machine's."""
    return isinstance(values, dict) and "machine" in values


def _fill_exchange_bytes(cost: Cost, values: dict[str, Any]) -> Cost:
    """Fill in the `exchange_bytes` that an older file lacks, in proportion to its `ring_bytes`.

    The proportion is the default cost's, of four query heads to a key/value head. A file without `ring_bytes` gets both
    defaults.
    """
    if "exchange_bytes" in values or "ring_bytes" not in values:
        return cost
    return replace(cost, exchange_bytes=cost.ring_bytes / DEFAULT_COST.ring_bytes * DEFAULT_COST.exchange_bytes)


def _fault_text(error: Exception, kind: str) -> str:
    """Say what is wrong with a file that should hold a machine or a cost (`kind`)."""
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    return f"holds no {kind}: {error.strerror if isinstance(error, OSError) else error}"
