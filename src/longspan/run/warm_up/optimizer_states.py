"""The moments of AdamW before its first step, so that memory is found for them where they stay."""

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

_STATES = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def make_states(optimizer: Optimizer) -> bool:
    """Make the states that an Adam's first step would make, all zero; whether this optimizer has such.

    A step along zero gradients, at learning rate and weight decay 0, makes them and changes no weight; its count is put
    back. Other optimizers, and one that has states, are left alone. Gradients must not be there, and are not after.
    """
    if optimizer.state or type(optimizer) not in (Adam, AdamW):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    settings = [{key: group[key] for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    assert all(parameter.grad is None for parameter in parameters)
    try:
        for group in optimizer.param_groups:
            group |= {"lr": 0.0, "weight_decay": 0.0}
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group |= before
        optimizer.zero_grad(set_to_none=True)
    for states in optimizer.state.values():
        assert set(states) <= _STATES
        for state in states.values():
            assert isinstance(state, Tensor)
            state.zero_()
    return True
