"""Worlds of different homes over the same ranks, open inside each other: what they share, and how they end."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from longspan.comm import World
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

RANKS = 4


def _opened(world: World) -> dict[str, dist.ProcessGroup]:
    """Every kind of group of a home with tp 2, or of slots alone."""
    _ = world.channels.everyone
    groups = {"control": world.control.group, "parent": world.process_groups.parent("plane")}
    groups["slots"] = world.meshes.fsdp.get_group("slots")
    if world.home.tp > 1:
        groups |= {"tp": world.channels.tp.group, "everyone": world.channels.everyone.group}
    return groups


def _kinds(world: World) -> list[str]:
    return [record.kind for record in world.process_groups.made]


def _nested(rank: int) -> None:
    with World(Layout(RANKS, tp=2), backend=backend(), timeout=60) as world:
        with World(Layout(RANKS), backend=backend(), timeout=60) as encoder_world:
            inner, outer = _opened(encoder_world), _opened(world)
            world.step = 3
            assert encoder_world.step == 3
            assert outer["control"] is inner["control"] and _kinds(encoder_world) == ["parent", "slots"]
            # Messages to all ranks go where the encoder's do, of which FSDP2 has its own
            assert outer["everyone"] is inner["parent"] is not inner["slots"]
            assert len({*outer.values()}) == 5 and _kinds(world) == ["control", "parent", "slots", "tp"]
            with World(Layout(RANKS, tp=2), backend=backend(), timeout=60) as third:
                assert _opened(third) == outer and _kinds(third) == [] and third.step == 3
            with World(Layout(RANKS), backend=backend(), timeout=50) as other:
                assert not {*_opened(other).values()} & {*inner.values()}, "with another limit of time"
            _check_reductions(world, encoder_world)
        _check_reductions(world)  # the encoder's group of all ranks lives on, as this world uses it
        assert world.channels.everyone.group is inner["parent"]
    assert not dist.is_initialized()


def _check_reductions(*worlds: World) -> None:
    for world in worlds:
        assert world.control.sum_over_ranks([1.0]) == [RANKS]
        x = torch.ones(1, device=world.device)
        assert sum(part.item() for part in world.channels.everyone.all_gather(x, [1] * RANKS, "ones").wait()) == RANKS
        total: Any = DTensor.from_local(x, world.meshes.fsdp, [Shard(0)]).sum()
        assert total.full_tensor().item() == world.home.slots


def test_nested_worlds_share_groups_of_the_same_ranks_and_purpose() -> None:
    run_ranks(_nested, RANKS)


def _apart(rank: int) -> str:
    """Rank 2 waits in a collective of the encoder's world, the others in one of the language model's."""
    with (
        pytest.raises(CommError) as error,
        World(Layout(RANKS, tp=2), backend="gloo", timeout=4) as world,
        World(Layout(RANKS), backend="gloo", timeout=4) as encoder_world,
    ):
        if rank == 2:
            encoder_world.control.barrier("encoding")
        else:
            world.control.gather_objects(rank, "embedding")
    return str(error.value)


def test_a_report_says_what_a_rank_does_in_another_world() -> None:
    reports = run_ranks(_apart, RANKS)  # that of the first rank whose time is over has all of them
    assert any("rank 2 is in 'encoding'" in said and "is in 'embedding'" in said for said in reports), reports
