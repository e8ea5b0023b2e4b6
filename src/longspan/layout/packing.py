"""Documents laid end to end: lengths, boundaries, positions and padding, on the host.

Not covered: which documents go into one micro-batch (`plan/`) and who holds their rows (`partition.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from longspan.errors import LayoutError
from longspan.layout.layout import check_degree, excerpt
from longspan.layout.segments import Integers, make_read_only

NO_TARGET = -100  # the label of a row that predicts nothing, as Hugging Face has it
_MOST_ROWS = 2**63 - 1  # the largest int64


def check_lengths(lengths: Iterable[object], *, what: str = "length") -> tuple[int, ...]:
    """Return document lengths as Python integers, each at least 1.

    >>> check_lengths(np.array([3, 1]))
    (3, 1)

    Takes any iterable of Python or numpy integers; it may be empty. Raises LayoutError, naming the index and the value,
    for what is not an integer (a bool, a float and NaN among them), zero or negative. `what` is the word for one entry.
    """
    values = _to_list(lengths, what)
    wrong = [kind for kind in set(map(type, values)) if not is_integer(kind)]
    if wrong:
        index = next(i for i, value in enumerate(values) if type(value) in wrong)
        _refuse_length(
            what, index, values[index], "a length is an integer number of rows: convert it with int(…) if it is whole"
        )
    integers = tuple(map(int, cast(list[int], values)))
    if integers and min(integers) < 1:
        index = next(i for i, value in enumerate(integers) if value < 1)
        _refuse_length(what, index, integers[index], "a document has at least 1 row: leave empty documents out")
    if sum(integers) > _MOST_ROWS:
        raise LayoutError(
            f"{len(integers)} lengths add up to {sum(integers)} rows; at most {_MOST_ROWS} can be counted"
        )
    return integers


def _to_list(lengths: Iterable[object], noun: str) -> list[object]:
    """`noun` is the word for one entry in messages."""
    if isinstance(lengths, np.ndarray):
        array = cast(NDArray[Any], lengths)
        if array.ndim != 1:
            raise LayoutError(f"{noun}s have shape {array.shape}; give one dimension, one {noun} per document")
        return cast(list[object], array.tolist())
    try:
        return list(lengths)
    except TypeError as error:
        raise LayoutError(f"{noun}s are {lengths!r}; give a sequence of integers, one per document") from error


def is_integer(kind: type) -> bool:
    """Return whether values of this type are counts: Python and numpy integers are, bools are not."""
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _refuse_length(noun: str, index: int, value: object, advice: str) -> NoReturn:
    raise LayoutError(f"{noun} {index} is {value!r} ({type(value).__name__}); {advice}")


@dataclass(frozen=True, init=False, repr=False)
class Packing:
    """Documents laid end to end, padded behind the last one to a multiple of rows.

    >>> packing = Packing([3, 2], pad_to_multiple=4)
    >>> packing.tokens, packing.padding, packing.cu_seqlens.tolist(), packing.positions.tolist()
    (5, 3, [0, 3, 5], [0, 1, 2, 0, 1])

    The arrays are read-only and made on first use; none of them counts the padding. Raises LayoutError for lengths that
    `check_lengths` refuses and for a multiple under 1.
    """

    lengths: tuple[int, ...]
    pad_to_multiple: int = 1

    def __init__(self, lengths: Iterable[object], pad_to_multiple: int = 1) -> None:
        """Check the values and store them as Python integers."""
        object.__setattr__(self, "lengths", check_lengths(lengths))
        object.__setattr__(self, "pad_to_multiple", check_degree("pad_to_multiple", pad_to_multiple))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the lengths and the multiple, without the arrays made so far."""
        return Packing, (self.lengths, self.pad_to_multiple)

    def __repr__(self) -> str:
        pad = f", pad_to_multiple={self.pad_to_multiple}" if self.pad_to_multiple > 1 else ""
        return f"Packing(lengths={excerpt(self.lengths)}{pad})"

    @property
    def tokens(self) -> int:
        """Rows of all documents, without padding: S."""
        return int(self.cu_seqlens[-1])

    @property
    def padding(self) -> int:
        """Rows behind the last document that make the whole a multiple of `pad_to_multiple`."""
        return -self.tokens % self.pad_to_multiple

    @cached_property
    def cu_seqlens(self) -> Integers:
        """Where each document starts, and the end of the last: (documents + 1,) int64 from 0."""
        return make_read_only(np.concatenate([[0], np.cumsum(np.array(self.lengths, dtype=np.int64))]))

    @cached_property
    def positions(self) -> Integers:
        """Position of each row inside its document: (S,) int64."""
        return make_read_only(np.arange(self.tokens, dtype=np.int64) - self.cu_seqlens[self.document_of_row])

    @cached_property
    def document_of_row(self) -> Integers:
        """Index of the document that each row belongs to: (S,) int64."""
        return make_read_only(np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths))


def find_runs(member: int, rows: Iterable[int]) -> Integers:
    """Find the runs of consecutive ids in a member's list of rows: (runs, 2), half-open (start, stop) in list order."""
    ids = _row_ids(member, rows)
    # A run opens where an id is not one more than the id before; -2 is one before no id, so the first id opens one.
    opens = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    closes = np.append(opens, len(ids))[1:] - 1
    return make_read_only(np.stack([ids[opens], ids[closes] + 1], axis=1))


def join_runs(member: int, runs: Integers) -> Integers:
    """Return the runs (start, stop) of a member, with runs that follow each other directly joined to one.

    Raises LayoutError for anything but non-empty runs from row 0 on.
    """
    if runs.ndim != 2 or runs.shape[1] != 2 or runs.dtype.kind not in "iu":
        raise LayoutError(
            f"the runs of member {member} are {runs.dtype} of shape {runs.shape}; give integers (runs, 2)"
        )
    wrong = (runs[:, 0] < 0) | (runs[:, 1] <= runs[:, 0])
    if wrong.any():
        start, stop = runs[wrong][0].tolist()
        raise LayoutError(f"member {member} has a run from row {start} to {stop}; runs are non-empty, from row 0 on")
    # The first run, if there is one, opens a joined run, and so does each that begins elsewhere than the last stopped.
    opens = np.flatnonzero(np.append([True] * (len(runs) > 0), runs[1:, 0] != runs[:-1, 1]))
    closes = np.append(opens, len(runs))[1:] - 1
    return make_read_only(np.stack([runs[opens, 0], runs[closes, 1]], axis=1).astype(np.int64))


def _row_ids(member: int, rows: object) -> Integers:
    if not isinstance(rows, Iterable):
        raise LayoutError(f"the rows of member {member} are {rows!r}; give a list of row ids for each member")
    array = cast(NDArray[Any], rows) if isinstance(rows, np.ndarray) else None
    if array is not None and array.ndim == 1 and array.dtype.kind in "iu":
        ids = array.astype(np.int64)  # millions of rows come as arrays
    else:
        ids = np.array(_list_row_ids(member, cast(Iterable[object], rows)), dtype=np.int64)
    if len(ids) and int(ids.min()) < 0:
        raise LayoutError(f"the rows of member {member} hold {int(ids.min())}; row ids are integers from 0")
    return ids


def _list_row_ids(member: int, rows: Iterable[object]) -> list[object]:
    values: list[object] = rows.tolist() if isinstance(rows, np.ndarray) else list(rows)
    wrong = sorted({kind.__name__ for kind in set(map(type, values)) if not is_integer(kind)})
    if wrong:
        raise LayoutError(f"the rows of member {member} hold {', '.join(wrong)}; row ids are integers from 0")
    return values
