"""Optimizers that torch could not update are refused before a step."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD

from longspan import Layout, World
from longspan.errors import ModelError
from longspan.testing import backend, run_ranks
from longspan.train.step_inputs import check_update


def refuse(rank: int) -> None:
    with World(Layout(1), backend=backend(), timeout=60) as world:
        plain = torch.nn.Parameter(torch.ones(2, device=world.device))
        sharded = torch.nn.Parameter(
            DTensor.from_local(torch.ones(2, device=world.device), world.meshes.fsdp, [Shard(0)])
        )
        with pytest.raises(ModelError, match=r"group 0 of the optimizer has 1 sharded parameters and 1 plain ones"):
            check_update(SGD([plain, sharded], foreach=True), None, backward=True)
        check_update(SGD([plain, sharded], foreach=False), 1.0, backward=True)
        check_update(SGD([{"params": [plain]}, {"params": [sharded]}], foreach=True), 1.0, backward=True)


def test_sharded_and_plain_parameters_in_one_group_for_one_kernel_are_refused() -> None:
    run_ranks(refuse, 1)
