"""What holds of every call of `attend`: autograd's ways to call it, types, blind rows, order of messages, lifetime."""

import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan import Group, Layout, MicroBatch, World, attend, bind, plan_fixed
from longspan.attention import PATTERNS, all_to_all, ring
from longspan.attention.attend import find_pattern
from longspan.attention.call import Members, cache_of
from longspan.attention.saved_outputs import Recording, active_recording
from longspan.attention.tiles import Mask
from longspan.comm import Channel, SequenceShard
from longspan.plan import PartitionKind
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import FOUR, TYPES, batch_of, needs
from tests.reference import dense_attention, relative_error


def made(rows, *shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def leaves_of(shard, tensors):
    return [shard.scatter(x.to(shard.device)).requires_grad_() for x in tensors]


# ---- other ways to call


def ways(rank, slots):
    gradients_of = {}
    with World(Layout(ranks=slots), backend=backend()) as world:
        batch = micro_batch(((0,), (3,)), (tuple(range(slots)), (20, 1, 9)), ((slots - 1, 0), (7,)))
        shard = bind(batch, world)
        tensors = made(shard.tokens, (6, 8), (2, 8), (2, 8))
        for kind in TYPES:

            def call(q, k, v, kind=kind, **options):
                return attend(q, k, v, options.pop("shard", shard), cp_comm_type=kind, **options)

            def gradients(fn):
                leaves = leaves_of(shard, tensors)
                out = fn(*leaves)
                out.square().sum().backward()
                return [out.detach(), *(x.grad for x in leaves)]

            plain = gradients(call)
            twice = gradients(lambda q, k, v, f=call: f(f(q, k, v), k, v))
            apart = gradients(lambda q, k, v, f=call: f(checkpoint(f, q, k, v, use_reentrant=False), k, v))
            strided = gradients(lambda q, k, v, f=call: f(*(x.mT.contiguous().mT for x in (q, k, v))))
            with torch.no_grad():
                bare = call(*leaves_of(shard, tensors))
            capped = [gradients(lambda *x, f=call, on=on: mixed(f, *x, on=on)) for on in (False, True)]
            dropped = [gradients(lambda *x, f=call, s=s: f(*x, dropout=0.5, dropout_seed=s)) for s in (1, 1, 2)]
            by_step = []
            for world.step in (1, 1, 2):
                options = {"shard": bind(batch, world), "dropout": 0.5, "use_reentrant": False}
                by_step.append(gradients(lambda *x, f=call, options=options: checkpoint(f, *x, **options)))
            gradients_of[kind, "twice"] = same(twice, apart)
            gradients_of[kind, "strided"] = same(plain, strided)
            gradients_of[kind, "without a graph"] = same(plain[:1], [bare]) and not bare.requires_grad
            gradients_of[kind, "under autocast"] = same(*capped)
            gradients_of[kind, "dropout by seed"] = same(*dropped[:2]) and not same(*dropped[1:])
            gradients_of[kind, "dropout by step"] = same(*by_step[:2]) and not same(*by_step[1:])
    return gradients_of


def mixed(call, q, k, v, on):
    """In float32 by the reference kernel, whose products autocast would round."""
    with torch.autocast(q.device.type, dtype=torch.bfloat16, enabled=on):
        return call(q.float(), k.float(), v.float(), softcap=3.0)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_recomputation_double_use_and_no_grad_give_the_same():
    needs(3)
    for rank, results in enumerate(run_ranks(ways, 3, 3)):
        assert all(results.values()), (rank, [what for what, good in results.items() if not good])


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


def recorded_and_not(rank: int, slots: int) -> dict[str, bool]:
    bits = dict[str, bool]()
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (37, 5))), world)
        *tensors, dout = made(shard.local_rows, (8, 16), (4, 16), (4, 16), (8, 16), seed=rank, dtype=torch.bfloat16)
        for kind in ("a2a", "p2p"):
            gradients = list[list[Tensor]]()
            for recording in (None, Recording()):
                leaves = [x.to(shard.device, copy=True).requires_grad_() for x in tensors]
                call = partial(attend, *leaves, shard, cp_comm_type=kind)
                if recording is not None:
                    with recording.forward():
                        call()
                    with recording.recompute():
                        out = call()
                else:
                    out = call()
                gradients.append(list(torch.autograd.grad(out, leaves, dout.to(shard.device))))
            bits[kind] = same(*gradients)
    return bits


