"""Blocks visit every member once, gradients come home summed, buffers do not grow with the degree."""

import pytest
import torch

from longspan.attention.rows import add_addends, join_columns
from longspan.comm.ring import Addend, GradientRing, RingBlocks, split_columns
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
    """Two tensors of unlike widths whose values name the owner and the row."""
    base = torch.arange(rows, dtype=torch.float64)[:, None] + 100.0 * (owner + 1)
    return base.expand(rows, 3).contiguous(), (base * 10).reshape(rows, 1, 1).expand(rows, 2, 2).contiguous()


def walk(rank: int, degree: int, counts: tuple[int, ...]) -> int:
    """Go round once, sending back a gradient that names who gave it; returns the peak of live blocks."""
    with World(Layout(ranks=degree), backend=backend()) as world:
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


@pytest.mark.parametrize(("degree", "counts"), [(d, c) for d, all_counts in COUNTS.items() for c in all_counts])
def test_every_block_visits_every_member_and_its_gradient_comes_home(degree: int, counts: tuple[int, ...]) -> None:
    peaks = run_ranks(walk, degree, degree, counts)
    assert max(peaks) <= 3, "own block and two rotating buffers, whatever the degree"


def walk_in_inference_mode(rank: int, degree: int, counts: tuple[int, ...]) -> int:
    """The same where views do not know what they are views of."""
    with torch.inference_mode():
        return walk(rank, degree, counts)


def test_buffers_come_round_whole_in_inference_mode() -> None:
    assert run_ranks(walk_in_inference_mode, 4, 4, (1, 0, 3, 2)) == [3] * 4


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


@pytest.mark.parametrize("sizes", [[(3,)], [(3,), (2, 2)], [(1,), (2,), (2, 1)]])
def test_columns_of_tensors_are_joined_and_split_again(sizes: list[tuple[int, ...]]) -> None:
    tensors = [torch.randn(5, *size) for size in sizes]
    matrix = join_columns(tensors)
    assert matrix.shape == (5, sum(t[0].numel() for t in tensors)) and matrix.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(split_columns(matrix, sizes), tensors, strict=True))
