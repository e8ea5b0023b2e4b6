import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import LayoutError
from longspan.layout import Packing, check_lengths
from tests.layout.strategies import examples, lengths

ACCEPTED = [
    [],
    [3, 1],
    (3, 1),
    range(3, 5),
    np.array([3, 1]),
    np.array([3, 1], dtype=np.uint8),
    [np.int32(3), 1, np.uint64(7)],
]


@pytest.mark.parametrize("given_lengths", ACCEPTED, ids=repr)
def test_integers_are_lengths(given_lengths):
    checked = check_lengths(given_lengths)
    assert checked == tuple(int(n) for n in given_lengths) and {type(n) for n in checked} <= {int}


REFUSED = [  # lengths, what the message must say
    ([4, 0], r"length 1 is 0 \(int\); .* at least 1 row"),
    ([4, 2, -3], r"length 2 is -3 .* at least 1 row"),
    ([True, 4], r"length 0 is True \(bool\); .* integer"),
    ([4, 3.0], r"length 1 is 3\.0 \(float\); .* int\("),
    ([4, float("nan"), 0], r"length 1 is nan \(float\)"),
    ([4, None], r"length 1 is None \(NoneType\)"),
    ("12", r"length 0 is '1' \(str\)"),
    (np.array([1.0, 2.0]), r"length 0 is 1\.0 \(float\)"),
    (np.array([True]), r"length 0 is True \(bool\)"),
    (np.array([3, 0]), r"length 1 is 0"),
    ([np.float32(2), 1], r"length 0 is .*float32"),
    ([np.bool_(True)], r"length 0 is .*bool"),
    (np.ones((2, 2), dtype=int), r"shape \(2, 2\); give one dimension"),
    (7, r"lengths are 7; give a sequence"),
    ([2**62, 2**62], r"2 lengths add up to 9223372036854775808 rows"),
]


@pytest.mark.parametrize(("given_lengths", "message"), REFUSED)
def test_what_is_not_a_length_is_refused(given_lengths, message):
    for make in (check_lengths, Packing):
        with pytest.raises(LayoutError, match=message):
            make(given_lengths)


@examples
@given(lengths, st.integers(1, 64))
def test_rows_know_their_document_and_position(given_lengths, multiple):
    packing = Packing(given_lengths, pad_to_multiple=multiple)
    rows = [(d, p) for d, n in enumerate(given_lengths) for p in range(n)]
    assert packing.tokens == len(rows)
    assert list(zip(packing.document_of_row.tolist(), packing.positions.tolist(), strict=True)) == rows
    assert np.diff(packing.cu_seqlens).tolist() == given_lengths and packing.cu_seqlens[0] == 0
    assert (packing.tokens + packing.padding) % multiple == 0 and 0 <= packing.padding < multiple


def test_a_packing_is_a_value():
    packing, same = Packing([3, 2], pad_to_multiple=4), Packing(np.array([3, 2]), 4)
    assert packing.padding == 3
    assert packing == same and hash(packing) == hash(same)
    assert packing != Packing([3, 2]) and packing != Packing([2, 3], 4)
    assert (
        repr(packing) == "Packing(lengths=(3, 2), pad_to_multiple=4)" and repr(Packing([3])) == "Packing(lengths=(3))"
    )
    for other in (pickle.loads(pickle.dumps(packing)), copy.deepcopy(packing)):
        assert other == packing and not other.positions.flags.writeable
    with pytest.raises(AttributeError):
        packing.lengths = (1,)


@pytest.mark.parametrize("name", ["cu_seqlens", "positions", "document_of_row"])
def test_arrays_are_read_only_int64(name):
    array = getattr(Packing([3, 2]), name)
    assert array.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("multiple", [0, -1, 2.0, True, None])
def test_a_multiple_under_one_is_refused(multiple):
    with pytest.raises(LayoutError, match=rf"pad_to_multiple is {multiple}"):
        Packing([3], pad_to_multiple=multiple)
