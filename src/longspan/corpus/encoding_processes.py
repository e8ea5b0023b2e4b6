"""Encodes batches of rows in several processes, and gives their documents back in order.

What a process does with a batch is in `document_encoder.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from longspan.corpus.document_encoder import DocumentEncoder, EncodedDocuments, FileChunk
from longspan.errors import DataError, LongspanError
from longspan.launch.worker import Worker, next_request

# Rows of this many bytes are sent and not yet taken back; more only where one batch is larger.
IN_FLIGHT_BYTES = 64 << 20
Batch = Sequence[FileChunk]


def encode_batches(
    encoder: DocumentEncoder, batches: Iterable[Batch], workers: int
) -> Iterator[tuple[Batch, EncodedDocuments]]:
    """Yield each batch with its documents, in order, encoded by `workers` processes (0 and 1: by this one).

    In flight are two batches for each worker: one that it encodes, and one that waits. A batch of more than
    IN_FLIGHT_BYTES is sent once no other is in flight. An error of a batch is raised where its documents would be
    yielded.
    """
    if workers <= 1:
        for batch in batches:
            yield batch, encoder.encode_chunks(batch)
        return
    in_flight = deque[tuple[Batch, int, Future[EncodedDocuments]]]()
    bytes_in_flight = 0
    with _worker_processes(encoder, workers) as encode:
        for batch in batches:
            size = sum(len(piece.chunk.data) for piece in batch)
            while in_flight and (len(in_flight) >= 2 * workers or bytes_in_flight + size > IN_FLIGHT_BYTES):
                oldest_batch, oldest_size, future = in_flight.popleft()
                bytes_in_flight -= oldest_size
                yield oldest_batch, future.result()
            in_flight.append((batch, size, encode(batch)))
            bytes_in_flight += size
        while in_flight:
            oldest_batch, _, future = in_flight.popleft()
            yield oldest_batch, future.result()


@contextmanager
def _worker_processes(
    encoder: DocumentEncoder, count: int
) -> Iterator[Callable[[Batch], Future[EncodedDocuments]]]:
    """There are as many threads, each of which waits for one worker at a time. A future raises DataError where its
    process ended."""
    # The workers take all cores together.
    environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    # Without a terminal's signals: an interrupted parent ends its workers itself.
    workers = [Worker(serve_batches, environment=environment, own_session=True) for _ in range(count)]
    threads = ThreadPoolExecutor(count, thread_name_prefix="tokenizing")
    idle = SimpleQueue[Worker]()
    for worker in workers:
        worker.send(encoder)
        idle.put(worker)

    def encode_by_idle_worker(batch: Batch) -> EncodedDocuments:
        worker = idle.get()
        try:
            worker.send(batch)
            answer = worker.connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenizes ended (status {worker.process.wait()}); where memory is short use "
                "fewer cores (taskset), each of which has one"
            ) from error
        finally:
            idle.put(worker)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    try:
        yield lambda batch: threads.submit(encode_by_idle_worker, batch)
    finally:  # the workers first: a thread that waits for one returns only once it ended
        for worker in workers:
            worker.end()
            worker.connection.close()
        threads.shutdown(cancel_futures=True)


def serve_batches(connection: "Connection[Any, Any]", parent: int) -> None:
    """Receive an encoder, then batches, and send back the documents of each, or the LongspanError that it raised.

    Ends once no batch comes, or process `parent` is gone.
    """
    encoder: DocumentEncoder = connection.recv()
    while (batch := next_request(connection, parent)) is not None:
        try:
            answer: Any = encoder.encode_chunks(batch)
        except LongspanError as error:
            answer = error
        connection.send(answer)
