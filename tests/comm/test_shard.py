"""What a rank holds in a micro-batch: rows, positions, segments, padding; scatter and gather are inverse."""

import copy
import pickle
from unittest import mock

import numpy as np
import pytest
import torch

from longspan import comm
from longspan.comm.device import to_device
from longspan.comm.shard import Derived, SequenceShard, bind
from longspan.comm.world import World
from longspan.errors import CommError, LayoutError, PlanError
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch
from longspan.testing import backend, run_ranks


def group(slots: tuple[int, ...], first: int, lengths: tuple[int, ...], **keywords: object) -> Group:
    documents = tuple(range(first, first + len(lengths)))
    return Group(slots, documents, lengths, **keywords)  # type: ignore[arg-type]


MICRO_BATCHES = {
    "one group": MicroBatch((group((0, 1, 2, 3), 0, (30, 3, 17)),)),
    "contiguous": MicroBatch((group((0, 1, 2, 3), 0, (30, 3, 17), partition="contiguous"),)),
    "two groups": MicroBatch((group((0, 1), 0, (9, 4)), group((2, 3), 2, (5,)))),
    "a slot in two groups": MicroBatch((group((1,), 0, (7, 2)), group((0, 1, 2), 2, (20,)), group((3,), 3, (6,)))),
    "order of slots": MicroBatch((group((3, 1, 0), 0, (10, 11)), group((2,), 2, (3,)))),
    "slots without rows": MicroBatch((group((1, 2), 0, (8,)),)),
    "short documents": MicroBatch((group((0, 1, 2, 3), 0, (1, 2, 1, 1, 3)),)),
    "padded": MicroBatch((group((0, 1), 0, (5, 9, 2), pad_to=9), group((2, 3), 3, (9,), pad_to=9))),
    "nothing": MicroBatch(()),
}


def check(rank: int, names: list[str]) -> None:
    with World(Layout(ranks=4), backend=backend()) as world:
        for name in names:
            micro_batch = MICRO_BATCHES[name]
            shard = bind(micro_batch, world)
            check_rows(shard)
            check_there_and_back(shard)
            check_there_and_back(shard.with_padding(minimum=3, multiple=4))


def check_rows(shard: SequenceShard) -> None:
    """Row by row against a plain walk over the packed documents."""
    packed = [
        (d, p) for g in shard.micro_batch.groups for d, n in zip(g.documents, g.lengths, strict=True) for p in range(n)
    ]
    boundaries = shard.cu_seqlens.tolist()
    assert boundaries[0] == 0 and boundaries[-1] == shard.local_rows == len(shard.rows) == len(shard.position_ids)
    assert len(boundaries) == len(shard.documents) + 1
    for segment, document in enumerate(shard.documents.tolist()):
        for local in range(boundaries[segment], boundaries[segment + 1]):
            row, position = int(shard.rows[local]), int(shard.position_ids[local])
            assert row < 0 or packed[row] == (document, position)
    assert shard.parts == () or shard.parts[-1].stop == shard.local_rows
    for part in shard.parts:
        assert part.counts[part.member] == part.stop - part.start


def check_there_and_back(shard: SequenceShard) -> None:
    x = torch.arange(shard.tokens * 2, dtype=torch.float64, device=shard.device).reshape(-1, 2) + 1
    local = shard.scatter(x).requires_grad_()
    assert local.shape == (shard.local_rows, 2)
    assert bool((local[shard.rows < 0] == 0).all())
    for value in (0, -100, float("nan")):
        filled = shard.scatter(x, fill=value)
        expected = torch.where(shard.rows[:, None] < 0, value, local.detach())
        torch.testing.assert_close(filled, expected, rtol=0, atol=0, equal_nan=True)
    packed = shard.gather(local)
    with mock.patch.object(comm.shard, "expand_runs", side_effect=AssertionError("a shard lays all slots out once")):
        assert torch.equal(shard.gather(local), packed)
    assert torch.equal(packed, x)
    weight = torch.arange(shard.tokens, dtype=torch.float64, device=shard.device)[:, None] + 1
    (packed * weight).sum().backward()
    assert local.grad is not None
    assert torch.equal(local.grad, shard.scatter(weight.expand(-1, 2))), "backward takes the own rows, once"


def test_rows_positions_and_segments_of_every_kind_of_micro_batch() -> None:
    run_ranks(check, 4, list(MICRO_BATCHES))


def pad_and_refuse(rank: int) -> None:
    with World(Layout(ranks=2), backend=backend()) as world:
        refuse(world)
        shard = bind(MicroBatch((group((0,), 0, (5,)),)), world)
        assert shard.local_rows == (5, 0)[rank]
        padded = shard.with_padding(multiple=4)
        assert padded.local_rows == (8, 4)[rank] and padded.padding_rows == (3, 4)[rank]
        assert padded.rows.tolist()[-padded.padding_rows :] == [-1] * padded.padding_rows
        assert padded.position_ids.tolist()[-padded.padding_rows :] == list(range(padded.padding_rows))
        assert padded.documents.tolist() == [[0, -1], [-1]][rank]
        assert padded.parts[-1].index == -1 and padded.parts[-1].degree == 1
        assert padded.with_padding(multiple=4) is padded
        assert shard.with_padding(minimum=0) is shard


