"""What holds of every call of `attend`: bounded memory, no growing error, autograd's other ways to call it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longspan.attention.ring as ring
from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention import PATTERNS
from longspan.comm import RingBlocks
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import needs
from tests.reference import dense_attention, relative_error

TYPES = ("p2p", "all_gather")


def made(rows, *shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def leaves_of(shard, tensors):
    return [shard.scatter(x.to(shard.device)).requires_grad_() for x in tensors]


# ---- memory


class Recording(RingBlocks):
    """Counts blocks that are alive at once, and distinct buffers that were handed out."""

    seen: list["Recording"] = []  # noqa: RUF012

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.buffers = set()
        Recording.seen.append(self)

    def __iter__(self):
        for owner, block in super().__iter__():
            self.buffers.add(block[0].untyped_storage().data_ptr())
            yield owner, block


def peaks(rank, slots):
    ring.RingBlocks = Recording  # in this process only
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (16 * slots, 5))), world)
        q, k, v = leaves_of(shard, made(shard.tokens, (4, 8), (2, 8), (2, 8)))
        attend(q, k, v, shard).sum().backward()
    return [(blocks.peak_blocks, len(blocks.buffers)) for blocks in Recording.seen]


@pytest.mark.parametrize("slots", [2, 4, 8])
def test_a_ring_holds_at_most_three_blocks_forward_and_backward(slots):
    needs(slots)
    for found in run_ranks(peaks, slots, slots):
        assert len(found) == 2, "one ring forward, one backward"
        assert all(peak <= 3 and buffers <= 3 for peak, buffers in found), (slots, found)


# ---- precision


def half_errors(rank, slots, degrees):
    """Relative errors of (out, dq, dk, dv) by degree and type, on the same rows."""
    with World(Layout(ranks=slots), backend=backend()) as world:
        return {(degree, kind): half_error(world, degree, kind) for degree in degrees for kind in TYPES}


def half_error(world, degree, kind):
    lengths = (90, 70)
    *qkv, dout = tensors = made(160, (4, 16), (2, 16), (2, 16), (4, 16), dtype=torch.bfloat16)
    shard = bind(micro_batch((tuple(range(degree)), lengths)), world)
    leaves = leaves_of(shard, qkv)
    out = attend(*leaves, shard, cp_comm_type=kind)
    out.backward(shard.scatter(dout.to(shard.device)))
    full = [x.double().requires_grad_() for x in qkv]
    wanted = dense_attention(*full, lengths)
    wanted.backward(tensors[3].double())
    found = [shard.gather(x.detach()).cpu() for x in (out, *(x.grad for x in leaves))]
    return [relative_error(f, w) for f, w in zip(found, [wanted, *(x.grad for x in full)], strict=True)]


def test_half_precision_error_does_not_grow_with_the_degree():
    needs(4)
    for errors in run_ranks(half_errors, 4, 4, (1, 2, 4)):
        for (degree, kind), found in errors.items():
            for name, many, one in zip(("out", "dq", "dk", "dv"), found, errors[1, kind], strict=True):
                assert many <= 2 * one, (degree, kind, name, many, one)


# ---- other ways to call


def ways(rank, slots):
    """Gradients through plain use, recomputation, two uses in one graph; outputs without a graph."""
    found = {}
    with World(Layout(ranks=slots), backend=backend()) as world:
        batch = micro_batch(((0,), (3,)), (tuple(range(slots)), (20, 1, 9)), ((slots - 1, 0), (7,)))
        shard = bind(batch, world)
        tensors = made(shard.tokens, (4, 8), (2, 8), (2, 8))
        for kind in TYPES:

            def call(q, k, v, kind=kind, **options):
                return attend(q, k, v, shard, cp_comm_type=kind, **options)

            def gradients(fn):
                leaves = leaves_of(shard, tensors)
                out = fn(*leaves)
                out.square().sum().backward()
                return [out.detach(), *(x.grad for x in leaves)]

            plain = gradients(call)
            again = gradients(call)
            recomputed = gradients(lambda q, k, v, f=call: checkpoint(f, q, k, v, use_reentrant=False))
            twice = gradients(lambda q, k, v, f=call: f(f(q, k, v), k, v))
            apart = gradients(lambda q, k, v, f=call: f(checkpoint(f, q, k, v, use_reentrant=False), k, v))
            strided = gradients(lambda q, k, v, f=call: f(*(x.mT.contiguous().mT for x in (q, k, v))))
            with torch.no_grad():
                bare = call(*leaves_of(shard, tensors))
            found[kind, "again"] = same(plain, again)
            found[kind, "recomputed"] = same(plain, recomputed)
            found[kind, "twice"] = same(twice, apart)
            found[kind, "strided"] = same(plain, strided)
            found[kind, "without a graph"] = same(plain[:1], [bare]) and not bare.requires_grad
    return found


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_recomputation_double_use_and_no_grad_give_the_same_bits():
    needs(3)
    for rank, found in enumerate(run_ranks(ways, 3, 3)):
        assert all(found.values()), (rank, found)


def used(rank, slots):
    """Which patterns ran, by layer, for a group with one type per layer and for an argument that wins."""
    ran = []
    for kind, pattern in list(PATTERNS.items()):

        def forward(*args, kind=kind, pattern=pattern):
            ran.append(kind)
            return pattern.forward(*args)

        PATTERNS[kind] = pattern._replace(forward=forward)
    with World(Layout(ranks=slots), backend=backend()) as world:
        group = Group((0, 1), (0,), (8,), cp_comm_type=("all_gather", "p2p", "all_gather"))
        shard = bind(MicroBatch((group,)), world)
        q, k, v = (shard.scatter(x.to(shard.device)) for x in made(8, (2, 4), (1, 4), (1, 4)))
        outs = [attend(q, k, v, shard, layer=layer) for layer in range(3)]
        outs.append(attend(q, k, v, shard, cp_comm_type="p2p", layer=0))
        outs.append(attend(q, k, v, shard, cp_comm_type=["p2p", "all_gather"], layer=1))
    return ran, max((out - outs[0]).abs().max().item() for out in outs)


def test_one_type_per_layer():
    needs(2)
    for ran, difference in run_ranks(used, 2, 2):
        assert ran == ["all_gather", "p2p", "all_gather", "p2p", "all_gather"]
        assert difference < 1e-15
