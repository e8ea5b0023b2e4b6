"""A teacher's likeliest tokens as tables of documents: made by its passes, and compared with a student in its place."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.bridge.bridge import carry_rows, copy_moves_to_device
from longspan.comm import World, raise_first_error, to_device
from longspan.data.likeliest import ENTRY, Table, make_table, table_numbers, table_of_numbers
from longspan.errors import DataError, LossError
from longspan.layout import Exchange, Integers, Partition
from longspan.model.kinds import score_columns
from longspan.model.layers import mtp_depths, vocabulary_size
from longspan.model.marks import is_multimodal, is_pipeline
from longspan.model.seams.call_rules import is_prepared
from longspan.plan import Plan
from longspan.train.divergence import Divergence, LikeliestRows, RowDivergences
from longspan.train.log_probs import cut_into_chunks
from longspan.train.loss import Head, rows_of_two_heads
from longspan.train.passes import Passes, read_step_batches, run_passes
from longspan.train.rows.agreed_reading import text_digest
from longspan.train.rows.read_rows import LocalBatch, target_rows
from longspan.train.step_inputs import StepInputs, check_step_arguments
from longspan.train.terms.loss_tokens import BatchTargets


@dataclass(frozen=True)
class TeacherTables:
    """What the tables are of that documents carry; the `teacher` of a Distillation in a teacher's place.

    The `top_k` likeliest tokens at a `temperature`, of a softmax over the first `vocabulary` columns of the head.
    """

    top_k: int
    temperature: float
    vocabulary: int

    def check_settings(self, top_k: int, temperature: float) -> None:
        """Raise LossError for a Distillation of other settings than those of the tables."""
        for name, asked in (("top_k", top_k), ("temperature", temperature)):
            if asked != (made := getattr(self, name)):
                raise LossError(
                    f"{name} is {asked}, and the tables of likeliest tokens were made with {made}; give {name}={made}, "
                    "or make the tables again"
                )

    def divergence(self) -> Divergence:
        """Return the settings by which a teacher's likeliest tokens are found. Raises LossError for values that there
        are not.
        """
        if not 0 < self.top_k < self.vocabulary:
            raise LossError(
                f"top_k is {self.top_k!r} for tables of a teacher's likeliest tokens, whose vocabulary has "
                f"{self.vocabulary}; give a number from 1 to {self.vocabulary - 1}"
            )
        return Divergence(temperature=self.temperature, top_k=self.top_k)


@dataclass(frozen=True, eq=False)
class TokenTables:
    """A teacher's likeliest tokens for the targets of a plan's documents, the same on every rank.

    `teacher` says what they are of. `rows` (n,) number the targets among the rows of all documents, ascending, and
    `entries` (n, k + 1) are their tables.
    """

    teacher: TeacherTables
    lengths: tuple[int, ...]
    bases: tuple[int, ...]
    rows: Integers
    entries: Table

    def of(self, document: int) -> Table:
        """Return the table (length, k + 1) of a document, for `Document.with_likeliest`: zeros where nothing is
        predicted, in its shared prefix say.
        """
        base = self.bases[document] if self.bases else 0
        start = int(self._starts[document])
        table = np.zeros((base + self.lengths[document], self.entries.shape[1]), ENTRY)
        first, stop = np.searchsorted(self.rows, (start, start + self.lengths[document]))
        table[base + self.rows[first:stop] - start] = self.entries[first:stop]
        return table

    @cached_property
    def _starts(self) -> Integers:
        return np.cumsum((0, *self.lengths))


def likeliest_tokens(
    teacher: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    top_k: int,
    *,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    loss_chunk_rows: int = 0,
) -> TokenTables:
    """Compute a teacher's k likeliest tokens for each target of a plan's documents, on every rank; no gradient.

    >>> tables = likeliest_tokens(teacher, plan, documents, world, top_k=64)
    >>> documents = [document.with_likeliest(tables.of(d)) for d, document in enumerate(documents)]
    >>> run_step(student, plan, documents, world, loss=Distillation(tables.teacher, top_k=64))

    `temperature` divides logits before the softmax, which is over the first `vocabulary` columns of the head (None: all
    of them): at most as many as the student's head has. Log-probabilities are kept in float32. The teacher runs in
    evaluation mode under any plan of these documents, and all ranks call it together. Raises LossError for a top_k or a
    temperature that there is not, CommError where ranks give different ones, and what `run_step` raises.
    """
    inputs = check_step_arguments(teacher, plan, documents, world, backward=False)
    columns = vocabulary_size(inputs.language_model) or 0
    settings = TeacherTables(top_k, temperature, columns if vocabulary is None else vocabulary)
    if score_columns(inputs.language_model) or settings.vocabulary > columns:
        raise LossError(
            f"the teacher has {score_columns(inputs.language_model) or columns} columns, and likeliest tokens of the "
            f"first {settings.vocabulary} are asked for; load a language model with them, or give vocabulary="
        )
    hint = "Give every rank the same top_k, temperature and vocabulary"
    world.control.compare_digests(text_digest(str(settings)), what="settings of likeliest tokens", hint=hint)
    rows, entries = collect_tables(inputs, settings, loss_chunk_rows).gather(world, on_all=True)
    return TokenTables(settings, plan.lengths, plan.bases, rows, entries)


def collect_tables(inputs: StepInputs, settings: TeacherTables, chunk_rows: int = 0) -> "CollectedTables":
    """Run a teacher over a plan's documents; entered by all ranks, each of which has the tables of its own targets."""
    collected = CollectedTables(settings, inputs.plan.lengths, chunk_rows)
    batches = read_step_batches(inputs, ())
    run_passes(Passes.with_terms(inputs, (), collected), batches)
    return collected


