"""What a call keeps and holds: counted, at degrees 2, 4 and 8, for as many rows a member."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longspan.attention.ring as ring
from longspan import Layout, World, attend, bind
from longspan.attention import all_gather, all_to_all, rows as rows_module
from longspan.attention.call import AttendCall, Saved
from longspan.attention.dropout import Dropout
from longspan.attention.kernels import reference
from longspan.attention.saved_outputs import Recording as OutputRecording
from longspan.attention.tiles import Launch, RowIdentities, Tile, Tiling
from longspan.comm import Channel, RingBlocks, SequenceShard
from longspan.plan import messages
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import TYPES, needs
from tests.launch.rank_pool import most_ranks

ROWS, HEADS, SIZE = 64, 8, 16  # rows of a member; heads, as many key/value heads
DTYPE = torch.float32 if backend() == "gloo" else torch.bfloat16  # which a kernel takes that holds no scores
BLOCK = ROWS * HEADS * SIZE * DTYPE.itemsize  # bytes of a member's rows of q, or of k
WAYS = {"p2p": {}, "window": {"cp_comm_type": "p2p", "window": 9}, "a2a": {}, "a2a+p2p": {}, "all_gather": {}}


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages made while it is active, and their largest sum."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.note(x.untyped_storage())
        return out

    def note(self, storage):
        if storage._cdata in self.live:
            return
        self.live[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key):
        self.now -= self.live.pop(key, 0)


class Recording(RingBlocks):
    """Counts the distinct buffers of the blocks that were handed out."""

    seen: list["Recording"] = []  # noqa: RUF012

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.buffers = set()
        Recording.seen.append(self)

    def __iter__(self):
        for owner, block in super().__iter__():
            self.buffers.add(block[0].untyped_storage().data_ptr())
            yield owner, block


def at_degree(rank, slots):
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (ROWS * slots,))), world)
        others = {2: (peaks_of_groups, are_gone, backward_peaks), 4: (keep,)}.get(slots, ())
        return measured(shard, slots), {measure.__name__: measure(shard) for measure in others}


def measured(shard, slots):
    """By way: bytes saved for backward, peak bytes, elements sent forward and backward; and peaks of ring blocks."""
    sent, figures = [], {}
    exchange = Channel.exchange

    def counted(self, sends, receives, *options):
        sent.append(sum(x.numel() for _, x in sends))
        return exchange(self, sends, receives, *options)

    with patch.object(ring, "RingBlocks", Recording), patch.object(Channel, "exchange", counted):
        for name, options in WAYS.items():
            # A ring of two at every degree: what is compared differs in nothing else.
            levels = {"hierarchical_context_parallel_sizes": (slots // 2, 2)} if name == "a2a+p2p" else {}
            options = {"cp_comm_type": name, **levels, **options}
            leaves = [
                torch.ones(ROWS, HEADS, SIZE, dtype=DTYPE, device=shard.device, requires_grad=True) for _ in range(3)
            ]
            attend(*leaves, shard, **options)  # geometry is derived once a shard
            saved = []
            sent.clear()
            with Allocated() as memory:
                with saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x):
                    out = attend(*leaves, shard, **options)
                forward = sum(sent)
                sent.clear()
                out.sum().backward()
                assert all(x.grad is not None for x in leaves)
            figures[name] = (sum(saved), memory.peak, forward, sum(sent))
            del out
    return figures, [len(blocks.buffers) for blocks in Recording.seen]


def peak_of_a_backward_pass(world, sinks):
    """In units of the queries, of one process: bytes that the forward and the backward pass make at their fullest."""
    shard, unit = bind(micro_batch(((0,), (1024,))), world), 1024 * HEADS * SIZE * 2
    leaves = [torch.ones(1024, HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    sinks = torch.zeros(HEADS, requires_grad=True) if sinks else None
    leaves, sinks = [x.to(shard.device) for x in leaves], None if sinks is None else sinks.to(shard.device)
    attend(*leaves, shard, sinks=sinks)
    with Allocated() as forward:
        out = attend(*leaves, shard, sinks=sinks)
    dout = torch.ones_like(out)
    with Allocated() as backward:
        out.backward(dout)
    return forward.peak / unit, backward.peak / unit


@pytest.fixture(scope="module")
def results():
    needs(2)
    slots = [n for n in (2, 4, 8) if backend() != "nccl" or n <= most_ranks()]
    return {n: run_ranks(at_degree, n, n) for n in slots}


def peaks_of_groups(shard):
    """By communication type, in units of the queries in float32: the peak of backward, of all heads and in groups."""
    unit, peaks = ROWS * HEADS * SIZE * 4, {}
    for kind, most in product(("p2p", "all_gather", "a2a"), (1 << 30, 1)):
        leaves = [torch.ones(ROWS, HEADS, SIZE, dtype=torch.bfloat16, device=shard.device) for _ in range(3)]
        leaves = [x.requires_grad_() for x in leaves]
        with in_slices(most):
            out = attend(*leaves, shard, cp_comm_type=kind)
            dout = torch.ones_like(out)
            with Allocated() as memory:
                out.backward(dout)
        peaks[kind, most] = memory.peak / unit
    return peaks


def in_slices(query_bytes, slices=all_to_all.SLICES):
    """Exchanges go in slices of heads; gradients of queries take so many bytes at a time."""
    changes = ((all_to_all, "SLICE_BYTES", 0), (all_to_all, "SLICES", slices))
    stack = ExitStack()
    for module, name, value in (*changes, (messages, "QUERY_GRADIENT_BYTES", query_bytes)):
        stack.enter_context(patch.object(module, name, value))
    return stack


def test_backward_holds_float32_sums_of_one_group_of_heads(results):
    """Of eight heads one at a time, where the sum of the queries' gradient of all took a unit, and keys' two.

    Under a2a the gradients of a slice have arrived before those of the next leave: three units for each part of heads.
    """
    for _, others in results[2]:
        peaks = others["peaks_of_groups"]
        for kind, least in (("p2p", 1.0), ("all_gather", 1.0), ("a2a", 1.75)):
            assert peaks[kind, 1] <= peaks[kind, 1 << 30] - least, peaks


def test_sinks_take_little_memory(monkeypatch):
    monkeypatch.setattr(rows_module, "NUMBERS_AT_ONCE", 64 * HEADS * SIZE)
    with World(Layout(ranks=1), backend=backend()) as world:
        without, result_with_sinks = (peak_of_a_backward_pass(world, sinks) for sinks in (False, True))
    assert all(b <= a + 0.5 for a, b in zip(without, result_with_sinks, strict=True)), (without, result_with_sinks)


@pytest.mark.parametrize(
    ("dtype", "softcap", "dropout"),
    [(torch.float32, None, None), (torch.float64, 2.0, None), (torch.bfloat16, 2.0, Dropout(0.3, seed=5))],
)
def test_the_reference_kernel_holds_no_more_of_scores_than_it_says(monkeypatch, dtype, softcap, dropout):
    rows, size, limit = 256, 4, 1 << 21
    monkeypatch.setattr(reference, "_BYTES_AT_ONCE", limit)
    at = np.arange(rows)
    launch = Launch(
        Tiling.from_tiles((Tile(0, rows, 0, rows, right=0),)),
        torch.device("cpu"),
        lambda: RowIdentities(0 * at, at, at),
    )
    for heads, kv_heads in ((4, 4), (4, 2)):
        q, k, v, dout = (torch.ones(rows, n, size, dtype=dtype) for n in (heads, kv_heads, kv_heads, heads))
        call = AttendCall(heads, kv_heads, size, size, dtype, scale=0.3, softcap=softcap, dropout=dropout)
        out, lse = reference.forward(q, k, v, launch, call)  # tokens are made once a launch
        with Allocated() as forward:
            reference.forward(q, k, v, launch, call)
        with Allocated() as backward:
            reference.backward(dout, Saved(q, k, v, out, lse), launch, call)
        others = 12 * rows * heads * size * lse.itemsize  # inputs and results in the accumulation dtype
        assert max(forward.peak, backward.peak) <= limit + others, (forward.peak, backward.peak)
        assert backward.peak >= limit / 4, "as much as it may hold is used"


def test_local_rows_alone_are_kept_for_backward(results):
    for (figures, blocks), _ in (of_rank for ranks in results.values() for of_rank in ranks):
        for name, (saved, *_) in figures.items():
            assert saved == 4 * BLOCK + ROWS * HEADS * 4, (name, saved)  # q, k, v, out and lse
        assert blocks and max(blocks) <= 3, blocks


def test_peaks_do_not_grow_with_the_degree(results):
    """From 2 to 4 a ring gains its third block, and (degree − 1) / degree of what is gathered comes from others."""
    needs(8)
    peaks = {name: [max(f[name][1] for (f, _), _ in ranks) / BLOCK for ranks in results.values()] for name in WAYS}
    del peaks["all_gather"]  # it holds all rows
    for name, (two, four, eight) in peaks.items():
        assert four <= 1.25 * two and eight <= 1.05 * four, (name, two, four, eight)


def test_a_window_sends_what_is_seen_and_no_more(results):
    for slots, ranks in results.items():
        forward, backward = (sum(figures["window"][i] for (figures, _), _ in ranks) for i in (2, 3))
        # All chunks but the last are seen by the next one, and the two in the middle lie on one member.
        rows = (2 * slots - 2) * (WAYS["window"]["window"] - 1)
        assert (forward, backward) == (rows * 2 * HEADS * SIZE, 2 * rows * 2 * HEADS * SIZE), slots
        around_rings = sum(figures["p2p"][2] for (figures, _), _ in ranks)
        assert around_rings == slots * (slots - 1) * 2 * ROWS * HEADS * SIZE


def are_gone(shard):
    arrived, gone, of_slice, send = [], [], [], Channel.all_to_all_rows
    join_columns, add_block, gradients = all_gather.join_columns, all_gather.add_block, all_gather.block_gradients

    def laid(tensors, order=None, dtype=None):
        if order is not None:
            arrived.append(weakref.ref(tensors[0]))
        return join_columns(tensors, order, dtype)

    def noting(compute):
        return lambda *args: gone.append(arrived[-1]() is None) or compute(*args)

    def computed(*args):
        addends = noting(gradients)(*args)
        of_slice[:] = [weakref.ref(x) for addend in addends for x in addend.tensors]
        return addends

    def sent(channel, *args):  # gradients of a slice, once their sums are packed
        gone.append(bool(of_slice) and all(x() is None for x in of_slice))
        return send(channel, *args)

    leaves = [torch.ones(ROWS, 2, SIZE, dtype=DTYPE, device=shard.device, requires_grad=True) for _ in range(3)]
    noted = {"join_columns": laid, "add_block": noting(add_block), "block_gradients": computed}
    with patch.multiple(all_gather, **noted), patch.object(Channel, "all_to_all_rows", sent):
        for slice_bytes in (all_gather.SLICE_BYTES, 0):  # in one slice, and in two
            with patch.object(all_gather, "SLICE_BYTES", slice_bytes):
                attend(*leaves, shard, cp_comm_type="all_gather").sum().backward()
    return gone


def test_what_arrived_is_let_go_once_it_is_in_order_and_gradients_once_they_are_packed(results):
    assert [others["are_gone"] for _, others in results[2]] == [[True] * 9] * 2


# ---- of layers that are recomputed, in the shape of Qwen3-8B

QUERY_HEADS, KEY_HEADS, HEAD_SIZE, HIDDEN = 32, 8, 128, 4096


def of_qwen(shard: SequenceShard) -> list[Tensor]:
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.ones(ROWS, n, HEAD_SIZE, dtype=torch.bfloat16, device=shard.device).requires_grad_() for n in heads]


def backward_peaks(shard: SequenceShard) -> dict[tuple[bool, bool], float]:
    """The peak of backward, by whether the local rows alone were kept, and whether slices are sent one by one.

    Its unit are the bytes of all slices: of the local rows' queries, keys, values and dout.
    """
    peaks, unit = dict[tuple[bool, bool], float](), ROWS * (2 * QUERY_HEADS + 2 * KEY_HEADS) * HEAD_SIZE * 2
    leaves = of_qwen(shard)
    for lean, most in product((False, True), (1 << 30, 1)):
        recording = OutputRecording(keep_exchanged=not lean)
        with in_slices(most, slices=4):
            with recording.record_outputs():
                attend(*leaves, shard, cp_comm_type="a2a")
            with recording.replay_outputs():
                out = attend(*leaves, shard, cp_comm_type="a2a")
            with Allocated() as memory:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
        peaks[lean, most == 1] = memory.peak / unit
    return peaks


def test_slices_that_are_sent_one_by_one_take_less_memory(results) -> None:
    for _, others in results[2]:
        peaks = others["backward_peaks"]
        assert peaks[True, True] < peaks[True, False] - 0.7 and peaks[False, True] <= peaks[False, False], peaks


def keep(shard: SequenceShard) -> dict[tuple[str, bool, bool], float]:
    """By type, whether what is exchanged is kept, and in slices: bytes of a row that stay for a layer's backward."""
    kept, usual = dict[tuple[str, bool, bool], float](), all_to_all.SLICE_BYTES
    storages = dict[int, int]()

    def park(x: Tensor) -> Callable[[], Tensor]:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach

    for kind, keep_exchanged, sliced in product(TYPES, (False, True), (False, True)):
        storages.clear()
        recording = OutputRecording(park, keep_exchanged=keep_exchanged)
        with patch.object(all_to_all, "SLICE_BYTES", 0 if sliced else usual), recording.record_outputs():
            levels = {"hierarchical_context_parallel_sizes": (2, 2)} if "+" in kind else {}
            out = attend(*of_qwen(shard), shard, cp_comm_type=kind, **levels)
        kept[kind, keep_exchanged, sliced] = sum(storages.values()) / ROWS + HIDDEN * out.element_size()
    return kept


def test_kept_bytes_of_a_row_and_layer(results) -> None:
    """16.1 KiB with the layer's input under every type, and 36.1 with what a2a types exchanged."""
    needs(4)
    lean = (HIDDEN + QUERY_HEADS * HEAD_SIZE) * 2 + QUERY_HEADS * 4
    exchanged = lean + (2 * QUERY_HEADS + 2 * KEY_HEADS) * HEAD_SIZE * 2
    assert (lean, exchanged) == (16.125 * 1024, 36.125 * 1024)
    for kept in (others["keep"] for _, others in results[4]):
        for (kind, keep_exchanged, sliced), found in kept.items():
            wanted = exchanged if keep_exchanged and "a2a" in kind else lean
            assert found == wanted, (kind, keep_exchanged, sliced, found)
