"""What holds of every call of `attend`: autograd's ways to call it, types, blind rows, order of messages, lifetime."""

import gc
import itertools
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Layout, World, attend, bind
from longspan.attention import PATTERNS, all_to_all, ring
from longspan.attention.attend import find_comm_pattern
from longspan.attention.call import cache_of
from longspan.attention.saved_outputs import Recording, active_recording
from longspan.comm import Channel
from longspan.testing import backend, run_ranks
from tests.attention.cases import layouts, micro_batch
from tests.attention.test_attend import TYPES, needs


def made(rows, *shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def leaves_of(shard, tensors, needs_gradient=(True, True, True)):
    local = [shard.scatter(x.to(shard.device)) for x in tensors]
    return [x.requires_grad_(needed) for x, needed in zip(local, needs_gradient, strict=True)]


# ---- other ways to call


@pytest.fixture(scope="module")
def of_three():
    needs(3)
    return run_ranks(at_three_ranks, 3)


def at_three_ranks(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "3" if rank == 0 else "1"
    with World(Layout(ranks=3), backend=backend()) as world:
        return ways(world) | {("every rank", "one node size"): world.node_size == 3}, blind(world), lse_errors(world)


def ways(world):
    results = {}
    batch = micro_batch(((0,), (3,)), ((0, 1, 2), (20, 1, 9)), ((2, 0), (7,)))
    shard = bind(batch, world)
    tensors = made(shard.tokens, (6, 8), (2, 8), (2, 8))
    for kind in TYPES:

        def call(q, k, v, kind=kind, **options):
            return attend(q, k, v, options.pop("shard", shard), cp_comm_type=kind, **options)

        def half(q, k, v, f=call):
            return f(q.bfloat16(), k.bfloat16(), v.bfloat16())

        def gradients(fn, needs_gradient=(True, True, True)):
            leaves = leaves_of(shard, tensors, needs_gradient)
            out = fn(*leaves)
            out.square().sum().backward()
            return [out.detach(), *(x.grad for x in leaves)]

        plain = gradients(call)
        twice = gradients(lambda q, k, v, f=call: f(f(q, k, v), k, v))
        apart = gradients(lambda q, k, v, f=call: f(checkpoint(f, q, k, v, use_reentrant=False), k, v))
        strided = gradients(lambda q, k, v, f=call: f(*(x.mT.contiguous().mT for x in (q, k, v))))
        one_sided = gradients(call, (True, world.rank == 0, world.rank == 0))
        recorded = partial(checkpoint, half, use_reentrant=False, context_fn=Recording().contexts)
        results[kind, "twice"] = same(twice, apart)
        results[kind, "strided"] = same(plain, strided)
        results[kind, "gradients that some members need"] = same(plain, one_sided)
        results[kind, "an output that is sent again"] = same(gradients(half), gradients(recorded))
        if kind != "a2a+p2p":  # what follows is decided before a type is called
            continue
        with torch.no_grad():
            bare = call(*leaves_of(shard, tensors))
        capped = [gradients(lambda *x, f=call, on=on: mixed(f, *x, on=on)) for on in (False, True)]
        dropped = [gradients(lambda *x, f=call, s=s: f(*x, dropout=0.5, dropout_seed=s)) for s in (1, 1, 2)]
        by_step = []
        for world.step in (1, 1, 2):
            options = {"shard": bind(batch, world), "dropout": 0.5, "use_reentrant": False}
            by_step.append(gradients(lambda *x, f=call, options=options: checkpoint(f, *x, **options)))
        results[kind, "without a graph"] = same(plain[:1], [bare]) and not bare.requires_grad
        results[kind, "under autocast"] = same(*capped)
        results[kind, "dropout by seed"] = same(*dropped[:2]) and not same(*dropped[1:])
        results[kind, "dropout by step"] = same(*by_step[:2]) and not same(*by_step[1:])
    return results


def mixed(call, q, k, v, on):
    """In float32 by the reference kernel, whose products autocast would round."""
    with torch.autocast(q.device.type, dtype=torch.bfloat16, enabled=on):
        return call(q.float(), k.float(), v.float(), softcap=3.0)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if b is not None)


def test_recomputation_double_use_and_no_grad_give_the_same(of_three):
    for rank, (results, *_) in enumerate(of_three):
        assert all(results.values()), (rank, [what for what, good in results.items() if not good])


def blind(world):
    of_calls = {}
    shard = bind(micro_batch(((0, 1, 2), (3, 1, 9)), pad_to=20), world)
    padding = shard.rows < 0
    for kind in TYPES:
        for options in ({}, {"causal": False, "softcap": 2.0}, {"window": 2}):
            q, k, v, dout = made(shard.local_rows, (6, 8), (2, 8), (2, 8), (6, 8), seed=world.rank)
            leaves = [x.to(shard.device).requires_grad_() for x in (q, k, v)]
            sinks = torch.tensor([0.0, 3.0, -torch.inf] * 2, device=shard.device, requires_grad=True)
            out = attend(*leaves, shard, sinks=sinks, cp_comm_type=kind, **options)
            out.backward(dout.to(shard.device))
            results = [out.detach(), *(x.grad for x in leaves)]
            blank = max(x[padding].abs().max().item() for x in results)
            finite = all(x.isfinite().all().item() for x in (*results, sinks.grad))
            of_calls[kind, str(options)] = (blank, finite, bool(padding.any()))
    return of_calls


def test_rows_that_see_no_key_have_zero_output_and_gradients(of_three):
    for _, of_calls, _ in of_three:
        assert all(numbers == (0.0, True, True) for numbers in of_calls.values()), of_calls


def dense_with_lse(q, k, v, sinks, lengths, window):
    """Out and lse of documents one after another, by torch's own operations; sinks are keys without a value."""
    outs, sums = [], []
    for rows_q, rows_k, rows_v in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("tnh,snh->nts", rows_q, rows_k.repeat_interleave(groups, 1)) * q.shape[2] ** -0.5
        row = torch.arange(len(rows_q))
        distance = row[:, None] - row
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(row), 1)], -1)
        sums.append(scores.logsumexp(-1).T)
        outs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1)[..., :-1], rows_v.repeat_interleave(groups, 1)))
    return torch.cat(outs), torch.cat(sums)


