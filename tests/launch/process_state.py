"""What one call may change in the process of a rank, noted before and put back after it.

Put back are torch's switches, seeds and default process group, the names of longspan's modules and the environment.
Not covered: what a call changes inside other packages, and values that it changes in place.
"""

import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ProcessState:
    """The state of a process between two calls."""

    names: dict[str, dict[str, Any]]
    environment: dict[str, str]
    seed: int
    threads: int
    dtype: torch.dtype

    @classmethod
    def now(cls) -> "ProcessState":
        """The state as it is, with every module of longspan imported."""
        names = {module.__name__: dict(vars(module)) for module in _modules()}
        return cls(names, dict(os.environ), torch.initial_seed(), torch.get_num_threads(), torch.get_default_dtype())

    def restore(self) -> None:
        """Put everything back, and free what nothing refers to any more."""
        if dist.is_initialized():
            dist.destroy_process_group()
        for module in _modules():
            names = self.names[module.__name__]
            for name in vars(module).keys() - names.keys():
                delattr(module, name)
            vars(module).update(names)
        _forget_worlds()
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.manual_seed(self.seed)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _modules() -> list[ModuleType]:
    """Longspan's modules, without those whose libraries are not installed."""
    package = import_module("longspan")
    modules: list[ModuleType] = []
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        with suppress(ImportError):
            modules += [import_module(module.name)] if not module.name.endswith("__main__") else []
    return modules


def _forget_worlds() -> None:
    """Worlds find each other by their number in a process, which differs between ranks that ran unlike calls.

    A later store may have the port of one that is gone.
    """
    from longspan.comm import rendezvous, world

    world._worlds.clear()
    rendezvous._stores.clear()
    world._keys = count()
