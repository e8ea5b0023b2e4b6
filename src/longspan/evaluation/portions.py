"""An evaluation run in portions of micro-batches, between which ranks agree whether to go on.

So an evaluation can be stopped, and a rank reads only a portion's rows of a large set at a time. Where there is room
parameters are gathered once for all portions.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from longspan.comm import World, raise_first_error
from longspan.comm.device import unused_bytes
from longspan.errors import EvaluationStopped, LongspanError, PlanError, plural
from longspan.evaluation.metrics import EvaluationOptions
from longspan.evaluation.row_sums import RowSums, Totals
from longspan.model.fsdp_params import (
    GatheredParameter,
    fsdp_modules,
    gathered_parameters,
    leave_out_idle_hooks,
    reshard,
)
from longspan.model.kinds import score_columns
from longspan.model.marks import find_float8_weight, find_packed_weight, has_weights_on_host, keep_float8_weights
from longspan.model.sharding import reshards_after_forward
from longspan.plan import MicroBatch, Plan
from longspan.plan.items.item_table import ItemTable
from longspan.train.passes import Passes, Term, run_passes
from longspan.train.rows.agreed_reading import reading_error
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch, read_micro_batches
from longspan.train.step_inputs import StepInputs
from longspan.train.terms.step_terms import encoder_terms

if TYPE_CHECKING:
    from longspan.train.terms.distillation import TeacherComparison
    from longspan.train.terms.document_loss import DocumentLoss
    from longspan.train.terms.loss_tokens import LossFunction


PORTION = 16  # micro-batches of a portion at most, for each pipeline stage
SHORT_SECONDS = 1.0  # a portion that takes less is followed by larger ones
# Gathered parameters may take this share of the memory that is left until an evaluation ends.
GATHERED_SHARE = 1 / 8


def _score_loss(model: nn.Module, loss: "DocumentLoss | None") -> "LossFunction | None":
    """With a loss of sets it is the weighted scores themselves, whose sums that loss reads; None for a
    language model."""
    if not score_columns(model):
        return None
    if loss is not None:
        return lambda scores, at: scores * at[WEIGHTS]
    from longspan.train.terms.scores import configured_loss

    return configured_loss(model)


def _compare_with_teacher(inputs: StepInputs, options: EvaluationOptions) -> "TeacherComparison | None":
    if options.distillation is None:
        return None
    from longspan.train.terms.distillation import compare_with_teacher

    return compare_with_teacher(options.distillation, inputs)


class Portions:
    """Runs one evaluation a portion of its micro-batches at a time.

    `started` is when the evaluation began, by `time.perf_counter`. `gathered`, bytes of parameters that stay gathered
    until the end (0: none), is known once the first portion has been read.
    """

    def __init__(self, inputs: StepInputs, options: EvaluationOptions, started: float) -> None:
        """Take the checked inputs; nothing is read and no rank waits yet."""
        self.inputs: StepInputs = inputs
        self.options: EvaluationOptions = options
        self.started: float = started
        self.plan: Plan = inputs.plan
        self.world: World = inputs.world
        self.items: ItemTable | None = inputs.documents.items
        self.teacher: TeacherComparison | None = _compare_with_teacher(inputs, options)
        self.sums: RowSums = RowSums(
            self.plan.path_lengths,
            options,
            self.world,
            _score_loss(inputs.language_model, options.loss),
            self.teacher,
        )
        self.largest: int = PORTION * self.world.home.pp  # micro-batches of a portion at most
        self.long: bool = False  # whether the last portion took long here
        # This is whether the last portion took long on any rank.
        self.any_long: bool = False
        self.gathered: int = 0  # bytes of parameters that stay gathered until the end
        self.terms: tuple[Term, ...] = encoder_terms(inputs)
        run_before = None if self.teacher is None else self.teacher.run
        self.passes = Passes.with_terms(inputs, self.terms, self.sums.measure, run_before=run_before)

    def evaluate_all(self) -> Totals:
        """Run all portions and return their sums over all ranks, which enter together.

        Portions double while they take less than SHORT_SECONDS on every rank; that a portion took longer elsewhere,
        ranks learn when they read the next one. Raises EvaluationStopped or an error of a metric on every rank.
        """
        # One micro-batch where something may end it early; a pipeline, which each portion fills, begins large.
        size = 1 if self.options.stopped is not None and self.world.home.pp == 1 else self.largest
        done = 0
        count = len(self.plan.micro_batches)
        with ExitStack() as stack:
            # An empty plan has one portion too, so that all ranks agree on it.
            while done < max(count, 1):
                portion = self.plan.micro_batches[done : done + size]
                batches = self._read_agreed_batches(portion, done)
                if self.teacher is not None and not done:
                    stack.enter_context(self.teacher.passes_context())
                if self.gathered and not done:
                    stack.enter_context(gather_once(self.inputs.language_model))
                started = time.perf_counter()
                run_passes(self.passes, batches)
                self.sums.collect_measured_sums()
                self.long = time.perf_counter() - started >= SHORT_SECONDS
                if not self.any_long:
                    size = min(2 * size, self.largest)
                done += max(len(portion), 1)
                if self.options.progress is not None:
                    self.options.progress(min(done, count), count)
        totals = self.sums.sum_over_ranks()
        if totals.failures:
            raise_first_error(self.world, self.sums.error)
        return totals

    def _read_agreed_batches(self, portion: Sequence[MicroBatch], done: int) -> list[LocalBatch]:
        """Entered by all ranks, which all raise the error of any. At the first portion they also compare items and
        plan, agree on whether parameters stay gathered, and make the plan's communicators; at later ones they learn
        whether the last portion took long anywhere."""
        batches = list[LocalBatch]()
        error = self._end_reason(done)
        try:
            if error is None:
                likeliest = 0 if self.teacher is None else self.teacher.likeliest
                batches = read_micro_batches(self.inputs, portion, likeliest=likeliest)
                for term in self.terms:
                    term.read_portion(portion)
                if self.teacher is not None:
                    error = self.teacher.check_ids(batches)
        except PlanError as failure:  # items that fit no slot of their encoder
            error = failure
        except Exception as failure:  # a corpus may raise anything: the other ranks must learn of it
            error = reading_error(failure, self.world)
        if done:
            any_ended, self.any_long = self.world.control.flags_on_any_rank(error is not None, self.long)
        else:
            any_ended = self._agree_at_start(error is not None)
        if any_ended:
            raise_first_error(self.world, error)
        if not done:
            self.passes: Passes = replace(self.passes, frees_parameters=not self.gathered)
            self.world.channels.make_communicators(self.plan)  # the ranks have just agreed on it
        return batches

    def _agree_at_start(self, ends: bool) -> bool:
        """Entered by all ranks; return whether any rank ends here, as this one does if `ends`."""
        control = self.world.control
        if self.items is not None:
            control.compare_digests(self.items.digest(), what="lists of items")
        room = 0  # bytes of parameters that may stay gathered on this rank until the end
        if len(self.plan.micro_batches) > 1 and self.world.home.pp == 1 and self.plan.mode != "free":
            most = int(unused_bytes(self.world.device, len(self.world.home.ranks)) * GATHERED_SHARE)
            size = gathered_bytes(self.inputs.language_model)
            room = size if size <= most else 0
        any_ends, no_room = control.compare_digests(self.plan.digest(), ends, not room)
        self.gathered = 0 if no_room else room
        return any_ends

    def _end_reason(self, done: int) -> LongspanError | None:
        """None to go on."""
        options = self.options
        if options.stopped is not None and (reason := options.stopped()):
            seconds = time.perf_counter() - self.started
            count = plural(len(self.plan.micro_batches), "micro-batch", "es")
            name = f" of {options.name}" if options.name else ""
            return EvaluationStopped(
                f"the evaluation{name} after step {options.step} was stopped after {done:,} of {count} "
                f"({seconds:.1f} s): {reason}; nothing of it is recorded, and the model is as it was"
            )
        return self.sums.error


@contextmanager
def gather_once(model: nn.Module) -> Iterator[None]:
    """Gather parameters once for forward passes inside, without backward passes; all ranks enter it together.

    A layer is gathered when it is first called, while the device computes the layer before, and freed at the end, also
    after an error. Copies of weights in float8 stay as long.
    """
    modules = fsdp_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        with keep_float8_weights(model), leave_out_idle_hooks(model):
            yield
    finally:
        for module in modules:
            # Never None: where it is not known, `gathered_bytes` is 0, and the caller does not gather once.
            module.set_reshard_after_forward(bool(reshards_after_forward(module)), recurse=False)
        reshard(model)


def gathered_bytes(model: nn.Module) -> int:
    """Count the bytes on this rank of all parameters that `gather_once` holds.

    It is 0 where weights wait on the host, and where longspan did not shard the model.
    """
    modules = fsdp_modules(model)
    if has_weights_on_host(model) or any(reshards_after_forward(module) is None for module in modules):
        return 0
    return int(sum(x.numel * _bytes_per_element(x) for x in gathered_parameters(modules)))


def _bytes_per_element(gathered: GatheredParameter) -> float:
    """The bytes are those of the gathered element, and one more for a float8 copy. An element of packed weights is a
    byte of a row: it stands for columns / row_bytes numbers."""
    copy_bytes = 0 if find_float8_weight(gathered.module, gathered.name) is None else 1
    if (packed := find_packed_weight(gathered.module, gathered.name)) is not None:
        return packed.columns / packed.row_bytes * (packed.dtype.itemsize + copy_bytes)
    return gathered.dtype.itemsize + copy_bytes
