"""Evaluation of the weights as they are, at any degree: the passes of training with another plan and no backward.

Each document counts once, whatever the degree. Nothing is rebound: the degree is in the plan. The plan runs in portions
of micro-batches, between which ranks agree whether to go on; so an evaluation can be stopped, and of a large set a rank
reads only a portion's rows at a time.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from longspan.bridge.item_documents import item_table_of
from longspan.comm import World, raise_first_error
from longspan.errors import EvaluationError, EvaluationStopped, LongspanError, PlanError, counted
from longspan.layout import Layout
from longspan.model.multimodal.multimodal_model import MultimodalModel, check_world, language_model_of
from longspan.model.placement.sharding import gathered_bytes, gathered_once
from longspan.model.prepared import vocabulary_size
from longspan.model.seams.call_rules import call_rules
from longspan.plan import MicroBatch, Plan
from longspan.plan.items import ItemTable
from longspan.train.data.documents import Documents
from longspan.train.encoding import Encoding, items_of
from longspan.train.evaluation.metrics import Mean, MeasuredDocuments, check_metrics
from longspan.train.evaluation.options import EvaluationOptions
from longspan.train.evaluation.result import Evaluation
from longspan.train.evaluation.row_sums import RowSums, Totals
from longspan.train.local_batch import LocalBatch, batches_of, reading_error
from longspan.train.memory.live_bytes import added_peak, unused_bytes
from longspan.train.passes import Passes, run_passes
from longspan.train.plans import PlanChoice, degrees_to_compare
from longspan.train.step_check import check_step

PORTION = 16  # micro-batches of a portion at most, for each pipeline stage
SHORT_SECONDS = 1.0  # a portion that takes less is followed by larger ones
GATHERED_SHARE = 1 / 8  # of the memory that is left, which gathered parameters may take until an evaluation ends


def evaluate(
    model: nn.Module, documents: Any, choice: PlanChoice | Plan, world: World, options: EvaluationOptions | None = None
) -> Evaluation:
    """Loss and metrics of these documents under a plan of `choice`, or a given one; all ranks call it together.

    >>> result = evaluate(model, documents, PlanChoice.fixed(4, max_tokens_per_slot=2048), world)
    >>> result.loss, result.perplexity, result.metrics["token_accuracy"].value

    `documents[d]` is document d: it has a length and is indexed by an int64 array of positions, of which a rank asks
    for its own; MeasuredDocuments bring metrics as well. Parameters, gradients, modes of modules, states of random
    generators and `world.step` are afterwards as they were before, also where it raises.

    Raises PlanError for documents that fit no plan, EvaluationError for a metric that gives no (sum, count), DataError
    for documents that cannot be read, and EvaluationStopped where `options` say so: each on all ranks.
    """
    started, options = time.perf_counter(), options or EvaluationOptions()
    check_world(model, world)
    measured = documents if isinstance(documents, MeasuredDocuments) else None
    if measured is not None:
        options = replace(options, document_metrics={**options.document_metrics, **measured.metrics})
    if isinstance(choice, Plan):
        plan = choice
    else:
        plan = _planned(_fitted(choice, language_model_of(model), documents), _lengths(documents), world.home)
    items = items_of(model, plan, documents)
    check_step(language_model_of(model), plan, documents, world, items, backward=False)
    with _step_restored(world, options.step), added_peak(world.device) as memory:
        portions = _Portions(model, plan, documents, world, options, started)
        totals = portions.run()
    if totals.rows != plan.targets:
        raise PlanError(
            f"the slots counted {totals.rows} targets, the plan has {plan.targets}; is a document left out?"
        )
    widest = max((group.degree for batch in plan.micro_batches for group in batch.groups), default=1)
    result = _result(plan, totals, options, items)
    result = replace(
        result,
        cp=widest if isinstance(choice, Plan) or choice.planner == "dynamic" else choice.degree,
        seconds=time.perf_counter() - started,
        activation_bytes=None if memory.bytes is None else world.control.largest(memory.bytes - portions.gathered),
    )
    if measured is not None:
        result = replace(result, **measured.figures(result.document_metrics, step=result.step, cp=result.cp))
    return result


def choices_at_degrees(choice: PlanChoice, documents: Documents, home: Layout) -> list[PlanChoice]:
    """A choice at degree 1, 2, 4, … as far as they divide the slots, each under a cap that holds these documents.

    Degrees at which a2a cannot split the query heads evenly are left out.
    """
    longest = max(documents.lengths)
    return [choice.at_degree(degree, longest=longest) for degree in degrees_to_compare(home, choice)]


class _Portions:
    """The portions of one evaluation."""

    def __init__(
        self, model: nn.Module, plan: Plan, documents: Any, world: World, options: EvaluationOptions, started: float
    ) -> None:
        self.whole, self.model, self.plan, self.documents, self.world = (
            model,
            language_model_of(model),
            plan,
            documents,
            world,
        )
        self.items = items_of(model, plan, documents)
        self.options, self.started = options, started
        self.sums = RowSums(plan.lengths, options, world.device)
        self.largest = PORTION * world.home.pp
        self.long = self.any_long = False  # whether the last portion took long, here and on any rank
        self.gathered = 0  # bytes of parameters that stay gathered until the end
        kernel = {} if options.attention_kernel is None else {"attention_kernel": options.attention_kernel}
        self.passes = Passes(self.model, plan, world, False, options.loss_chunk_rows, None, self.sums.measure, kernel)

    def run(self) -> Totals:
        """All portions, then the sums over ranks."""
        size, done, count = self._first_size(), 0, len(self.plan.micro_batches)
        with ExitStack() as stack:
            while done < max(count, 1):  # one portion of an empty plan too, so that all ranks agree on it
                portion = self.plan.micro_batches[done : done + size]
                batches, encoding = self._agreed_batches(portion, done)
                if self.gathered and not done:
                    stack.enter_context(gathered_once(self.model))
                started = time.perf_counter()
                with nullcontext() if encoding is None else encoding.around(batches):
                    run_passes(self.passes, batches)
                self.sums.flush()
                self.long = time.perf_counter() - started >= SHORT_SECONDS
                size = size if self.any_long else min(2 * size, self.largest)
                done += max(len(portion), 1)
                if self.options.progress is not None:
                    self.options.progress(min(done, count), count)
        error = self._metric_error()
        totals = self.sums.over_ranks(self.world, failed=error is not None)
        if totals.failures:
            raise_first_error(self.world, error)
        return totals

    def _first_size(self) -> int:
        """One micro-batch where something may end the evaluation early, so that long ones do not delay it for long.

        A pipeline, which each portion fills and empties, begins with the largest portions.
        """
        may_end = self.options.seconds is not None or self.options.stopped is not None
        return 1 if may_end and self.world.home.pp == 1 else self.largest

    def _agreed_batches(self, portion: Sequence[MicroBatch], done: int) -> tuple[list[LocalBatch], Encoding | None]:
        """This rank's rows and items of a portion, once all ranks have theirs and none stops; else all raise."""
        batches, encoding, error = list[LocalBatch](), None, self._reason_to_end(done)
        try:
            if error is None:
                batches = batches_of(self.model, self.plan, self.documents, self.world, portion, self.items)
                encoding = self._encoding(portion)
        except Exception as failure:  # a corpus may raise anything: the other ranks must learn of it
            error = reading_error(failure, self.world)
        if self._agreed_end(error is not None, first=not done):
            raise_first_error(self.world, error)
        if not done:
            self.passes = replace(self.passes, frees_parameters=not self.gathered)
            self.world.channels.make_communicators(self.plan)  # the ranks have just agreed on it
        return batches, encoding

    def _encoding(self, portion: Sequence[MicroBatch]) -> Encoding | None:
        if self.items is None or not isinstance(self.whole, MultimodalModel):
            return None
        encoding = Encoding(self.whole, self.plan, portion, self.items, backward=False)
        encoding.read(self.documents)
        return encoding

    def _agreed_end(self, ended: bool, *, first: bool) -> bool:
        """Whether any rank has ended; after the first portion, ranks also say whether their last one took long."""
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
        size = gathered_bytes(self.model)
        return size if size <= room else 0

    def _reason_to_end(self, done: int) -> LongspanError | None:
        """Why this rank would end the evaluation before its next portion."""
        options, seconds = self.options, time.perf_counter() - self.started
        if not done:
            try:
                vocabulary, device = vocabulary_size(self.model), self.world.device
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


