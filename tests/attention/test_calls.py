"""What a call of `attend` makes of its arguments, on the host and without ranks: refusals, masks, what is remembered.

Shards belong to a world that was never opened: whatever gets past the checks and talks raises CommError.
"""

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention.call import AttendCall
from longspan.attention.masks import Mask
from longspan.comm import SequenceShard
from longspan.errors import AttentionError, CommError
from longspan.testing import backend

module: Any = import_module("longspan.attention.attend")
LENGTHS = (4096, 30)
HIDING_NOTHING = (max(LENGTHS), 10**6, 2**62, sys.maxsize, 2**63, 2**80, np.int64(max(LENGTHS)), np.int64(2**62))


def bound(*groups: Group, slot: int = 0) -> SequenceShard:
    return bound_shard(MicroBatch(groups), slot)


def bound_shard(batch: MicroBatch, slot: int = 0) -> SequenceShard:
    return SequenceShard(batch, slot, -1, torch.device("cpu"))


def split(**options: Any) -> SequenceShard:
    return bound(Group((0, 1, 2, 3), (0, 1), LENGTHS, **options))


def tensors(shard: SequenceShard) -> list[Tensor]:
    return [torch.zeros(shard.local_rows, n, 8) for n in (4, 2, 2)]


def called(shard: SequenceShard, **options: Any) -> None:
    with pytest.raises(CommError, match="world -1"):
        attend(*tensors(shard), shard, **options)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[AttendCall]:
    packed: list[AttendCall] = []
    pack = module.pack_call
    monkeypatch.setattr(module, "pack_call", lambda *args: packed.append(pack(*args)) or packed[-1])
    return packed


def launched(call: AttendCall) -> list[str]:
    members = call.parts[0].members
    return [repr(members.mask), *(repr([x.tiling for x in members.launches(owner)]) for owner in range(members.degree))]


def test_a_window_that_hides_nothing_is_none(packed: list[AttendCall]) -> None:
    called(split())
    for window in HIDING_NOTHING:
        called(split(), window=window)
    without, *windowed = packed
    for call in windowed:
        assert replace(call, parts=()) == replace(without, parts=()) and not call.features
        assert launched(call) == launched(without)


def test_a_window_is_dropped_only_for_the_groups_in_which_it_hides_nothing(packed: list[AttendCall]) -> None:
    for window in (max(LENGTHS) - 1, np.int64(5)):
        called(split(), window=window)
        assert packed[-1].features == {"window"} and packed[-1].parts[0].members.mask == Mask(True, int(window))
    called(bound(Group((0, 1), (0,), (50,)), Group((0, 2), (1,), (500,))), window=60)
    assert packed[-1].features == {"window"}
    assert [part.members.mask.window for part in packed[-1].parts] == [None, 60]


def test_layers_share_what_was_checked_unless_types_are_listed_by_layer(packed: list[AttendCall]) -> None:
    kinds = ("p2p", "all_gather", "a2a", "a2a+p2p")
    shard, listed = split(), split(cp_comm_type=kinds, hierarchical_context_parallel_sizes=(2, 2))
    for layer in (0, 1, 0, 1, None):
        called(shard, layer=layer)
    assert len(packed) == 1
    for layer in (0, 1, 0, 1):
        called(shard, layer=layer, cp_comm_type=["p2p", "all_gather"])
    assert len(packed) == 3
    for layer in (0, 1, 2, 3) * 2:
        called(listed, layer=layer)
    assert len(packed) == 7
    called(listed, layer=np.int64(1), cp_comm_type="p2p")
    called(listed, layer=3, hierarchical_context_parallel_sizes=(1, 4))
    ways = [(call.parts[0].cp_comm_type, call.parts[0].members.inner) for call in packed[1:]]
    of_four = [("p2p", 1), ("all_gather", 1), ("a2a", 4), ("a2a+p2p", 2)]
    assert ways == [*of_four[:2], *of_four, ("p2p", 1), ("a2a+p2p", 1)]
    with pytest.raises(AttentionError, match="cp_comm_type of group 0 has 4 entries, one per layer; got layer=None"):
        attend(*tensors(listed), listed)


