"""Processes that encode pieces of a corpus side by side; their results come back in order.

They are fresh interpreters, started without `multiprocessing.Process`: they share no torch, threads or devices with a
rank, and a daemonic rank may start them too. A worker ends when its connection closes, as when this process is killed.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from longspan.corpus.store.document_encoder import DocumentEncoder, Encoded, FileChunk
from longspan.errors import DataError, LongspanError

IN_FLIGHT_BYTES = 64 << 20  # of rows that are sent and not yet taken back; more only where one batch is larger
_START = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from longspan.corpus.store.workers import serve
serve(connection)
"""

Batch = Sequence[FileChunk]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encoded_batches(
    encoder: DocumentEncoder, batches: Iterable[Batch], workers: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch with its documents, in order, encoded by so many processes; by this one where it is one.

    Raises DataError for a row that gives no document, and where a process ended.
    """
    if workers <= 1:
        for batch in batches:
            yield batch, encoder.encode(batch)
        return
    with _Workers(encoder, workers) as pool:
        yield from pool.map(batches)


class _Workers:
    """A context with worker processes, and for each a thread that talks to one."""

    def __init__(self, encoder: DocumentEncoder, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenizing")
        self._all = [_Worker(encoder) for _ in range(count)]
        self._idle = SimpleQueue[_Worker]()
        for worker in self._all:
            self._idle.put(worker)
        self._most = 2 * count

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)

    def map(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        waiting, sent = deque[tuple[Batch, int, Future[Encoded]]](), 0
        for batch in batches:
            size = sum(len(piece.chunk.data) for piece in batch)
            while waiting and (len(waiting) >= self._most or sent + size > IN_FLIGHT_BYTES):
                done, bytes_done, result = waiting.popleft()
                sent -= bytes_done
                yield done, result.result()
            waiting.append((batch, size, self._threads.submit(self._encode, batch)))
            sent += size
        while waiting:
            done, _, result = waiting.popleft()
            yield done, result.result()

    def _encode(self, batch: Batch) -> Encoded:
        worker = self._idle.get()
        try:
            return worker.encode(batch)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, seen from here."""

    def __init__(self, encoder: DocumentEncoder) -> None:
        self._connection, there = Pipe()
        command = [sys.executable, "-c", _START, str(there.fileno())]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment, start_new_session=True
        )
        there.close()
        self._connection.send([str(Path(folder).absolute()) for folder in sys.path])
        self._connection.send(encoder)

    def encode(self, batch: Batch) -> Encoded:
        try:
            self._connection.send(batch)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenizes ended (status {self._process.wait()}); where memory is short set "
                "data.workers to fewer processes"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, also in the middle of a batch."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._connection.close()


def serve(connection: "Connection[Any, Any]") -> None:
    """What a worker does: encode batches until its connection closes."""
    encoder: DocumentEncoder = connection.recv()
    while True:
        try:
            batch: Batch = connection.recv()
        except EOFError:
            return
        try:
            answer: Any = encoder.encode(batch)
        except LongspanError as error:
            answer = error
        connection.send(answer)
