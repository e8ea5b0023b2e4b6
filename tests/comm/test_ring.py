"""Blocks visit every member once, gradients come home summed, buffers do not grow with the degree."""

import pytest
import torch

from longspan.attention.rows import add_addends
from longspan.comm.ring import Addend, GradientRing, RingBlocks
from longspan.comm.world import World
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

Slots = tuple[int, ...]
COUNTS = {  # rows of each member; groups overlap, and their order is that of their rings, not of the ranks
    (0,): [(3,), (0,)],
    (0, 1): [(2, 2), (3, 1), (0, 4)],
    (3, 0, 2): [(2, 1, 3), (0, 0, 5)],
    (1, 2, 3): [(2, 3, 4)],
    (0, 1, 2, 3): [(2, 2, 2, 2), (1, 0, 3, 0)],
}


def blocks(owner: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(rows, dtype=torch.float64)[:, None] + 100.0 * (owner + 1)
    return base.expand(rows, 3).contiguous(), (base * 10).reshape(rows, 1, 1).expand(rows, 2, 2).contiguous()


def walk_all(rank: int) -> dict[Slots, int]:
    peaks: dict[Slots, int] = {}
    with World(Layout(ranks=4), backend=backend()) as world:
        for is_inference in (False, True):
            with torch.inference_mode(is_inference):
                for slots in (slots for slots in COUNTS if rank in slots):
                    peaks[slots] = max(walk(slots.index(rank), slots, counts, world) for counts in COUNTS[slots])
    return peaks


def walk(me: int, slots: Slots, counts: tuple[int, ...], world: World) -> int:
    channel, degree = world.channels.find_channel(slots), len(slots)
    mine = tuple(t.to(world.device) for t in blocks(me, counts[me]))
    ring = RingBlocks(channel, mine, counts, "test ring")
    home = GradientRing(channel, mine, counts, "test gradients", add=add_addends, dtype=torch.float64)
    owners, buffers = [], set()
    for owner, block in ring:
        owners.append(owner)
        buffers.add(block[0].untyped_storage().data_ptr())
        for arrived, expected in zip(block, blocks(owner, counts[owner]), strict=True):
            assert torch.equal(arrived.cpu(), expected), (me, owner, arrived, expected)
        if owner != me:
            home.add(owner, [Addend(slice(0, counts[owner]), [t * (me + 1) for t in block])])
    assert owners == [(me - step) % degree for step in range(degree)]
    factor = sum(range(1, degree + 1))
    addend = Addend(slice(0, counts[me]), [t * (me + 1) for t in mine])
    for arrived, expected in zip(home.finish([addend]), mine, strict=True):
        assert torch.equal(arrived, expected * factor), (me, arrived, expected * factor)
    return len(buffers)


@pytest.mark.whole
def test_every_block_visits_every_member_and_its_gradient_comes_home() -> None:
    for peaks in run_ranks(walk_all, 4):
        for slots, peak in peaks.items():
            assert peak == 3 or (peak < 3 and len(slots) < 3), "own block and two rotating buffers, whatever the degree"
