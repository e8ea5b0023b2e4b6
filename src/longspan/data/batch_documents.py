"""Documents of a padded or packed batch, as collators make it, and values of their tokens back in the batch's shape.

rows = documents_of(batch)                      # {"input_ids": (B, L), "labels": …, "attention_mask": …}
table = rows.to_batch([log_probs.of(d) for d in range(len(rows.documents))])        # (B, L)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.data.document import NO_TARGET, Document, host_array
from longspan.errors import DataError, plural
from longspan.layout import Integers
from longspan.plain_text import short_text

_READ = ("input_ids", "labels", "attention_mask", "position_ids")


class RowPlace(NamedTuple):
    """Where a document stands in a batch: a row, and the columns from start to before stop."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class BatchDocuments:
    """The documents of a batch of `shape` (B, L), row after row, and the place of each; made by `documents_of`."""

    documents: tuple[Document, ...]
    places: tuple[RowPlace, ...]
    shape: tuple[int, int]

    def to_batch(
        self,
        values: Sequence[Any] | Mapping[int, Any],
        *,
        dtype: torch.dtype = torch.float64,
        fill: float = 0.0,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return a tensor (B, L) with the values of each document's tokens at their columns, `fill` elsewhere.

        >>> documents_of({"input_ids": [[5, 6, 7]]}).to_batch([np.array([0.5, 1.5, 2.5])])
        tensor([[0.5000, 1.5000, 2.5000]], dtype=torch.float64)

        `values` are an array (length,) for each document, or those of some documents by their numbers. Raises DataError
        for another number of arrays and for arrays of another length.
        """
        by_document = values if isinstance(values, Mapping) else dict(enumerate(values))
        count = len(self.documents)
        if not isinstance(values, Mapping) and len(by_document) != count:
            raise DataError(
                f"to_batch got {plural(len(by_document), 'array')} for {plural(count, 'document')}; give one for each, "
                "or those of some by number: {3: array}"
            )
        if unknown_documents := [d for d in by_document if d not in range(count)]:
            raise DataError(
                f"to_batch got values of document {unknown_documents[0]!r}, the batch has {count}: 0 to {count - 1}"
            )
        table = torch.full(self.shape, fill, dtype=dtype)
        for document, value in by_document.items():
            row, start, stop = self.places[document]
            array = host_array(f"to_batch: values of document {document}", value, "one number for each token")
            if array.shape != (stop - start,):
                raise DataError(
                    f"to_batch got values of shape {array.shape} for document {document}, which has {stop - start} "
                    "tokens; give one for each"
                )
            table[row, start:stop] = torch.from_numpy(array.copy()).to(dtype)
        return table if device is None else table.to(device)

    def from_batch(self, table: Any) -> list[npt.NDArray[Any]]:
        """Return the values of each document's tokens (length,), from a tensor or an array (B, L) of the batch's shape.

        >>> documents_of({"input_ids": [[5, 6, 7]]}).from_batch(np.array([[0.5, 1.5, 2.5]]))
        [array([0.5, 1.5, 2.5])]

        Floating-point values come in float64. Raises DataError for another shape.
        """
        array = host_array("from_batch: a table", table, "numbers (B, L)")
        if array.shape != self.shape:
            raise DataError(
                f"from_batch got shape {array.shape}, the batch has {self.shape}; give a value for each column: of "
                "values that begin at column 1, put a column of zeros first"
            )
        array = array.astype(np.float64) if array.dtype.kind == "f" else array
        return [array[row, start:stop] for row, start, stop in self.places]


def documents_of(batch: Mapping[str, Any], *, ignore: Collection[str] = ()) -> BatchDocuments:
    """Return the documents of a batch as collators make it: rows of token ids, padded or packed.

    >>> rows = documents_of({"input_ids": [[5, 6, 7, 0], [8, 9, 0, 0]], "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]]})
    >>> [len(d) for d in rows.documents], sum(d.targets for d in rows.documents)
    ([3, 2], 3)

    `input_ids`, `labels` (not shifted, −100 for none; without them all tokens are targets), `attention_mask` (1 at
    tokens, 0 at padding, left or right) and `position_ids` are (B, L), tensors on any device or arrays. Where
    `position_ids` begin again at 0 another document begins; without them a row is one. The first token of a document is
    never a target. Raises DataError for entries of other names, unless `ignore` lists them, for padding between tokens,
    for labels of padding, and for positions that do not count up from 0.
    """
    entries = _read_entries(batch, ignore)
    ids = entries["input_ids"]
    labels = entries.get("labels")
    positions = entries.get("position_ids")
    mask = entries.get("attention_mask")
    places = list[RowPlace]()
    for row in range(len(ids)):
        start, stop = (0, ids.shape[1]) if mask is None else _find_token_columns(row, mask[row])
        if labels is not None:
            outside = labels[row] != NO_TARGET
            outside[start:stop] = False
            if outside.any():
                raise DataError(
                    f"row {row} has labels in {plural(int(outside.sum()), 'column')} of padding, the first at column "
                    f"{int(outside.argmax())}; label padding −100"
                )
        begins = [start] if positions is None else _find_first_columns(row, positions[row], start, stop)
        ends = [*begins[1:], stop]
        places += [RowPlace(row, begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
    documents = tuple(
        Document(ids[row, start:stop], labels=None if labels is None else labels[row, start:stop])
        for row, start, stop in places
    )
    return BatchDocuments(documents, tuple(places), (ids.shape[0], ids.shape[1]))


def _read_entries(batch: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Integers]:
    """(B, L); `ignore` and values of None are left out, and masks may be booleans."""
    if not isinstance(batch, Mapping):
        raise DataError(f"a batch is {short_text(batch)}; give a mapping of input_ids, labels, attention_mask")
    batch = {name: value for name, value in batch.items() if value is not None and name not in ignore}
    if others := [str(name) for name in batch if name not in _READ]:
        raise DataError(
            f"a batch has {', '.join(others)}, which documents_of does not read (it reads {', '.join(_READ)}); if the "
            f"loss does not depend on them: documents_of(batch, ignore={others})"
        )
    if "input_ids" not in batch:
        raise DataError(f"a batch has {', '.join(batch) or 'nothing'}; give its input_ids (B, L)")
    entries = {name: host_array(f"{name} of a batch", value, "integers (B, L)") for name, value in batch.items()}
    shape = entries["input_ids"].shape
    for name, array in entries.items():
        kinds = "iub" if name == "attention_mask" else "iu"  # a mask may be booleans
        if array.ndim != 2 or array.shape != shape or array.dtype.kind not in kinds:
            raise DataError(
                f"{name} of a batch is {array.dtype} of shape {array.shape}, input_ids have shape {shape}; give "
                "integers (B, L)"
            )
    return {name: array.astype(np.int64) for name, array in entries.items()}


def _find_token_columns(row: int, mask: Integers) -> tuple[int, int]:
    """(0, 0) for a row without tokens"""
    if not np.isin(mask, (0, 1)).all():
        raise DataError(
            f"attention_mask of row {row} has values from {mask.min()} to {mask.max()}; give 1 at tokens and 0 at "
            "padding, and position_ids to part packed documents"
        )
    columns = np.flatnonzero(mask)
    if not len(columns):
        return 0, 0
    start = int(columns[0])
    stop = int(columns[-1]) + 1
    if stop - start != len(columns):
        hole = start + int(np.argmin(mask[start:stop]))
        raise DataError(
            f"attention_mask of row {row} is 0 at column {hole}, between tokens at columns {start} to {stop - 1}; pad "
            "left or right of a row's tokens"
        )
    return start, stop


def _find_first_columns(row: int, positions: Integers, start: int, stop: int) -> list[int]:
    """Documents begin at position 0; [start] for a row of padding."""
    inside = positions[start:stop]
    begins = np.flatnonzero(inside == 0)
    columns = np.arange(len(inside))
    # how many columns ago the document began
    expected = columns - np.maximum.accumulate(np.where(inside == 0, columns, 0))
    wrong = inside != expected
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(
            f"position_ids of row {row} have {inside[at]} at column {start + at}, where {expected[at]} should be; "
            "give positions that count up from 0 in each document"
        )
    return (begins + start).tolist() or [start]
