"""Documents whose tokens are not stored (data.cache "none"): a row is read and encoded again when a rank reads it.

`open_corpus` opens any corpus, with stored tokens or without.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longspan.corpus.row_files import RowFile, row_file
from longspan.corpus.rows.sample import BadRow, RowSettings
from longspan.data.documents import OWN_TOKEN, Corpus, encode_labels
from longspan.data.manifest import Manifest, Record, SourceLines, map_array
from longspan.errors import DataError
from longspan.layout import Integers

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding

KEPT_TOKENS = 1 << 22  # of the rows encoded last, which stay in memory
_OPEN_FILES = 16
MakeEncodings = Callable[[], "tuple[RowEncoding, ...]"]


def open_corpus(folder: Path) -> Corpus:
    """Open the corpus in a folder, of a run or of documents; tokens that are not stored are made when they are read.

    Raises DataError if the folder is missing or damaged.
    """
    return Corpus(folder, _make_tokens)


def _make_tokens(folder: Path, manifest: Manifest, tokenizer_folder: Path, record: Record) -> "StreamedTokens":
    """Return the tokens of the documents in a folder, made by the run's tokenizer and settings (`record`)."""

    def make_encodings() -> "tuple[RowEncoding, ...]":
        """Make the encoding of each source, by the settings of the record."""
        from longspan.corpus.rows.encoding import RowEncoding  # it imports transformers
        from longspan.corpus.tokenizer import load_tokenizer

        # the run's folder need not have the generation settings of the folder that the tokenizer was read from
        tokenizer = replace(load_tokenizer(tokenizer_folder), generation_ends=record.generation_ends)
        settings = RowSettings(**record.row_settings)
        return tuple(RowEncoding(kind, tokenizer, settings) for kind in manifest.kinds)  # type: ignore[arg-type]

    return StreamedTokens(folder, manifest, make_encodings)


class EncodedRow(NamedTuple):
    """The tokens of a row, and their codes."""

    ids: Integers
    codes: Integers


class StreamedTokens:
    """The tokens of documents, made from their rows, whose places are in the documents' folder (a `TokenSource`)."""

    def __init__(self, folder: Path, manifest: Manifest, make_encodings: MakeEncodings) -> None:
        """Map the folder's columns, one value a document: file, position of the row, and first token in the row.

        With several sources one more column has the number of each document's source. `make_encodings` is
        called at the first read.
        """
        self._sources = SourceLines(folder)
        self._positions, self._starts = map_array(folder / "positions.npy"), map_array(folder / "starts.npy")
        self._origins = map_array(folder / "origins.npy")
        several = len(manifest.kinds) > 1
        self._source_of = map_array(folder / "source_of.npy") if several else None
        self._manifest, self._make_encodings = manifest, make_encodings
        self._encodings: tuple[RowEncoding, ...] | None = None
        self._files = OrderedDict[int, RowFile]()
        self._rows = OrderedDict[tuple[int, int], EncodedRow]()
        self._kept_tokens = 0

    def ids(self, document: int, positions: Integers) -> Integers:
        """Return the tokens of a document at these positions."""
        return self._read_row(document).ids[positions + int(self._starts[document])]

    def codes(self, document: int, positions: Integers) -> Any:
        """Return the codes of a document's tokens at these positions."""
        return self._read_row(document).codes[positions + int(self._starts[document])]

    def _read_row(self, document: int) -> EncodedRow:
        """Return the tokens of a document's row; the rows used last stay in memory, KEPT_TOKENS of them."""
        file_and_position = int(self._origins[document]), int(self._positions[document])
        if file_and_position in self._rows:
            self._rows.move_to_end(file_and_position)
            return self._rows[file_and_position]
        row = self._rows[file_and_position] = self._encode_row(document, *file_and_position)
        self._kept_tokens += len(row.ids)
        while self._kept_tokens > KEPT_TOKENS and len(self._rows) > 1:
            self._kept_tokens -= len(self._rows.popitem(last=False)[1].ids)
        return row

    def _encode_row(self, document: int, file: int, position: int) -> EncodedRow:
        """Encode a row again: return the tokens of all its samples end to end; a document is a slice of them.

        A turn of a conversation in which no token is a target gave no document when rows were counted, and has no
        tokens here. Raises DataError if the row has become a bad one.
        """
        row = self._open_file(file).row_at(position)
        source = 0 if self._source_of is None else int(self._source_of[document])
        samples = [row] if isinstance(row, BadRow) else self._encoding(source).encode([row])
        ids, codes = list[Integers](), list[Integers]()
        for sample in samples:
            if isinstance(sample, BadRow):
                if sample.masked and len(samples) > 1:  # one turn of several
                    continue
                raise DataError(f"{sample.where} is another row than when the run began: {sample.reason}")
            sample_codes = encode_labels(sample.ids, sample.labels)
            ids.append(sample.ids)
            codes.append(np.full(len(sample.ids), OWN_TOKEN) if sample_codes is None else sample_codes)
        return EncodedRow(np.concatenate(ids), np.concatenate(codes))

    def _encoding(self, source: int) -> "RowEncoding":
        """Return the encoding of a source's rows.

        Raises DataError if tokenizer or settings are not those that the corpus was made with.
        """
        if self._encodings is None:
            self._encodings = self._make_encodings()
            if tuple(encoding.digest for encoding in self._encodings) != self._manifest.encodings:
                raise DataError("the tokenizer of the run is another one than when its corpus was counted")
        return self._encodings[source]

    def _open_file(self, number: int) -> RowFile:
        """Open a source file; the _OPEN_FILES used last stay open. Raises DataError if the file changed."""
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