A2A = ("a2a", "a2a+p2p")


def lse_errors(world):
    """By type and what the loss is a function of: the worst error of gradients of q, k, v and sinks."""
    errors = {}
    lengths = (20, 1, 9, 7)
    shard = bind(micro_batch(((0, 1, 2), lengths[:3]), ((2, 0), lengths[3:])), world)
    tensors = made(shard.tokens, (6, 8), (2, 8), (2, 8))
    logits = made(6, ())[0]
    weights = made(shard.tokens, (6, 8), (6,), seed=1)
    uses = {"out and lse": (1.0, 1.0), "lse alone": (0.0, 1.0)}
    for (name, shares), window in itertools.product(uses.items(), (5, 64)):
        leaves = [x.clone().requires_grad_() for x in (*tensors, logits)]
        exact = dense_with_lse(*leaves, lengths, window)
        sum(share * (x * w).sum() for share, x, w in zip(shares, exact, weights, strict=True)).backward()
        for kind, slice_bytes in (("p2p", 1), ("all_gather", 1), ("auto", 1), *itertools.product(A2A, (0, 1 << 30))):
            options = {"window": window, "cp_comm_type": kind, "with_lse": True}
            local = [*leaves_of(shard, tensors), logits.clone().to(shard.device).requires_grad_()]

            def call(q, k, v, sinks, options=options, slice_bytes=slice_bytes):
                with patch.object(all_to_all, "SLICE_BYTES", slice_bytes):
                    return attend(q, k, v, shard, sinks=sinks, **options)

            found = checkpoint(call, *local, use_reentrant=False, context_fn=Recording().contexts)
            parts = [shard.scatter(x.to(shard.device)) for x in weights]
            sum(share * (x * w).sum() for share, x, w in zip(shares, found, parts, strict=True)).backward()
            with torch.no_grad():
                bare = call(*local)
            sinks_gradient = world.control.sum_over_slots(local[3].grad.tolist())
            differences = [
                *(x - shard.scatter(y.detach().to(x.device)) for x, y in zip((*found, *bare), exact * 2, strict=True)),
                *(x.grad - shard.scatter(y.grad.to(x.device)) for x, y in zip(local[:3], leaves, strict=False)),
                torch.tensor(sinks_gradient, dtype=torch.float64) - leaves[3].grad,
            ]
            errors[name, window, kind, slice_bytes] = max(x.detach().abs().max().item() for x in differences)
    return errors


