"""What a step reads as a document: token ids, labels and numbers in memory.

A step takes the length of a document and indexes it with an array of positions: a list, an array or a tensor of token
ids will do. A document may also have these members, which a rank calls with the positions of its rows:

- `labels(positions)`: (n,) the token id to predict at each position, −100 for none; by default the position's own
  token. As in Hugging Face's `labels` they are not shifted, and position 0 is never predicted.
- `token_values(positions)`: numbers (n,) by name of the tokens at these positions. `weights` multiply losses.
- `likeliest(positions)`: a table (n, k + 1) of a teacher's likeliest tokens (`likeliest.py`), None without one.
- `targets`: how many positions after 0 have a label; every rank needs this number without reading the document.
"""

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from longspan.data.likeliest import Table, check_table
from longspan.errors import DataError
from longspan.layout import Integers
from longspan.layout.partition import NO_TARGET
from longspan.plain_text import short_text


@runtime_checkable
class Labelled(Protocol):
    """A document in which not every token is a target."""

    @property
    def targets(self) -> int: ...

    def labels(self, positions: Integers) -> Integers: ...


@runtime_checkable
class Valued(Protocol):
    """A document whose tokens have numbers."""

    def token_values(self, positions: Integers) -> Mapping[str, npt.NDArray[np.float64]]: ...


