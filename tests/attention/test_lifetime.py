"""What attention derives from a shard is freed with the shard, without Python's collector of cycles."""

import gc
import weakref

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention.call import Members, cache_of
from longspan.attention.tiles import Mask
from longspan.comm import SequenceShard
from longspan.testing import backend

CPU = torch.device("cpu")
BATCH = MicroBatch((Group(tuple(range(4)), (0, 1, 2), (40, 9, 23)),))


@pytest.fixture(autouse=True)
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def derived(members: Members) -> list[object]:
    """Everything that a members derives, with its index tensors."""
    launches = [launch for owner in range(members.degree) for launch in members.launches(owner)]
    if members.inner == 1:
        launches += members.launches(None)
        members.document_order(tuple(range(members.degree)))
        _ = members.keys_by_member
    if members.mask.window is not None:
        launches += members.window_rows.launches
    tensors = [x for launch in launches for x in (*launch.tokens, *launch.cu_seqlens)]
    tensors += [x for launch in launches for x in (launch.q_rows, launch.k_rows) if isinstance(x, torch.Tensor)]
    return [members, *launches, *tensors, *(members.arrival_orders or ())]


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_index_tensors_are_freed_with_their_circle(inner, window):
    members = Members(SequenceShard(BATCH, 1, -1, CPU).parts[0], Mask(True, window), CPU, inner)
    alive = [weakref.ref(x) for x in derived(members)]
    assert len(alive) > 10
    del members
    assert not [ref for ref in alive if ref() is not None]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "dropout_seed": 1}, {"window": 5, "softcap": 2.0}], ids=str)
def test_a_call_and_its_backward_leave_nothing_of_the_shard_behind(options):
    with World(Layout(ranks=1), backend=backend()) as world:
        shard = bind(MicroBatch((Group((0,), (0, 1), (40, 9)),)), world)
        q, k, v = (torch.ones(49, 2, 8, device=shard.device, requires_grad=True) for _ in range(3))
        attend(q, k, v, shard, **options).sum().backward()
        derived = [weakref.ref(x) for x in cache_of(shard).members.values()]
        assert derived
        del shard
        assert not [ref for ref in derived if ref() is not None]
