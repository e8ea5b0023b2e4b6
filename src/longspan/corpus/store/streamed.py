"""Documents whose tokens are not stored: their rows are read and encoded again whenever a rank asks for them."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.corpus.formats.row_file import RowFile, row_file
from longspan.corpus.rows.sample import BadRow
from longspan.corpus.store.document_encoder import OWN_TOKEN, codes_of
from longspan.data.store.arrays import mapped
from longspan.data.store.manifest import Manifest, SourceLines
from longspan.errors import DataError

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding

KEPT_TOKENS = 1 << 22  # of rows that were encoded last
_OPEN_FILES = 16
Rows = npt.NDArray[np.int64]
Encodings = Callable[[], "tuple[RowEncoding, ...]"]


class EncodedRow(NamedTuple):
    """The tokens of one row, and their codes."""

    ids: Rows
    codes: Rows


class StreamedTokens:
    """The tokens of documents in a folder that says where their rows stand."""

    def __init__(self, folder: Path, manifest: Manifest, encodings: Encodings) -> None:
        self._sources = SourceLines(folder)
        self._positions, self._starts = mapped(folder / "positions.npy"), mapped(folder / "starts.npy")
        self._origins = mapped(folder / "origins.npy")
        several = len(manifest.kinds) > 1
        self._source_of = mapped(folder / "source_of.npy") if several else None
        self._manifest, self._make_encodings = manifest, encodings
        self._encodings: tuple[RowEncoding, ...] | None = None
        self._files = OrderedDict[int, RowFile]()
        self._rows = OrderedDict[tuple[int, int], EncodedRow]()
        self._kept = 0

    def ids(self, document: int, positions: Rows) -> Rows:
        """The tokens of a document at these positions."""
        return self._row(document).ids[positions + int(self._starts[document])]

    def codes(self, document: int, positions: Rows) -> Any:
        """Their codes."""
        return self._row(document).codes[positions + int(self._starts[document])]

    def _row(self, document: int) -> EncodedRow:
        place = int(self._origins[document]), int(self._positions[document])
        if place in self._rows:
            self._rows.move_to_end(place)
            return self._rows[place]
        row = self._rows[place] = self._encoded(document, *place)
        self._kept += len(row.ids)
        while self._kept > KEPT_TOKENS and len(self._rows) > 1:
            self._kept -= len(self._rows.popitem(last=False)[1].ids)
        return row

    def _encoded(self, document: int, file: int, position: int) -> EncodedRow:
        row = self._file(file).row_at(position)
        source = 0 if self._source_of is None else int(self._source_of[document])
        samples = [row] if isinstance(row, BadRow) else self._encoding(source).encode([row])
        ids, codes = list[Rows](), list[Rows]()
        for sample in samples:
            if isinstance(sample, BadRow):
                raise DataError(f"{sample.where} is another row than when the run began: {sample.reason}")
            code = codes_of(sample)
            ids.append(sample.ids)
            codes.append(np.full(len(sample.ids), OWN_TOKEN) if code is None else code)
        return EncodedRow(np.concatenate(ids), np.concatenate(codes))

    def _encoding(self, source: int) -> "RowEncoding":
        if self._encodings is None:
            self._encodings = self._make_encodings()
            if tuple(encoding.digest for encoding in self._encodings) != self._manifest.encodings:
                raise DataError("the tokenizer of the run is another one than when its corpus was counted")
        return self._encodings[source]

    def _file(self, number: int) -> RowFile:
        if number not in self._files:
            source = self._sources[number]
            path = Path(source.path)
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(f"cannot read {source.name} of the corpus ({path}): {error.strerror}") from error
            if (stat.st_size, stat.st_mtime_ns) != (source.bytes, source.modified_ns):
                raise DataError(
                    f"{source.name} of the corpus ({path}) changed since the run began; restore it, and start again"
                )
            self._files[number] = row_file(source.name, path)
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(number)
        return self._files[number]
