"""Rows of files become documents: tokens, lengths and targets of some rows at a time, in any process.

How a row becomes tokens is in `rows/`; files are read in order and written in `build_documents.py`.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import rename_columns
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.corpus.sources.row_chunks import RowChunk, parse_chunk
from longspan.data.array_files import NOTHING, OTHER_TOKEN, OWN_TOKEN, encode_labels
from longspan.data.image_table import PlacedImage
from longspan.data.manifest import SHORTEST
from longspan.errors import DataError, plural
from longspan.layout import Integers

SHOWN = 3  # bad rows that messages name
# Messages name at most this many columns, as each row may have another one.
MOST_KEYS = 100


class FileChunk(NamedTuple):
    """Some rows of file number `file`, which belongs to source number `source`."""

    source: int
    file: int
    chunk: RowChunk


class Notes:
    """Notes about some rows; `left_out` counts fields of LeftOut, `unseen` what a chat template leaves out."""

    def __init__(self) -> None:
        self.rows: int = 0
        # the largest token id, labels included, and the place of its first row
        self.largest: tuple[int, str] = -1, ""
        # how many numbers a document has as its label, and the place of its first row
        self.sizes: dict[int, str] = {}
        self.left_out: Counter[str] = Counter[str]()
        self.unseen: Counter[str] = Counter[str]()
        self.unread: Counter[str] = Counter[str]()  # keys that nothing reads
        self.bad: list[str] = []  # the first bad rows
        self.skipped: list[str] = []  # files that are not UTF-8
        self.ends: dict[str, int] = {}  # the special tokens with which answers end, and their ids

    def add_notes(self, other: "Notes") -> None:
        """Add the notes of later rows. Where only the first are kept (`largest`, `sizes`, `bad`), earlier ones stay."""
        self.rows += other.rows
        self.largest = max(self.largest, other.largest, key=lambda pair: pair[0])
        self.sizes = {**other.sizes, **self.sizes}
        self.left_out.update(other.left_out)
        self.unseen.update(other.unseen)
        self.unread.update(other.unread)
        if len(self.unread) > MOST_KEYS:
            self.unread = Counter(dict(self.unread.most_common(MOST_KEYS)))
        self.bad += other.bad[: SHOWN - len(self.bad)]
        self.skipped += other.skipped
        self.ends |= other.ends


class EncodedDocuments(NamedTuple):
    """The documents of some rows: `ids` and `codes` end to end (T,), other fields with one value per document (D,).

    `positions` are those of rows in files, `hashes` of the texts before they were cut. Without `codes` every token is
    its own label. `images` count documents from 0. `numbers` are the labels of documents, or their pairs' margins, end
    to end.
    """

    ids: npt.NDArray[Any]
    codes: npt.NDArray[Any] | None
    lengths: Integers
    targets: Integers
    files: Integers
    positions: Integers
    hashes: Integers
    notes: Notes
    images: Sequence[PlacedImage] = ()
    numbers: Sequence[float] = ()


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes documents of rows, of at most `longest` tokens (0: any), whose ids have the numpy type `dtype`.

    `encodings` has the encoding of each source's rows. A bad row is an error, or with `skip_bad` counted.
    """

    encodings: tuple[RowEncoding, ...]
    longest: int
    dtype: str
    skip_bad: bool = False

    def encode_chunks(self, chunks: Sequence[FileChunk]) -> EncodedDocuments:
        """Encode the rows of chunks in order. Raises DataError for the first bad row, unless bad rows are skipped.

        A text that is not UTF-8 is only noted.
        """
        batch = _BatchDocuments(self)
        for source, group in groupby(chunks, key=lambda chunk: chunk.source):
            encoding = self.encodings[source]
            rows = list[Row]()
            # Each row has the file that it is from, and its position there.
            places = list[tuple[int, int]]()
            for file_chunk in group:
                try:
                    for position, row in parse_chunk(file_chunk.chunk):
                        batch.notes.rows += 1
                        if isinstance(row, BadRow):
                            batch.add_bad_row(row)
                        else:
                            rows.append(rename_columns(row, encoding.settings.columns))
                            places.append((file_chunk.file, position))
                except UnicodeDecodeError:
                    # The file of a text has no other rows.
                    batch.notes.skipped.append(file_chunk.chunk.name)
            good_rows = set[int]()  # a conversation that is split gives several samples
            for sample in encoding.encode(rows):
                if isinstance(sample, BadRow):
                    batch.add_bad_row(sample)
                    continue
                if sample.row not in good_rows:
                    good_rows.add(sample.row)
                    batch.notes.unread.update(encoding.unread_columns(rows[sample.row].values))
                # The counts are fields of LeftOut, except for "others".
                unseen_counts = sample.unseen._asdict()
                batch.notes.unseen.update(unseen_counts.pop("others"))
                batch.notes.left_out.update(unseen_counts)
                batch.notes.ends.update(sample.ends)
                batch.add_sample(sample, places[sample.row], rows[sample.row].where)
        return batch.collect_documents()


