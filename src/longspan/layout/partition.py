"""Documents laid end to end, and who holds which of their rows: zigzag, contiguous, or listed by the caller.

A Partition is a value over integers. It keeps lengths, or runs, and expands them to rows on demand: asking one member
of a group of 1024 costs a few array operations over the documents. Not covered: who the members are (a plan's groups
name slots) and how rows travel between two partitions (`exchange.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import numpy as np

from longspan.errors import LayoutError
from longspan.layout.layout import check_degree
from longspan.layout.segments import (
    Integers,
    Segments,
    expand_runs,
    is_integer_type,
    join_runs,
    make_read_only,
    segments_from_runs,
)
from longspan.plain_text import excerpt

NO_TARGET = -100  # the label of a row that predicts nothing, as Hugging Face has it


def check_lengths(lengths: Iterable[object]) -> tuple[int, ...]:
    """Return document lengths as Python integers, each at least 1.

    >>> check_lengths(np.array([3, 1]))
    (3, 1)

    Takes any iterable of Python or numpy integers; it may be empty. Raises LayoutError, naming the index and the value,
    for what is not an integer (a bool, a float and NaN among them), zero or negative.
    """
    try:
        values = cast(list[int], lengths.tolist() if isinstance(lengths, np.ndarray) else list(lengths))
    except TypeError as error:
        raise LayoutError(f"lengths are {lengths!r}; give a sequence of integers, one per document") from error
    if not {*map(type, values)} <= {int} or min(values, default=1) < 1:
        for index, value in enumerate(values):
            if not is_integer_type(type(value)) or value < 1:
                raise LayoutError(
                    f"length {index} is {value!r} ({type(value).__name__}); a length is an integer number of rows, at "
                    "least 1: convert it with int(…) if it is whole, and leave empty documents out"
                )
    return tuple(map(int, values))


@dataclass(frozen=True, init=False, repr=False)
class Packing:
    """Documents laid end to end.

    >>> packing = Packing([3, 2])
    >>> packing.tokens, packing.cu_seqlens.tolist(), packing.positions.tolist()
    (5, [0, 3, 5], [0, 1, 2, 0, 1])

    The arrays are read-only and made on first use. Raises LayoutError for lengths that `check_lengths` refuses.
    """

    lengths: tuple[int, ...]

    def __init__(self, lengths: Iterable[object]) -> None:
        object.__setattr__(self, "lengths", check_lengths(lengths))

    def __reduce__(self) -> tuple[object, ...]:
        """Arrays made so far are left out."""
        return Packing, (self.lengths,)

    def __repr__(self) -> str:
        return f"Packing(lengths={excerpt(self.lengths)})"

    @property
    def tokens(self) -> int:
        """Rows of all documents: S."""
        return int(self.cu_seqlens[-1])

    @cached_property
    def cu_seqlens(self) -> Integers:
        """Where each document starts, and the end of the last: (documents + 1,) int64 from 0."""
        return _document_starts(self.lengths)

    @cached_property
    def positions(self) -> Integers:
        """Position of each row inside its document: (S,) int64."""
        return make_read_only(np.arange(self.tokens, dtype=np.int64) - self.cu_seqlens[self.document_of_row])

    @cached_property
    def document_of_row(self) -> Integers:
        """Index of the document that each row belongs to: (S,) int64."""
        return make_read_only(np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths))


def _document_starts(lengths: tuple[int, ...]) -> Integers:
    """(documents + 1,), the total last."""
    return make_read_only(np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]))


# 2^64 / golden ratio: its multiples modulo 2^64 lie evenly, whatever the stride.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
RECENT = 2  # members whose segments are kept: a ring asks for those of a member and of each other one in turn


class Partition(ABC):
    """Which rows each member of a group holds, in order. Rows are counted from 0 through the documents end to end.

    >>> shares = Partition.zigzag([8, 3], degree=2)
    >>> shares.counts, shares.rows(0).tolist(), shares.rows(1).tolist()
    ((6, 5), [0, 1, 6, 7, 8, 10], [2, 3, 4, 5, 9])

    Made by `zigzag`, `contiguous`, `from_rows` or `from_runs`; equal when made in the same way from the same numbers.
    Arrays that it gives out are int64 and read-only. A member outside the group raises LayoutError.
    """

    degree: int

    @staticmethod
    def zigzag(lengths: Iterable[object], degree: int) -> "Partition":
        """Cut each document into 2·degree chunks; member r holds chunk r, then chunk 2·degree−1−r.

        A document of L rows gives every member L // degree rows; its L % degree remaining rows go round the members, on
        from where the document before stopped. So members differ by at most one row in all, and none holds more than
        ceil(sum / degree). A member's n rows of a document are n // 2 in one chunk and the rest in the other; where
        n is odd, the members take the longer chunk at the late and at the early end in turn. If a row's work is
        position + 1 pairs, the work of members then differs by at most L + 1 pairs a document. Which member begins
        changes from document to document, so that these differences do not add up.
        """
        return _Zigzag(check_lengths(lengths), check_degree("degree", degree))

    @staticmethod
    def contiguous(lengths: Iterable[object], degree: int) -> "Partition":
        """Lay the documents end to end and cut them into one run of rows a member.

        Each holds sum(lengths) // degree rows, and the first sum(lengths) % degree members one more.
        """
        return _Contiguous(check_lengths(lengths), check_degree("degree", degree))

    @staticmethod
    def from_rows(rows_by_member: Iterable[Iterable[int]]) -> "Partition":
        """Make a partition of given rows: for each member an ordered list of row ids from 0.

        Any ids, none, or ids that other members or the same member hold too. Raises LayoutError for ids that are not
        integers or are negative, and where there is no member.
        """
        runs = list[Integers]()
        for member, rows in enumerate(rows_by_member):
            try:
                ids = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows))
            except TypeError as error:
                raise LayoutError(
                    f"the rows of member {member} are {rows!r}; give a list of row ids for each member"
                ) from error
            if len(ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0):
                raise LayoutError(
                    f"the rows of member {member} hold {excerpt(ids.tolist())}; row ids are integers from 0"
                )
            ids = ids.astype(np.int64)
            runs.append(join_runs(np.stack([ids, ids + 1], axis=1)))
        if not runs:
            raise LayoutError(
                "rows of 0 members are given; give one list of row ids, which may be empty, per member"
            )
        return _ListedPartition(tuple(runs), len(runs))

    @staticmethod
    def from_runs(runs_by_member: Iterable[Integers]) -> "Partition":
        """Make the partition of `from_rows` from each member's half-open runs of rows (runs, 2), in held order.

        >>> Partition.from_runs([np.array([[0, 3]]), np.array([[3, 5], [0, 1]])]).rows(1).tolist()
        [3, 4, 0]
        """
        runs = tuple(map(join_runs, runs_by_member))
        return _ListedPartition(runs, len(runs))

    @property
    @abstractmethod
    def counts(self) -> tuple[int, ...]:
        """How many rows each member holds."""

    @abstractmethod
    def runs(self, member: int) -> Integers:
        """Return the member's rows as half-open runs in held order, (runs, 2); runs that touch are one."""

    @abstractmethod
    def segments(self, member: int) -> Segments:
        """Return the member's runs inside their documents. Raises LayoutError for runs without documents."""

    def rows(self, member: int) -> Integers:
        """Return the member's row ids in held order."""
        runs = self.runs(member)
        return make_read_only(expand_runs(runs[:, 0], runs[:, 1]))

    def _check_member(self, member: int) -> None:
        if not 0 <= member < self.degree:
            raise LayoutError(
                f"member {member} is outside a group of {self.degree} (members 0 to {self.degree - 1})"
            )


