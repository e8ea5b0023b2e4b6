"""A document whose rows have scores: its last token's, those of given rows, or of every token."""

from functools import cached_property
from typing import Any

import numpy as np

from longspan.data.document import Document, host_array
from longspan.errors import DataError
from longspan.layout import Integers
from longspan.layout.partition import NO_TARGET
from longspan.plain_text import short_text

LABEL = "label"  # the number of a label among the values of tokens; of several `label_0`, `label_1`, …


class ScoredDocument(Document):
    """Token ids (n,) of one document for a model with a head of scores, and which of its rows count.

    >>> answer = ScoredDocument([5, 7, 9, 2], pad=2)                        # the row of 9, as transformers chooses it
    >>> review = ScoredDocument([5, 7, 9, 2], label=3)                      # one of n, or a number
    >>> words = ScoredDocument([5, 7, 9, 2], labels=[-100, 0, 2, 1])        # of tokens, not shifted
    >>> values = ScoredDocument([5, 7, 9, 2], rows=range(1, 4), old_values=[0.0, 0.1, 0.4, 0.2])  # of a critic

    By default one row counts: that of the last token whose id is not `pad` (if there is none, the first row; without
    `pad` the last). `rows` are positions of rows that count in its place; "all" is every row. `label` is a number or
    (L,) numbers of the document; `labels` (n,) or (n, L) are those of tokens, of which those that are not −100 count. A
    loss reads them as `at["label"]`, of several as `at["label_0"]`, `at["label_1"]`, …. `weights` and other keywords
    are numbers as a Document has them. Raises DataError for rows that the document has not, and for labels of both
    kinds.
    """

    makes_scores = True

    def __init__(
        self,
        ids: Any,
        *,
        rows: Any = None,
        pad: int | None = None,
        label: Any = None,
        labels: Any = None,
        weights: Any = None,
        **values: Any,
    ) -> None:
        super().__init__(ids)
        choices = [choice for choice in (rows, pad, labels) if choice is not None]
        if len(choices) > 1 or (label is not None and labels is not None):
            raise DataError(
                "a ScoredDocument has more than one of rows, pad and labels, or label and labels; each says which rows "
                "count or what their scores are to be: give one of them"
            )
        columns = dict[str, Any]()
        is_scored = np.zeros(len(self._ids), dtype=bool)
        if labels is not None:
            table = host_array("labels of a document", labels)
            if table.ndim not in (1, 2) or len(table) != len(self._ids):
                raise DataError(
                    f"labels of a document have shape {table.shape} for {len(self._ids)} token ids; give one for each, "
                    "(n,) or (n, L)"
                )
            is_scored = (table != NO_TARGET).reshape(len(table), -1).all(-1)
            columns = label_columns(table)
        else:
            is_scored[self._choose_rows(rows, pad)] = True
            if label is not None:
                # The table has one row.
                table = host_array(f"{LABEL} of a document", label)[None]
                columns = {name: column[0] for name, column in label_columns(table).items()}
        self._labels = np.where(is_scored, 0, NO_TARGET)
        self._values = self._read_values(({} if weights is None else {"weights": weights}) | columns | values)

    def _choose_rows(self, rows: Any, pad: int | None) -> Integers | slice:
        """transformers' rule: the rightmost token with another id than `pad`, row 0 if there is none."""
        if isinstance(rows, str) and rows == "all":
            return slice(None)
        if rows is None:
            if not len(self._ids):
                return slice(0, 0)
            # transformers' rule: the rightmost token with another id than `pad`, row 0 if there is none; all ids differ
            # from None
            return np.flatnonzero(self._ids != pad).max(initial=0, keepdims=True)
        values = list(rows) if isinstance(rows, range) else rows
        chosen: Integers = np.unique(host_array("rows of a document", values))
        has_integers = not chosen.size or chosen.dtype.kind in "iu"  # numpy takes an empty list for floats
        if not has_integers or (chosen.size and not 0 <= chosen[0] <= chosen[-1] < len(self)):
            raise DataError(
                f"rows of a document are {short_text(rows)}, the document has {len(self)} tokens; give positions from "
                'its first to its last, or "all"'
            )
        return chosen.astype(np.int64)

    @cached_property
    def targets(self) -> int:
        """How many rows count."""
        return int((self._labels != NO_TARGET).sum())


def label_columns(table: Any) -> dict[str, Any]:
    """Return the columns (n,) of a table (n,) or (n, L) of labels by name: `label`, or `label_0`, `label_1`, …."""
    if table.ndim == 1 or table.shape[1] == 1:
        return {LABEL: table.reshape(-1)}
    return {f"{LABEL}_{i}": column for i, column in enumerate(table.T)}
