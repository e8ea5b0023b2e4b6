"""The bytes that `attend` sends inside hosts and across, counted message by message, against formulas.

Every rank counts what it hands to torch, by receiver. A collective is counted by what a member must receive from each
member, and a gather over a communicator as NCCL sends it: around a ring of the members in rank order.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from math import gcd
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention import all_to_all
from longspan.attention.all_to_all import HeadSplit
from longspan.attention.saved_outputs import Recording
from longspan.comm import channel
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from tests.attention.test_attend import needs

Sizes = tuple[int, int] | None
HEAD, VALUE = 12, 8


class Case(NamedTuple):
    """A call on all slots, over communicators of the members' own or from member to member."""

    kind: str
    sizes: Sizes
    heads: int
    kv_heads: int
    dtype: str
    own: bool = False
    sliced: bool = False
    recomputed: bool = False
    kernel: str | None = None


SLOTS, NODE_SIZE = 4, 2


def cases() -> list[Case]:
    ways: list[tuple[str, Sizes]] = [("p2p", None), ("all_gather", None), ("a2a", None)]
    ways += [("a2a+p2p", (2, 2)), ("a2a+p2p", (1, 4))]
    calls = [Case(*way, *shape, "bfloat16") for way in ways for shape in ((4, 2), (12, 3), (8, 8))]
    own = [call._replace(own=True) for call in calls if call.heads == 12]
    exchanging = [call for call in own if "a2a" in call.kind]
    sliced = [call._replace(sliced=True) for call in exchanging]
    again = [call._replace(recomputed=True, kernel=kernel) for call in exchanging for kernel in (None, "reference")]
    return [*calls, *(call._replace(dtype="float32") for call in calls[::2]), *own, *sliced, *again]


def group_of(case: Case) -> Group:
    lengths = (8 * SLOTS, 4 * SLOTS)  # every member has as many rows
    return Group(tuple(range(SLOTS)), (0, 1), lengths, case.kind, case.sizes)


class Spy:
    """Counts what this rank sends, at torch's functions that start messages; in this process only."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sent = rank, Counter[int]()
        batch, gather = dist.batch_isend_irecv, channel.all_gather_single
        exchange: Callable[..., Any] = dist.ProcessGroup.alltoall_base

        def count_batch(ops: list[dist.P2POp]) -> Any:
            for op in ops:
                if op.op is dist.isend:
                    self.sent[op.peer] += op.tensor.nbytes
            return batch(ops)

        def count_exchange(group: Any, into: Tensor, x: Tensor, receives: list[int], sends: list[int]) -> Any:
            for peer, rows in zip(dist.get_process_group_ranks(group), sends, strict=True):
                self.sent[peer] += rows * x[:1].nbytes if peer != rank else 0
            return exchange(group, into, x, receives, sends)

        def count_gather(buffer: Tensor, x: Tensor, *, group: Any, async_op: bool) -> Any:
            ranks = sorted(dist.get_process_group_ranks(group))
            self.sent[ranks[(ranks.index(rank) + 1) % len(ranks)]] += (len(ranks) - 1) * x.nbytes
            return gather(buffer, x, group=group, async_op=async_op)

        dist.batch_isend_irecv, channel.all_gather_single = count_batch, count_gather
        dist.ProcessGroup.alltoall_base = count_exchange  # pyright: ignore[reportAttributeAccessIssue]


def count_sent(rank: int) -> list[Counter[int]]:
    spy, counted, usual = Spy(rank), list[Counter[int]](), all_to_all.SLICE_BYTES
    for own in (False, True):
        with World(home := Layout(ranks=SLOTS), backend=backend(), max_groups=8 if own else 0) as world:
            for cp in (SLOTS, NODE_SIZE) if own else ():  # communicators of all slots, and of hosts
                world.prepare(plan_fixed([SLOTS] * SLOTS, home, cp=cp))
            for case in (case for case in cases() if case.own == own):
                all_to_all.SLICE_BYTES = 0 if case.sliced else usual
                shard, dtype = bind(MicroBatch((group_of(case),)), world), getattr(torch, case.dtype)
                shapes = ((case.heads, HEAD), (case.kv_heads, HEAD), (case.kv_heads, VALUE))
                q, k, v = (
                    torch.ones(shard.local_rows, *s, dtype=dtype, device=shard.device).requires_grad_() for s in shapes
                )
                recording = Recording() if case.recomputed else None
                spy.sent.clear()
                with recording.record_outputs() if recording else nullcontext():
                    out = attend(q, k, v, shard, kernel=case.kernel)
                with recording.replay_outputs() if recording else nullcontext():
                    out = attend(q, k, v, shard, kernel=case.kernel) if recording else out
                out.sum().backward()
                counted.append(Counter({peer: size for peer, size in spy.sent.items() if size}))
    return counted


def expected_bytes(case: Case) -> dict[str, float]:
    """What a call sends around rings and in exchanges; in a recomputed layer, with what is exchanged once more."""
    tokens, nodes = sum(group_of(case).lengths), [s // NODE_SIZE for s in range(SLOTS)]
    inner, around = case.sizes or ((SLOTS, 1) if case.kind == "a2a" else (1, SLOTS))
    number = getattr(torch, case.dtype).itemsize
    wide = max(4, number)
    copies = HeadSplit(case.heads, case.kv_heads, inner).kv_copies  # whose gradients are summed
    keys, queries = tokens * case.kv_heads * (HEAD + VALUE) * copies, tokens * case.heads * (HEAD + VALUE)
    blocks, gradients = 2 * number * keys * (around - 1), wide * keys * (around - 1)
    exchanged = (2 * number * queries + (number + (wide if copies > 1 else number)) * keys) * (inner - 1) / inner
    rings = [nodes[i::inner] for i in range(inner)]
    steps = [a != b for ring in rings for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
    sets = [nodes] if case.kind == "all_gather" else [nodes[i : i + inner] for i in range(0, SLOTS, inner)]
    pairs = [a != b for members in sets for a, b in permutations(members, 2)]
    turns, swaps = blocks + gradients, exchanged
    if case.kind == "all_gather":  # over a communicator of one's own around a ring, else each member to every other
        turns, swaps = (blocks, gradients) if case.own else (0, blocks + gradients)
    across = turns * sum(steps) / len(steps) + swaps * sum(pairs) / max(1, len(pairs))
    expected = {"inside": turns + swaps - across, "across": across}
    if not case.recomputed:
        return expected
    split = HeadSplit(case.heads, case.kv_heads, inner)
    heads = case.heads * HEAD + case.kv_heads * split.kv_copies * (HEAD + VALUE)  # q, k and v
    of_out = case.heads * VALUE * number
    if case.kernel == "reference":  # in place of the output dout · out in float32, filled up to multiples of 16 bytes
        of_out = case.heads * 4 * (4 // gcd(4, split.member_heads))
    across = max(0, inner - NODE_SIZE) / inner  # neighbours on the other host
    again = tokens * (number * heads + of_out)
    expected["across"] += again * across
    expected["inside"] += again * ((inner - 1) / inner - across)
    return expected


def test_what_is_sent() -> None:
    needs(SLOTS)
    ranks = run_ranks(count_sent, SLOTS)
    for i, case in enumerate(sorted(cases(), key=lambda case: case.own)):
        levels = {"inside": 0.0, "across": 0.0}
        for rank, counted in enumerate(ranks):
            for peer, size in counted[i].items():
                levels["inside" if rank // NODE_SIZE == peer // NODE_SIZE else "across"] += size
        assert levels == pytest.approx(expected_bytes(case), rel=1e-9), case
