"""One step of an affine recurrence of states."""

import torch
from torch import Tensor


def moved(transition: Tensor, state: Tensor, added: Tensor) -> Tensor:
    """M S + B of (n, H, ·, ·); a transition of one number a head is (n, H, 1, 1)."""
    if transition.shape[2:] == (1, 1):
        return torch.addcmul(added, transition, state)
    shape = added.shape
    return torch.baddbmm(added.flatten(0, 1), transition.flatten(0, 1), state.flatten(0, 1)).view(shape)