@lru_cache(maxsize=8)
def _planned(choice: PlanChoice, lengths: tuple[int, ...], home: Layout) -> Plan:
    """Planned once for a set of documents: a dynamic plan takes longer than the evaluation of a few."""
    return choice.plan(lengths, home)


def _fitted(choice: PlanChoice, model: nn.Module, documents: Any) -> PlanChoice:
    """The choice priced for forward passes alone, with what a prepared model asks of the rows of a slot.

    Documents with items say how many tokens they predict.
    """
    multiple, options = call_rules(model).row_multiple, choice.options
    rows = options.row_multiple if options.row_multiple % multiple == 0 else multiple
    table = item_table_of(documents, _lengths(documents))
    targets = options.targets if table is None else sum(table.targets)
    return replace(
        choice, options=replace(options, cost=options.cost.forward_only(), row_multiple=rows, targets=targets)
    )


def _lengths(documents: Any) -> tuple[int, ...]:
    lengths = getattr(documents, "lengths", None)
    return tuple(len(documents[d]) for d in range(len(documents))) if lengths is None else tuple(map(int, lengths))


@contextmanager
def _step_restored(world: World, step: int) -> Iterator[None]:
    before, world.step = world.step, step
    try:
        yield
    finally:
        world.step = before


def _result(plan: Plan, totals: Totals, options: EvaluationOptions, items: ItemTable | None) -> Evaluation:
    targets = [length - 1 for length in plan.lengths] if items is None else items.targets
    loss = math.fsum(totals.documents.tolist())
    metrics = {"token_accuracy": Mean(totals.hits, totals.rows)}
    if options.token_bytes is not None:
        metrics["bits_per_byte"] = Mean(loss / math.log(2), totals.bytes)
    metrics |= {name: Mean(*pair) for name, pair in zip(options.metrics, totals.metrics.tolist(), strict=True)}
    return Evaluation(
        step=options.step,
        cp=0,
        loss=loss / max(plan.targets, 1),
        documents=len(plan.lengths),
        tokens=plan.tokens,
        targets=plan.targets,
        seconds=0.0,
        plan=plan,
        name=options.name,
        metrics=metrics,
        by_position=totals.by_position(plan.lengths),
        by_length=totals.by_length(plan.lengths),
        document_losses=tuple(
            Mean(loss, count) for loss, count in zip(totals.documents.tolist(), targets, strict=True)
        ),
        document_metrics={
            name: tuple(Mean(*pair) for pair in sums.T.tolist())
            for name, sums in zip(options.document_metrics, totals.document_metrics, strict=True)
        },
    )
