"""Processes that encode pieces of a corpus side by side; their results come back in order.

How a worker starts and ends is `launch/worker.py`'s.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from longspan.corpus.store.document_encoder import DocumentEncoder, Encoded, FileChunk
from longspan.errors import DataError, LongspanError
from longspan.launch.worker import Worker, next_request

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
        """Yield batches in order with their documents; only some batches and bytes are in flight at a time.

        A batch of more than IN_FLIGHT_BYTES is sent once no other is in flight.
        """
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
        """Have an idle worker encode a batch, and return its documents."""
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
        """Send a batch to the worker and return its documents. Raises the error that the worker sent, if any."""
        try:
            self._worker.connection.send(batch)
            answer = self._worker.connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenizes ended (status {self._worker.process.wait()}); where memory is short set "
                "data.workers to fewer processes"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end_process(self) -> None:
        """End the process, also in the middle of a batch."""
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
