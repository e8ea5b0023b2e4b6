"""What a kernel of linear recurrences is: its inputs, and the steps of it that the exchange of states calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.kernels.local_runs import LocalRuns


def map_states(transition: Tensor, state: Tensor, added: Tensor) -> Tensor:
    """Compute M S + B of (n, H, ·, ·) tensors; M (n, H, 1, 1) is one number a head, by which S is multiplied."""
    if transition.shape[2:] == (1, 1):
        return torch.addcmul(added, transition, state)
    shape = added.shape
    return torch.baddbmm(added.flatten(0, 1), transition.flatten(0, 1), state.flatten(0, 1)).view(shape)


class Inputs(NamedTuple):
    """q, k (T, G, K), v (T, H, V), g (T, H, K or 1), beta (T, H) or None; head h of v reads head h // (H // G) of k.

    q reads the state, k and v write to it, g are log-decays, and beta the factors of a delta rule.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def rows(self, start: int, stop: int) -> "Inputs":
        """Return the inputs of local rows start to stop."""
        return Inputs(*(None if x is None else x[start:stop] for x in self))  # pyright: ignore[reportArgumentType]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(H, K, V) of one run's state"""
        return self.v.shape[1], self.k.shape[2], self.v.shape[2]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, of folds, and on the wire: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ScanForward(Protocol):
    """The forward pass over some runs."""

    def summaries(self, leaving: Integers, carrying: Integers) -> tuple[Tensor, Tensor]:
        """Return B (n, H, K, V) of the runs `leaving` and M of the runs `carrying`, where S_out = M S_in + B.

        M is (m, H, K, K), without a delta term (m, H, 1, 1).
        """
        ...

    def outputs(self, states: Tensor) -> Tensor:
        """Return the outputs (T, H, V) from the states (R, H, K, V) that enter the runs."""
        ...

    @property
    def activations(self) -> tuple[Tensor, ...]:
        """What backward needs in addition to inputs and entering states."""
        ...


class ScanBackward(Protocol):
    """The backward pass over some runs."""

    def initial_state_gradients(self, runs: Integers) -> Tensor:
        """Return gradients (n, H, K, V) of the outputs by the states that enter these runs, with 0 at final states."""
        ...

    def prepare_chunks(self) -> None:
        """Do work that needs no gradient at final states, while these are exchanged; runs once, before `gradients`."""
        ...

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs that are not None, with those (R, H, K, V) at final states of runs."""
        ...


class SavedScan(NamedTuple):
    """Inputs of a backward pass: entering states (R, H, K, V), tensors that forward saved, gradients of the outputs."""

    states: Tensor
    activations: tuple[Tensor, ...]
    dout: Tensor


@dataclass(frozen=True)
class ScanKernel:
    """A kernel by its name.

    `half` says whether it takes q, k and v in half precision (otherwise they are cast to float32).
    `forward(inputs, runs, scale)` and `backward(inputs, runs, scale, saved)` begin passes, in which q is multiplied by
    `scale`.
    """

    name: str
    forward: Callable[[Inputs, LocalRuns, float], ScanForward]
    backward: Callable[[Inputs, LocalRuns, float, SavedScan], ScanBackward]
    half: bool = False
