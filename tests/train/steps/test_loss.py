"""Labels are shifted inside documents before they are split, and a rank reads its own rows only."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longspan.comm import SequenceShard
from longspan.data.document import NO_TARGET
from longspan.errors import DataError
from longspan.plan import Group, MicroBatch
from longspan.train.loss import summed_cross_entropy
from longspan.train.read_rows import read_inputs_and_labels

CPU = torch.device("cpu")


class Recorder:
    """A document that remembers which positions were asked for."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.asked = tokens, Counter[int]()

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        assert positions.dtype == np.int64
        self.asked.update(positions.tolist())
        return self.tokens[positions]


def groups_of(draw: st.DrawFn) -> tuple[MicroBatch, int]:
    slots = draw(st.integers(1, 5))
    groups, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.permutations(range(slots)))[: draw(st.integers(1, slots))]
        lengths = tuple(draw(st.lists(st.integers(1, 23), min_size=1, max_size=4)))
        documents = tuple(range(first, first + len(lengths)))
        first += len(lengths)
        kind = draw(st.sampled_from(["zigzag", "contiguous"]))
        pad_to = draw(st.sampled_from([None, max(lengths), max(lengths) + 3]))
        groups.append(Group(tuple(members), documents, lengths, partition=kind, pad_to=pad_to))
    return MicroBatch(tuple(groups)), slots


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ids_labels_and_what_is_read(data: st.DataObject) -> None:
    micro_batch, slots = groups_of(data.draw)
    texts = [np.arange(n, dtype=np.int32) + 1000 * (d + 1) for d, n in enumerate(micro_batch.lengths)]
    labels_of: dict[int, int] = {}
    for slot in range(slots):
        documents = [Recorder(text) for text in texts]
        shard = SequenceShard(micro_batch, slot, 0, CPU).with_padding(minimum=3, multiple=2)
        ids, labels = read_inputs_and_labels(documents, shard, vocabulary=10**6)
        real = shard.rows.numpy() >= 0
        assert (ids[~real] == 0).all() and (labels[~real] == NO_TARGET).all()
        packed = np.concatenate(texts)
        assert (ids[real] == packed[shard.rows.numpy()[real]]).all()
        for token, label in zip(ids[real].tolist(), labels[real].tolist(), strict=True):
            assert token not in labels_of
            labels_of[token] = label
        asked = {1000 * (d + 1) + p for d, document in enumerate(documents) for p in document.asked}
        own = set(ids[real].tolist())
        assert asked <= own | {token + 1 for token in own}
    wanted = {token: token + 1 for text in texts for token in text.tolist()}
    wanted |= {int(text[-1]): NO_TARGET for text in texts}
    assert labels_of == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_is_a_sum_over_targets(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=dtype, requires_grad=True)
    labels = torch.tensor([3, NO_TARGET, 0, 10, NO_TARGET, 5, 1])
    total = summed_cross_entropy(logits, labels)
    (total / 5).backward()
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, labels, ignore_index=NO_TARGET)
    wanted.backward()
    assert total.dtype == torch.float64 and logits.grad is not None and exact.grad is not None
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert abs(total.item() / 5 - wanted.item()) < min(tolerance, 1e-6) * wanted.item()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    assert (logits.grad[[1, 4]] == 0).all()


def test_no_targets_give_zero_and_zero_gradients() -> None:
    logits = torch.randn(1, 5, requires_grad=True)
    total = summed_cross_entropy(logits, torch.tensor([NO_TARGET]))
    total.backward()
    assert total.item() == 0.0 and logits.grad is not None and (logits.grad == 0).all()


class Short:
    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return np.zeros(len(positions) - 1, dtype=np.int64)


REFUSED: dict[str, tuple[object, str]] = {
    "outside": (np.array([1, 2, 50, 3]), "document 7 holds token id 50 at position 2, .* is 0 to 49"),
    "negative": (np.array([1, -1, 2, 3]), "document 7 holds token id -1 at position 1"),
    "floats": (np.array([1.0, 2.0, 3.0, 4.0]), "document 7 gave float64 of shape"),
    "too few": (Short(), r"document 7 gave int64 of shape \(3,\) for 4 positions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    document, says = REFUSED[case]
    shard = SequenceShard(MicroBatch((Group((0,), (7,), (4,)),)), 0, 0, CPU)
    with pytest.raises(DataError, match=says):
        read_inputs_and_labels({7: document}, shard, vocabulary=50)


@pytest.mark.parametrize("make", [list, np.asarray, torch.tensor])
def test_kinds_of_documents(make: type) -> None:
    text: Sequence[int] = [4, 5, 6, 7, 8]
    shard = SequenceShard(MicroBatch((Group((1, 0), (0,), (5,)),)), 0, 0, CPU)
    ids, labels = read_inputs_and_labels([make(text)], shard)
    plain = read_inputs_and_labels([np.array(text)], shard)
    assert (ids == plain[0]).all() and (labels == plain[1]).all() and len(ids)