@dataclass(frozen=True, repr=False)
class _LengthPartition(Partition):
    """A partition that follows only from the documents' lengths and the degree."""

    lengths: tuple[int, ...]
    degree: int

    @cached_property
    def _starts(self) -> Integers:
        return _document_starts(self.lengths)

    @property
    def counts(self) -> tuple[int, ...]:
        base, extra = divmod(sum(self.lengths), self.degree)
        return (base + 1,) * extra + (base,) * (self.degree - extra)

    @cached_property
    def _recent_segments(self) -> Callable[[int], Segments]:
        """The segments of the RECENT members that were last asked for are kept."""
        return lru_cache(RECENT)(self._make_segments)

    def segments(self, member: int) -> Segments:
        self._check_member(member)
        return self._recent_segments(member)

    @abstractmethod
    def _make_segments(self, member: int) -> Segments:
        """Make the member's runs inside their documents."""

    def runs(self, member: int) -> Integers:
        segments = self.segments(member)
        shift = self._starts[segments.document]
        concatenated = segments_from_runs(np.zeros_like(shift), segments.start + shift, segments.stop + shift)
        return make_read_only(np.stack([concatenated.start, concatenated.stop], axis=1))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.lengths, self.degree)

    def __repr__(self) -> str:
        kind = type(self).__name__.removeprefix("_").lower()
        return f"Partition.{kind}({excerpt(self.lengths)}, degree={self.degree})"


