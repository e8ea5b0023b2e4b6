"""Rows of files become documents: tokens, lengths and targets of some rows at a time, in any process.

How a row becomes tokens is in `rows/`; how files are read in order and written is in `builder.py`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.corpus.chunk import Chunk, chunk_rows
from longspan.corpus.rows.formats import rename_columns
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.data.documents import NOTHING, OTHER_TOKEN, OWN_TOKEN, encode_labels
from longspan.data.images import PlacedImage, SampleImage
from longspan.data.manifest import SHORTEST
from longspan.errors import DataError, LongspanError
from longspan.launch.worker import Worker, next_request
from longspan.layout import Integers

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding


SHOWN = 3  # bad rows that messages name


class FileChunk(NamedTuple):
    """Some rows of file number `file`, which belongs to source number `source`."""

    source: int
    file: int
    chunk: Chunk


class Notes:
    """Notes about some rows: their number, their largest token id, counts of what is left out (fields of LeftOut),
    names of special tokens in them, names of images that are plain text, what a chat template leaves out, the first bad
    rows, and files that are not UTF-8."""

    def __init__(self) -> None:
        self.rows = 0
        self.largest: tuple[int, str] = -1, ""  # the largest token id, labels included, and the place of its first row
        self.left_out: Counter[str] = Counter[str]()
        self.special: Counter[str] = Counter[str]()
        self.names_as_text: Counter[str] = Counter[str]()
        self.unseen: Counter[str] = Counter[str]()
        self.bad, self.skipped = list[str](), list[str]()

    def add_notes(self, other: "Notes") -> None:
        """Add the notes about further rows."""
        self.rows += other.rows
        self.largest = max(self.largest, other.largest, key=lambda pair: pair[0])
        self.left_out.update(other.left_out)
        self.special.update(other.special)
        self.names_as_text.update(other.names_as_text)
        self.unseen.update(other.unseen)
        self.bad += other.bad[: SHOWN - len(self.bad)]
        self.skipped += other.skipped


class Encoded(NamedTuple):
    """The documents of some rows: `ids` and `codes` end to end (T,), other fields with one value per document (D,).

    `positions` are the places of the documents' rows in their files. `codes` are None if every token is predicted as
    itself. `images` count documents from 0.
    """

    ids: npt.NDArray[Any]
    codes: npt.NDArray[Any] | None
    lengths: Integers
    targets: Integers
    files: Integers
    positions: Integers
    notes: Notes
    images: Sequence[PlacedImage] = ()


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes documents of rows, of at most `longest` tokens (0: any), whose ids have the numpy type `dtype`.

    `encodings` has the encoding of each source's rows. A bad row is an error, or with `skip_bad` counted.
    """

    encodings: "tuple[RowEncoding, ...]"
    longest: int
    dtype: str
    skip_bad: bool = False

    def encode_chunks(self, pieces: Sequence[FileChunk]) -> Encoded:
        """Encode the rows of these chunks in order. Raises DataError for a bad row, unless bad rows are skipped."""
        batch = _BatchDocuments(self)
        for source, group in groupby(pieces, key=lambda piece: piece.source):
            rows, places = list[Row](), list[tuple[int, int]]()
            for piece in group:
                for position, row in batch.read_rows(piece):
                    if isinstance(row, BadRow):
                        batch.add_bad_row(row)
                    else:
                        rows.append(row)
                        places.append((piece.file, position))
            batch.add_documents(self.encodings[source], rows, places)
        return batch.collect_documents()


