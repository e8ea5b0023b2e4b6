"""Documents with items: what an encoder reads, and items found by their placeholders."""

import numpy as np
import pytest

from longspan import Document
from longspan.bridge import MediaItem
from longspan.data.item_documents import MediaDocuments, count_text_targets, find_item_table, items_at_placeholders
from longspan.errors import DataError
from longspan.layout.partition import NO_TARGET


def test_items_are_found_by_their_placeholders() -> None:
    tokens = [np.array([5, 0, 0, 9, 0, 0, 0]), [1, 2], [0]]
    items = items_at_placeholders(tokens, 0, [[1, 3, 1], [], [1]], "audio")
    assert items == [
        MediaItem(0, ((1, 2),), "audio"),
        MediaItem(0, ((2, 3), (4, 6)), "audio"),
        MediaItem(0, ((6, 7),), "audio"),
        MediaItem(2, ((0, 1),), "audio"),
    ]
    assert items_at_placeholders([[1, 2]], 0, [[]]) == []


@pytest.mark.parametrize("rows", [[[1], []], [[2, 1], [0]], [[3], [1]], [[3, 0], []]])
def test_other_counts_name_document_modality_and_both_counts(rows: list[list[int]]) -> None:
    with pytest.raises(DataError, match=r"document [01] has \d placeholders? of image \(token id 0\), its .* rows"):
        items_at_placeholders([[0, 0, 7, 0], [8]], 0, rows)
    with pytest.raises(DataError, match="given for 1 document, there are 2; give one list"):
        items_at_placeholders([[0], [0]], 0, [[1]])


def test_documents_with_items() -> None:
    documents = MediaDocuments([[1, 2, 3, 4], [5, 6]], [MediaItem(0, ((1, 3),)), MediaItem(1, ((0, 1),))], ["a", "b"])
    assert (documents.lengths, documents.targets, len(documents), documents[1]) == ((4, 2), 2, 2, [5, 6])
    assert documents.read(1) == "b" and MediaDocuments([[1]], [], str.upper).lengths == (1,)  # pyright: ignore
    assert find_item_table(documents, [4, 2]) is documents.item_table
    assert find_item_table({0: [1]}, [1]) is None and find_item_table([[1]], [1]) is None


LABELS: dict[str, list[int] | None] = {  # of a document of 8 tokens whose items take positions 0, 1, 4 and 5
    "none given": None,
    "everywhere": [1] * 8,
    "at placeholders alone": [1, 1, -100, -100, 1, 1, -100, -100],
    "beside them alone": [-100, -100, 1, 1, -100, -100, 1, 1],
    "at some": [1, -100, 1, -100, -100, 1, -100, 1],
    "nowhere": [-100] * 8,
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_at_placeholders_are_no_targets(labels: list[int] | None) -> None:
    ids = np.arange(8)
    document = ids if labels is None else Document(ids, labels=labels)
    items = [MediaItem(1, ((4, 6),)), MediaItem(0, ((2, 3),)), MediaItem(1, ((0, 2),), "audio")]
    documents = MediaDocuments([[1, 2, 3, 4], document, [7]], items, ["a", "b", "c"])
    targets = sum((labels or [1] * 8)[position] != NO_TARGET for position in (2, 3, 6, 7))
    assert count_text_targets(documents, documents.item_table) == (2, targets, 0)
    assert documents.targets == 2 + targets


def test_there_is_something_to_read_for_each_item() -> None:
    with pytest.raises(DataError, match=r"read has 1 value for 2 items; give what the encoder is given for each item"):
        MediaDocuments([[1, 2, 3, 4]], [MediaItem(0, ((1, 3),)), MediaItem(0, ((3, 4),))], ["a"])
