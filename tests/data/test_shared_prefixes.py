"""Prefixes are found on ids, cut before the row that predicts the first target, and put together give the documents."""

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longspan import Document, Layout, plan_fixed
from longspan.data.shared_prefixes import find_prefix_trees
from longspan.errors import DataError
from longspan.plan.shape.positions import LengthLimit, length_class
from longspan.train import ScoredDocument, SharedDocuments, share_prefixes


def chat(ids, prompt, **values):
    return Document(ids, loss_mask=[i >= prompt for i in range(len(ids))], **values)


def put_together(shared, document):
    """The ids, labels and numbers of a whole document, from the first one that it continues on."""
    parts = [shared[document]]
    while parts[0].parent >= 0:
        assert parts[0].parent >= len(shared.prefix_lengths)
        parts.insert(0, shared[parts[0].parent])
    return np.concatenate([part.ids for part in parts]), np.concatenate([part.labels() for part in parts])


def check_shared(documents, shared, least, max_rows=None):
    assert isinstance(shared, SharedDocuments) and shared.targets == sum(d.targets for d in documents)
    assert [d.parent for d in shared] == list(shared.parents) and min(shared.lengths) >= 1
    for number, document in enumerate(documents):
        ids, labels = put_together(shared, number)
        assert np.array_equal(ids, document.ids)
        assert np.array_equal(labels[1:], document.labels()[1:])  # the first is never predicted
        assert shared[number].targets == document.targets
        assert shared.lengths[number] + shared.prefix_lengths[number] == len(document)
    for prefix in range(len(documents), len(shared)):
        branches = [d for d, parent in enumerate(shared.parents) if parent == prefix]
        assert len(branches) >= 2 and shared.lengths[prefix] >= least and shared[prefix].targets == 0
    plan = plan_fixed(shared.lengths, Layout(1), 1, parents=shared.parents, targets=shared.targets)
    assert (plan.parents or (-1,) * len(shared)) == shared.parents
    if max_rows is not None:
        families = {}
        for d in range(len(shared)):
            root = d
            while shared.parents[root] >= 0:
                root = shared.parents[root]
            families.setdefault(root, []).append(shared.lengths[d])
        assert all(sum(rows) <= max_rows for rows in families.values() if len(rows) > 1)


@st.composite
def chats(draw):
    """Documents of few different tokens, so that many begin alike."""
    ids = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=9))
    return [chat(x, draw(st.integers(0, len(x)))) for x in ids]