def refuse(world: World) -> None:
    with pytest.raises(PlanError, match=r"uses slot 3, the home has 2 slots \(0 to 1\)"):
        bind(MicroBatch((group((1, 3), 0, (5,)),)), world)
    shard = bind(MicroBatch((group((0, 1), 0, (5,)),)), world)
    with pytest.raises(LayoutError, match="scatter got 4 rows, the micro-batch has 5"):
        shard.scatter(torch.zeros(4, 1))
    for fill, dtype, says in (
        (-100, torch.uint8, "uint8 with -100; give a whole number from 0 to 255"),
        (0.5, torch.int64, "int64 with 0.5"),
        (float("nan"), torch.int32, "int32 with nan"),
        (2, torch.bool, "bool with 2; give a whole number from 0 to 1"),
    ):
        with pytest.raises(LayoutError, match=f"scatter cannot fill torch.{says}"):
            shard.scatter(torch.zeros(5, dtype=dtype), fill=fill)
    with pytest.raises(LayoutError, match="gather got 9 rows, the shard holds"):
        shard.gather(torch.zeros(9, 1))
    with pytest.raises(AttributeError, match="immutable"):
        shard.slot = 1
    for value in (shard, shard.parts[0]):
        assert copy.copy(value) is value and copy.deepcopy({"shard": value})["shard"] is value
        with pytest.raises(CommError, match=r"cannot be pickled; send its MicroBatch .* call bind\(micro_batch"):
            pickle.dumps(value)
    assert "rows" in repr(shard) and "member" in repr(shard.parts[0])


def test_padding_rows_are_a_document_of_their_own_and_errors_name_the_numbers() -> None:
    run_ranks(pad_and_refuse, 2)


def test_what_is_derived_from_a_shard_has_one_writer() -> None:
    shard = SequenceShard(MicroBatch((Group((0,), (0,), (8,)),)), 0, -1, torch.device("cpu"))
    places, rows = torch.tensor([5]), torch.ones(1, 3)
    for name in Derived.__slots__:
        with pytest.raises(AttributeError, match=f"immutable: .*do not set {name}"):
            setattr(shard.derived, name, None)
    for of_rows in (1, 2):  # of two modalities
        shard.derived.add_items(rows, {0: ((places, rows),)}, {})
        assert len(shard.derived.leaves) == len(shard.derived.spliced[0]) == of_rows and not shard.derived.added
        for slot in (shard.derived.spliced, shard.derived.added):
            with pytest.raises(TypeError, match="does not support item assignment"):
                slot[0] = ()  # type: ignore[index]
    assert shard.find_real_rows() is shard.find_real_rows() and len(shard.find_real_rows()) == 8


def test_real_rows_are_found_without_asking_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = Group((0, 1), (0, 1), (11, 4), pad_to=12)
    shard = SequenceShard(MicroBatch((padded,)), 1, -1, torch.device("cpu"), padding=3)
    is_real = shard.rows >= 0
    wanted = {place: is_real[slice(*place)].nonzero().squeeze(1) for place in ((0, None), (0, 8), (8, 16), (3, 5))}
    for owner in (torch, torch.Tensor):
        monkeypatch.setattr(owner, "nonzero", lambda *_: pytest.fail("this waits for a GPU"))
    found = {place: shard.find_real_rows(*place) for place in wanted}
    assert all(torch.equal(found[place], index) for place, index in wanted.items())
    assert 0 < len(wanted[0, None]) < len(is_real) == 15


# ---- arrays of the host on the device: pytest --backend nccl for a GPU

DEVICE = torch.device("cuda" if backend() == "nccl" else "cpu")


@pytest.mark.parametrize(
    "array", (np.arange(7), np.zeros(0, np.int64), np.ones((2, 3), np.int32), np.float64(1) * np.eye(2))
)
def test_an_array_arrives_as_it_is(array: np.ndarray) -> None:
    tensor = to_device(array, DEVICE)
    assert tensor.device.type == DEVICE.type and tensor.shape == array.shape
    assert np.array_equal(tensor.cpu().numpy(), array) and tensor.cpu().numpy().dtype == array.dtype
    assert tensor.is_cuda or not len(array) or tensor.data_ptr() == array.ctypes.data, "memory is shared on a CPU"


def test_on_a_gpu_the_array_may_change_at_once() -> None:
    """What arrives is what it held when it was given, also where the device is busy meanwhile."""
    if DEVICE.type != "cuda":
        pytest.skip("needs --backend nccl and a GPU")
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    array = np.arange(1 << 16)
    tensor = to_device(array, DEVICE)
    array[:] = -1
    assert torch.equal(tensor.cpu(), torch.arange(1 << 16))
