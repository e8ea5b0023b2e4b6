"""What a call of `attend` makes of its arguments, on the host and without ranks: masks, kernels, what is remembered."""

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

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.attention.call import AttendCall
from longspan.attention.tiles import Mask
from longspan.comm import SequenceShard
from longspan.errors import AttentionError, CommError
from longspan.testing import backend

module: Any = import_module("longspan.attention.attend")
LENGTHS = (4096, 30)
HIDING_NOTHING = (max(LENGTHS), 10**6, 2**62, sys.maxsize, 2**63, 2**80, np.int64(max(LENGTHS)), np.int64(2**62))


def bound(*groups: Group, slot: int = 0) -> SequenceShard:
    return SequenceShard(MicroBatch(groups), slot, -1, torch.device("cpu"))


def split(**options: Any) -> SequenceShard:
    return bound(Group((0, 1, 2, 3), (0, 1), LENGTHS, **options))


def tensors(shard: SequenceShard) -> list[Tensor]:
    return [torch.zeros(shard.local_rows, n, 8) for n in (4, 2, 2)]


def called(shard: SequenceShard, **options: Any) -> None:
    """A call that passes the checks talks; this world was never opened."""
    with pytest.raises(CommError, match="world -1"):
        module.attend(*tensors(shard), shard, **options)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[AttendCall]:
    """The calls that were checked and packed, in order."""
    packed: list[AttendCall] = []
    pack = module.pack_call
    monkeypatch.setattr(module, "pack_call", lambda *args: packed.append(pack(*args)) or packed[-1])
    return packed


def launched(call: AttendCall) -> list[str]:
    """The mask of a call's first part and its launches, block by block."""
    members = call.parts[0].members
    return [repr(members.mask), *(repr([x.tiling for x in members.launches(owner)]) for owner in range(members.degree))]


@pytest.mark.parametrize("window", HIDING_NOTHING, ids=str)
def test_a_window_that_hides_nothing_is_none(packed: list[AttendCall], window: int) -> None:
    """It needs nothing of a kernel (cuDNN has no windows), and costs as many launches as the call without it."""
    called(split())
    called(split(), window=window)
    without, windowed = packed
    assert replace(windowed, parts=()) == replace(without, parts=()) and not without.features
    assert launched(windowed) == launched(without)


@pytest.mark.parametrize("window", [max(LENGTHS) - 1, np.int64(5)], ids=str)
def test_a_window_that_hides_a_key_is_kept(packed: list[AttendCall], window: int) -> None:
    called(split(), window=window)
    (call,) = packed
    assert call.features == {"window"} and call.parts[0].members.mask == Mask(True, int(window))


def test_a_window_is_dropped_for_the_groups_in_which_it_hides_nothing(packed: list[AttendCall]) -> None:
    called(bound(Group((0, 1), (0,), (50,)), Group((0, 2), (1,), (500,))), window=60)
    (call,) = packed
    assert call.features == {"window"}
    assert [part.members.mask.window for part in call.parts] == [None, 60]


def test_layers_share_what_was_checked_unless_types_are_listed_by_layer(packed: list[AttendCall]) -> None:
    shard, listed = split(), split(cp_comm_type=("p2p", "all_gather"))
    for layer in (0, 1, 0, 1, None):
        called(shard, layer=layer)
    assert len(packed) == 1
    for layer in (0, 1, 0, 1):
        called(shard, layer=layer, cp_comm_type=["p2p", "all_gather"])
    assert len(packed) == 3
    for layer in (0, 1, 0, 1):
        called(listed, layer=layer)
    assert len(packed) == 5
    assert [call.parts[0].cp_comm_type for call in packed[1:]] == ["p2p", "all_gather"] * 2
    called(listed, layer=np.int64(1), cp_comm_type="p2p")
    assert len(packed) == 6
    with pytest.raises(AttentionError, match="cp_comm_type of group 0 has 2 entries, one per layer; got layer=None"):
        module.attend(*tensors(listed), listed)


@pytest.mark.parametrize("kind", [AttributeError, TypeError])
def test_an_error_of_our_own_comes_out_once_and_unchanged(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Only what is no tensor, no shard or no key is left to the checks; a mistake in packing is not tried again."""
    error, calls = kind("a mistake of ours"), list[object]()

    def fail(*args: object) -> None:
        calls.append(args)
        raise error

    monkeypatch.setattr(module, "pack_call", fail)
    with pytest.raises(kind) as raised:
        called(split())
    assert raised.value is error and error.__context__ is None and len(calls) == 1


def test_a_tensor_of_another_kind_is_not_taken_for_one_that_was_checked() -> None:
    """DTensors have the shapes of whole tensors: they are refused, also after plain tensors of such shapes."""
    with World(Layout(ranks=1), backend=backend()) as world:
        mesh = init_device_mesh(world.device.type, (1,))
        shard = bind(MicroBatch((Group((0,), (0,), (6,)),)), world)
        arguments = {name: x.to(world.device) for name, x in zip("qkv", tensors(shard), strict=True)}
        arguments["sinks"] = torch.zeros(4, device=world.device)
        module.attend(shard=shard, **arguments)
        for name in ("q", "v", "sinks"):
            spread = DTensor.from_local(arguments[name], mesh, [Replicate()])
            with pytest.raises(AttentionError, match=rf"{name} is a DTensor \(R.*; pass .* {name}.to_local\(\)"):
                module.attend(shard=shard, **{**arguments, name: spread})