class CollectedTables:
    """A loss of passes that is 0 and collects a teacher's likeliest tokens for this rank's targets."""

    def __init__(self, settings: TeacherTables, lengths: Sequence[int], chunk_rows: int) -> None:
        self._settings = settings
        self._divergence = settings.divergence()
        self._chunk_rows = chunk_rows
        self._starts = np.cumsum((0, *lengths))
        self._rows = list[Integers]()
        self._tables = list[Table]()

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        targets = BatchTargets(batch, hidden.device)
        rows = targets.targets.with_padding().rows
        chunk_rows = self._chunk_rows or rows_of_two_heads(0, head.vocabulary, hidden)
        parts = list[LikeliestRows]()
        for chunk in cut_into_chunks(len(rows), chunk_rows):
            logits = head(hidden.index_select(0, rows[chunk]))
            likeliest = self._divergence.find_likeliest(logits[:, : self._settings.vocabulary])
            parts.append(LikeliestRows(likeliest.ids.int(), *(x.float() for x in likeliest[1:])))
            # The logits are freed before those of the next chunk are made.
            del logits
        count = len(targets.documents)
        made = make_table(*(torch.cat(x)[:count].cpu().numpy() for x in zip(*parts, strict=True)))
        # A row is the token that is predicted, which is the one after the row that predicts it.
        self._rows.append(self._starts[targets.documents] + targets.positions + 1)
        self._tables.append(made)
        return hidden.new_zeros((), dtype=torch.float64)

    def gather(self, world: World, *, on_all: bool) -> tuple[Integers, Table]:
        """Return the numbers (n,) of all ranks' targets among the rows of all documents, ascending, and their tables
        (n, k + 1); entered by all ranks. Unless `on_all`, only the first rank gets any.
        """
        width = self._settings.top_k + 1
        rows = np.concatenate([np.zeros(0, np.int64), *self._rows])
        table = np.concatenate([np.zeros((0, width), ENTRY), *self._tables])
        if world.coordinates.tp:  # tensor-parallel ranks of a slot hold the same
            rows, table = rows[:0], table[:0]
        rows_by_rank = world.control.gather_objects(rows, "targets of a teacher")
        all_rows = np.sort(np.concatenate(rows_by_rank))
        channel = world.channels.hosts
        needed = [all_rows if on_all or rank == 0 else all_rows[:0] for rank in range(len(rows_by_rank))]
        exchange = Exchange(Partition.from_rows(rows_by_rank), Partition.from_rows(needed))
        moves = copy_moves_to_device(exchange.moves(channel.index), channel.device)
        numbers = carry_rows(torch.from_numpy(table_numbers(table)), moves, channel, "likeliest tokens")
        return needed[channel.index], table_of_numbers(numbers.numpy())


