"""Sums of an evaluation over rows that have a target: measured in its passes, added up over ranks, cut into buckets."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.comm import World
from longspan.data.scored_document import LABEL
from longspan.errors import EvaluationError, LongspanError
from longspan.evaluation.metrics import EvaluationOptions, Mean, TargetTokens, check_columns, check_sum_and_count
from longspan.layout import Floats, Integers
from longspan.train.log_probs import cut_into_chunks, row_scores, target_log_probs_and_gradient
from longspan.train.loss import rows_of_two_heads, rows_per_chunk
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch, target_rows
from longspan.train.terms.loss_tokens import BatchTargets, LossFunction

if TYPE_CHECKING:
    from longspan.train.terms.distillation import TeacherComparison


class Bucket(NamedTuple):
    """The loss of rows at positions `first` to `last`, or of documents of `first` to `last` tokens."""

    first: int
    last: int
    loss: Mean
    documents: int


FIRST_EDGE = 128  # positions and lengths below it are one bucket; the others are cut at powers of two


class _MeasuredRows(NamedTuple):
    """Rows of a micro-batch that have a target: documents and positions (n,) on the host, the others on the device."""

    documents: Integers
    positions: Integers
    losses: list[Tensor]
    hits: list[Tensor]
    columns: list[Tensor]  # (2 M, n) values and counts of metrics of documents
    divergences: list[Tensor]  # from a teacher; empty without one
    agreements: list[Tensor]


class RowSums:
    """Adds up losses, hits and metrics of this rank's rows; `measure` is given to the passes of a step."""

    def __init__(
        self,
        lengths: Sequence[int],
        options: EvaluationOptions,
        world: World,
        score_loss: LossFunction | None,
        teacher: "TeacherComparison | None" = None,
    ) -> None:
        """Begin with sums of 0 over documents of these `lengths`; `score_loss` is the loss of rows that have scores,
        None of a language model; `teacher` runs over a micro-batch before it is measured.
        """
        # An error of a user's metric is kept and the passes go on, so that no rank leaves the others in a collective.
        self.error: EvaluationError | None = None
        self._options = options
        self._world = world
        self._score_loss = score_loss
        self._teacher = teacher
        self._divergence = None if options.distillation is None else options.distillation.divergence()
        self._edges = bucket_edges(max(lengths, default=1))
        self._measured_rows: list[_MeasuredRows] = []
        # Each document has its sum of losses.
        self._losses: Floats = np.zeros(len(lengths))
        # Each bucket has its sums of losses and of rows.
        self._positions: Floats = np.zeros((2, len(self._edges)))
        # The same sums of divergences from a teacher, and in how many rows its likeliest token is the model's.
        count = len(lengths) if teacher is not None else 0
        self._divergences: Floats = np.zeros(count)
        self._divergences_by_position: Floats = np.zeros(len(self._edges) if teacher is not None else 0)
        self._agreements = 0
        # These count the targets' bytes of text, right predictions, and rows.
        self._bytes = self._hits = self._rows = 0
        self._metrics = torch.zeros(len(options.metrics), 2, dtype=torch.float64, device=world.device)
        self._document_metrics: Floats = np.zeros((len(options.document_metrics), 2, len(lengths)))

    def measure(self, batch: LocalBatch, hidden: Tensor, head: Any) -> Tensor:
        """Measure a micro-batch's hidden states (T, D), from which `head` makes logits; return the sum of their losses.

        What was measured stays on the device until `collect_measured_sums`. An error of a metric is kept in `error`.
        """
        targets = BatchTargets(batch, hidden.device)
        count = len(targets.documents)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        if self._teacher is not None:
            self._teacher.gather_head()
        if not count:
            # All slots gather the head's parameters together.
            head(hidden[:1])
            self._end_micro_batch()
            return total
        measured = _MeasuredRows(targets.documents, targets.path_positions, [], [], [], [], [])
        size = self._options.loss_chunk_rows or self._rows_per_chunk(
            getattr(head, "vocabulary", hidden.shape[-1]), hidden
        )
        for part in cut_into_chunks(count, size):
            chunk = self._measure_rows(targets, part, head(hidden.index_select(0, targets.targets.rows[part])))
            measured.losses.append(chunk.losses)
            measured.hits.append(chunk.logits.argmax(-1) == chunk.targets)
            measured.columns.append(self._add_metrics(chunk))
            if self._teacher is not None and self._divergence is not None:
                divergences, agreements = self._teacher.measure_rows(self._divergence, chunk.logits, part)
                measured.divergences.append(divergences.double() * chunk.values[WEIGHTS])
                measured.agreements.append(agreements)
            total += chunk.losses.sum()
        self._end_micro_batch()
        self._measured_rows.append(measured)
        self._rows += count
        if (token_bytes := self._options.token_bytes) is not None:
            self._bytes += int(token_bytes[batch.labels[target_rows(batch)]].sum())
        return total

    def _rows_per_chunk(self, vocabulary: int, hidden: Tensor) -> int:
        if self._teacher is None:
            return rows_per_chunk(vocabulary, hidden.dtype, hidden.device.type)
        return rows_of_two_heads(vocabulary, self._teacher.vocabulary, hidden)

    def _end_micro_batch(self) -> None:
        if self._teacher is not None:
            self._teacher.end_micro_batch()

    def _measure_rows(self, targets: BatchTargets, part: slice, logits: Tensor) -> TargetTokens:
        """Losses and classes are 0 after an error of the loss, which is kept in `error`; classes also without one
        label."""
        if self._score_loss is None:
            at = targets.loss_tokens(part, torch.float64)
            losses = -target_log_probs_and_gradient(logits, at.target)[0].double() * at[WEIGHTS]
            return TargetTokens(at.document, at.position, at.target, losses, logits, at.values)
        scores = row_scores(logits)[0]
        at = targets.loss_tokens(part, scores.dtype)
        losses = logits.new_zeros(len(logits), dtype=torch.float64)
        classes = torch.zeros_like(at.target)
        if self.error is None:
            try:
                losses = self._score_loss(scores, at).double()
                classes = at.values[LABEL].long() if LABEL in at.values else classes
            except LongspanError as error:
                self.error = EvaluationError(f"the loss failed on rank {self._world.rank}: {error}")
        return TargetTokens(at.document, at.position, classes, losses, logits, at.values)

    def _add_metrics(self, rows: TargetTokens) -> Tensor:
        """(2 M, n): values and counts of M metrics of documents. After an error, kept in `error`, nothing is added and
        columns are 0."""
        count = len(rows.losses)
        document_metrics = self._options.document_metrics
        columns = rows.losses.new_zeros(len(document_metrics), 2, count)
        # An error names the metric that is computed.
        name = ""
        if self.error is not None:
            return columns.flatten(0, 1)
        try:
            for sums, (name, metric) in zip(self._metrics, self._options.metrics.items(), strict=True):
                for i, value in enumerate(check_sum_and_count(name, metric(rows))):
                    sums[i] += value
            for column, (name, metric) in zip(columns, document_metrics.items(), strict=True):
                column.copy_(check_columns(name, metric(rows), count))
        except EvaluationError as error:
            self.error = error
        except Exception as error:
            # The user's function may raise anything.
            self.error = EvaluationError(
                f"the metric {name!r} failed on rank {self._world.rank}: {type(error).__name__}: {error}"
            )
            self.error.__cause__ = error
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
            if measured.divergences:
                divergences = torch.cat(measured.divergences).cpu().numpy()
                np.add.at(self._divergences, measured.documents, divergences)
                np.add.at(self._divergences_by_position, bucket, divergences)
                self._agreements += int(torch.cat(measured.agreements).sum())
        self._measured_rows.clear()

    def sum_over_ranks(self) -> "Totals":
        """Sum over all ranks; every rank gets the sums, and in `failures` on how many ranks a metric failed."""
        world = self._world
        # All tensor-parallel ranks of a slot have the same sums.
        counts_here = world.coordinates.tp == 0
        factor = 1.0 if counts_here else 0.0
        parts = [
            self._losses,
            self._positions.ravel(),
            self._metrics.cpu().numpy().ravel(),
            self._document_metrics.ravel(),
            self._divergences,
            self._divergences_by_position,
            np.array([float(self._rows), float(self._hits), float(self._bytes), float(self._agreements)]),
        ]
        has_failed = 0.0 if self.error is None else 1.0
        flat = np.concatenate([*(part * factor for part in parts), [has_failed]])
        flat = world.control.sum_array_over_ranks(flat, "sums of an evaluation")
        parts = np.split(flat, np.cumsum([part.size for part in parts]))
        documents, positions, metrics, document_metrics, divergences, by_position, numbers, failures = parts
        return Totals(
            documents=documents,
            positions=positions.reshape(2, -1),
            edges=self._edges,
            metrics=metrics.reshape(-1, 2),
            document_metrics=document_metrics.reshape(self._document_metrics.shape),
            rows=int(numbers[0]),
            hits=int(numbers[1]),
            bytes=int(numbers[2]),
            divergences=divergences,
            divergences_by_position=by_position,
            agreements=int(numbers[3]),
            failures=int(failures[0]),
        )


