"""The random states with which the rows of an epoch are drawn: those of the process, and those of a loader's own.

Generators in a loader are the attributes of its samplers and its stream; one elsewhere, as in a closure, is not known.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, Sampler

GLOBAL: tuple[Any, ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
)


class EpochOrder(NamedTuple):
    """An epoch that runs: its loader, its number, the step at which it began, and the states with which it began."""

    loader: Any
    number: int
    first_step: int
    began: list[Any]

    def place(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of a step keeps, to go on from there with the same rows."""
        steps, now = step - self.first_step, order_states(self.loader)
        return {"epoch": self.number, "steps": steps, "began": self.began, "now": now}


def order_states(loader: Any) -> list[Any]:
    """Return the states of the global generators and of a loader's own, as plain values and tensors."""
    states = [get() for get, _ in (*GLOBAL, *_own_generators(loader))]
    return tree_map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, states)


def set_order_states(loader: Any, states: list[Any]) -> None:
    """Set what `order_states` returned; states of more or fewer generators than the loader has now are left out."""
    for (_, set_state), state in zip((*GLOBAL, *_own_generators(loader)), states, strict=False):
        set_state(state)


def _own_generators(owner: Any) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    for value in vars(owner).values():
        if isinstance(value, torch.Generator):
            yield value.get_state, value.set_state
        elif isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif isinstance(value, np.random.RandomState):
            yield value.get_state, value.set_state
        elif isinstance(value, np.random.Generator):
            bits: Any = value.bit_generator
            yield lambda bits=bits: bits.state, lambda state, bits=bits: setattr(bits, "state", state)
        elif isinstance(value, (DataLoader, Sampler, IterableDataset)):
            yield from _own_generators(value)
