"""A document with labels: which of its tokens are targets, how much each counts, and what a loss wants to know of it.

A step reads a document through its length and an array of positions; a list, an array or a tensor of token ids will do.
What has more to say has methods beside these, of which a rank asks for the positions that it holds:

- `labels(positions)`: (n,) the token id to predict at each position, or −100 where none is; by default its own token.
  They stand as in Hugging Face's `labels`: not shifted, and position 0 is never predicted.
- `token_values(positions)`: numbers (n,) by name of the tokens at these positions. `weights` multiply losses.
- `targets`: how many positions beyond 0 have a label, which every rank must know without reading the document.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError, shortened
from longspan.layout.packing import NO_TARGET

Rows = npt.NDArray[np.int64]


@runtime_checkable
class Labelled(Protocol):
    """A document of which not every token is a target."""

    @property
    def targets(self) -> int:
        """Positions beyond 0 that have a label."""
        ...

    def labels(self, positions: Rows) -> Rows:
        """The token id to predict at each position (n,), −100 where none is."""
        ...


@runtime_checkable
class Valued(Protocol):
    """A document whose tokens have numbers."""

    def token_values(self, positions: Rows) -> Mapping[str, npt.NDArray[np.float64]]:
        """Numbers (n,) of the tokens at these positions, by name."""
        ...


class Document:
    """Token ids (n,) of one document in memory, which of them are targets, and numbers that a loss is given.

    >>> chat = Document([5, 7, 9, 2], loss_mask=[False, False, True, True])
    >>> len(chat), chat.targets
    (4, 2)
    >>> answer = Document([5, 7, 9, 2], labels=[-100, -100, 9, 2], weights=[0, 0, 1, 0.5], advantage=-0.3)

    `loss_mask` says which tokens are targets; `labels` say so as Hugging Face's do, −100 for none, and may name other
    tokens. The first token is never one. `weights` multiply the losses of tokens. Other keywords are numbers of the
    document, or of each of its tokens, that a loss of one's own reads by their names. Raises DataError for arrays of
    another length and for what is no number.
    """

    def __init__(
        self, ids: Any, *, labels: Any = None, loss_mask: Any = None, weights: Any = None, **values: Any
    ) -> None:
        self._ids = _integers("ids", ids)
        if labels is not None and loss_mask is not None:
            raise DataError("a document has labels and a loss_mask; give one of them: −100 in labels masks a token")
        self._labels = self._ids
        if labels is not None:
            self._labels = _integers("labels", labels)
        elif loss_mask is not None:
            self._labels = np.where(_mask(loss_mask, len(self._ids)), self._ids, NO_TARGET)
        columns = values if weights is None else {"weights": weights, **values}
        self._values = {name: _numbers(name, value, len(self._ids)) for name, value in columns.items()}
        if len(self._labels) != len(self._ids):
            raise DataError(f"a document has {len(self._labels)} labels for {len(self._ids)} token ids; give one each")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, positions: Any) -> Any:
        return self._ids[positions]

    def labels(self, positions: Rows) -> Rows:
        """The token id to predict at each position (n,), −100 where none is."""
        return self._labels[positions]

    def token_values(self, positions: Rows) -> Mapping[str, npt.NDArray[np.float64]]:
        """The numbers of the tokens at these positions (n,), by name."""
        return {
            name: value[positions] if value.ndim else np.full(len(positions), value)
            for name, value in self._values.items()
        }

    @cached_property
    def targets(self) -> int:
        """How many tokens are predicted."""
        return int((self._labels[1:] != NO_TARGET).sum())


def targets_of(document: Any) -> int:
    """How many tokens of a document are targets: of one without labels all but the first."""
    return int(document.targets) if isinstance(document, Labelled) else max(len(document) - 1, 0)


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    """What a caller gave as an array on the host: tensors of any device and floating-point type, with a graph too."""
    if hasattr(values, "detach"):  # a tensor, known by what it can do: help texts are printed without torch
        values = values.detach()
        return (values.double() if values.is_floating_point() else values).cpu().numpy()
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} of a document is {shortened(values)}, which is no array: {error}; give one number, or one for "
            "each token"
        ) from error


def _integers(name: str, values: Any) -> Rows:
    array = _array(name, values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"{name} of a document are {array.dtype} of shape {array.shape}; give integers (n,)")
    return array.astype(np.int64)


def _mask(values: Any, length: int) -> npt.NDArray[np.bool_]:
    array = _array("loss_mask", values)
    if array.ndim == 1 and len(array) != length:
        raise DataError(f"a loss_mask has {len(array)} values for {length} token ids; give one each")
    if array.ndim != 1 or not np.isin(array, (0, 1)).all():
        raise DataError(
            f"a loss_mask is {array.dtype} of shape {array.shape}; give a 0 or a 1 for each token: what counts by "
            "parts is weights="
        )
    return array.astype(bool)


def _numbers(name: str, value: Any, length: int) -> npt.NDArray[np.float64]:
    try:
        array = _array(repr(name), value).astype(np.float64)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{name!r} of a document is {shortened(value)}; give a number, or one for each token"
        ) from error
    if array.ndim > 1 or (array.ndim == 1 and len(array) != length):
        raise DataError(
            f"{name!r} of a document has shape {array.shape}, the document {length} tokens; give one number, or one "
            "for each token"
        )
    if not np.isfinite(array).all():
        raise DataError(f"{name!r} of a document has values that are not finite; give finite numbers")
    return array