class _BatchDocuments:
    """Collects the documents and notes of one batch of rows."""

    def __init__(self, encoder: DocumentEncoder) -> None:
        self._encoder = encoder
        self._ids, self._codes = list[npt.NDArray[Any]](), list[npt.NDArray[Any] | None]()
        self._facts = list[tuple[int, int, int, int]]()  # length, targets, file, position
        self._images = list[PlacedImage]()
        self._notes = Notes()

    def read_rows(self, piece: FileChunk) -> Iterator[tuple[int, Row | BadRow]]:
        """Yield the rows of a chunk with their positions; a text that is not UTF-8 has none and is noted."""
        try:
            for position, row in chunk_rows(piece.chunk):
                self._notes.rows += 1
                yield position, row
        except UnicodeDecodeError:
            self._notes.skipped.append(piece.chunk.name)

    def add_documents(self, encoding: "RowEncoding", rows: Sequence[Row], places: Sequence[tuple[int, int]]) -> None:
        """Add the documents of rows, which are at these places (file, position), and note what their texts name."""
        rows = [rename_columns(row, encoding.settings.columns) for row in rows]
        if encoding.kind == "text":
            texts = (row.values.get("text") for row in rows)
            self._notes.special.update(encoding.tokenizer.count_special_tokens(t for t in texts if isinstance(t, str)))
        self._notes.names_as_text.update(encoding.names_as_text(rows))
        for sample in encoding.encode(rows):
            if isinstance(sample, BadRow):
                self.add_bad_row(sample)
                continue
            counts = sample.unseen._asdict()
            self._notes.unseen.update(counts.pop("others"))
            self._notes.left_out.update(counts)
            self._add_sample(sample, places[sample.row], rows[sample.row].where)

    def _add_sample(self, sample: Sample, place: tuple[int, int], where: str) -> None:
        """`place` is the number of the row's file, and the row's position there; `where` names the row in messages. A
        sample is counted as a bad row if the type of tokens cannot hold one of its ids, or if an image takes more
        tokens than a document may have. Without codes (`encode_labels`) every token but the first is a target.
        """
        ids, codes = sample.ids, encode_labels(sample.ids, sample.labels)
        largest_id = np.iinfo(self._encoder.dtype).max
        if ids.size and not (ids.min() >= 0 and ids.max() <= largest_id):
            self.add_bad_row(BadRow(where, f"token ids {ids.min()} to {ids.max()}; give ids from 0 to {largest_id}"))
            return
        uncut = [(image.start, image.stop) for image in sample.images]
        most_tokens = self._encoder.longest
        if most_tokens and (largest_span := max((stop - start for start, stop in uncut), default=0)) > most_tokens:
            reason = f"max_document_tokens is {most_tokens}, and an image is not cut; raise it, or set it to 0"
            self.add_bad_row(BadRow(where, f"an image takes {largest_span} tokens: {reason}"))
            return
        ids_and_labels = ids if sample.labels is None else np.concatenate([ids, sample.labels])
        self._notes.largest = max(self._notes.largest, (int(ids_and_labels.max(initial=-1)), where), key=lambda x: x[0])
        file, position = place
        for piece in cut_row(len(ids), codes, most_tokens, self._notes.left_out, uncut):
            images = (image for image in sample.images if piece.start <= image.start < piece.stop)
            self._images += (  # len(self._facts) is the number of this document, whose facts are added below
                PlacedImage(len(self._facts), _shift_image(image, -piece.start), position) for image in images
            )
            document_ids, document_codes = ids[piece], None if codes is None else codes[piece].copy()
            targets = len(document_ids) - 1
            if document_codes is not None:
                targets = int((document_codes[1:] != NOTHING).sum())
                document_codes[0] = OWN_TOKEN  # never predicted; so that codes with no other value need not be stored
            self._ids.append(document_ids)
            self._codes.append(document_codes)
            self._facts.append((len(document_ids), targets, file, position))

    def add_bad_row(self, row: BadRow) -> None:
        """Count a row that gives no document. Raises DataError unless the row is masked or bad rows are skipped."""
        if row.masked:
            self._notes.left_out["masked_rows"] += 1
            return
        if not self._encoder.skip_bad:
            raise DataError(f"{row.where}: {row.reason}")
        self._notes.left_out["bad_rows"] += 1
        if len(self._notes.bad) < SHOWN:
            self._notes.bad.append(f"{row.where}: {row.reason}")

    def collect_documents(self) -> Encoded:
        """Return all documents that were added; their codes have one byte each unless labels name other tokens.

        Without codes, or if all of them are OWN_TOKEN (0), every token is predicted as itself.
        """
        codes = None
        if any(code is not None and code.any() for code in self._codes):
            pairs = zip(self._codes, self._ids, strict=True)
            codes = np.concatenate([np.zeros(len(ids), np.int64) if code is None else code for code, ids in pairs])
            codes = codes.astype(np.uint8 if codes.max() < OTHER_TOKEN else np.int32)
        ids = np.concatenate([np.zeros(0, np.int64), *self._ids]).astype(self._encoder.dtype)
        table = np.array(self._facts, dtype=np.int64).reshape(-1, 4)
        lengths, targets, files, positions = (column.copy() for column in table.T)
        return Encoded(ids, codes, lengths, targets, files, positions, self._notes, self._images)


