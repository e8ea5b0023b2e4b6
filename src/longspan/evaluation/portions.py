"""The portions of micro-batches in which an evaluation runs, and between which ranks agree whether to go on.

So an evaluation can be stopped, and of a large set a rank reads only a portion's rows at a time.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from longspan.comm import raise_first_error
from longspan.errors import EvaluationError, EvaluationStopped, LongspanError, PlanError, counted
from longspan.evaluation.metrics import EvaluationOptions, check_metrics
from longspan.evaluation.row_sums import RowSums, Totals
from longspan.model.placement.sharding import gathered_bytes, gathered_once
from longspan.model.prepared import vocabulary_size
from longspan.plan import MicroBatch
from longspan.train.memory.live_bytes import unused_bytes
from longspan.train.passes import Passes, run_passes
from longspan.train.reading.local_batch import read_micro_batches, reading_error
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.reading.step_inputs import StepInputs
from longspan.train.terms.step_terms import input_terms

PORTION = 16  # micro-batches of a portion at most, for each pipeline stage
SHORT_SECONDS = 1.0  # a portion that takes less is followed by larger ones
GATHERED_SHARE = 1 / 8  # of the memory that is left, which gathered parameters may take until an evaluation ends


class Portions:
    """The portions of one evaluation."""

    def __init__(self, inputs: StepInputs, options: EvaluationOptions, started: float) -> None:
        self.inputs, self.options, self.started = inputs, options, started
        self.plan, self.world, self.items = inputs.plan, inputs.world, inputs.documents.items
        self.sums = RowSums(self.plan.lengths, options, self.world.device)
        self.largest = PORTION * self.world.home.pp
        self.long = self.any_long = False  # whether the last portion took long, here and on any rank
        self.gathered = 0  # bytes of parameters that stay gathered until the end
        kernel = {} if options.attention_kernel is None else {"attention_kernel": options.attention_kernel}
        self.terms = input_terms(inputs)
        self.passes = Passes.of(inputs, self.terms, self.sums.measure, keywords=kernel)

    def run(self) -> Totals:
        """Run all portions, then sum over ranks."""
        size, done, count = self._first_size(), 0, len(self.plan.micro_batches)
        with ExitStack() as stack:
            while done < max(count, 1):  # one portion of an empty plan too, so that all ranks agree on it
                portion = self.plan.micro_batches[done : done + size]
                batches = self._read_agreed(portion, done)
                if self.gathered and not done:
                    stack.enter_context(gathered_once(self.inputs.language_model))
                started = time.perf_counter()
                run_passes(self.passes, batches)
                self.sums.flush()
                self.long = time.perf_counter() - started >= SHORT_SECONDS
                size = size if self.any_long else min(2 * size, self.largest)
                done += max(len(portion), 1)
                if self.options.progress is not None:
                    self.options.progress(min(done, count), count)
        error = self._metric_error()
        totals = self.sums.sum_over_ranks(self.world, failed=error is not None)
        if totals.failures:
            raise_first_error(self.world, error)
        return totals

    def _first_size(self) -> int:
        """One micro-batch where something may end the evaluation early, so that long ones do not delay it for long.

        A pipeline, which each portion fills and empties, begins with the largest portions.
        """
        may_end = self.options.seconds is not None or self.options.stopped is not None
        return 1 if may_end and self.world.home.pp == 1 else self.largest

    def _read_agreed(self, portion: Sequence[MicroBatch], done: int) -> list[LocalBatch]:
        """Read this rank's rows and items of a portion, once all ranks have theirs and none stops; else all raise."""
        batches, error = list[LocalBatch](), self._reason_to_end(done)
        try:
            if error is None:
                batches = read_micro_batches(self.inputs, portion)
                for term in self.terms:
                    term.read_portion(portion)
        except PlanError as failure:  # items that fit no slot of their encoder
            error = failure
        except Exception as failure:  # a corpus may raise anything: the other ranks must learn of it
            error = reading_error(failure, self.world)
        if self._agree_on_end(error is not None, first=not done):
            raise_first_error(self.world, error)
        if not done:
            self.passes = replace(self.passes, frees_parameters=not self.gathered)
            self.world.channels.make_communicators(self.plan)  # the ranks have just agreed on it
        return batches

    def _agree_on_end(self, ended: bool, *, first: bool) -> bool:
        """Whether any rank has ended; after the first portion, it also covers whether any rank's last one took long."""
        if first:
            if self.items is not None:
                self.world.control.agree(self.items.digest(), what="lists of items")
            room = self._bytes_to_gather()
            any_ended, no_room = self.world.control.agree_on_flags(self.plan.digest(), ended, not room)
            self.gathered = 0 if no_room else room
            return any_ended
        any_ended, self.any_long = self.world.control.any_ranks(ended, self.long)
        return any_ended

    def _bytes_to_gather(self) -> int:
        """Bytes of the parameters that FSDP2 gathers, where they may stay gathered for all micro-batches; or 0.

        A pipeline keeps its stages gathered in any case, and free plans gather before their passes.
        """
        world, plan = self.world, self.plan
        if len(plan.micro_batches) < 2 or world.home.pp > 1 or plan.mode == "free":
            return 0
        room = int(unused_bytes(world.device, len(world.home.ranks)) * GATHERED_SHARE)
        size = gathered_bytes(self.inputs.language_model)
        return size if size <= room else 0

    def _reason_to_end(self, done: int) -> LongspanError | None:
        """Why this rank would end the evaluation before its next portion."""
        options, seconds = self.options, time.perf_counter() - self.started
        if not done:
            try:
                vocabulary, device = vocabulary_size(self.inputs.language_model), self.world.device
                check_metrics(options.metrics, options.document_metrics, vocabulary, device)
            except EvaluationError as error:
                return error
        why = options.stopped() if options.stopped is not None else ""
        if not why and options.seconds is not None and seconds > options.seconds:
            why = f"its time limit of {options.seconds:g} s is over"
        if why:
            count = counted(len(self.plan.micro_batches), "micro-batch", "es")
            name = f" of {options.name}" if options.name else ""
            return EvaluationStopped(
                f"the evaluation{name} after step {options.step} was stopped after {done:,} of {count} "
                f"({seconds:.1f} s): {why}; nothing of it is recorded, and the model is as it was"
            )
        return self._metric_error()

    def _metric_error(self) -> LongspanError | None:
        if (error := self.sums.error) is None or isinstance(error, LongspanError):
            return error
        named = EvaluationError(f"a metric failed on rank {self.world.rank}: {type(error).__name__}: {error}")
        named.__cause__ = error
        return named