class _BatchDocuments:
    """Collects the documents and notes of one batch of rows."""

    def __init__(self, encoder: DocumentEncoder) -> None:
        self._encoder = encoder
        self._ids = list[npt.NDArray[Any]]()
        self._codes = list[npt.NDArray[Any] | None]()
        self._facts = list[tuple[int, int, int, int, int]]()  # length, targets, file, position, hash
        self._images = list[PlacedImage]()
        self._numbers = list[float]()
        self.notes = Notes()

    def add_sample(self, sample: Sample, place: tuple[int, int], where: str) -> None:
        """Cut a sample into documents and collect them; one whose ids, images or lengths do not fit is a bad row.

        `place` is its row's file and position, `where` the row in words. A sample with `stops`, whose documents are
        scored or compared, is cut there; any other one at the length of the longest document.
        """
        if reason := self._unfit_sample_text(sample):
            self.add_bad_row(BadRow(where, reason))
            return
        ids = sample.ids
        codes = None if sample.labels is None else encode_labels(ids, sample.labels)
        ids_and_labels = ids if sample.labels is None else np.concatenate([ids, sample.labels])
        self.notes.largest = max(
            self.notes.largest, (int(ids_and_labels.max(initial=-1)), where), key=lambda entry: entry[0]
        )
        file, position = place
        if sample.stops:
            pieces = [slice(start, stop) for start, stop in pairwise((0, *sample.stops))]
            self.notes.sizes.setdefault(len(sample.numbers), where)
        else:
            uncut = [(image.start, image.stop) for image in sample.images]
            pieces = cut_into_documents(len(ids), codes, self._encoder.longest, self.notes.left_out, uncut)
        text_hash = _text_hash(sample)
        for piece in pieces:
            number = len(self._facts)
            for image in (image for image in sample.images if piece.start <= image.start < piece.stop):
                moved_image = image._replace(start=image.start - piece.start, stop=image.stop - piece.start)
                self._images.append(PlacedImage(number, moved_image, position))
            document_ids = ids[piece]
            document_codes = None if codes is None else codes[piece].copy()
            self._numbers += sample.numbers
            if document_codes is None:  # then every token but the first is a target, or the one score
                targets = 1 if sample.stops else len(document_ids) - 1
            else:
                targets = int((document_codes[1:] != NOTHING).sum())
                # The first token is never predicted. With this code, codes that have no other value are not stored.
                document_codes[0] = OWN_TOKEN
            self._ids.append(document_ids)
            self._codes.append(document_codes)
            self._facts.append((len(document_ids), targets, file, position, text_hash))

    def _unfit_sample_text(self, sample: Sample) -> str:
        """The text is "" if the sample can become documents."""
        ids = sample.ids
        largest_id = np.iinfo(self._encoder.dtype).max
        if ids.size and not (ids.min() >= 0 and ids.max() <= largest_id):
            return f"token ids {ids.min()} to {ids.max()}; give ids from 0 to {largest_id}"
        most_tokens = self._encoder.longest
        largest_image = max((image.stop - image.start for image in sample.images), default=0)
        if most_tokens and largest_image > most_tokens:
            return (
                f"an image takes {largest_image} tokens: max_document_tokens is {most_tokens}, and an image is not "
                "cut; raise it, or set it to 0"
            )
        if not sample.stops:
            return ""
        lengths = np.diff(sample.stops, prepend=0).tolist()
        if most_tokens and max(lengths) > most_tokens:
            return (
                f"a document has {max(lengths)} tokens, max_document_tokens is {most_tokens}, and one that is scored, "
                "or compared with another, is not cut; raise it, or set it to 0"
            )
        if min(lengths) < SHORTEST:
            return f"a document has {plural(min(lengths), 'token')}; give {SHORTEST} or more"
        return ""

    def add_bad_row(self, row: BadRow) -> None:
        """Count a row that gives no document. Raises DataError for it unless bad rows are skipped, or it is
        `masked`.
        """
        if row.masked:
            self.notes.left_out["masked_rows"] += 1
            return
        if not self._encoder.skip_bad:
            raise DataError(f"{row.where}: {row.reason}")
        self.notes.left_out["bad_rows"] += 1
        if len(self.notes.bad) < SHOWN:
            self.notes.bad.append(f"{row.where}: {row.reason}")

    def collect_documents(self) -> EncodedDocuments:
        """Return all that was collected, end to end.

        Codes have one byte each unless labels name other tokens; if all are OWN_TOKEN there are none.
        """
        codes = None
        if any(code is not None and code.any() for code in self._codes):
            pairs = zip(self._codes, self._ids, strict=True)
            codes = np.concatenate([np.zeros(len(ids), np.int64) if code is None else code for code, ids in pairs])
            codes = codes.astype(np.uint8 if codes.max() < OTHER_TOKEN else np.int32)
        ids = np.concatenate([np.zeros(0, np.int64), *self._ids]).astype(self._encoder.dtype)
        table = np.array(self._facts, dtype=np.int64).reshape(-1, 5)
        lengths, targets, files, positions, hashes = (column.copy() for column in table.T)
        return EncodedDocuments(
            ids, codes, lengths, targets, files, positions, hashes, self.notes, self._images, self._numbers
        )