def test_a_tensor_of_another_kind_is_not_taken_for_one_that_was_checked() -> None:
    with World(Layout(ranks=1), backend=backend()) as world:
        mesh = init_device_mesh(world.device.type, (1,))
        shard = bind(MicroBatch((Group((0,), (0,), (6,)),)), world)
        arguments = {name: x.to(world.device) for name, x in zip("qkv", tensors(shard), strict=True)}
        arguments["sinks"] = torch.zeros(4, device=world.device)
        attend(shard=shard, **arguments)
        for name in ("q", "v", "sinks"):
            spread = DTensor.from_local(arguments[name], mesh, [Replicate()])
            with pytest.raises(AttentionError, match=rf"{name} is a DTensor \(R.*; pass .* {name}.to_local\(\)"):
                attend(shard=shard, **{**arguments, name: spread})


# ---- calls that cannot be computed exactly are refused with their numbers, before anything is sent

BATCH = MicroBatch((Group((0, 1), (0,), (6,)),))  # three rows here
LISTED = MicroBatch((Group((0, 1), (0,), (6,), cp_comm_type=("p2p", "ring")),))
ELSEWHERE = MicroBatch((Group((0, 1), (0,), (6,)), Group((2, 3, 4), (1,), (9,), "a2a")))
UNLEVELLED = MicroBatch((Group((0, 1, 2, 3), (0,), (12,), "a2a+p2p"),))
LEVELS = MicroBatch((Group((0, 1, 2, 3, 4, 5), (0,), (18,), "a2a+p2p", (2, 3)),))


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": x(3, 4, 8), "k": x(3, 2, 8), "v": x(3, 2, 8), "shard": bound_shard(BATCH)}
WIDE = {**GOOD, "shard": bound_shard(LEVELS), "hierarchical_context_parallel_sizes": None}

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
    ({"v": x(3, 1, 8)}, "k and v need equal heads"),
    ({"k": x(3, 2, 16)}, "q and k equal head sizes"),
    ({"shard": BATCH}, "shard is a MicroBatch; pass what bind"),
    ({"window": 0}, "window is 0; it is how many positions"),
    ({"window": 2.5}, "window is 2.5"),
    ({"window": 4, "causal": False}, "needs causal=True"),
    ({"chunk": 0}, "chunk is 0; it is how many positions of a document see each other, at least 1, or None"),
    ({"chunk": 4, "causal": False}, "chunk 4 looks back from each position; it needs causal=True"),
    ({"softcap": 0.0}, "softcap is 0.0; give a finite number above 0"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"scale": torch.ones(())}, r"scale is tensor\(1.\); give a finite number"),
    ({"dropout": "a"}, "dropout is 'a'; give the probability"),
    ({"dropout": 1.0}, "dropout is 1.0; give the probability"),
    ({"sinks": x(3)}, r"sinks has shape \(3,\); give one logit per query head: \(4,\)"),
    ({"sinks": 0.5}, "sinks is a float; give a tensor of one logit per query head"),
    ({"latents": True}, "latents k and v need one head, and q the head sizes of both together"),
    ({"indices": [0]}, "indices is a list; give a tensor of positions for each row"),
    ({"indices": x(2, 8, dtype=torch.int32)}, r"indices has shape \(2, 8\); give positions for each row: \(3, k\)"),
    ({"block_size": 4}, "block_size is 4 with no indices; it is how many keys each of the blocks has"),
    ({"block_size": 0, "indices": x(3, 8, dtype=torch.int32)}, "block_size is 0 with indices"),
    (
        {"block_size": 2, "indices": x(3, 3, 8, dtype=torch.int32)},
        r"indices has shape \(3, 3, 8\); give numbers of blocks for each row and key/value head: \(3, 2, k\)",
    ),
    ({"indices": x(3, 8)}, "indices is torch.float32 on cpu; give int32 on cpu"),
    ({"indices": torch.tensor([[0], [-2], [1]])}, "indices has -2; give positions"),
    ({"indices": x(3, 8, dtype=torch.int32), "causal": False}, "indices choose among earlier keys, got causal=False"),
    ({"cp_comm_type": 5}, "cp_comm_type is 5; use one of p2p, all_gather, a2a, a2a.p2p, auto, or one per layer"),
    ({"cp_comm_type": [5]}, r"cp_comm_type has 1 entries, one per layer; got layer=None"),
    ({"cp_comm_type": [5], "layer": 0}, "cp_comm_type 5 is unknown"),
    ({"cp_comm_type": "ring"}, "cp_comm_type 'ring' is unknown; use one of p2p, all_gather, a2a, a2a.p2p, auto"),
    ({"cp_comm_type": ["p2p", "p2p"], "layer": 2}, "got layer=2"),
    ({"shard": bound_shard(LISTED), "layer": 1}, "cp_comm_type 'ring' of group 0 is unknown"),
    ({"cp_comm_type": "a2a+p2p"}, r"needs hierarchical_.*\(a2a, p2p\) with product 2: one of \(1, 2\), \(2, 1\)"),
    (
        {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)},
        r"sizes \(2, 2\) of group 0 multiply to 4, but the group has cp 2; use one of \(1, 2\), \(2, 1\)",
    ),
    (
        {"shard": bound_shard(UNLEVELLED)},
        r"'a2a\+p2p' of group 0 needs .* product 4: one of \(1, 4\), \(2, 2\), \(4, 1\)",
    ),
    ({"shard": bound_shard(UNLEVELLED, slot=9), **{n: x(0, 4, 8) for n in "qkv"}}, "of group 0 needs hierarchical_"),
    ({"hierarchical_context_parallel_sizes": (0, 2)}, r"is \(0, 2\); give \(a2a, p2p\)"),
    (
        {**WIDE, "cp_comm_type": "a2a"},
        r"4 query heads cannot be dealt to the 6 members .* of group 0 .*: 1, 2 \(.* \(1, 6\), \(2, 3\)\)",
    ),
    ({"shard": bound_shard(ELSEWHERE)}, "4 query heads cannot be dealt to the 3 members .* of group 1"),
    ({"kernel": "fast"}, "kernel 'fast' is unknown; available here: cpu_flash, reference"),
    ({"kernel": "torch_flash"}, "needs cuda tensors, got cpu; available here: cpu_flash, reference"),
    ({"kernel": "cpu_flash", "softcap": 2.0}, "needs a call without softcap, got softcap; available here: reference"),
    ({"kernel": "cpu_flash", "dropout": 0.1, "dropout_seed": 0}, "got dropout; available here: reference"),
    ({"kernel": "cpu_flash", "indices": x(3, 8, dtype=torch.int32)}, "got indices; available here: reference"),
    ({"kernel": "cpu_flash", "with_lse": True}, "needs a call without with_lse, .* got with_lse; available here: ref"),
    ({"kernel": "tests.attention.own.NEITHER"}, r"'tests.attention.own.NEITHER' is no Kernel; ava"),
    ({"cp_comm_type": "no_such_module.x"}, r"cp_comm_type is 'no_such_module.x', and no_such_module cannot"),
    ({"cp_comm_type": "tests.attention.own.NEITHER"}, "or the dotted name of a pair of functions of your own"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[message for _, message in BAD])
