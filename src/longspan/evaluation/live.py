"""Evaluation of the weights as they are, at any degree: the passes of training with another plan and no backward.

Each document counts once, whatever the degree. Nothing is rebound: the degree is in the plan. The plan runs in portions
of micro-batches, between which ranks agree whether to go on: so an evaluation can be stopped, and a rank reads only a
portion's rows of a large set at a time.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from longspan.comm import World, raise_first_error
from longspan.comm.device import measure_added_peak, unused_bytes
from longspan.data.scored_document import LABEL
from longspan.errors import EvaluationError, EvaluationStopped, LongspanError, PlanError, plural
from longspan.evaluation.metrics import (
    EvaluationOptions,
    Mean,
    RowSums,
    Totals,
    with_sums_of_sets,
)
from longspan.evaluation.result import Evaluation
from longspan.model.fsdp_passes import leave_out_idle_hooks, reshard
from longspan.model.kinds import score_columns
from longspan.model.marks import find_float8_weight, find_packed_weight, has_weights_on_host, keep_float8_weights
from longspan.model.multimodal.multimodal_model import MultimodalModel, check_world_of_model
from longspan.model.seams.call_rules import call_rules
from longspan.model.sharding import fsdp_modules, reduction_groups, reshards_after_forward
from longspan.plan import MicroBatch, Plan
from longspan.resolve.choice import PlannerConfig
from longspan.train.families import cached_plan, share_where_faster
from longspan.train.passes import Passes, run_passes
from longspan.train.read_rows import WEIGHTS, LocalBatch, bring_gathered_rows, read_micro_batches, reading_error
from longspan.train.step_inputs import StepDocuments, StepInputs, check_step_arguments
from longspan.train.terms.step_terms import encoder_terms

if TYPE_CHECKING:
    from longspan.train.terms.document_loss import DocumentLoss
    from longspan.train.terms.token_loss import LossFunction


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
    """Count the bytes on this rank of all parameters that `gather_once` holds; 0 where others sharded the model, or
    where weights wait on the host."""
    modules = fsdp_modules(model)
    if has_weights_on_host(model) or any(reshards_after_forward(module) is None for module in modules):
        return 0
    sizes = (
        parameter._sharded_param_data.numel()
        * group.mesh_info.shard_mesh_size
        * _bytes_per_element(group, parameter)
        for group in reduction_groups(modules)
        for parameter in group.fsdp_params
    )
    return int(sum(sizes))


def _bytes_per_element(group: Any, parameter: Any) -> float:
    """Bytes that passes hold for each element: gathered, and one more for a float8 copy."""
    owner = parameter._module_info
    policy = getattr(parameter, "mp_policy", None) or group.mp_policy  # torch 2.15 has one for each parameter
    dtype = policy.param_dtype or parameter._sharded_param_data.dtype  # in which it is gathered
    has_copy = find_float8_weight(owner.module, owner.param_name) is not None
    if (packed := find_packed_weight(owner.module, owner.param_name)) is not None:
        return packed.columns / packed.row_bytes * (packed.dtype.itemsize + has_copy)
    return dtype.itemsize + has_copy


_NOWHERE = np.arange(0)  # of a document's positions: its values are there by name
PORTION = 16  # micro-batches of a portion at most, for each pipeline stage
SHORT_SECONDS = 1.0  # a portion that takes less is followed by larger ones
GATHERED_SHARE = 1 / 8  # of the memory that is left, which gathered parameters may take until an evaluation ends


def evaluate(
    model: nn.Module,
    documents: Any,
    choice: PlannerConfig | Plan,
    world: World,
    options: EvaluationOptions | None = None,
) -> Evaluation:
    """Evaluate these documents under a plan of `choice`, or a given one; all ranks call it together.

    >>> result = evaluate(model, documents, PlannerConfig.fixed(4, max_tokens_per_slot=2048), world)
    >>> result.loss, result.perplexity, result.metrics["token_accuracy"].value

    `documents[d]` is document d: it has a length and is indexed by an int64 array of positions, those that a rank
    holds. Parameters, gradients, modes of modules and states of random
    generators are afterwards as they were before, also where it raises; `world.step` does not change.

    Raises PlanError for documents that fit no plan, EvaluationError for a metric that gives no (sum, count), DataError
    for documents that cannot be read, and EvaluationStopped where `options` stop it: each on all ranks.
    """
    started = time.perf_counter()
    options = options or EvaluationOptions()
    inputs = _checked_step_inputs(model, documents, choice, world, share_prefixes=options.share_prefixes)
    inputs = bring_gathered_rows(inputs, 0)
    if options.loss is not None and score_columns(inputs.language_model) > 1:
        raise EvaluationError(
            "a loss of sets of documents is evaluated of a language model, or one of one score; leave loss= out"
        )
    if options.loss is not None and not score_columns(inputs.language_model):
        options = with_sums_of_sets(options)
    plan = inputs.plan
    naming = world.watch.name_collectives("evaluation", world.home.ranks, step=options.step)
    with naming, measure_added_peak(world.device) as added_bytes:
        portions = Portions(inputs, options, started)
        totals = portions.evaluate_all()
    if totals.rows != plan.targets:  # the mean would be wrong
        raise PlanError(
            f"the slots counted {totals.rows} targets, the plan has {plan.targets}; is a document left out?"
        )
    # the result names the widest degree, unless a choice names one degree for all documents (0: the plan's)
    degree = max((group.degree for group in plan.groups), default=1)
    if isinstance(choice, PlannerConfig) and choice.has_one_degree:
        degree = choice.degree or degree
    return replace(
        _make_result(inputs, totals, options),
        cp=degree,
        seconds=time.perf_counter() - started,
        # Without the parameters that stayed gathered, which are no activations.
        activation_bytes=int(
            world.control.largest_over_ranks([added_bytes[0] - portions.gathered], "peaks of memory")[0]
        )
        if added_bytes
        else None,
    )


def _checked_step_inputs(
    model: nn.Module, documents: Any, choice: PlannerConfig | Plan, world: World, *, share_prefixes: bool
) -> StepInputs:
    if isinstance(choice, Plan):
        return check_step_arguments(model, choice, documents, world, backward=False)
    language_model = model
    if isinstance(model, MultimodalModel):
        check_world_of_model(model, world)  # as `check_step_arguments` does, which comes only after planning
        language_model = model.language_model
    lengths = getattr(documents, "lengths", None)
    if lengths is None:
        lengths = [len(documents[d]) for d in range(len(documents))]
    documents = StepDocuments(model, documents, tuple(map(int, lengths)))
    choice = _choice_for_evaluation(choice, language_model, documents)
    read: Any = documents
    if share_prefixes and documents.items is None and isinstance(documents.documents, Sequence):
        shared, plan = share_where_faster(
            language_model, documents.documents, documents.lengths, choice, world, training=False
        )
        read = documents if plan.parents is None else shared
    else:
        plan = cached_plan(choice, documents.lengths, world.home)
    return check_step_arguments(model, plan, read, world, backward=False)


def _make_result(inputs: StepInputs, totals: Totals, options: EvaluationOptions) -> Evaluation:
    """Every metric is a mean: a sum and what divides it. The caller sets degree, seconds and bytes."""
    plan = inputs.plan
    whole = [*plan.whole_documents]
    lengths = [plan.path_lengths[document] for document in whole]
    targets = [inputs.documents.targets_by_document[document] for document in whole]
    totals = totals._replace(
        documents=totals.documents[whole], document_metrics=totals.document_metrics[..., whole]
    )
    columns = score_columns(inputs.language_model)
    by_position = ()
    if options.loss is None:
        loss = Mean(math.fsum(totals.documents.tolist()), plan.targets)
        # the last row may count too
        by_position = totals.bucket_by_position([n + (columns > 0) for n in lengths])
    elif columns:
        totals, loss = _totals_of_sets(totals, options.loss, plan)
    else:
        return _result_of_sets(inputs, totals, options, options.loss)
    # Of scores it is the share of right classes, where each row has one of several.
    chooses = (
        not columns
        or options.loss is not None
        or (columns > 1 and plan.targets > 0 and LABEL in inputs.documents[0].token_values(_NOWHERE))
    )
    metrics = {"accuracy" if columns else "token_accuracy": Mean(totals.hits, totals.rows)} if chooses else {}
    if options.token_bytes is not None and not columns:
        metrics["bits_per_byte"] = Mean(loss.sum / math.log(2), totals.bytes)
    metrics |= {name: Mean(*pair) for name, pair in zip(options.metrics, totals.metrics.tolist(), strict=True)}
    return Evaluation(
        step=options.step,
        cp=0,
        loss=loss.sum / max(loss.count, 1),
        documents=len(lengths),
        tokens=sum(lengths),
        targets=plan.targets,
        seconds=0.0,
        plan=plan,
        name=options.name,
        scored=columns > 0,
        metrics=metrics,
        by_position=by_position,
        by_length=totals.bucket_by_length(lengths, targets),
        document_losses=tuple(
            Mean(loss, count) for loss, count in zip(totals.documents.tolist(), targets, strict=True)
        ),
        document_metrics={
            name: tuple(Mean(*pair) for pair in sums.T.tolist())
            for name, sums in zip(options.document_metrics, totals.document_metrics, strict=True)
        },
    )


def _result_of_sets(
    inputs: StepInputs, totals: Totals, options: EvaluationOptions, loss: "DocumentLoss"
) -> Evaluation:
    """Make the result of a loss of sets of a language model's documents, from the sums of `with_sums_of_sets`."""
    from longspan.train.terms.document_loss import sum_set_losses

    count = len(loss.columns) + len(loss.also)
    sums = totals.document_metrics[:count, 0].T
    sets = loss.check_sets(inputs.plan)
    given = sums[:, 0] if len(loss.columns) == 1 else sums[:, : len(loss.columns)]
    total, _ = sum_set_losses(loss.function, sets, given)
    tokens = _make_result(inputs, totals, replace(options, loss=None))  # cross entropies, which are not told
    figures = {} if loss.figures is None else loss.figures(sums)
    own_metrics = {name: mean for name, mean in tokens.metrics.items() if name in options.metrics}
    return replace(
        tokens,
        loss=total / max(len(sets), 1),
        scored=True,
        metrics={name: Mean(value, 1) for name, value in figures.items()} | own_metrics,
        by_position=(),
        by_length=(),
        document_metrics=dict([*tokens.document_metrics.items()][count:]),
    )