class Document:
    """Token ids (n,) of one document in memory, with its targets and with numbers for a loss.

    >>> chat = Document([5, 7, 9, 2], loss_mask=[False, False, True, True])
    >>> len(chat), chat.targets
    (4, 2)
    >>> answer = Document([5, 7, 9, 2], labels=[-100, -100, 9, 2], weights=[0, 0, 1, 0.5], advantage=-0.3)

    `loss_mask` marks the targets, or `labels` as Hugging Face's, −100 for none; the first token is never one. `weights`
    multiply the losses of tokens. Other keywords are numbers of the document, or of each of its tokens, which a loss of
    one's own reads by their names. `parent` is the number, in the step, of a document whose tokens come before these,
    as `share_prefixes` gives it. Raises DataError for arrays of another length and for values that are no numbers.
    """

    ahead: int = 0  # tokens behind the last one of a shared prefix, which depths of multi-token prediction read
    _likeliest: Table | None = None

    def __init__(
        self,
        ids: Any,
        *,
        labels: Any = None,
        loss_mask: Any = None,
        weights: Any = None,
        parent: int = -1,
        **values: Any,
    ) -> None:
        if type(parent) is not int or parent < -1:
            raise DataError(f"parent of a document is {parent!r}; give the number of a document of the step, or -1")
        self.parent: int = parent
        self._ids = integer_array("ids", ids)
        if labels is not None and loss_mask is not None:
            raise DataError("a document has labels and a loss_mask; give one of them: −100 in labels masks a token")
        self._labels = self._ids  # every token is a target
        if labels is not None:
            self._labels = integer_array("labels", labels)
        elif loss_mask is not None:
            mask = host_array("loss_mask of a document", loss_mask)
            if mask.ndim == 1 and len(mask) != len(self._ids):
                raise DataError(f"a loss_mask has {len(mask)} values for {len(self._ids)} token ids; give one each")
            if mask.ndim != 1 or not np.isin(mask, (0, 1)).all():
                raise DataError(
                    f"a loss_mask is {mask.dtype} of shape {mask.shape}; give a 0 or a 1 for each token: what counts "
                    "by parts is weights="
                )
            self._labels = np.where(mask, self._ids, NO_TARGET)
        columns = values if weights is None else {"weights": weights, **values}
        self._values = self._read_values(columns)
        if len(self._labels) != len(self._ids):
            raise DataError(
                f"a document has {len(self._labels)} labels for {len(self._ids)} token ids; give one each"
            )

    def __len__(self) -> int:
        return len(self._ids) - self.ahead

    def __getitem__(self, positions: Any) -> Any:
        return self._ids[positions]

    @property
    def ids(self) -> Integers:
        """The token ids (n,)."""
        return self._ids

    def labels(self, positions: Integers | None = None) -> Integers:
        """Return the token id to predict at each position, −100 for none: at these (n,), or at all of the document."""
        return self._labels if positions is None else self._labels[positions]

    def with_values(self, **values: Any) -> "Document":
        """Return this document with more numbers, `weights` too: each one of the document, or one for each token.

        >>> answer = Document([5, 6, 7]).with_values(old_log_probs=[0.0, -0.25, -1.5])

        Token ids and labels are shared, not copied. A name that the document has gets the new numbers. Raises DataError
        as Document does, and for ids and labels.
        """
        if fixed := sorted({"ids", "labels", "loss_mask"} & values.keys()):
            raise DataError(
                f"with_values got {', '.join(fixed)}, which are no numbers of a loss; make a Document of other ids or "
                "labels: Document(document.ids, labels=…)"
            )
        document = copy(self)
        document._values = {**self._values, **self._read_values(values)}
        return document

    def with_likeliest(self, table: Table) -> "Document":
        """Return this document with a teacher's likeliest tokens, a table (n, k + 1) as `likeliest_tokens` gives it.

        >>> document = document.with_likeliest(tables.of(3))  # doctest: +SKIP

        A Distillation reads them in place of a teacher. Nothing is copied. Raises DataError for another table.
        """
        document = copy(self)
        document._likeliest = check_table(table, len(self._ids), "token ids")
        return document

    def likeliest(self, positions: Integers) -> Table | None:
        """Return the rows (n, k + 1) of the table of likeliest tokens at these positions; None without a table."""
        return None if self._likeliest is None else self._likeliest[positions]

    def part(self, start: int, stop: int, parent: int = -1, ahead: int = 0) -> "Document":
        """Return tokens `start` to `stop` as a document that continues `parent`; arrays are views, its first token is
        predicted by none. Depths of multi-token prediction read `ahead` tokens behind them.
        """
        part = copy(self)
        # This document may have counted its targets already.
        vars(part).pop("targets", None)
        part.parent = parent
        part.ahead = ahead
        held = slice(start, stop + ahead)
        part._ids = self._ids[held]
        part._labels = self._labels[held]
        part._values = {name: value[held] if value.ndim else value for name, value in self._values.items()}
        part._likeliest = None if self._likeliest is None else self._likeliest[held]
        return part

    def token_values(self, positions: Integers) -> Mapping[str, npt.NDArray[np.float64]]:
        """Return numbers (n,) of the tokens at these positions, by name; a number of the document is repeated."""
        return {
            name: value[positions] if value.ndim else np.full(len(positions), value)
            for name, value in self._values.items()
        }

    @cached_property
    def targets(self) -> int:
        """How many tokens are predicted."""
        return int((self._labels[1:] != NO_TARGET).sum())

    def _read_values(self, values: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float64]]:
        """Copies: one number of the document (), or one for each of its tokens (n,)."""
        length = len(self._ids)
        arrays = dict[str, npt.NDArray[np.float64]]()
        for name, value in values.items():
            try:
                array = host_array(f"{name!r} of a document", value).astype(np.float64)
            except (TypeError, ValueError) as error:
                # A DataError is a ValueError too, and says more.
                if isinstance(error, DataError):
                    raise
                raise DataError(
                    f"{name!r} of a document is {short_text(value)}; give a number, or one for each token"
                ) from error
            if array.ndim > 1 or (array.ndim == 1 and len(array) != length):
                raise DataError(
                    f"{name!r} of a document has shape {array.shape}, the document {length} tokens; give one number, "
                    "or one for each token"
                )
            if not np.isfinite(array).all():
                raise DataError(f"{name!r} of a document has values that are not finite; give finite numbers")
            arrays[name] = array
        return arrays


def count_targets(document: Any) -> int:
    """Count the tokens that a document predicts: those that it says itself, or all but the first."""
    if isinstance(document, Labelled):
        return int(document.targets)
    return max(len(document) - 1, 0)


def host_array(name: str, values: Any, advice: str = "one number, or one for each token") -> npt.NDArray[Any]:
    """Return values as an array on the host, which may share their memory; tensors of floating point come in float64,
    as numpy has no bfloat16.

    Raises DataError for what is no array: it calls the values `name`, "ids of a document" say, and says to give
    `advice`.
    """
    if hasattr(values, "detach"):  # a tensor; torch is not imported here, so that help texts are printed without it
        values = values.detach()
        return (values.double() if values.is_floating_point() else values).cpu().numpy()
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is {short_text(values)}, which is no array: {error}; give {advice}") from error


def integer_array(name: str, values: Any) -> Integers:
    """Return integers (n,) of a document, a copy. Raises DataError, which calls them `name`, for anything else."""
    array = host_array(f"{name} of a document", values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):  # numpy takes an empty list for floats
        raise DataError(f"{name} of a document are {array.dtype} of shape {array.shape}; give integers (n,)")
    return array.astype(np.int64)
