"""The state of random generators, for a forward pass that is run a second time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """States of the host's generator and of a GPU's."""

    host: Tensor
    gpu: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> "RandomState":
        """The state now."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)


@contextmanager
def random_state_of(state: RandomState, device: torch.device) -> Iterator[None]:
    """The random generators as they were, for a second forward pass; afterwards as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(state.host)
        if state.gpu is not None:
            torch.cuda.set_rng_state(state.gpu, device)
        yield
