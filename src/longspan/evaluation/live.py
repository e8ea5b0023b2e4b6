"""Evaluation of the weights as they are, at any degree: the passes of training with another plan and no backward.

Each document counts once, whatever the degree. Nothing is rebound: the degree is in the plan, which runs in
portions (`portions.py`).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from longspan.comm import World
from longspan.comm.device import measure_added_peak
from longspan.data.scored_document import LABEL
from longspan.errors import EvaluationError, PlanError
from longspan.evaluation.metrics import EvaluationOptions, Mean, with_sums_of_sets
from longspan.evaluation.portions import Portions
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import Totals
from longspan.layout import Floats, Integers
from longspan.model.kinds import score_columns
from longspan.model.marks import find_language_model
from longspan.model.multimodal.multimodal_model import MultimodalModel, check_world_of_model
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.resolve.planner_config import PlannerConfig
from longspan.train.prefix_sharing import cached_plan, share_prefixes_where_faster
from longspan.train.rows.gather_documents import bring_gathered_rows
from longspan.train.step_inputs import StepDocuments, StepInputs, check_step_arguments

if TYPE_CHECKING:
    from longspan.train.terms.document_loss import DocumentLoss, LossUnits


# A document's values are there by name, without any positions.
_NOWHERE = np.arange(0)


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
    share_prefixes = options.share_prefixes
    if options.distillation is not None:
        if options.loss is not None or score_columns(find_language_model(model)):
            raise EvaluationError("distillation= compares distributions of tokens, without loss= and scores")
        share_prefixes = share_prefixes and _may_share_prefixes(options.distillation.teacher)
    inputs = _plan_and_check(model, documents, choice, world, share_prefixes=share_prefixes)
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
    # The result names the widest degree, unless a choice names one degree for all documents.
    degree = max((group.degree for group in plan.groups), default=1)
    if isinstance(choice, PlannerConfig) and choice.has_one_degree:
        degree = choice.degree or degree
    result = _make_result(inputs, totals, options)
    seconds = time.perf_counter() - started
    activation_bytes = None
    # The peak is known on GPUs; parameters that stayed gathered are no activations.
    if added_bytes:
        (peak,) = world.control.largest_over_ranks([added_bytes[0] - portions.gathered], "peaks of memory")
        activation_bytes = int(peak)
    return replace(result, cp=degree, seconds=seconds, activation_bytes=activation_bytes)


def _may_share_prefixes(teacher: Any) -> bool:
    """Tables of a teacher may be of any documents."""
    if not isinstance(teacher, nn.Module):
        return True
    rules = call_rules(teacher)
    return not (rules.separate_features(training=False) or rules.length_limits)


def _plan_and_check(
    model: nn.Module, documents: Any, choice: PlannerConfig | Plan, world: World, *, share_prefixes: bool
) -> StepInputs:
    """With `share_prefixes` documents that begin alike may be planned, and read, with common prefixes apart."""
    if isinstance(choice, Plan):
        return check_step_arguments(model, choice, documents, world, backward=False)
    language_model = model
    if isinstance(model, MultimodalModel):
        # `check_step_arguments` does the same, but only after planning.
        check_world_of_model(model, world)
        language_model = model.language_model
    lengths = getattr(documents, "lengths", None)
    if lengths is None:
        lengths = [len(documents[d]) for d in range(len(documents))]
    step_documents = StepDocuments(model, documents, tuple(map(int, lengths)))
    # The plan is priced for forward passes, and its rows come in multiples that the model takes.
    options = choice.options
    model_multiple = call_rules(language_model).row_multiple
    multiple = options.row_multiple if options.row_multiple % model_multiple == 0 else model_multiple
    targets = sum(step_documents.targets_by_document)
    options = replace(options, cost=options.cost.forward_only(), row_multiple=multiple, targets=targets)
    choice = replace(choice, options=options)
    documents_to_read: Any = step_documents
    if share_prefixes and step_documents.items is None and isinstance(documents, Sequence):
        shared, plan = share_prefixes_where_faster(
            language_model, documents, step_documents.lengths, choice, world, training=False
        )
        if plan.parents is not None:
            documents_to_read = shared
    else:
        plan = cached_plan(choice, step_documents.lengths, world.home)
    return check_step_arguments(model, plan, documents_to_read, world, backward=False)


def _make_result(inputs: StepInputs, totals: Totals, options: EvaluationOptions) -> Evaluation:
    """The caller sets degree, seconds and bytes. Losses are of tokens, of scores, or of the sets of documents of
    `options.loss`."""
    plan = inputs.plan
    whole = [*plan.whole_documents]
    lengths = [plan.path_lengths[document] for document in whole]
    targets = [inputs.documents.targets_by_document[document] for document in whole]
    has_teacher = options.distillation is not None
    totals = totals._replace(
        documents=totals.documents[whole],
        document_metrics=totals.document_metrics[..., whole],
        divergences=totals.divergences[whole] if has_teacher else totals.divergences,
    )
    columns = score_columns(inputs.language_model)
    by_position = ()
    kl_by_position = kl_by_length = ()
    units = None
    if options.loss is None:
        loss = Mean(math.fsum(totals.documents.tolist()), plan.targets)
        # The last row of a document predicts nothing, but it may have a score: then it is as if a token followed.
        reached_lengths = [length + 1 for length in lengths] if columns else lengths
        by_position = totals.bucket_by_position(reached_lengths)
    elif columns:
        totals, units = _totals_of_sets(totals, options.loss, plan)
        loss = Mean(math.fsum(units.figures["loss"]), len(units.documents))
    else:
        return _result_of_sets(inputs, totals, options, options.loss)
    metrics = dict[str, Mean]()
    if not columns:
        metrics["token_accuracy"] = Mean(totals.hits, totals.rows)
    # Sets have hits, and so have rows with one of several classes.
    elif options.loss is not None or (
        columns > 1 and plan.targets > 0 and LABEL in inputs.documents[0].token_values(_NOWHERE)
    ):
        metrics["accuracy"] = Mean(totals.hits, totals.rows)
    if options.token_bytes is not None and not columns:
        metrics["bits_per_byte"] = Mean(loss.sum / math.log(2), totals.bytes)
    if has_teacher:
        divergences = totals.divergence_totals
        metrics["kl"] = Mean(math.fsum(divergences.documents.tolist()), plan.targets)
        metrics["agreement"] = Mean(totals.agreements, totals.rows)
        kl_by_position = divergences.bucket_by_position(lengths)
        kl_by_length = divergences.bucket_by_length(lengths, targets)
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
        kl_by_position=kl_by_position,
        kl_by_length=kl_by_length,
        document_losses=tuple(
            Mean(total, count) for total, count in zip(totals.documents.tolist(), targets, strict=True)
        ),
        document_metrics={
            name: tuple(Mean(*pair) for pair in sums.T.tolist())
            for name, sums in zip(options.document_metrics, totals.document_metrics, strict=True)
        },
        units=units,
    )


def _result_of_sets(
    inputs: StepInputs, totals: Totals, options: EvaluationOptions, loss: "DocumentLoss"
) -> Evaluation:
    """It has the caller's own metrics, and the loss's figures in place of the built-in ones."""
    from longspan.train.terms.document_loss import loss_units, sum_set_losses

    # These sums of sets come before the caller's metrics of documents.
    count = len(loss.columns) + len(loss.also)
    sums = totals.document_metrics[:count, 0].T
    sets = loss.check_sets(inputs.plan)
    numbers = sums[:, 0] if len(loss.columns) == 1 else sums[:, : len(loss.columns)]
    total, _ = sum_set_losses(loss.function, sets, numbers)
    token_result = _make_result(inputs, totals, replace(options, loss=None))
    figures = {} if loss.figures is None else loss.figures(sums)
    own_metrics = {name: mean for name, mean in token_result.metrics.items() if name in options.metrics}
    units = loss_units(loss, sets, sums)
    losses, counts = _sum_units_by_document(units, len(totals.documents))
    in_units = np.flatnonzero(counts).tolist()  # not the mismatched documents of kto
    lengths = [token_result.document_lengths[document] for document in in_units]
    return replace(
        token_result,
        loss=total / max(len(sets), 1),
        scored=True,  # the loss is no cross entropy: it has no perplexity
        metrics={name: Mean(value, 1) for name, value in figures.items()} | own_metrics,
        by_position=(),
        by_length=totals._replace(documents=losses[in_units]).bucket_by_length(lengths, counts[in_units].tolist()),
        document_metrics=dict([*token_result.document_metrics.items()][count:]),
        units=units,
        document_value="cross_entropy",
    )


def _totals_of_sets(totals: Totals, loss: "DocumentLoss", plan: Plan) -> tuple[Totals, "LossUnits"]:
    """Each document has its set's loss; a set is a hit if its first document has the highest score."""
    from longspan.train.terms.document_loss import loss_units

    units = loss_units(loss, loss.check_sets(plan), totals.documents)
    losses, _ = _sum_units_by_document(units, len(totals.documents))
    hits = 0
    for documents in units.documents:
        first, *others = totals.documents[list(documents)]
        if all(first > other for other in others):
            hits += 1
    return totals._replace(documents=losses, hits=hits, rows=len(units.documents)), units


def _sum_units_by_document(units: "LossUnits", count: int) -> tuple[Floats, Integers]:
    """Return for each of `count` documents the sum of the losses of units that it is in, and how many these are."""
    losses, units_of_documents = np.zeros(count), np.zeros(count, dtype=np.int64)
    for documents, loss in zip(units.documents, units.figures["loss"], strict=True):
        losses[list(documents)] += loss
        units_of_documents[list(documents)] += 1
    return losses, units_of_documents
