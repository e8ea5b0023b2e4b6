"""A mode in which every collective that torch starts is noted, with whether the watch of a world knows of it."""

import traceback
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.comm.world import open_worlds

PACKAGE = f"{Path(longspan.__file__).parent}/"
SPACES = ("c10d", "_c10d_functional")
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class WatchedCollectives(TorchDispatchMode):
    """Notes what collectives are called, and where those are started that no watch names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()
        self.nameless = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, and run the operator."""
        name = str(func)
        if func.namespace in SPACES and func._opname not in NO_COLLECTIVES:
            self.seen.add(name)
            watches = [world.watch for world in open_worlds()]
            if not any(watch.current or watch.named for watch in watches):
                frames = [frame for frame in traceback.extract_stack() if PACKAGE in frame.filename]
                where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-3:]]
                self.nameless.add(f"{name} at {' '.join(where)}")
        return func(*args, **(kwargs or {}))
