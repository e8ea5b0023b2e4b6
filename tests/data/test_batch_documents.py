"""Documents of padded and packed batches: which tokens, labels and places, and values there and back."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from longspan import Layout, World, load_model, plan_fixed, prepare, token_log_probs  # noqa: F401
from longspan.data.batch_documents import documents_of
from longspan.data.document import Document
from longspan.errors import DataError

IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 4, 0, 0], [0, 0, 0, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
LABELS = torch.tensor([[-100, -100, -100, 6, 3], [8, -100, 4, -100, -100], [-100] * 5])


def test_padding_left_right_and_whole_rows() -> None:
    rows = documents_of({"input_ids": IDS, "labels": LABELS, "attention_mask": MASK.bool(), "position_ids": None})
    assert [d.ids.tolist() for d in rows.documents] == [[5, 6, 7], [8, 9, 4]]
    assert [d.labels().tolist() for d in rows.documents] == [[-100, 6, 3], [8, -100, 4]]
    assert [d.targets for d in rows.documents] == [2, 1]  # the first token of a document is no target
    assert rows.places == ((0, 2, 5), (1, 0, 3)) and rows.shape == (3, 5)


def test_packed_rows_are_cut_where_positions_begin_again() -> None:
    packed = {"input_ids": [[3, 4, 5, 6, 0], [7, 8, 9, 1, 2]], "position_ids": [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]}
    rows = documents_of({**packed, "attention_mask": [[1, 1, 1, 1, 0], [1] * 5]})
    assert [d.ids.tolist() for d in rows.documents] == [[3, 4], [5, 6], [7, 8, 9, 1, 2]]
    assert len(documents_of(packed).documents) == 4  # without a mask the last token is a document as well


def test_values_of_tokens_stand_at_their_own_columns() -> None:
    rows = documents_of({"input_ids": IDS, "attention_mask": MASK})
    table = rows.to_batch([torch.tensor([1.0, 2, 3]), [4, 5, 6]], dtype=torch.float32)
    assert table.dtype == torch.float32
    assert table.tolist() == [[0, 0, 1, 2, 3], [4, 5, 6, 0, 0], [0] * 5]
    assert [x.tolist() for x in rows.from_batch(table)] == [[1, 2, 3], [4, 5, 6]]
    assert rows.to_batch({1: [4, 5, 6]}, fill=-1)[0].tolist() == [-1] * 5
    assert rows.from_batch(MASK)[0].dtype == np.int64


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_every_token_comes_back_to_its_place(lengths: list[list[int]], left: bool) -> None:
    width = max(map(sum, lengths)) + 1
    ids = np.arange(1, len(lengths) * width + 1).reshape(len(lengths), width)
    mask, positions = np.zeros_like(ids), np.zeros_like(ids)
    for row, packed in enumerate(lengths):
        at = width - sum(packed) if left else 0
        for length in packed:
            mask[row, at : at + length], positions[row, at : at + length] = 1, np.arange(length)
            at += length
    rows = documents_of({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    assert [len(d) for d in rows.documents] == [length for packed in lengths for length in packed]
    table = rows.to_batch([d.ids for d in rows.documents], dtype=torch.int64)
    assert torch.equal(table, torch.from_numpy(ids * mask))
    for document, values in zip(rows.documents, rows.from_batch(ids), strict=True):
        assert np.array_equal(document.ids, values)


@pytest.mark.parametrize(
    "batch, error",
    [
        ({"labels": LABELS}, "a batch has labels; give its input_ids"),
        ({"input_ids": [[1], [1, 2]]}, r"input_ids of a batch is .*, which is no array: .*; give integers \(B, L\)"),
        ({"input_ids": IDS[0]}, r"input_ids of a batch is int64 of shape \(5,\)"),
        ({"input_ids": IDS, "labels": LABELS[:, 1:]}, r"labels of a batch is int64 of shape \(3, 4\), input_ids have"),
        ({"input_ids": IDS.float()}, "input_ids of a batch is float64"),
        ({"input_ids": IDS, "pixel_values": IDS, "x": 1}, r"a batch has pixel_values, x, which .* ignore=\['pixel_val"),
        ({"input_ids": IDS, "attention_mask": [[1, 0, 1, 1, 1]] * 3}, "row 0 is 0 at column 1, between tokens at col"),
        ({"input_ids": IDS, "attention_mask": MASK * 2}, "row 0 has values from 0 to 2; give 1 at tokens"),
        ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS}, "row 0 has labels in 2 columns of padding"),
        ({"input_ids": IDS, "position_ids": [[1, 2, 3, 4, 5]] * 3}, "row 0 have 1 at column 0, where 0 should"),
        ({"input_ids": IDS, "position_ids": [[0, 1, 0, 1, 3]] * 3}, "row 0 have 3 at column 4, where 2 should"),
        (5, "a batch is 5; give a mapping"),
    ],
)
def test_refused_batches(batch: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        documents_of(batch)


def test_names_to_ignore_and_wrong_tables() -> None:
    rows = documents_of({"input_ids": IDS, "idx": 3}, ignore=["idx"])
    for values, error in (
        ([[1] * 5], "1 array for 3 documents"),
        ({7: [1]}, "values of document 7, the batch has 3: 0 to 2"),
        ({0: [1, 2]}, r"shape \(2,\) for document 0, which has 5 tokens"),
    ):
        with pytest.raises(DataError, match=error):
            rows.to_batch(values)
    with pytest.raises(DataError, match=r"from_batch got shape \(3, 4\), the batch has \(3, 5\)"):
        rows.from_batch(IDS[:, 1:])


def test_a_document_with_more_values_shares_ids_and_labels() -> None:
    plain = Document([5, 7, 9], loss_mask=[0, 1, 1], advantage=2, weights=0.5)
    more = plain.with_values(advantage=[1, 2, 3], weights=[0, 1, 0.25])
    assert more.ids is plain.ids and more.labels() is plain.labels() and more.targets == 2
    assert more.labels(np.array([0, 2])).tolist() == [-100, 9] and plain.ids.dtype == np.int64
    at = np.array([0, 2])
    numbers = [{name: x.tolist() for name, x in one.token_values(at).items()} for one in (more, plain)]
    assert numbers[0] == {"advantage": [1, 3], "weights": [0, 0.25]}
    assert numbers[1] == {"advantage": [2, 2], "weights": [0.5] * 2}
    with pytest.raises(DataError, match="with_values got labels, which are no numbers"):
        plain.with_values(labels=[1, 2, 3])
    with pytest.raises(DataError, match=r"'advantage' of a document has shape \(2,\)"):
        plain.with_values(advantage=[1, 2])


def test_the_lines_of_the_page_on_own_loops() -> None:
    page = (Path(__file__).parents[2] / "docs/own-loop.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(rows = documents_of.*?)```", page, flags=re.DOTALL)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    with World(Layout(1), backend="gloo") as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=16), world)
        names = globals() | {"world": world, "batch": batch, "model": model}
        exec(block, names)
    table = names["table"]
    assert ((table != 0) == torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0] * 5])).all()
    assert names["weighted"][1].token_values(np.array([0, 2]))["c"].tolist() == [1.0, table[1, 2].exp().item()]