class Totals(NamedTuple):
    """Sums over all ranks: losses of documents (D,), losses and rows of buckets of positions (2, B), metrics (M, 2),
    and metrics of documents (M, 2, D); under a teacher also divergences of documents (D,) and of buckets (B,)."""

    documents: Floats
    positions: Floats
    edges: Integers
    metrics: Floats
    document_metrics: Floats
    rows: int
    hits: int
    bytes: int
    divergences: Floats
    divergences_by_position: Floats
    agreements: int
    failures: int

    @property
    def divergence_totals(self) -> "Totals":
        """The sums with divergences from a teacher in place of losses."""
        positions = np.stack([self.divergences_by_position, self.positions[1]])
        return self._replace(documents=self.divergences, positions=positions)

    def bucket_by_position(self, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        """Return losses by bucket of positions; `documents` of a bucket have a target in it or behind it."""
        # The rows at positions 0 to targets − 1 of a document predict its targets.
        targets = np.asarray(lengths) - 1
        documents_reaching = [int((targets > edge).sum()) for edge in self.edges.tolist()]
        loss, rows = self.positions
        return _make_buckets(
            self.edges, [Mean(*pair) for pair in zip(loss.tolist(), rows.tolist(), strict=True)], documents_reaching
        )

    def bucket_by_length(self, lengths: Sequence[int], targets: Sequence[int]) -> tuple[Bucket, ...]:
        """Return losses by bucket of documents' lengths; `targets` are those of each document."""
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
    """Buckets without documents are left out. The last bucket ends at twice its start, or at FIRST_EDGE if it is the
    only one."""
    starts = edges.tolist()
    lasts = [*(start - 1 for start in starts[1:]), 2 * max(starts[-1], FIRST_EDGE // 2) - 1]
    buckets = (Bucket(*values) for values in zip(starts, lasts, losses, documents, strict=True))
    return tuple(bucket for bucket in buckets if bucket.documents)