def _text_hash(sample: Sample) -> int:
    images = [(image.grid, image.bytes) for image in sample.images]
    digest = hashlib.blake2b(sample.ids.tobytes() + repr(images).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def cut_into_documents(
    length: int,
    codes: Integers | None,
    longest: int,
    counts: Counter[str],
    uncut: Sequence[tuple[int, int]] = (),
) -> list[slice]:
    """Cut a row of `length` tokens into documents of at most `longest` tokens (0: one document).

    What is cut or lost is added to `counts`, by fields of LeftOut. A part of fewer than SHORTEST tokens is no document,
    nor is one whose `codes` name no target after its first token. Each of the `uncut` spans (start, stop), ascending
    and none longer than `longest`, stays in one part.
    """
    step = longest or max(length, 1)
    pieces = list[slice]()
    start = 0
    while start < length:
        stop = min(start + step, length)
        # The part ends before a span inside which it would end.
        stop = next((span_start for span_start, span_stop in uncut if start < span_start < stop < span_stop), stop)
        if stop - start >= SHORTEST:
            pieces.append(slice(start, stop))
        start = stop
    # masked parts are counted by themselves
    lost_tokens = length - sum(piece.stop - piece.start for piece in pieces)
    if codes is not None:
        with_targets = [piece for piece in pieces if (codes[piece][1:] != NOTHING).any()]
        counts.update(masked_parts=len(pieces) - len(with_targets))
        pieces = with_targets
    if length > step:
        counts.update(cut_texts=1, cut_tokens=length, cut_documents=len(pieces))
    elif length < SHORTEST:
        counts.update(short_texts=1)
    counts.update(lost_tokens=lost_tokens)
    return pieces
