"""Calls that cannot be computed exactly are refused with their numbers, before anything is sent.

The shard belongs to a world that was never opened: whatever gets past the checks and talks would raise CommError.
"""

import numpy as np
import pytest
import torch

from longspan import Group, MicroBatch, attend
from longspan.comm import SequenceShard
from longspan.errors import AttentionError, CommError, LayoutError

BATCH = MicroBatch((Group((0, 1), (0,), (6,)),))  # three rows here
LISTED = MicroBatch((Group((0, 1), (0,), (6,), cp_comm_type=("p2p", "ring")),))
ELSEWHERE = MicroBatch((Group((0, 1), (0,), (6,)), Group((2, 3, 4), (1,), (9,), "a2a")))
UNLEVELLED = MicroBatch((Group((0, 1, 2, 3), (0,), (12,), "a2a+p2p"),))
UNEVEN = MicroBatch((Group((0, 1, 2, 3), (0,), (12,), "a2a+p2p", (3, 2)),))
LEVELS = MicroBatch((Group((0, 1, 2, 3, 4, 5), (0,), (18,), "a2a+p2p", (2, 3)),))


def shard(batch=BATCH, slot=0):
    return SequenceShard(batch, slot, -1, torch.device("cpu"))


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": x(3, 4, 8), "k": x(3, 2, 8), "v": x(3, 2, 8), "shard": shard()}
WIDE = {**GOOD, "shard": shard(LEVELS), "hierarchical_context_parallel_sizes": None}

BAD = [
    ({"q": x(2, 4, 8), "k": x(2, 2, 8), "v": x(2, 2, 8)}, r"got 2 rows, the shard holds 3; q \(2, 4, 8\)"),
    ({"v": x(4, 2, 8)}, "got 3 and 4 rows, the shard holds 3"),
    ({"q": x(1, 3, 4, 8)}, r"q has shape \(1, 3, 4, 8\); attend takes \(rows, heads, head size\)"),
    ({"k": None}, "k has a NoneType"),
    ({"k": x(3, 2, 8, dtype=torch.float64)}, "one dtype, got q float32, k float64, v float32"),
    ({n: x(3, 2, 8, dtype=torch.int64) for n in "qkv"}, "got int64"),
    ({"v": x(3, 2, 8).to("meta")}, "one device, got q cpu, k cpu, v meta"),
    ({n: x(3, 2, 8).to("meta") for n in "qkv"}, "are on meta, the shard is bound to cpu"),
    ({"k": x(3, 3, 8), "v": x(3, 3, 8)}, "3 key/value heads do not divide 4 query heads"),
    ({"k": x(3, 0, 8), "v": x(3, 0, 8)}, "0 key/value heads do not divide 4 query heads"),
    ({"v": x(3, 1, 8)}, "k and v need equal heads"),
    ({"k": x(3, 2, 16)}, "q and k equal head sizes"),
    ({"shard": BATCH}, "shard is a MicroBatch; pass what bind"),
    ({"window": 0}, "window is 0; it is how many positions"),
    ({"window": -3}, "window is -3; it is how many positions"),
    ({"window": 2.5}, "window is 2.5"),
    ({"window": True}, "window is True"),
    ({"window": np.float64(4)}, r"window is np.float64\(4.0\)"),
    ({"window": 4, "causal": False}, "needs causal=True"),
    ({"chunk": 0}, "chunk is 0; it is how many positions of a document see each other, at least 1, or None"),
    ({"chunk": 4, "causal": False}, "chunk 4 looks back from each position; it needs causal=True"),
    ({"softcap": 0.0}, "softcap is 0.0; give a finite number above 0"),
    ({"softcap": "a"}, "softcap is 'a'; give a finite number above 0"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"scale": torch.ones(())}, r"scale is tensor\(1.\); give a finite number"),
    ({"dropout": "a"}, "dropout is 'a'; give the probability"),
    ({"dropout": 1.0}, "dropout is 1.0; give the probability"),
    ({"dropout": -0.1}, "dropout is -0.1"),
    ({"dropout": float("nan")}, "dropout is nan"),
    ({"sinks": x(3)}, r"sinks has shape \(3,\); give one logit per query head: \(4,\)"),
    ({"sinks": x(4, dtype=torch.int64)}, "sinks is torch.int64"),
    ({"sinks": 0.5}, "sinks is a float; give a tensor of one logit per query head"),
    ({"cp_comm_type": 5}, "cp_comm_type is 5; use one of p2p, all_gather, a2a, a2a.p2p, auto, or one per layer"),
    ({"cp_comm_type": [5]}, r"cp_comm_type has 1 entries, one per layer; got layer=None"),
    ({"cp_comm_type": [5], "layer": 0}, "cp_comm_type 5 is unknown"),
    ({"cp_comm_type": ["p2p"], "layer": "a"}, "has 1 entries, one per layer; got layer='a'"),
    ({"cp_comm_type": "ring"}, "cp_comm_type 'ring' is unknown; use one of p2p, all_gather, a2a, a2a.p2p, auto"),
    ({"cp_comm_type": ["p2p", "p2p"]}, "has 2 entries, one per layer; got layer=None"),
    ({"cp_comm_type": ["p2p", "p2p"], "layer": 2}, "got layer=2"),
    ({"shard": shard(LISTED), "layer": 1}, "cp_comm_type 'ring' of group 0 is unknown"),
    ({"shard": shard(LISTED)}, "cp_comm_type of group 0 has 2 entries, one per layer; got layer=None"),
    ({"cp_comm_type": "a2a+p2p"}, r"needs hierarchical_.*\(a2a, p2p\) with product 2: one of \(1, 2\), \(2, 1\)"),
    (
        {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)},
        r"sizes \(2, 2\) of group 0 multiply to 4, but the group has cp 2; use one of \(1, 2\), \(2, 1\)",
    ),
    ({"shard": shard(UNLEVELLED)}, r"'a2a\+p2p' of group 0 needs .* product 4: one of \(1, 4\), \(2, 2\), \(4, 1\)"),
    ({"shard": shard(UNLEVELLED, slot=9), **{n: x(0, 4, 8) for n in "qkv"}}, "of group 0 needs hierarchical_"),
    ({"shard": shard(UNEVEN)}, r"sizes \(3, 2\) of group 0 multiply to 6, but the group has cp 4"),
    ({"hierarchical_context_parallel_sizes": (2,)}, r"is \(2,\); give \(a2a, p2p\), two sizes"),
    ({"hierarchical_context_parallel_sizes": (0, 2)}, r"is \(0, 2\); give \(a2a, p2p\)"),
    ({"hierarchical_context_parallel_sizes": 2}, r"is 2; give \(a2a, p2p\), two sizes"),
    ({"hierarchical_context_parallel_sizes": "22"}, r"is '22'; give \(a2a, p2p\), two sizes"),
    (
        {**WIDE, "cp_comm_type": "a2a"},
        r"4 query heads cannot be dealt to the 6 members .* of group 0 .*: 1, 2 \(.* \(1, 6\), \(2, 3\)\)",
    ),
    (
        {**WIDE, "hierarchical_context_parallel_sizes": (3, 2)},
        r"4 query heads cannot be dealt to the 3 members that cp_comm_type 'a2a\+p2p'",
    ),
    ({"shard": shard(ELSEWHERE)}, "4 query heads cannot be dealt to the 3 members .* of group 1"),
    ({"max_gather_bytes": 0}, "max_gather_bytes is 0; give a number of bytes"),
    ({"max_gather_bytes": "1"}, "max_gather_bytes is '1'; give a number of bytes"),
    (
        {"cp_comm_type": "all_gather", "max_gather_bytes": 1000},
        "max_gather_bytes 1000 does not hold one key/value head of a group of 6 rows, which takes 1920 bytes",
    ),
    ({"kernel": "fast"}, "kernel 'fast' is unknown; available here: cpu_flash, reference"),
    ({"kernel": "torch_flash"}, "needs cuda tensors, got cpu; available here: cpu_flash, reference"),
    ({"kernel": "cpu_flash", "softcap": 2.0}, "needs a call without softcap, got softcap; available here: reference"),
    ({"kernel": "cpu_flash", "dropout": 0.1, "dropout_seed": 0}, "got dropout; available here: reference"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[message for _, message in BAD])
