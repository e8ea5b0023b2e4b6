"""Cuts a stream of bytes into rows: the elements of a JSON list, or the records of a .csv. No value is parsed."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

# Messages show this many bytes of the beginning of a row that is too long.
SHOWN_BYTES = 240
_PIECE = 1 << 20  # bytes that are read at a time
_BLANKS = b" \t\r\n"
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_QUOTE_OR_LINE_END = re.compile(rb'["\n]')


class CutError(Exception):
    """Where a stream cannot be cut into rows, and why."""


class CutRow(NamedTuple):
    """A row of a stream: the position of its first byte, its bytes (only the first if it is too long), and its size."""

    position: int
    data: bytes
    size: int


class RowEnds(ABC):
    """Finds the byte behind each row, in pieces of a stream that follow each other."""

    # Blanks belong to no row where they stand around one.
    blanks: bytes
    skips_blank_rows = True
    is_whole = True  # whether a row may end where the stream does
    is_closed = False  # whether no row follows, whatever the stream still has

    @abstractmethod
    def find_ends(self, piece: bytes) -> Iterator[int]:
        """Yield the place in the next piece of each byte that ends a row, and belongs to none."""


class ListEnds(RowEnds):
    """The commas between elements of a list, from behind its opening bracket on, and its closing bracket."""

    blanks = _BLANKS
    skips_blank_rows = False
    is_whole = False

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # whether the piece before ended with a backslash in a string

    def find_ends(self, piece: bytes) -> Iterator[int]:
        at = int(self._is_escaped)
        self._is_escaped = False
        while True:
            if self._in_string:
                match = _IN_STRING.match(piece, at)
                at = len(piece) if match is None else match.end()
                if at >= len(piece) or piece[at : at + 1] == b"\\":
                    self._is_escaped = at < len(piece)
                    return
                self._in_string = False
                at += 1
            if (mark := _STRUCTURE.search(piece, at)) is None:
                return
            at = mark.end()
            character = mark.group()
            self._in_string = character == b'"'
            if self._depth == 0 and character in b",]":
                self.is_closed = character != b","
                yield mark.start()
                if self.is_closed:
                    return
            elif character in b"[{":
                self._depth += 1
            elif character in b"]}":
                # A row with one brace too many affects no other row.
                self._depth = max(0, self._depth - 1)


class RecordEnds(RowEnds):
    """The line ends of a .csv that stand in no quoted cell."""

    blanks = b"\r"

    def find_ends(self, piece: bytes) -> Iterator[int]:
        for mark in _QUOTE_OR_LINE_END.finditer(piece):
            if mark.group() == b'"':
                self.is_whole = not self.is_whole
            elif self.is_whole:
                yield mark.start()


def cut_rows(stream: BinaryIO, position: int, ends: RowEnds, most_bytes: int = 0) -> Iterator[CutRow]:
    """Yield the rows of a stream that stands at `position`, without blanks around them; blank rows of a .csv are none.

    Of a row of more than `most_bytes` (0: any) only the beginning is kept. Raises CutError where the stream ends inside
    a row, and where more than blanks follows a list.
    """
    parts = list[bytes]()
    size = 0
    count = 0
    while piece := stream.read(_PIECE):
        start = 0
        for end in ends.find_ends(piece):
            parts.append(piece[start:end])
            size += end - start
            start = end + 1
            row = _make_row(position, parts, size, most_bytes, ends.blanks)
            is_empty_list = ends.is_closed and count == 0
            if row.data or not (is_empty_list or ends.skips_blank_rows):
                yield row
                count += 1
            position += size + 1
            parts = []
            size = 0
        if ends.is_closed:
            while not (rest := piece[start:].strip(_BLANKS)) and (piece := stream.read(_PIECE)):
                start = 0
            if rest:
                raise CutError(f"behind its list of {count:,} rows stands {_quote(rest)}")
            return
        if not most_bytes or size <= most_bytes:
            parts.append(piece[start:])
        size += len(piece) - start
    row = _make_row(position, parts, size, most_bytes, ends.blanks)
    if not ends.is_whole:
        raise CutError(
            f"it ends inside row {count + 1}, which begins at byte {row.position:,}: it was cut off, or a quote or a "
            f"bracket is missing there: {_quote(row.data)}"
        )
    if row.data:
        yield row


def _make_row(position: int, parts: list[bytes], size: int, most_bytes: int, blanks: bytes) -> CutRow:
    data = b"".join(parts)
    is_cut = most_bytes > 0 and size > most_bytes
    row = data.lstrip(blanks)
    position += len(data) - len(row)
    row = row[:SHOWN_BYTES] if is_cut else row.rstrip(blanks)
    return CutRow(position, row, size if is_cut else len(row))


def _quote(data: bytes) -> str:
    return repr(data[:SHOWN_BYTES].decode("utf-8", "replace").strip()[:60])