def _totals_of_sets(totals: Totals, loss: "DocumentLoss", plan: Plan) -> tuple[Totals, Mean]:
    """Return totals, of documents' scores, as those of the sets of documents, each of which has its set's loss."""
    sets = loss.check_sets(plan)
    losses = np.zeros_like(totals.documents)
    hits = 0
    values = list[float]()
    for documents in sets:
        first, *others = scores = totals.documents[list(documents)]
        values.append(float(loss.function(torch.from_numpy(scores), documents)))
        losses[list(documents)] += values[-1]
        hits += all(first > other for other in others)
    return totals._replace(documents=losses, hits=hits, rows=len(sets)), Mean(math.fsum(values), len(sets))


# ---- the plan of an evaluation, priced for forward passes only


def _choice_for_evaluation(choice: PlannerConfig, model: nn.Module, documents: StepDocuments) -> PlannerConfig:
    multiple = call_rules(model).row_multiple
    options = choice.options
    rows = options.row_multiple if options.row_multiple % multiple == 0 else multiple
    targets = sum(documents.targets_by_document)
    return replace(
        choice, options=replace(options, cost=options.cost.forward_only(), row_multiple=rows, targets=targets)
    )


# ---- portions


def _score_loss(model: nn.Module, loss: "DocumentLoss | None") -> "LossFunction | None":
    if not score_columns(model):
        return None
    if loss is not None:  # of the sums of scores
        return lambda scores, at: scores * at[WEIGHTS]
    from longspan.train.terms.scores import configured_loss

    return configured_loss(model)


