"""Blocks visit every member once, gradients come home summed, buffers do not grow with the degree."""

import pytest
import torch

from longspan.attention.rows import add_addends
from longspan.comm.ring import Addend, GradientRing, RingBlocks
from longspan.comm.world import World
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

COUNTS = {
    1: [(3,), (0,)],
    2: [(2, 2), (3, 1), (0, 4)],
    3: [(2, 1, 3), (0, 0, 5)],
    4: [(2, 2, 2, 2), (1, 0, 3, 0)],
    8: [(1, 2, 1, 2, 1, 2, 1, 2)],
}


def blocks(owner: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(rows, dtype=torch.float64)[:, None] + 100.0 * (owner + 1)
    return base.expand(rows, 3).contiguous(), (base * 10).reshape(rows, 1, 1).expand(rows, 2, 2).contiguous()


def walk_all(rank: int, degree: int) -> list[int]:
    with World(Layout(ranks=degree), backend=backend()) as world:
        peaks = [walk(rank, degree, counts, world) for counts in COUNTS[degree]]
        with torch.inference_mode():
            return [*peaks, *(walk(rank, degree, counts, world) for counts in COUNTS[degree])]


def walk(rank: int, degree: int, counts: tuple[int, ...], world: World) -> int:
    channel = world.channels.find_channel(tuple(range(degree)))
    mine = tuple(t.to(world.device) for t in blocks(rank, counts[rank]))
    ring = RingBlocks(channel, mine, counts, "test ring")
    home = GradientRing(channel, mine, counts, "test gradients", add=add_addends, dtype=torch.float64)
    owners = []
    for owner, block in ring:
        owners.append(owner)
        for arrived, expected in zip(block, blocks(owner, counts[owner]), strict=True):
            assert torch.equal(arrived.cpu(), expected), (rank, owner, arrived, expected)
        if owner != rank:
            home.add(owner, [Addend(slice(0, counts[owner]), [t * (rank + 1) for t in block])])
    assert owners == [(rank - step) % degree for step in range(degree)]
    factor = sum(range(1, degree + 1))
    addend = Addend(slice(0, counts[rank]), [t * (rank + 1) for t in mine])
    for arrived, expected in zip(home.finish([addend]), mine, strict=True):
        assert torch.equal(arrived, expected * factor), (rank, arrived, expected * factor)
    return ring.peak_blocks


@pytest.mark.parametrize("degree", COUNTS)
def test_every_block_visits_every_member_and_its_gradient_comes_home(degree: int) -> None:
    most = max(map(max, run_ranks(walk_all, degree, degree)))
    assert most == 3 or (most < 3 and degree < 3), "own block and two rotating buffers, whatever the degree"


def walk_subset(rank: int) -> None:
    """Overlapping groups of three on four ranks, taken in one order; the ring order is the group's, not the ranks'."""
    with World(Layout(ranks=4), backend=backend()) as world:
        for slots in ((3, 0, 2), (1, 2, 3), (0, 1)):
            if rank in slots:
                me, counts = slots.index(rank), tuple(slot + 1 for slot in slots)
                mine = (torch.full((counts[me], 2), float(rank), device=world.device),)
                for owner, (block,) in RingBlocks(world.channels.find_channel(slots), mine, counts, "subset"):
                    assert block.shape[0] == counts[owner]
                    assert (block == slots[owner]).all()


def test_overlapping_groups_need_no_communicator_of_their_own() -> None:
    run_ranks(walk_subset, 4)
