"""Variables of the environment: those of torchrun that ranks start with, and those that are set for a while."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, in which its children start and threads read them too; put the old values back."""
    old_values = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def import_path() -> list[str]:
    """Return the folders of `sys.path`, none of them relative, for another process that imports from the same."""
    return [str(Path(folder).absolute()) for folder in sys.path]


def import_path_variables() -> dict[str, str]:
    """Return variables for a Python that Python itself starts by `-c`: it imports from where this process does, and not
    from its working directory first, where anybody's data may lie.
    """
    folders = [folder for folder in import_path() if os.pathsep not in folder]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folders)}


LOOPBACK = "127.0.0.1"  # where local ranks and their launcher listen: nothing outside this host reaches them


def torchrun_variables(n: int, port: int, threads: int) -> dict[str, str]:
    """Return the variables that torchrun would set for each of n local ranks whose store listens on this port.

    RANK and LOCAL_RANK, which differ between ranks, are not among them.
    """
    variables = {
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "GROUP_RANK": 0,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 does not serve the store, this process does
        "OMP_NUM_THREADS": threads,
    }
    # Ranks talk over the loopback network, unless the user has named another.
    if sys.platform == "linux":
        variables |= {name: "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
    return {name: str(value) for name, value in variables.items()}
