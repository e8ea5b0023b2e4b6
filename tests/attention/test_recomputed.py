"""Attention in a layer that is recomputed: exact under every type, kept are the local output and the log-sum-exp."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from longspan import Layout, World, attend, bind
from longspan.attention import all_to_all
from longspan.attention.saved_outputs import Recording
from longspan.plan import head_split
from longspan.testing import backend, run_ranks
from tests.attention.cases import Case, Question, Way, cases_of, micro_batch, worst_errors
from tests.attention.test_attend import check, needs
from tests.attention.test_memory import Allocated

HEADS, KV_HEADS, SIZE, HIDDEN, ROWS = 32, 8, 128, 4096, 48  # of Qwen3-8B; rows of a member
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
QUESTIONS = (
    Question("ragged", "gqa", sinks=True),
    Question("padded", "mqa", causal=False),  # one key/value head, sent to several members
    Question("shares without rows", "mla", window=5, sinks=True, spans=4),
    Question("even", "mha", dropout=0.3, softcap=1.5, sinks=True),
    Question("many documents", "gqa", window=19),
    Question("ragged", "gqa", chunk=11),
    Question("ragged", "mla", "float32", scale=-0.4),
)
DYNAMIC = (Question("slots without rows", "gqa", sinks=True), Question("several groups a slot", "mha", sinks=True))
# cpu_flash takes the output in backward; the reference takes dout · out of each row.
WAYS = [Way(kind, kernel=kernel, recomputed=True) for kind in ("a2a", "a2a+p2p") for kernel in (None, "reference")]


def cases(slots: int) -> list[Case]:
    """Every question of so many slots in every way."""
    named = [*QUESTIONS, *(DYNAMIC[: slots // 2] if slots < 4 else DYNAMIC)]
    asked = cases_of(named, [*WAYS, Way("p2p", recomputed=True), Way("all_gather", recomputed=True)])
    return [case for case in asked if not (case[1].kernel and case[0].dropout)]  # the reference is chosen anyway


def sliced(rank: int, slots: int, cases: list[Case]) -> list[float]:
    """Errors of cases with tensors taken for large: of several slices, some of which share keys and values."""
    all_to_all.SLICE_BYTES, all_to_all.SLICES = 0, 4  # in this process only
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        return worst_errors(cases, slots, world)


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=pytest.mark.whole) for n in (2, 3))])
def test_parity(slots: int) -> None:
    needs(slots)
    check(slots, cases(slots))


@pytest.mark.parametrize("slots", [4, pytest.param(2, marks=pytest.mark.whole)])
def test_parity_in_slices(slots: int) -> None:
    needs(slots)
    check(slots, [case for case in cases(slots) if "a2a" in (case[1].kind or "")], sliced)


def one_by_one(rank: int, slots: int, cases: list[Case]) -> list[float]:
    """The same where the sums of all slices are taken for too large: a slice is sent when the one before arrived."""
    head_split.QUERY_GRADIENT_BYTES = 1  # in this process only
    return sliced(rank, slots, cases)


@pytest.mark.parametrize("slots", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_parity_of_one_slice_after_another(slots: int) -> None:
    needs(slots)
    check(slots, [case for case in cases(slots) if "a2a" in (case[1].kind or "")], one_by_one)


def backward_peaks(rank: int, slots: int) -> dict[tuple[bool, bool], float]:
    """The peak of backward, by whether the local rows alone were kept, and whether slices are sent one by one.

    Its unit are the bytes of all slices: of the local rows' queries, keys, values and dout.
    """
    peaks, unit = dict[tuple[bool, bool], float](), 512 * (2 * HEADS + 2 * KV_HEADS) * SIZE * 2
    all_to_all.SLICE_BYTES, all_to_all.SLICES = 0, 4  # in this process only
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (512 * slots,))), world)
        shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE))
        q, k, v = (torch.ones(512, *s, dtype=torch.bfloat16, device=shard.device).requires_grad_() for s in shapes)
        for lean in (False, True):
            for most in (1 << 30, 1):
                head_split.QUERY_GRADIENT_BYTES = most  # in this process only
                recording = Recording(keep_exchanged=not lean)
                with recording.forward():
                    attend(q, k, v, shard, cp_comm_type="a2a")
                with recording.recompute():
                    out = attend(q, k, v, shard, cp_comm_type="a2a")
                with Allocated() as memory:
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
                peaks[lean, most == 1] = memory.peak / unit
    return peaks


def test_slices_that_are_sent_one_by_one_take_less_memory() -> None:
    """Sent at once, all slices lie there twice, packed and as they arrive, while the first one is computed."""
    needs(2)
    for peaks in run_ranks(backward_peaks, 2, 2):
        assert peaks[True, True] < peaks[True, False] - 0.7 and peaks[False, True] <= peaks[False, False], peaks


def kept_bytes(recording: Recording) -> int:
    """Of the tensors that a recording holds, each storage once."""
    storages = dict[int, int]()
    for stored in tree_leaves(recording._calls, is_leaf=lambda x: hasattr(x, "fetch")):
        if hasattr(stored, "fetch"):
            storage = stored.fetch().untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def keep(rank: int, slots: int) -> dict[tuple[str, bool, bool], float]:
    """By type, whether what is exchanged is kept, and in slices: bytes of a row that stay for a layer's backward."""
    kept, usual = dict[tuple[str, bool, bool], float](), all_to_all.SLICE_BYTES
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (ROWS * slots,))), world)
        shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE))
        for kind in TYPES:
            levels: dict[str, Any] = {"hierarchical_context_parallel_sizes": (2, slots // 2)} if "+" in kind else {}
            for keep_exchanged in (False, True):
                for in_slices in (False, True):
                    all_to_all.SLICE_BYTES = 0 if in_slices else usual
                    q, k, v = (torch.randn(ROWS, *s).bfloat16().to(shard.device).requires_grad_() for s in shapes)
                    recording = Recording(keep_exchanged=keep_exchanged)
                    with recording.forward():
                        out = attend(q, k, v, shard, cp_comm_type=kind, **levels)
                    kept[kind, keep_exchanged, in_slices] = kept_bytes(recording) / ROWS + HIDDEN * out.element_size()
    return kept


@pytest.mark.parametrize("slots", [2, 4])
def test_kept_bytes_of_a_row_and_layer(slots: int) -> None:
    """16.1 KiB with the layer's input under every type, and 36.1 with what a2a types exchanged."""
    needs(slots)
    lean = (HIDDEN + HEADS * SIZE) * 2 + HEADS * 4
    exchanged = lean + (2 * HEADS + 2 * KV_HEADS) * SIZE * 2
    assert (lean, exchanged) == (16.125 * 1024, 36.125 * 1024)
    for kept in run_ranks(keep, slots, slots):
        for (kind, keep_exchanged, in_slices), found in kept.items():
            wanted = exchanged if keep_exchanged and "a2a" in kind else lean
            assert found == wanted, (kind, keep_exchanged, in_slices, found)


def compare(rank: int, slots: int) -> dict[str, bool]:
    """By type and kernel, whether gradients in bfloat16 are those of a call without a recording, bit for bit."""
    same = dict[str, bool]()
    with World(Layout(ranks=slots), backend=backend()) as world:
        shard = bind(micro_batch((tuple(range(slots)), (37, 5))), world)
        generator = torch.Generator().manual_seed(rank)
        shapes = ((8, 16), (4, 16), (4, 16), (8, 16))
        made = [torch.randn(shard.local_rows, *s, generator=generator).bfloat16().to(shard.device) for s in shapes]
        for kind in ("a2a", "p2p"):
            gradients = list[list[torch.Tensor]]()
            for recorded in (False, True):
                leaves = [x.clone().requires_grad_() for x in made[:3]]
                call = partial(attend, *leaves, shard, cp_comm_type=kind)
                if recorded:
                    recording = Recording()
                    with recording.forward():
                        call()
                    with recording.recompute():
                        out = call()
                else:
                    out = call()
                gradients.append(list(torch.autograd.grad(out, leaves, made[3])))
            same[kind] = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return same


def test_half_precision_gradients_are_the_same_bits_where_the_output_is_sent_again() -> None:
    needs(2)
    for same in run_ranks(compare, 2, 2):
        assert same == {"a2a": True, "p2p": True}