def test_a_bad_call_is_refused_before_communication(changes, message):
    with pytest.raises(AttentionError, match=message):
        attend(**{**GOOD, **changes})


def test_dropout_inside_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for seed in (None, 1):
        with pytest.raises(AttentionError, match=r"dropout is 0.1 while a CUDA graph is captured: .* dropout=0.0"):
            attend(**GOOD, dropout=0.1, dropout_seed=seed)
    with pytest.raises(CommError, match="world -1"):
        attend(**GOOD)


def test_a_slot_without_groups_checks_as_well_and_has_no_rows():
    idle = {name: x(0, 4, 8) for name in "qkv"} | {"shard": bound_shard(BATCH, slot=2)}
    with pytest.raises(AttentionError, match="'ring' is unknown"):
        attend(**idle, cp_comm_type="ring")
    with pytest.raises(AttentionError, match="of group 1"):
        attend(**{**idle, "shard": bound_shard(ELSEWHERE, slot=5)})
    leaves = [idle[name].requires_grad_() for name in "qkv"]
    out = attend(**idle, sinks=torch.ones(4, requires_grad=True))
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == (0, 4, 8) for leaf in leaves)


def test_one_member_needs_no_heads_and_no_levels():
    odd = {"q": x(3, 3, 8), "k": x(3, 1, 8), "v": x(3, 1, 8), "shard": bound(Group((0,), (0,), (3,)))}
    expected = attend(**odd)
    for kind in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        assert torch.equal(attend(**odd, cp_comm_type=kind), expected)
