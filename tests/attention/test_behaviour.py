"""What holds of every call of `attend`: autograd's ways to call it, types, blind rows, order of messages, lifetime."""

import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention import PATTERNS, all_to_all, ring
from longspan.attention.attend import find_pattern
from longspan.attention.call import Members, cache_of
from longspan.attention.saved_outputs import Recording, active_recording
from longspan.attention.tiles import Mask
from longspan.comm import Channel, SequenceShard
from longspan.testing import backend, run_ranks
from tests.attention.cases import layouts, micro_batch
from tests.attention.test_attend import TYPES, needs
from tests.reference import relative_error


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
        return ways(world) | {("every rank", "one node size"): world.node_size == 3}, blind(world)


def ways(world):
    results = {}
    batch = micro_batch(((0,), (3,)), ((0, 1, 2), (20, 1, 9)), ((2, 0), (7,)))
    shard = bind(batch, world)
    tensors = made(shard.tokens, (6, 8), (2, 8), (2, 8))
    for kind in (*TYPES, "auto"):

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
        with torch.no_grad():
            bare = call(*leaves_of(shard, tensors))
        capped = [gradients(lambda *x, f=call, on=on: mixed(f, *x, on=on)) for on in (False, True)]
        dropped = [gradients(lambda *x, f=call, s=s: f(*x, dropout=0.5, dropout_seed=s)) for s in (1, 1, 2)]
        by_step = []
        for world.step in (1, 1, 2):
            options = {"shard": bind(batch, world), "dropout": 0.5, "use_reentrant": False}
            by_step.append(gradients(lambda *x, f=call, options=options: checkpoint(f, *x, **options)))
        results[kind, "twice"] = same(twice, apart)
        results[kind, "strided"] = same(plain, strided)
        results[kind, "gradients that some members need"] = same(plain, one_sided)
        results[kind, "an output that is sent again"] = same(gradients(half), gradients(recorded))
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
    """Bit for bit, where both are there."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if b is not None)


def test_recomputation_double_use_and_no_grad_give_the_same(of_three):
    for rank, (results, _) in enumerate(of_three):
        assert all(results.values()), (rank, [what for what, good in results.items() if not good])


def blind(world):
    of_calls = {}
    shard = bind(micro_batch(((0, 1, 2), (3, 1, 9)), pad_to=20), world)
    padding = shard.rows < 0
    for kind in TYPES:
        for options in ({}, {"causal": False}, {"window": 2}, {"softcap": 2.0}):
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
    for _, of_calls in of_three:
        assert all(numbers == (0.0, True, True) for numbers in of_calls.values()), of_calls


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (32, 16, 16))
        self.out = nn.Linear(32, 16, bias=False)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, shard: SequenceShard) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        options: dict[str, Any] = {"sinks": self.sinks, "dropout": 0.2, "dropout_seed": 5, "layer": 0, "window": 9}
        return x + self.out(attend(q, k, v, shard, **options).flatten(1)).relu()


@pytest.mark.filterwarnings("default")  # torch's own, of what it compiles
def test_compiled_and_recomputed_layers_compute_the_same() -> None:
    """In micro-batches of other rows. `attend` is not compiled: what it does between ranks is the same."""
    from torch._dynamo.utils import counters  # which takes seconds to import

    counters.clear()
    results = list[list[Any]]()
    with World(Layout(ranks=1), backend=backend()) as world:
        for is_compiled in (False, True):
            torch.manual_seed(1)
            layer: Any = Layer().double().to(world.device)
            call = torch.compile(layer, backend="aot_eager", dynamic=True) if is_compiled else layer
            results.append([])
            for lengths in ((20, 1, 9), (14, 7)):
                shard = bind(micro_batch(((0,), lengths)), world)
                x = torch.randn(sum(lengths), 16, dtype=torch.float64).to(world.device).requires_grad_()
                out = checkpoint(call, x, shard, use_reentrant=False) if is_compiled else call(x, shard)
                out.square().sum().backward()
                results[-1] += [out.detach(), x.grad]
            results[-1] += [p.grad for p in layer.parameters()]
    assert max(relative_error(a, b) for a, b in zip(*reversed(results), strict=True)) < 1e-13
    assert sum(counters["graph_break"].values()) and all("disable" in why for why in counters["graph_break"])


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
        return groups_taken(world), [reorderings(world, x) for x in ("zigzag", "contiguous")], events(world)


def groups_taken(world: World) -> list[Any]:
    ran: list[tuple[int, ...]] = []

    def noted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            ran.append(next(x for x in args if hasattr(x, "part")).part.group.slots)
            return function(*args)

        return call

    find_pattern.cache_clear()
    with patch.dict(PATTERNS, {kind: (noted(f), noted(g)) for kind, (f, g) in PATTERNS.items()}):
        shard = bind(layouts(4)["chains that overlap"], world)
        q, k, v = (torch.ones(shard.local_rows, n, 8, device=shard.device, requires_grad=True) for n in (4, 2, 2))
        out = attend(q, k, v, shard)
        forward = tuple(ran)
        ran.clear()
        out.sum().backward()
    find_pattern.cache_clear()
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
    return compute() if recording is None else recording.output(compute, inputs)


def test_calls_are_computed_once_inside_a_recording_and_always_outside() -> None:
    computed: list[int] = []

    def call() -> float:
        def compute() -> Tensor:
            computed.append(len(computed))
            return torch.tensor(float(computed[-1]))

        return output(compute, ()).item()

    recording = Recording()
    with recording.forward():
        assert [call(), call()] == [0.0, 1.0]
    assert call() == 2.0
    for _ in range(2):  # a graph that is kept is recomputed in every backward pass
        with recording.recompute():
            assert [call(), call()] == [0.0, 1.0]
    assert call() == 3.0 and len(computed) == 4


def test_a_recording_inside_another_leaves_it_at_hand() -> None:
    outer, inner = Recording(), Recording()
    with outer.forward():
        with inner.forward():
            output(lambda: torch.tensor(1.0), ())
        output(lambda: torch.tensor(2.0), ())
    for recording, value in ((inner, 1.0), (outer, 2.0)):
        with recording.recompute():
            assert output(lambda: torch.tensor(9.0), ()).item() == value


def test_views_of_inputs_are_made_again_of_the_inputs_at_hand() -> None:
    recording, x = Recording(), torch.arange(6.0)
    with recording.forward():
        output(lambda: (x.view(2, 3)[1], x + 1), (x,))
    again = 10 * x
    with recording.recompute():
        view, stored = output(lambda: (again, again), (again,))
    assert view.tolist() == [30.0, 40.0, 50.0] and stored.tolist() == (x + 1).tolist()


# ---- what is derived from a shard is freed with it, without Python's collector of cycles


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def derived(members: Members) -> list[object]:
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


@pytest.mark.parametrize(("inner", "window"), [(1, None), (2, 5)])
def test_index_tensors_are_freed_with_their_circle(without_collector, inner, window):
    batch, cpu = MicroBatch((Group(tuple(range(4)), (0, 1, 2), (40, 9, 23)),)), torch.device("cpu")
    members = Members(SequenceShard(batch, 1, -1, cpu).parts[0], Mask(True, window), cpu, inner)
    alive = [weakref.ref(x) for x in derived(members)]
    assert len(alive) > 10
    del members
    assert not [ref for ref in alive if ref() is not None]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "dropout_seed": 1, "window": 5}], ids=str)
def test_a_call_and_its_backward_leave_nothing_of_the_shard_behind(without_collector, options):
    with World(Layout(ranks=1), backend=backend()) as world:
        shard = bind(MicroBatch((Group((0,), (0, 1), (40, 9)),)), world)
        q, k, v = (torch.ones(49, 2, 8, device=shard.device, requires_grad=True) for _ in range(3))
        attend(q, k, v, shard, **options).sum().backward()
        kept = [weakref.ref(x) for x in cache_of(shard).members.values()]
        assert kept
        del shard
        assert not [ref for ref in kept if ref() is not None]
