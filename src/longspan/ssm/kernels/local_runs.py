"""Runs of rows that a rank holds, one after another, and rows picked by numbers that the host knows."""

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.layout.segments import Flags, Integers

CHUNK = 64  # rows of a chunk of the kernels of flash-linear-attention


class LocalRuns:
    """Runs of rows, one after another: `lengths` (R,) of each; `shared` (R,), whether its document has further runs.

    Each is cut into chunks of CHUNK rows, of which the last may be shorter; N chunks in all. Tensors are on `device`,
    made once for all layers.
    """

    def __init__(self, lengths: Integers, device: torch.device, shared: Flags | None = None) -> None:
        self.lengths: Integers = lengths
        self.device: torch.device = device
        self.shared: Flags = np.zeros(len(lengths), dtype=bool) if shared is None else shared
        # `delta.cut_into_pieces` fills it, by the number of heads.
        self.pieces: dict[int, Any] = {}
        self.rows: int = int(lengths.sum())
        self._chunks = -(-lengths // CHUNK)

    @property
    def starts(self) -> Integers:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def ends(self) -> Tensor:
        """(R + 1,) int64: the first row of each run, and the number of all rows (`cu_seqlens`)."""
        return self._to_device(np.concatenate([[0], np.cumsum(self.lengths)]))

    @cached_property
    def chunk_indices(self) -> Tensor:
        """(N, 2) int64: the run of each chunk, and its number in the run."""
        return self._to_device(np.stack([self._run_of_chunk, self._place_of_chunk], 1))

    @cached_property
    def chunk_ends(self) -> Tensor:
        """(R + 1,) int64: the first chunk of each run among all chunks, and N."""
        return self._to_device(np.concatenate([[0], np.cumsum(self._chunks)]))

    @cached_property
    def run_of_chunk(self) -> Tensor:
        """(N,) int64: the run that each chunk is of."""
        return self._to_device(self._run_of_chunk)

    @cached_property
    def chunk_of_row(self) -> Tensor:
        """(T,) int64: the chunk that each row is in."""
        return self._to_device(np.repeat(np.arange(len(self._first_rows)), self._sizes))

    @cached_property
    def last_rows(self) -> Tensor:
        """(N,) int64: the last row of each chunk."""
        return self._to_device(self._first_rows + self._sizes - 1)

    @cached_property
    def padded_rows(self) -> Tensor | None:
        """The row at each place of chunks padded to full size: (N · CHUNK,) int64; None if all chunks are full.

        A place without a row has the number of rows, at which callers append a row of zeros.
        """
        if (self._sizes == CHUNK).all():
            return None
        rows = self._first_rows[:, None] + np.arange(CHUNK)
        return self._to_device(np.where(np.arange(CHUNK) < self._sizes[:, None], rows, self.rows).reshape(-1))

    @property
    def chunks(self) -> int:
        return len(self._first_rows)

    @cached_property
    def _run_of_chunk(self) -> Integers:
        return np.repeat(np.arange(len(self.lengths)), self._chunks)

    @cached_property
    def _place_of_chunk(self) -> Integers:
        """(N,), the number of each chunk in its run."""
        return np.arange(int(self._chunks.sum())) - np.repeat(np.cumsum(self._chunks) - self._chunks, self._chunks)

    @cached_property
    def _first_rows(self) -> Integers:
        """(N,), among all rows."""
        return self.starts[self._run_of_chunk] + self._place_of_chunk * CHUNK

    @cached_property
    def _sizes(self) -> Integers:
        return np.minimum(self.lengths[self._run_of_chunk] - self._place_of_chunk * CHUNK, CHUNK)

    def _to_device(self, rows: Integers) -> Tensor:
        return to_device(np.ascontiguousarray(rows), self.device)


def pick_rows(x: Tensor, rows: Integers) -> Tensor:
    """Return x[rows]; a view where the rows are consecutive, so that callers only read it."""
    if _are_consecutive(rows):
        return x[int(rows[0]) : int(rows[-1]) + 1]
    return x.index_select(0, index_on_device(rows, x.device))


def put_rows(into: Tensor, rows: Integers, values: Tensor) -> None:
    """Write into[rows] ← values, in place."""
    if _are_consecutive(rows):
        into[int(rows[0]) : int(rows[-1]) + 1].copy_(values)
    else:
        into.index_copy_(0, index_on_device(rows, into.device), values)


def _are_consecutive(rows: Integers) -> bool:
    return len(rows) > 0 and bool((np.diff(rows) == 1).all())


def index_on_device(rows: Integers, device: torch.device) -> Tensor:
    """Return row numbers as an int64 tensor on the device. Every layer uses the same few, so that each is
    copied once.
    """
    return _upload_index(np.ascontiguousarray(rows, dtype=np.int64).tobytes(), device)


@lru_cache(maxsize=1024)
def _upload_index(rows: bytes, device: torch.device) -> Tensor:
    """The bytes of an int64 array can be the key of the cache."""
    return to_device(np.frombuffer(rows, dtype=np.int64).copy(), device)
