"""`auto`: every rank takes the same type, that of the world's machine and node size."""

import os

import torch

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.testing import backend, run_ranks
from tests.attention.test_attend import needs


def node_sizes(rank, slots):
    """The node size where the first rank says 3, and whether auto runs by it."""
    os.environ["LOCAL_WORLD_SIZE"] = "3" if rank == 0 else "1"
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(MicroBatch((Group((0, 1), (0,), (8,), "auto"),)), world)
        q, k, v = (torch.ones(shard.local_rows, 2, 4, device=shard.device) for _ in range(3))
        return world.node_size, torch.equal(attend(q, k, v, shard), v)


def test_every_rank_goes_by_one_node_size():
    needs(3)
    assert run_ranks(node_sizes, 3, 3) == [(3, True)] * 3
