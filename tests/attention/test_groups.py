"""A slot in several groups of one micro-batch: local, of its node, across nodes; each with a type of its own.

Groups are taken in the plan's order on every rank, whatever their types, forward and in reverse backward: no deadlock,
and out and every gradient as dense attention has them.
"""

import itertools
from typing import Any

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.testing import backend, run_ranks
from tests.attention.test_attend import needs
from tests.reference import dense_attention, relative_error

Members = tuple[tuple[int, ...], tuple[int, ...], str | tuple[str, ...], tuple[int, int] | None]

# Two nodes of two slots: the own documents, those of the node, and one across nodes, in several orders.
FOUR: dict[str, list[Members]] = {
    "local, node, cross-node": [
        *(((slot,), (5 + slot, 2), "p2p", None) for slot in range(4)),
        ((0, 1), (14, 3), "a2a", None),
        ((2, 3), (11,), "all_gather", None),
        ((0, 1, 2, 3), (40,), "a2a+p2p", (2, 2)),
    ],
    "cross-node first": [
        ((0, 1, 2, 3), (33, 1), "a2a+p2p", (2, 2)),
        ((1, 2), (9,), "p2p", None),
        ((3, 0), (7, 7), "a2a", None),
        ((2,), (6,), "auto", None),
    ],
    "chains that overlap": [
        ((0, 1), (10,), "a2a", None),
        ((1, 2), (12,), "p2p", None),
        ((2, 3), (8,), "all_gather", None),
        ((3, 0), (9,), "a2a+p2p", (1, 2)),
        ((0, 2), (5,), "p2p", None),
        ((1, 3), (1,), "a2a", None),
    ],
    "one type a layer": [
        ((0, 1, 2), (21,), ("p2p", "all_gather"), None),
        ((3, 1), (8, 4), ("a2a", "p2p"), None),
        ((0, 1, 2, 3), (17,), ("a2a+p2p", "a2a"), (2, 2)),
        ((0,), (6,), ("p2p", "p2p"), None),
    ],
}
EIGHT: dict[str, list[Members]] = {
    "three levels of eight": [
        *(((slot,), (3 + slot % 3,), "p2p", None) for slot in range(8)),
        *((tuple(range(first, first + 4)), (20, 9), kind, None) for first, kind in ((0, "a2a"), (4, "p2p"))),
        (tuple(range(8)), (60, 5), "a2a+p2p", (4, 2)),
        (tuple(range(0, 8, 2)), (15,), "all_gather", None),
    ]
}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 6}, {"causal": False, "softcap": 2.0})


def batch_of(members: list[Members]) -> MicroBatch:
    ids = itertools.count()
    return MicroBatch(
        tuple(
            Group(slots, tuple(next(ids) for _ in lengths), lengths, kind, sizes)
            for slots, lengths, kind, sizes in members
        )
    )


def errors(rank: int, slots: int, named: dict[str, list[Members]]) -> dict[tuple[str, str], float]:
    """The worst error of out, dq, dk and dv of each micro-batch and call."""
    worst: dict[tuple[str, str], float] = {}
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        for name, members in named.items():
            shard = bind(batch_of(members), world)
            assert shard.local_rows, "every slot has rows here"
            generator = torch.Generator().manual_seed(len(name))
            shapes = ((8, 16), (2, 16), (2, 16), (8, 16))
            tensors = [torch.randn(shard.tokens, *s, generator=generator, dtype=torch.float64) for s in shapes]
            for options in OPTIONS:
                full = [x.clone().requires_grad_() for x in tensors[:3]]
                expected = dense_attention(*full, shard.micro_batch.lengths, **options)
                expected.backward(tensors[3])
                leaves = [shard.scatter(x.to(shard.device)).requires_grad_() for x in tensors[:3]]
                out = attend(*leaves, shard, layer=1, **options)
                out.backward(shard.scatter(tensors[3].to(shard.device)))
                pairs = zip((out, *(x.grad for x in leaves)), (expected, *(x.grad for x in full)), strict=True)
                errors = [relative_error(shard.gather(a.detach()).cpu(), b) for a, b in pairs]
                worst[name, str(options)] = max(errors)
    return worst


@pytest.mark.parametrize(("slots", "named"), [(4, FOUR), (8, EIGHT)], ids=["4 slots", "8 slots"])
def test_a_slot_in_several_groups_of_several_types(slots: int, named: dict[str, list[Members]]) -> None:
    needs(slots)
    for worst in run_ranks(errors, slots, slots, named):
        assert len(worst) == len(named) * len(OPTIONS)
        assert max(worst.values()) <= 1e-12, worst


def calls(rank: int, slots: int) -> list[tuple[tuple[int, ...], ...]]:
    """Which groups this rank's patterns ran for, in order, forward and backward of one call."""
    from importlib import import_module

    module: Any = import_module("longspan.attention.attend")
    ran: list[tuple[int, ...]] = []
    for cp_comm_type, functions in list(module.PATTERNS.items()):

        def noted(function: Any) -> Any:
            def call(*args: Any) -> Any:
                ran.append(next(x for x in args if hasattr(x, "part")).part.group.slots)
                return function(*args)

            return call

        module.PATTERNS[cp_comm_type] = tuple(noted(function) for function in functions)
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        shard = bind(batch_of(FOUR["chains that overlap"]), world)
        q, k, v = (torch.ones(shard.local_rows, n, 8, device=shard.device, requires_grad=True) for n in (4, 2, 2))
        out = attend(q, k, v, shard)
        forward = tuple(ran)
        ran.clear()
        out.sum().backward()
        mine = tuple(group.slots for _, group in shard.micro_batch.groups_of(world.slot))
    return [mine, forward, tuple(reversed(ran))]


def test_groups_are_taken_in_the_order_of_the_plan_and_back() -> None:
    needs(4)
    for mine, forward, backward in run_ranks(calls, 4, 4):
        assert len(mine) == 3 and mine == forward == backward
