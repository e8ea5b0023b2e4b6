"""The state in which a forward pass ran, so that backward runs it again alike: autocast and random numbers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

MakeContext = Callable[[], AbstractContextManager[Any]]  # makes a context anew at each call


def current_autocast_factory(x: Tensor) -> MakeContext:
    """Return a function that makes the autocast context that is on now, for the device of `x`, at a later time.

    Its cache is off: a tile would use the cast weights of the tile before, whose graph autograd has freed.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, cache_enabled=False)


def has_active_dropout(module: nn.Module) -> bool:
    """Return whether a module has nn.Dropout that draws now: of a rate above 0, in training."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in module.modules())


def random_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the random generators of the host and of a device (None if it is not a GPU)."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def use_random_states(states: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    """Set the random generators to these states inside, and then put the caller's back; None changes nothing."""
    if states is None:
        yield
        return
    host_state, device_state = states
    with torch.random.fork_rng(devices=[] if device_state is None else [device]):
        torch.set_rng_state(host_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
        yield