def test_the_log_sum_exp_has_the_gradients_of_dense_attention(of_three):
    for _, _, errors in of_three:
        assert max(errors.values()) <= 1e-12, errors


# ---- the order of messages, the same on all ranks

ORDER = {  # of a rank with two slices and a ring of two: what it sends, and what it computes
    "forward": "heads heads block compute block compute compute out compute out",
    "backward": "dout dout block compute block compute gradient rows compute gradient compute rows rows rows",
}
LABELS = {
    "attention all-to-all forward": "heads",
    "attention ring forward": "block",
    "attention all-to-all forward, back": "out",
    "attention all-to-all backward": "dout",
    "attention ring backward": "block",
    "attention ring backward, gradients": "gradient",
    "attention all-to-all backward, gradients": "rows",
}


@pytest.fixture(scope="module")
def of_four():
    needs(4)
    return run_ranks(at_four_ranks, 4)


def at_four_ranks(rank: int) -> tuple[Any, ...]:
    with World(Layout(ranks=4), backend=backend(), timeout=60) as world:
        assert not alive(world), "what is derived from a shard is freed with it, without Python's collector of cycles"
        return groups_taken(world), [reorderings(world, x) for x in ("zigzag", "contiguous")], events(world)


def alive(world: World) -> list[object]:
    gc.collect()
    gc.disable()
    kept = list[weakref.ref[Any]]()
    for options in ({}, {"dropout": 0.5, "dropout_seed": 1, "window": 5}):
        shard = bind(layouts(4)["chains that overlap"], world)  # of every type
        q, k, v = (torch.ones(shard.local_rows, 4, 8, device=shard.device, requires_grad=True) for _ in range(3))
        attend(q, k, v, shard, **options).sum().backward()
        members = [*cache_of(shard).members.values()]
        launches = [launch for of in members for owner in range(of.degree) for launch in of.launches(owner)]
        kept += [weakref.ref(x) for x in (*members, *launches, *(launch.row_identities[0] for launch in launches))]
        del shard, members, launches
    gc.enable()
    assert len(kept) > 10
    return [x for ref in kept if (x := ref()) is not None]


def groups_taken(world: World) -> list[Any]:
    ran: list[tuple[int, ...]] = []

    def noted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            ran.append(next(x for x in args if hasattr(x, "part")).part.group.slots)
            return function(*args)

        return call

    find_comm_pattern.cache_clear()
    with patch.dict(PATTERNS, {kind: (noted(f), noted(g)) for kind, (f, g) in PATTERNS.items()}):
        shard = bind(layouts(4)["chains that overlap"], world)
        q, k, v = (torch.ones(shard.local_rows, n, 8, device=shard.device, requires_grad=True) for n in (4, 2, 2))
        out = attend(q, k, v, shard)
        forward = tuple(ran)
        ran.clear()
        out.sum().backward()
    find_comm_pattern.cache_clear()
    mine = tuple(group.slots for _, group in shard.micro_batch.groups_of(world.slot))
    return [mine, forward, tuple(reversed(ran))]