def test_half_precision_gradients_are_the_same_bits_where_the_output_is_sent_again() -> None:
    needs(2)
    assert run_ranks(recorded_and_not, 2, 2) == [{"a2a": True, "p2p": True}] * 2


def used(rank, slots):
    ran = []
    for kind, (forward, backward) in list(PATTERNS.items()):

        def noting(*args, kind=kind, forward=forward):
            ran.append((kind, args[3].inner))
            return forward(*args)

        PATTERNS[kind] = noting, backward
    find_pattern.cache_clear()  # where ranks on GPUs ran other tests before
    with World(Layout(ranks=slots), backend=backend()) as world:
        kinds = ("all_gather", "p2p", "a2a", "a2a+p2p", "auto")
        group = Group((0, 1), (0,), (8,), kinds, (1, 2))
        shard = bind(MicroBatch((group,)), world)
        q, k, v = (shard.scatter(x.to(shard.device)) for x in made(8, (2, 4), (1, 4), (1, 4)))
        outs = [attend(q, k, v, shard, layer=layer) for layer in range(5)]
        outs.append(attend(q, k, v, shard, cp_comm_type="p2p", layer=0))
        outs.append(attend(q, k, v, shard, cp_comm_type=["p2p", "a2a"], layer=1))
        outs.append(attend(q, k, v, shard, layer=3, hierarchical_context_parallel_sizes=(2, 1)))
    return ran, max((out - outs[0]).abs().max().item() for out in outs)


def test_one_type_per_layer():
    needs(2)
    for ran, difference in run_ranks(used, 2, 2):
        listed = [("all_gather", 1), ("p2p", 1), ("a2a", 2), ("a2a+p2p", 1)]
        assert ran[:4] == listed and ran[5:] == [("p2p", 1), ("a2a", 2), ("a2a+p2p", 2)]
        assert difference < 1e-15


def node_sizes(rank, slots):
    os.environ["LOCAL_WORLD_SIZE"] = "3" if rank == 0 else "1"
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(MicroBatch((Group((0, 1), (0,), (8,), "auto"),)), world)
        q, k, v = (torch.ones(shard.local_rows, 2, 4, device=shard.device) for _ in range(3))
        return world.node_size, torch.equal(attend(q, k, v, shard), v)


def test_every_rank_goes_by_one_node_size():
    needs(3)
    assert run_ranks(node_sizes, 3, 3) == [(3, True)] * 3


def one_sided(rank, slots):
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (9, 4))), world)
        qkv = made(13, (4, 8), (2, 8), (2, 8))
        full = [x.requires_grad_() for x in qkv]
        dense_attention(*full, (9, 4)).square().sum().backward()
        expected = [shard.scatter(x.grad.to(shard.device)) for x in full]
        errors = []
        for kind in TYPES:
            leaves = [shard.scatter(x.detach().to(shard.device)).requires_grad_(rank == 0) for x in qkv]
            leaves[0].requires_grad_()
            out = attend(*leaves, shard, cp_comm_type=kind, hierarchical_context_parallel_sizes=(1, 2))
            out.square().sum().backward()
            errors += [relative_error(x.grad, w) for x, w in zip(leaves, expected, strict=True) if x.requires_grad]
    return max(errors)


def test_a_member_whose_inputs_need_no_gradient_enters_backward_once_one_does():
    needs(2)
    assert max(run_ranks(one_sided, 2, 2)) <= 1e-12


# ---- rows that see nothing


def blind(rank, slots):
    of_calls = {}
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (3, 1, 9)), pad_to=20), world)
        rows = shard.local_rows
        for kind in TYPES:
            for options in ({}, {"causal": False}, {"window": 2}, {"softcap": 2.0}, {"dropout": 0.5}):
                q, k, v, dout = made(rows, (6, 8), (2, 8), (2, 8), (6, 8), seed=rank)
                leaves = [x.to(shard.device).requires_grad_() for x in (q, k, v)]
                sinks = torch.tensor([0.0, 3.0, -torch.inf] * 2, device=shard.device, requires_grad=True)
                out = attend(*leaves, shard, sinks=sinks, cp_comm_type=kind, **options)
                out.backward(dout.to(shard.device))
                padding = shard.rows < 0
                results = [out.detach(), *(x.grad for x in leaves)]
                blank = max(x[padding].abs().max().item() for x in results)
                finite = all(x.isfinite().all().item() for x in (*results, sinks.grad))
                of_calls[kind, str(options)] = (blank, finite, bool(padding.any()))
    return of_calls


