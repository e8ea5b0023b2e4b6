"""Gradients that backward passes add to those of earlier ones."""

import pytest
import torch
from torch import nn

from longspan.model.weights.local_tensors import set_earlier_gradients_aside


def test_gradients_are_added_to_earlier_ones_or_left_as_they_were() -> None:
    parameter, absent = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with set_earlier_gradients_aside([parameter, absent]):
        (parameter * 3).sum().backward()
        assert parameter.grad.tolist() == [3, 3]
    assert parameter.grad.tolist() == [4, 4]
    with pytest.raises(KeyError), set_earlier_gradients_aside([parameter, absent]):
        (parameter * absent).sum().backward()
        raise KeyError
    assert parameter.grad.tolist() == [4, 4] and absent.grad is None