class _DocumentShares(NamedTuple):
    """How the rows of each document are dealt to the members; arrays over documents."""

    length: Integers
    base: Integers  # rows that every member gets
    extra: Integers  # rows beyond that, one each to the members from `first` on, cyclically
    first: Integers
    # 0: the first member with an odd number of rows takes its longer chunk at the late end; 1: early
    turn: Integers


@dataclass(frozen=True, repr=False)
class _Zigzag(_LengthPartition):
    """The partition of `Partition.zigzag`, made of two chunks of each document a member."""

    @cached_property
    def _document_shares(self) -> _DocumentShares:
        """Every member has `base` rows of a document, and `extra` members from `first` on one more. Of those with an
        odd number of rows, one chunk gets a row more: from one of them to the next, early and late in turn."""
        length = np.array(self.lengths, dtype=np.int64)
        base = length // self.degree
        extra = length % self.degree
        first = (np.cumsum(extra) - extra) % self.degree  # the member behind the last one that got an extra row
        # The highest bit of index · GOLDEN has no period. So differences between members do not add up, even where
        # the lengths of documents repeat.
        turn = (np.arange(len(length), dtype=np.uint64) * GOLDEN >> np.uint64(63)).astype(np.int64)
        return _DocumentShares(length, base, extra, first, turn)

    def _find_chunk_borders(self, member: int) -> tuple[Integers, Integers]:
        """Early chunks lie in the order of members from the document's start on, late ones in reverse up to its end. A
        chunk has half of its member's rows; an odd row goes to early and late in turn."""
        length, base, extra, first, turn = self._document_shares
        # Members before this one with an extra row: those from `first` on, and those reached past the last member.
        extras = np.clip(member - first, 0, extra) + np.clip(first + extra - self.degree, 0, member)
        rows = member * base + extras
        odd = np.where(base % 2 > 0, member - extras, extras)  # members before this one with an odd number of rows
        early = (rows - odd) // 2 + (odd + turn) // 2
        return early, length - (rows - early)

    def _make_segments(self, member: int) -> Segments:
        early_start, late_stop = self._find_chunk_borders(member)
        early_stop, late_start = self._find_chunk_borders(member + 1)  # the next member's lie between these
        document = np.repeat(np.arange(len(self.lengths), dtype=np.int64), 2)
        start = np.stack([early_start, late_start], axis=1).reshape(-1)
        stop = np.stack([early_stop, late_stop], axis=1).reshape(-1)
        return segments_from_runs(document, start, stop)


@dataclass(frozen=True, repr=False)
class _Contiguous(_LengthPartition):
    """The partition of `Partition.contiguous`: one run of rows a member through all documents."""

    def _border(self, member: int) -> int:
        base, extra = divmod(int(self._starts[-1]), self.degree)
        return member * base + min(member, extra)

    def _make_segments(self, member: int) -> Segments:
        begin = self._border(member)
        end = self._border(member + 1)
        # Documents that reach between the borders.
        touched = slice(
            int(np.searchsorted(self._starts, begin, side="right")) - 1, int(np.searchsorted(self._starts, end))
        )
        start, stop = self._starts[:-1][touched], self._starts[1:][touched]
        document = np.arange(len(self.lengths), dtype=np.int64)[touched]
        return segments_from_runs(document, np.maximum(begin - start, 0), np.minimum(end, stop) - start)


@dataclass(frozen=True, eq=False, repr=False)
class _ListedPartition(Partition):
    """A partition of any runs of rows, without documents."""

    member_runs: tuple[Integers, ...]
    degree: int

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(int((runs[:, 1] - runs[:, 0]).sum()) for runs in self.member_runs)

    def runs(self, member: int) -> Integers:
        self._check_member(member)
        return self.member_runs[member]

    def segments(self, member: int) -> Segments:
        raise LayoutError("a partition from rows knows no documents; use runs(member), or make it from lengths")

    @cached_property
    def _bytes_of_runs(self) -> tuple[bytes, ...]:
        return tuple(runs.tobytes() for runs in self.member_runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ListedPartition) and self._bytes_of_runs == other._bytes_of_runs

    def __hash__(self) -> int:
        return hash(self._bytes_of_runs)

    def __reduce__(self) -> tuple[object, ...]:
        return Partition.from_rows, ([self.rows(member) for member in range(self.degree)],)

    def __repr__(self) -> str:
        return f"Partition.from_rows({self.degree} members with {excerpt(self.counts)} rows)"