def test_rows_that_see_no_key_have_zero_output_and_gradients():
    needs(3)
    for of_calls in run_ranks(blind, 3, 3):
        assert all(numbers == (0.0, True, True) for numbers in of_calls.values()), of_calls


@pytest.mark.parametrize("lengths", [(1,), (1, 1)])
def test_a_single_process_needs_no_ranks(lengths):
    with World(Layout(ranks=1), backend=backend()) as world:
        shard = bind(micro_batch(((0,), lengths)), world)
        q, k, v = (x.to(shard.device) for x in made(len(lengths), (2, 4), (1, 4), (1, 4)))
        assert torch.equal(attend(q, k, v, shard), v.expand(-1, 2, -1))


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


def spy(owner: Any, name: str, done: list[Any], event: Callable[..., Any]) -> None:
    function = getattr(owner, name)
    setattr(owner, name, lambda *args: done.append(event(*args)) or function(*args))


def events(rank: int, slots: int) -> dict[str, str]:
    all_to_all.SLICE_BYTES = 0  # in this process only
    done = list[str]()
    for name in ("shift", "all_to_all_rows"):
        spy(Channel, name, done, lambda *args: LABELS[args[-1]])
    spy(all_to_all, "add_block", done, lambda *_: "compute")
    spy(ring, "block_gradients", done, lambda *_: "compute")
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        shard = bind(micro_batch((tuple(range(slots)), (24, 9))), world)
        leaves = leaves_of(shard, made(shard.tokens, (8, 16), (4, 16), (4, 16)))
        out: Any = checkpoint(partial(attend, cp_comm_type="a2a+p2p"), *leaves, shard, use_reentrant=False)
        forward = " ".join(done)
        done.clear()
        out.sum().backward()
        again = " ".join(done)
        assert again.startswith(f"{forward} "), again  # recomputed
    return {"forward": forward, "backward": again.removeprefix(f"{forward} ")}


def test_messages_travel_ahead_in_one_order_on_every_rank() -> None:
    needs(4)
    assert run_ranks(events, 4, 4) == [ORDER] * 4


def calls(rank: int, slots: int) -> list[tuple[tuple[int, ...], ...]]:
    ran: list[tuple[int, ...]] = []
    for cp_comm_type, functions in list(PATTERNS.items()):

        def noted(function: Any) -> Any:
            def call(*args: Any) -> Any:
                ran.append(next(x for x in args if hasattr(x, "part")).part.group.slots)
                return function(*args)

            return call

        PATTERNS[cp_comm_type] = noted(functions[0]), noted(functions[1])
    find_pattern.cache_clear()
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


def reorderings(rank: int, partition: PartitionKind) -> int:
    counted = list[bool]()
    spy(all_to_all, "join_columns", counted, lambda tensors, index=None, dtype=None: index is not None)
    with World(home := Layout(ranks=2), backend=backend()) as world:
        plan = plan_fixed((9, 30, 1), home, 2, cp_comm_type="a2a", partition=partition)
        shard = bind(plan.micro_batches[0], world)
        q, k, v = (torch.ones(shard.local_rows, 4, 8, device=world.device, requires_grad=True) for _ in range(3))
        attend(q, k, v, shard).sum().backward()
    return sum(counted)


@pytest.mark.parametrize(("partition", "times"), [("zigzag", 4), ("contiguous", 0)])
def test_what_a2a_lays_in_another_order(partition, times):
    needs(2)
    assert run_ranks(reorderings, 2, partition) == [times] * 2


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


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "dropout_seed": 1}, {"window": 5, "softcap": 2.0}], ids=str)
def test_a_call_and_its_backward_leave_nothing_of_the_shard_behind(without_collector, options):
    with World(Layout(ranks=1), backend=backend()) as world:
        shard = bind(MicroBatch((Group((0,), (0, 1), (40, 9)),)), world)
        q, k, v = (torch.ones(49, 2, 8, device=shard.device, requires_grad=True) for _ in range(3))
        attend(q, k, v, shard, **options).sum().backward()
        kept = [weakref.ref(x) for x in cache_of(shard).members.values()]
        assert kept
        del shard
        assert not [ref for ref in kept if ref() is not None]