def test_groups_are_taken_in_the_order_of_the_plan_and_back(of_four) -> None:
    for (mine, forward, backward), *_ in of_four:
        assert len(mine) >= 2 and mine == forward == backward


def spied(owner: Any, name: str, done: list[Any], event: Callable[..., Any]) -> Any:
    function = getattr(owner, name)
    return patch.object(owner, name, lambda *args: done.append(event(*args)) or function(*args))


def reorderings(world: World, partition: str) -> int:
    counted = list[bool]()
    shard = bind(micro_batch(((0, 1, 2, 3), (9, 30, 1), "a2a"), partition=partition), world)
    q, k, v = (torch.ones(shard.local_rows, 4, 8, device=world.device, requires_grad=True) for _ in range(3))
    with spied(all_to_all, "join_columns", counted, lambda tensors, index=None, dtype=None: index is not None):
        attend(q, k, v, shard).sum().backward()
    return sum(counted)


def test_what_a2a_lays_in_another_order(of_four) -> None:
    assert [times for _, times, _ in of_four] == [[4, 0]] * 4


def events(world: World) -> dict[str, str]:
    done = list[str]()
    shard = bind(micro_batch(((0, 1, 2, 3), (24, 9))), world)
    leaves = leaves_of(shard, made(shard.tokens, (8, 16), (4, 16), (4, 16)))
    with (
        patch.object(all_to_all, "SLICE_BYTES", 0),
        spied(Channel, "shift", done, lambda *args: LABELS[args[-1]]),
        spied(Channel, "all_to_all_rows", done, lambda *args: LABELS[args[-1]]),
        spied(all_to_all, "add_block", done, lambda *_: "compute"),
        spied(ring, "block_gradients", done, lambda *_: "compute"),
    ):
        out: Any = checkpoint(partial(attend, cp_comm_type="a2a+p2p"), *leaves, shard, use_reentrant=False)
        forward = " ".join(done)
        done.clear()
        out.sum().backward()
    again = " ".join(done)
    assert again.startswith(f"{forward} "), again  # recomputed
    return {"forward": forward, "backward": again.removeprefix(f"{forward} ")}


def test_messages_travel_ahead_in_one_order_on_every_rank(of_four) -> None:
    assert [order for *_, order in of_four] == [ORDER] * 4


# ---- what a recording keeps


def output(compute, inputs):
    recording = active_recording.get()
    return compute() if recording is None else recording.record_or_replay(compute, inputs)


def test_calls_are_computed_once_inside_a_recording_and_always_outside() -> None:
    computed: list[int] = []

    def call() -> float:
        def compute() -> Tensor:
            computed.append(len(computed))
            return torch.tensor(float(computed[-1]))

        return output(compute, ()).item()

    recording = Recording()
    with recording.record_outputs():
        assert [call(), call()] == [0.0, 1.0]
    assert call() == 2.0
    for _ in range(2):  # a graph that is kept is recomputed in every backward pass
        with recording.replay_outputs():
            assert [call(), call()] == [0.0, 1.0]
    assert call() == 3.0 and len(computed) == 4


def test_a_recording_inside_another_leaves_it_at_hand() -> None:
    outer, inner = Recording(), Recording()
    with outer.record_outputs():
        with inner.record_outputs():
            output(lambda: torch.tensor(1.0), ())
        output(lambda: torch.tensor(2.0), ())
    for recording, value in ((inner, 1.0), (outer, 2.0)):
        with recording.replay_outputs():
            assert output(lambda: torch.tensor(9.0), ()).item() == value


def test_views_of_inputs_are_made_again_of_the_inputs_at_hand() -> None:
    recording, x = Recording(), torch.arange(6.0)
    with recording.record_outputs():
        output(lambda: (x.view(2, 3)[1], x + 1), (x,))
    again = 10 * x
    with recording.replay_outputs():
        view, stored = output(lambda: (again, again), (again,))
    assert view.tolist() == [30.0, 40.0, 50.0] and stored.tolist() == (x + 1).tolist()