@given(chats(), st.integers(1, 4), st.none() | st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_documents_are_put_together_again(documents, least, max_rows):
    check_shared(documents, share_prefixes(documents, least_rows=least, max_rows=max_rows), least, max_rows)


@given(chats(), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_depths_read_the_same_tokens_behind_a_prefix(documents, least, depths):
    """And none is a target, so that a depth's targets are those of the separate documents too."""
    shared = share_prefixes(documents, least_rows=least, depths=depths)
    for number, document in enumerate(documents):
        part, end = shared[number], shared.prefix_lengths[number]
        assert end == 0 or (document.labels()[1 : end + depths + 1] == -100).all()
        while part.parent >= 0:
            part = shared[part.parent]
            assert np.array_equal(part.ids, document.ids[end - len(part) : end + depths]) and part.targets == 0
            end -= len(part)
    assert all(len(part) >= least for part in shared[len(documents) :])
    check_shared(documents, share_prefixes(documents, least_rows=least), least)


@given(chats(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_documents_share_with_those_of_the_same_frequencies(documents, of_each_length):
    limits = [LengthLimit(6, of_each_length)]
    shared = share_prefixes(documents, least_rows=1, length_limits=limits)
    for prefix in range(len(documents), len(shared)):
        below = [d for d in range(len(documents)) if prefix in ancestors(shared, d)]
        assert len({length_class(limits, len(documents[d])) for d in below}) == 1
    assert length_class(limits, 7) != length_class(limits, 6) == length_class(limits, 2)
    assert (length_class(limits, 7) == length_class(limits, 9)) != of_each_length


def ancestors(shared, document):
    while (document := shared.parents[document]) >= 0:
        yield document


def best_rows(documents, least):
    """How many rows remain if every row whose path and absence of targets agree is computed once (a trie)."""
    paths = set()
    for number, document in enumerate(documents):
        labels = document.labels()
        first = next((i for i in range(1, len(labels)) if labels[i] != -100), len(labels))
        for end in range(1, len(labels) + 1):
            paths.add(tuple(document.ids[:end]) if end < first else (number, end, "own"))
    return len(paths)


@given(chats())
@settings(max_examples=100, deadline=None)
def test_with_prefixes_of_any_length_every_row_is_shared_that_can_be(documents):
    assert sum(share_prefixes(documents, least_rows=1).lengths) == best_rows(documents, 1)


def test_the_last_token_of_a_prompt_heads_each_branch():
    prompt = list(range(10))
    documents = [chat([*prompt, 7, 8, 9], 10), chat([*prompt, 7], 10), chat([5, 6, 7], 1)]
    shared = share_prefixes(documents, least_rows=4)
    assert shared.lengths == (4, 2, 3, 9) and shared.parents == (3, 3, -1, -1)
    assert shared[0].ids.tolist() == [9, 7, 8, 9] and shared[0].labels()[1:].tolist() == [7, 8, 9]
    assert shared[2] is documents[2] and np.shares_memory(shared[3].ids, documents[0].ids)
    assert repr(shared) == "3 documents, 1 shared prefix: 18 rows in place of 27"


def test_numbers_of_tokens_come_along():
    documents = [chat([1, 2, 3, 4], 3, weights=[0, 1, 2, 3], advantage=a) for a in (0.5, -0.5)]
    shared = share_prefixes(documents, least_rows=1)
    for document, advantage in zip(shared, (0.5, -0.5), strict=False):
        values = document.token_values(np.arange(2))
        assert values["weights"].tolist() == [2, 3] and values["advantage"].tolist() == [advantage] * 2
    assert set(shared[2].token_values(np.arange(2))) == {"weights", "advantage"}


def test_what_is_predicted_or_short_or_no_document_is_not_shared():
    whole = [Document(range(40)), Document(range(40))]
    for documents in (whole, [chat([1, 2, 3], 3)] * 2, [list(range(9))] * 3, [ScoredDocument(range(9), label=1.0)] * 2):
        shared = share_prefixes(documents)
        assert list(shared) == documents and max(shared.parents) == -1
    assert len(share_prefixes([])) == 0


def test_families_above_max_rows_are_divided_or_left_separate_and_said():
    documents = [chat([*range(50), 60 + i, 61], 50) for i in range(10)]
    shared = share_prefixes(documents, least_rows=10, max_rows=58)
    assert len(shared) == 13 and shared.left_out == 1
    assert repr(shared).endswith("1 in prefix trees above max_rows are left separate")
    check_shared(documents, shared, 10, 58)
    assert share_prefixes(documents, least_rows=10, max_rows=54).left_out == 10
    assert find_prefix_trees(documents, 10, 58).too_large == (10, 49 + 10 * 3)
    assert find_prefix_trees(documents, 10, 79).too_large is None


@pytest.mark.parametrize("arguments", [{"least_rows": 0}, {"max_rows": 0}, {"least_rows": 1.5}, {"max_rows": True}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(DataError, match="give an integer of at least 1"):
        share_prefixes([chat([1, 2], 1)], **arguments)


@pytest.mark.parametrize("parent", [-2, 1.0, None, True])
def test_bad_parents_are_refused(parent):
    with pytest.raises(DataError, match="give the number of a document of the step, or -1"):
        Document([1, 2], parent=parent)


def test_documents_that_are_cut_already_are_refused():
    shared = share_prefixes([chat([*range(9), i], 9) for i in range(2)], least_rows=3)
    with pytest.raises(DataError, match="document 0 has the parent 2"):
        share_prefixes(shared)


def test_a_step_of_a_million_tokens_takes_milliseconds():
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 150_000, 30_000) for _ in range(4)]
    prompts *= 8
    documents = [chat(np.append(prompt, draw.integers(0, 150_000, 1000)), 30_000) for prompt in prompts]
    short = draw.integers(0, 150_000, 900)
    documents += [chat(np.append(short, draw.integers(0, 150_000, 100)), 900) for _ in range(200)]
    seconds = []
    for _ in range(3):
        started = time.process_time()
        shared = share_prefixes(documents)
        seconds.append(time.process_time() - started)
    assert len(shared) == len(documents) + 5
    assert min(seconds) < 0.05, seconds  # of the processor; 0.017 on an idle machine