def _shift_image(image: SampleImage, by: int) -> SampleImage:
    return image._replace(start=image.start + by, stop=image.stop + by)


def cut_row(
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
    pieces = [piece for piece in _cut_outside_spans(length, step, uncut) if piece.stop - piece.start >= SHORTEST]
    lost_tokens = length - sum(piece.stop - piece.start for piece in pieces)  # masked parts are counted by themselves
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


def _cut_outside_spans(length: int, step: int, uncut: Sequence[tuple[int, int]]) -> list[slice]:
    """Cut `length` tokens into parts of at most `step` tokens; a part that would end inside a span ends before it."""
    parts, start = list[slice](), 0
    while start < length:
        stop = min(start + step, length)
        stop = next((a for a, b in uncut if start < a < stop < b), stop)
        parts.append(slice(start, stop))
        start = stop
    return parts


IN_FLIGHT_BYTES = 64 << 20  # of rows that are sent and not yet taken back; more only where one batch is larger

Batch = Sequence[FileChunk]


def encode_batches(encoder: DocumentEncoder, batches: Iterable[Batch], workers: int) -> Iterator[tuple[Batch, Encoded]]:
    """Yield each batch with its documents, in order.

    They are encoded by `workers` processes, or by this process if `workers` is 0 or 1. Raises DataError for a bad row
    that is not left out, and if a process ended.
    """
    if workers <= 1:
        for batch in batches:
            yield batch, encoder.encode_chunks(batch)
        return
    with _Encoders(encoder, workers) as pool:
        yield from pool.encode_in_order(batches)


class _Encoders:
    """A context with worker processes, and as many threads, each of which waits for one worker at a time."""

    def __init__(self, encoder: DocumentEncoder, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenizing")
        self._workers = [_Encoder(encoder) for _ in range(count)]
        self._idle = SimpleQueue[_Encoder]()
        for worker in self._workers:
            self._idle.put(worker)
        self._most_batches = 2 * count  # in flight: one that each worker encodes, and one that waits for it

    def __enter__(self) -> "_Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, then the threads: a thread that waits for a worker returns only once the worker ended."""
        for worker in self._workers:
            worker.end_process()
        self._threads.shutdown(cancel_futures=True)

    def encode_in_order(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """A batch of more than IN_FLIGHT_BYTES is sent once no other is in flight."""
        in_flight, bytes_in_flight = deque[tuple[Batch, int, Future[Encoded]]](), 0
        for batch in batches:
            size = sum(len(piece.chunk.data) for piece in batch)
            while in_flight and (len(in_flight) >= self._most_batches or bytes_in_flight + size > IN_FLIGHT_BYTES):
                oldest_batch, oldest_size, future = in_flight.popleft()
                bytes_in_flight -= oldest_size
                yield oldest_batch, future.result()
            in_flight.append((batch, size, self._threads.submit(self._encode_by_idle_worker, batch)))
            bytes_in_flight += size
        while in_flight:
            oldest_batch, _, future = in_flight.popleft()
            yield oldest_batch, future.result()

    def _encode_by_idle_worker(self, batch: Batch) -> Encoded:
        worker = self._idle.get()
        try:
            return worker.encode_batch(batch)
        finally:
            self._idle.put(worker)


class _Encoder:
    """A worker process, as its parent uses it; it computes in one thread, as workers take all cores."""

    def __init__(self, encoder: DocumentEncoder) -> None:
        environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # Without a terminal's signals: an interrupted parent ends its workers itself.
        self._worker = Worker(serve_batches, environment=environment, own_session=True)
        self._worker.connection.send(encoder)

    def encode_batch(self, batch: Batch) -> Encoded:
        try:
            self._worker.connection.send(batch)
            answer = self._worker.connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenizes ended (status {self._worker.process.wait()}); where memory is short use "
                "fewer cores (taskset), each of which has one"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end_process(self) -> None:
        self._worker.end()
        self._worker.connection.close()


def serve_batches(connection: "Connection[Any, Any]", parent: int) -> None:
    """Encode the batches that come through `connection`, as a worker, until none comes or process `parent` is gone.

    The encoder comes first. Errors of rows are sent back as answers.
    """
    encoder: DocumentEncoder = connection.recv()
    while (batch := next_request(connection, parent)) is not None:
        try:
            answer: Any = encoder.encode_chunks(batch)
        except LongspanError as error:
            answer = error
        connection.send(answer)