class Portions:
    """Runs one evaluation a portion of its micro-batches at a time."""

    def __init__(self, inputs: StepInputs, options: EvaluationOptions, started: float) -> None:
        self.inputs: StepInputs = inputs
        self.options: EvaluationOptions = options
        self.started: float = started
        self.plan: Plan = inputs.plan
        self.world: World = inputs.world
        self.items = inputs.documents.items
        self.sums: RowSums = RowSums(
            self.plan.path_lengths, options, self.world, _score_loss(inputs.language_model, options.loss)
        )
        self.largest: int = PORTION * self.world.home.pp  # micro-batches of a portion at most
        self.long = self.any_long = False  # whether the last portion took long, here and on any rank
        self.gathered = 0  # bytes of parameters that stay gathered until the end
        kernel = {} if options.attention_kernel is None else {"attention_kernel": options.attention_kernel}
        self.terms = encoder_terms(inputs)
        self.passes = Passes.with_terms(inputs, self.terms, self.sums.measure, keywords=kernel)

    def evaluate_all(self) -> Totals:
        """Portions double while they take less than SHORT_SECONDS on every rank, as ranks learn one portion later."""
        # One micro-batch where something may end it early; a pipeline, which each portion fills, begins large.
        size = 1 if self.options.stopped is not None and self.world.home.pp == 1 else self.largest
        done = 0
        count = len(self.plan.micro_batches)
        with ExitStack() as stack:
            while done < max(count, 1):  # one portion of an empty plan too, so that all ranks agree on it
                portion = self.plan.micro_batches[done : done + size]
                batches = self._read_agreed_batches(portion, done)
                if self.gathered and not done:
                    stack.enter_context(gather_once(self.inputs.language_model))
                started = time.perf_counter()
                run_passes(self.passes, batches)
                self.sums.collect_measured_sums()
                self.long: bool = time.perf_counter() - started >= SHORT_SECONDS
                size = size if self.any_long else min(2 * size, self.largest)
                done += max(len(portion), 1)
                if self.options.progress is not None:
                    self.options.progress(min(done, count), count)
        totals = self.sums.sum_over_ranks()
        if totals.failures:
            raise_first_error(self.world, self.sums.error)
        return totals

    def _read_agreed_batches(self, portion: Sequence[MicroBatch], done: int) -> list[LocalBatch]:
        batches = list[LocalBatch]()
        error = self._end_reason(done)
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
            self.passes: Passes = replace(self.passes, frees_parameters=not self.gathered)
            self.world.channels.make_communicators(self.plan)  # the ranks have just agreed on it
        return batches

    def _agree_on_end(self, ended: bool, *, first: bool) -> bool:
        """The first portion compares items and plan and agrees on gathering; later ones, whether the last took long."""
        if first:
            if self.items is not None:
                self.world.control.compare_digests(self.items.digest(), what="lists of items")
            room = self._gathering_bytes()
            any_ended, no_room = self.world.control.compare_digests(self.plan.digest(), ended, not room)
            self.gathered: int = 0 if no_room else room
            return any_ended
        self.any_long: bool
        any_ended, self.any_long = self.world.control.any_ranks(ended, self.long)
        return any_ended

    def _gathering_bytes(self) -> int:
        world = self.world
        plan = self.plan
        if len(plan.micro_batches) < 2 or world.home.pp > 1 or plan.mode == "free":
            return 0
        room = int(unused_bytes(world.device, len(world.home.ranks)) * GATHERED_SHARE)
        size = gathered_bytes(self.inputs.language_model)
        return size if size <= room else 0

    def _end_reason(self, done: int) -> LongspanError | None:
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
