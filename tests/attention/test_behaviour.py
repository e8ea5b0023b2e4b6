"""What holds of every call of `attend`: autograd's ways to call it, types, blind rows."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention import PATTERNS
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import needs
from tests.reference import dense_attention, relative_error

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def made(rows, *shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def leaves_of(shard, tensors):
    return [shard.scatter(x.to(shard.device)).requires_grad_() for x in tensors]


# ---- other ways to call


def ways(rank, slots):
    """Gradients through plain use, recomputation, two uses in one graph; outputs without a graph."""
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
            again = gradients(call)
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
            gradients_of[kind, "again"] = same(plain, again)
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


def used(rank, slots):
    """Which patterns ran, by layer, for a group with one type per layer and for an argument that wins."""
    ran = []
    for kind, (forward, backward) in list(PATTERNS.items()):

        def noting(*args, kind=kind, forward=forward):
            ran.append((kind, args[3].inner))
            return forward(*args)

        PATTERNS[kind] = noting, backward
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


def one_sided(rank, slots):
    """Worst error of the first rank's gradients, where no input of the others needs one but for their entering."""
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
            attend(
                *leaves, shard, cp_comm_type=kind, hierarchical_context_parallel_sizes=(1, 2)
            ).square().sum().backward()
            errors += [relative_error(x.grad, w) for x, w in zip(leaves, expected, strict=True) if x.requires_grad]
    return max(errors)


def test_a_member_whose_inputs_need_no_gradient_enters_backward_once_one_does():
    needs(2)
    assert max(run_ranks(one_sided, 2, 2)) <= 1e-12


# ---- rows that see nothing


def blind(rank, slots):
    """Largest absolute output and gradients of rows that pad documents out, and whether all numbers are finite."""
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
