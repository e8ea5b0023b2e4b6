"""Sums over the rows of an evaluation as one rank sees them, and over all ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.comm import World, to_device
from longspan.evaluation.metrics import Bucket, EvaluationOptions, Mean, TargetRows, check_columns, check_sum_and_count
from longspan.layout import Floats, Integers
from longspan.train.loss import cut_into_chunks, row_log_probs, rows_per_chunk
from longspan.train.reading.read_rows import WEIGHTS, LocalBatch, documents_and_positions, target_rows

FIRST_EDGE = 128  # positions and lengths below it are one bucket; the others are cut at powers of two


class _MeasuredRows(NamedTuple):
    """Rows of a micro-batch that have a target: documents and positions (n,) on the host, the others on the device."""

    documents: Integers
    positions: Integers
    losses: list[Tensor]
    hits: list[Tensor]
    columns: list[Tensor]  # (2 M, n) values and counts of metrics of documents


class RowSums:
    """Adds up losses, hits and metrics of this rank's rows; `measure` is given to the passes of a step.

    Nothing waits for the device before `collect_measured_sums`. An error of a user's metric is kept in `error`, and the
    passes go on, so that this rank does not leave the others in a collective.
    """

    def __init__(self, lengths: Sequence[int], options: EvaluationOptions, device: torch.device) -> None:
        """Begin all sums at 0, for documents of these lengths; metrics are added up on the device."""
        self.error: Exception | None = None
        self._options = options
        self._edges = bucket_edges(max(lengths, default=1))
        self._measured_rows: list[_MeasuredRows] = []
        self._losses: Floats = np.zeros(len(lengths))  # of each document
        self._positions: Floats = np.zeros((2, len(self._edges)))  # of each bucket: losses, rows
        self._bytes = self._hits = self._rows = 0  # of targets: bytes of text, right predictions, number
        self._metrics = torch.zeros(len(options.metrics), 2, dtype=torch.float64, device=device)
        self._document_metrics: Floats = np.zeros((len(options.document_metrics), 2, len(lengths)))

    def measure(self, batch: LocalBatch, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum the losses of a micro-batch's hidden states (T, D), from which `head` makes logits.

        Hits and metrics wait on the device for `collect_measured_sums`; a hit is a row whose target is the likeliest.
        """
        rows = target_rows(batch)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        if not len(rows):
            head(hidden[:1])  # its parameters are gathered by all slots together
            return total
        documents, positions = (values[rows] for values in documents_and_positions(batch.shard))
        targets = batch.labels[rows]
        measured = _MeasuredRows(documents, positions, [], [], [])
        weights = batch.values[WEIGHTS][rows] if WEIGHTS in batch.values else None
        for chunk in self._compute_target_rows(hidden, head, (rows, documents, positions, targets), weights):
            measured.losses.append(chunk.losses)
            measured.hits.append(chunk.logits.argmax(-1) == chunk.targets)
            measured.columns.append(self._add_metrics(chunk))
            total += chunk.losses.sum()
        self._measured_rows.append(measured)
        self._rows += len(rows)
        if (token_bytes := self._options.token_bytes) is not None:
            self._bytes += int(token_bytes[targets].sum())
        return total

    def _compute_target_rows(
        self,
        hidden: Tensor,
        head: Any,
        columns: tuple[Integers, Integers, Integers, Integers],
        row_weights: Floats | None,
    ) -> Iterator[TargetRows]:
        """Compute logits and losses of the n rows that have a target; yield some rows at a time, so that logits fit.

        `columns` are the rows' indices in `hidden`, documents, positions and targets, and `row_weights` multiply
        losses: (n,) each, on the host. The size of the hidden states stands in for a vocabulary that a head of another
        class does not know.
        """
        rows, documents, positions, targets = (to_device(values, hidden.device) for values in columns)
        weights = None if row_weights is None else to_device(row_weights, hidden.device)
        size = self._options.loss_chunk_rows or rows_per_chunk(
            getattr(head, "vocabulary", hidden.shape[-1]), hidden.dtype, hidden.device.type
        )
        for part in cut_into_chunks(len(rows), size):
            logits, ids = head(hidden.index_select(0, rows[part])), targets[part]
            losses = -row_log_probs(logits, ids).double()
            if weights is not None:
                losses = losses * weights[part]
            yield TargetRows(documents[part], positions[part], ids, losses, logits)

    def _add_metrics(self, rows: TargetRows) -> Tensor:
        """Add the metrics of some rows to their sums, and compute the M metrics of documents of these n rows.

        Returns the values and counts of the metrics of documents, to be added up later: columns (2 M, n). After an
        error no metric is computed any more, and the columns that are missing stay 0.
        """
        count, metrics = len(rows.losses), self._options.document_metrics
        columns = rows.losses.new_zeros(len(metrics), 2, count)
        if self.error is not None:
            return columns.flatten(0, 1)
        try:
            for sums, (name, metric) in zip(self._metrics, self._options.metrics.items(), strict=True):
                for i, value in enumerate(check_sum_and_count(name, metric(rows))):
                    sums[i] += value
            for column, (name, metric) in zip(columns, metrics.items(), strict=True):
                column.copy_(check_columns(name, metric(rows), count))
        except Exception as error:  # of the user's function
            self.error = error
        return columns.flatten(0, 1)

    def collect_measured_sums(self) -> None:
        """Bring what was measured to the host and add it up there, in the order in which it was measured."""
        for measured in self._measured_rows:
            losses = torch.cat(measured.losses).cpu().numpy()
            self._hits += int(torch.cat(measured.hits).sum())
            np.add.at(self._losses, measured.documents, losses)
            columns = torch.cat(measured.columns, -1).cpu().numpy()
            for sums, column in zip(self._document_metrics.reshape(-1, len(self._losses)), columns, strict=True):
                np.add.at(sums, measured.documents, column)
            bucket = np.searchsorted(self._edges, measured.positions, side="right") - 1
            np.add.at(self._positions[0], bucket, losses)
            self._positions[1] += np.bincount(bucket, minlength=len(self._edges))
        self._measured_rows.clear()

    def sum_over_ranks(self, world: World, *, failed: bool = False) -> "Totals":
        """Sum over all ranks; every rank gets the sums.

        `failed`: this rank has an error, which all then learn of.
        """
        counts_here = world.coordinates.tp == 0  # all tensor-parallel ranks of a slot have the same sums
        numbers = [float(self._rows), float(self._hits), float(self._bytes)]
        metrics, document_metrics = self._metrics.cpu().numpy(), self._document_metrics
        parts = [self._losses, self._positions.ravel(), metrics.ravel(), document_metrics.ravel(), np.array(numbers)]
        flat = np.concatenate([*(part * counts_here for part in parts), [float(failed)]])
        flat = world.control.sum_of_arrays(flat, "sums of an evaluation")
        documents, positions, metrics, document_metrics, numbers, failures = np.split(
            flat, np.cumsum([part.size for part in parts])
        )
        return Totals(
            documents=documents,
            positions=positions.reshape(2, -1),
            edges=self._edges,
            metrics=metrics.reshape(-1, 2),
            document_metrics=document_metrics.reshape(self._document_metrics.shape),
            rows=int(numbers[0]),
            hits=int(numbers[1]),
            bytes=int(numbers[2]),
            failures=int(failures[0]),
        )