def test_a_bad_call_is_refused_before_communication(changes, message):
    with pytest.raises(AttentionError, match=message):
        attend(**{**GOOD, **changes})


def test_dropout_inside_a_cuda_graph_is_refused(monkeypatch):
    """Its seed is an integer of the captured launch: a replay cannot have another."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for seed in (None, 1):
        with pytest.raises(AttentionError, match=r"dropout is 0.1 while a CUDA graph is captured: .* dropout=0.0"):
            attend(**GOOD, dropout=0.1, dropout_seed=seed)
    with pytest.raises(CommError, match="world -1"):
        attend(**GOOD)


TALKING = [
    {"cp_comm_type": "p2p"},
    {"cp_comm_type": "all_gather"},
    {"cp_comm_type": "a2a"},
    {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 1)},
    {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (1, 2)},
    {"cp_comm_type": "auto"},
    {"window": 1},
]


@pytest.mark.parametrize("changes", TALKING, ids=str)
def test_a_good_call_talks_whatever_its_type(changes):
    """Never attention over the local rows: a level without its group is an error."""
    with pytest.raises(CommError, match="world -1"):
        attend(**{**GOOD, **changes})


def test_a_slot_without_groups_checks_as_well_and_has_no_rows():
    idle = {name: x(0, 4, 8) for name in "qkv"} | {"shard": shard(slot=2)}
    with pytest.raises(AttentionError, match="'ring' is unknown"):
        attend(**idle, cp_comm_type="ring")
    with pytest.raises(AttentionError, match="of group 1"):
        attend(**{**idle, "shard": shard(ELSEWHERE, slot=5)})
    leaves = [idle[name].requires_grad_() for name in "qkv"]
    out = attend(**idle, sinks=torch.ones(4, requires_grad=True))
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == (0, 4, 8) for leaf in leaves)


def test_a_document_without_rows_is_refused_where_it_is_laid_out():
    for lengths in ((0,), (3, 0, 2)):
        with pytest.raises(LayoutError, match=r"is 0 .*; a document has at least 1 row: leave empty documents out"):
            shard(MicroBatch((Group((0,), tuple(range(len(lengths))), lengths),)))


def test_one_member_needs_no_heads_and_no_levels():
    alone = SequenceShard(MicroBatch((Group((0,), (0,), (3,)),)), 0, -1, torch.device("cpu"))
    odd = {"q": x(3, 3, 8), "k": x(3, 1, 8), "v": x(3, 1, 8), "shard": alone}
    expected = attend(**odd)
    for changes in (*TALKING[:3], {"cp_comm_type": "a2a+p2p"}):
        assert torch.equal(attend(**odd, **changes), expected)
