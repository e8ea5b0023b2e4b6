"""Calls that cannot be computed exactly are refused with their numbers, before anything is sent.

The shard belongs to a world that was never opened: whatever gets past the checks and talks would raise CommError.
"""

import pytest
import torch

from longspan import Group, MicroBatch, attend
from longspan.comm import SequenceShard
from longspan.errors import AttentionError, CommError, PlanError

BATCH = MicroBatch((Group((0, 1), (0,), (6,)),))  # three rows here
LISTED = MicroBatch((Group((0, 1), (0,), (6,), cp_comm_type=("p2p", "a2a")),))


def shard(batch=BATCH, slot=0):
    return SequenceShard(batch, slot, -1, torch.device("cpu"))


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": x(3, 4, 8), "k": x(3, 2, 8), "v": x(3, 2, 8), "shard": shard()}

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
    ({"window": 2.5}, "window is 2.5"),
    ({"window": 4, "causal": False}, "needs causal=True"),
    ({"softcap": 0.0}, "softcap is 0.0; give a finite number above 0"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"dropout": 0.1}, "dropout 0.1 is not in this release"),
    ({"sinks": x(3)}, r"sinks has shape \(3,\); give one logit per query head: \(4,\)"),
    ({"sinks": x(4, dtype=torch.int64)}, "sinks is torch.int64"),
    ({"cp_comm_type": "ring"}, "cp_comm_type 'ring' is unknown; use 'p2p' or 'all_gather'"),
    ({"cp_comm_type": "a2a"}, "cp_comm_type 'a2a' is not in this release"),
    ({"cp_comm_type": "a2a+p2p"}, r"cp_comm_type 'a2a\+p2p' is not in this release"),
    ({"cp_comm_type": ["p2p", "p2p"]}, "has 2 entries, one per layer; got layer=None"),
    ({"cp_comm_type": ["p2p", "p2p"], "layer": 2}, "got layer=2"),
    ({"shard": shard(LISTED), "layer": 1}, "cp_comm_type 'a2a' of group 0 is not in this release"),
    ({"kernel": "fast"}, "kernel 'fast' is unknown; available here: cpu_flash, reference"),
    ({"kernel": "torch_flash"}, "needs cuda tensors, got cpu; available here: cpu_flash, reference"),
    ({"kernel": "cpu_flash", "softcap": 2.0}, "needs a call without softcap, got softcap; available here: reference"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[message for _, message in BAD])
def test_a_bad_call_is_refused_before_communication(changes, message):
    with pytest.raises(AttentionError, match=message):
        attend(**{**GOOD, **changes})


def test_a_type_per_layer_needs_the_layer():
    with pytest.raises(PlanError, match="layer=None"):
        attend(**{**GOOD, "shard": shard(LISTED)})


def test_a_good_call_talks():
    with pytest.raises(CommError, match="world -1"):
        attend(**GOOD)


def test_a_slot_without_groups_checks_as_well_and_has_no_rows():
    idle = {name: x(0, 4, 8) for name in "qkv"} | {"shard": shard(slot=2)}
    with pytest.raises(AttentionError, match="'ring' is unknown"):
        attend(**idle, cp_comm_type="ring")
    leaves = [idle[name].requires_grad_() for name in "qkv"]
    out = attend(**idle, sinks=torch.ones(4, requires_grad=True))
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == (0, 4, 8) for leaf in leaves)