class Totals(NamedTuple):
    """Sums over all ranks: losses of documents (D,), losses and rows of buckets of positions (2, B), metrics (M, 2),
    and metrics of documents (M, 2, D)."""

    documents: Floats
    positions: Floats
    edges: Integers
    metrics: Floats
    document_metrics: Floats
    rows: int
    hits: int
    bytes: int
    failures: int

    def bucket_by_position(self, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        """Return the loss of rows at positions in each bucket, without buckets that no document reaches.

        A bucket's `documents` counts the documents that have a row with a target in the bucket or behind it.
        """
        targets = np.asarray(lengths) - 1  # of each document: the rows at positions 0 to targets - 1 predict them
        documents_reaching = [int((targets > edge).sum()) for edge in self.edges.tolist()]
        loss, rows = self.positions
        return _make_buckets(
            self.edges, [Mean(*pair) for pair in zip(loss.tolist(), rows.tolist(), strict=True)], documents_reaching
        )

    def bucket_by_length(self, lengths: Sequence[int], targets: Sequence[int]) -> tuple[Bucket, ...]:
        """Return the loss of the documents in each bucket of lengths that has any.

        `targets` has the number of targets of each document.
        """
        bucket = np.searchsorted(self.edges, np.asarray(lengths, dtype=np.int64), side="right") - 1
        size = len(self.edges)
        losses = np.bincount(bucket, weights=self.documents, minlength=size).tolist()
        rows = np.bincount(bucket, weights=np.asarray(targets), minlength=size).tolist()
        counts = np.bincount(bucket, minlength=size).tolist()
        return _make_buckets(self.edges, [Mean(*pair) for pair in zip(losses, rows, strict=True)], counts)


def bucket_edges(longest: int) -> Integers:
    """Return where buckets begin, for positions and lengths up to `longest`: 0, 128, 256, 512, …"""
    doublings = max(0, math.ceil(math.log2(max(longest, 1) / FIRST_EDGE)) + 1)
    return np.array([0, *(FIRST_EDGE << i for i in range(doublings) if FIRST_EDGE << i <= longest)], dtype=np.int64)


def _make_buckets(edges: Integers, losses: Sequence[Mean], documents: Sequence[int]) -> tuple[Bucket, ...]:
    """Make the buckets that begin at these edges, without those that hold no document.

    Each ends before the next begins; the last one at twice its start, or at FIRST_EDGE if it is the only one.
    """
    starts = edges.tolist()
    lasts = [*(start - 1 for start in starts[1:]), 2 * max(starts[-1], FIRST_EDGE // 2) - 1]
    buckets = (Bucket(*values) for values in zip(starts, lasts, losses, documents, strict=True))
    return tuple(bucket for bucket in buckets if bucket.documents)
