"""Bytes of tensors that are alive, counted where an allocator has no figures."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators make inside it, in this thread, until they are freed.

    >>> with LiveBytes() as counted:
    ...     x = torch.ones(1000) + 1
    >>> counted.peak
    8000

    `now` are the bytes alive, `peak` the most so far. What a kernel takes for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}  # bytes of each storage that is alive, by its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note the tensors that it made, but no subclasses of Tensor, which hold no storage."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, torch.nn.Parameter):
                self._note_storage(x.untyped_storage())
        return out

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak: int = max(self.peak, self.now)
        weakref.finalize(storage, self._forget_storage, key)

    def _forget_storage(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)