class TableComparison:
    """Compares a student with the tables of a step's documents, as `TeacherPasses` compares it with a teacher."""

    # No logits of a teacher are formed.
    vocabulary = 0

    def __init__(self, tables: TeacherTables) -> None:
        self._tables = tables
        self.likeliest = tables.top_k
        # The tables (n, k + 1, 2) of a micro-batch's targets, on the device, as bits of int32.
        self._entries: Tensor | None = None

    def check_models(self, inputs: StepInputs) -> None:
        """Raise LossError for models that cannot be a student of tables; entered by all ranks."""
        student = inputs.language_model
        reason = refuse_student(inputs)
        if reason is None and (vocabulary_size(student) or 0) < self._tables.vocabulary:
            reason = (
                f"the tables are of {self._tables.vocabulary} columns, and the student has {vocabulary_size(student)}; "
                f"make them with vocabulary={vocabulary_size(student)}"
            )
        raise_first_error(inputs.world, None if reason is None else LossError(f"Distillation: {reason}"))

    def check_ids(self, batches: Sequence[LocalBatch]) -> DataError | None:
        """Return the error of tables with ids that their vocabulary has not; None without any."""
        for batch in batches:
            largest = -1 if batch.likeliest is None else int(batch.likeliest["id"].max(initial=-1))
            if largest >= self._tables.vocabulary:
                return DataError(
                    f"a document's table has token {largest}, and the Distillation's tables are of "
                    f"{self._tables.vocabulary} columns; give it the `teacher` of likeliest_tokens(…) that made these"
                )
        return None

    def passes_context(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: there is no teacher."""
        return nullcontext()

    def run(self, batch: LocalBatch, inputs: Mapping[str, Any]) -> None:
        """Bring the tables of a micro-batch's targets to the device."""
        if batch.likeliest is not None:
            table = batch.likeliest[target_rows(batch)]
            entries = np.ascontiguousarray(table).view(np.int32).reshape(*table.shape, 2)
            self._entries = to_device(entries, batch.shard.device)

    def gather_head(self) -> None:
        """Do nothing: there is no teacher."""

    def compare(
        self, divergence: Divergence, logits: Tensor, part: slice, weights: Tensor | None
    ) -> RowDivergences:
        """Compare the student's logits (t, V) of some of the micro-batch's targets with their tables."""
        assert self._entries is not None, "the tables come before the student's pass"
        entries = self._entries[part]
        log_probs = entries[..., 1].contiguous().view(torch.float32)
        likeliest = LikeliestRows(entries[:, :-1, 0].long(), log_probs[:, :-1], log_probs[:, -1])
        return divergence.compare_likeliest(logits, likeliest, self._tables.vocabulary, weights)

    def measure_rows(self, divergence: Divergence, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the divergences (t,) of some targets' logits (t, V), and whether the student's likeliest token is the
        tables' first.
        """
        assert self._entries is not None, "the tables come before the student's pass"
        likeliest = logits[:, : self._tables.vocabulary].argmax(-1)
        losses = self.compare(divergence, logits, part, None).losses
        return losses, likeliest == self._entries[part][:, 0, 0]

    def end_micro_batch(self) -> None:
        """Free the tables."""
        self._entries = None


def refuse_student(inputs: StepInputs) -> str | None:
    """Return why a step's model is no student of a teacher, or None."""
    student = inputs.language_model
    if is_multimodal(inputs.model):
        return "a MultimodalModel has no teacher; distil its language model over documents without items"
    if is_pipeline(student):
        return f"the home has pp {inputs.world.home.pp}; use a home without pp"
    if mtp_depths(student):
        return "depths of multi-token prediction have no teacher; load the model without them"
    if not is_prepared(student):
        return "the student is a model that longspan.prepare returns"
    return None
