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
import torch
from torch import nn

from longspan.comm import World
from longspan.comm.device import measure_added_peak
from longspan.data.scored_document import LABEL
from longspan.errors import EvaluationError, PlanError
from longspan.evaluation.metrics import EvaluationOptions, Mean, with_sums_of_sets
from longspan.evaluation.portions import Portions
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import Totals
from longspan.model.kinds import score_columns
from longspan.model.multimodal.multimodal_model import MultimodalModel, check_world_of_model
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.resolve.choice import PlannerConfig
from longspan.train.families import cached_plan, share_prefixes_where_faster
from longspan.train.rows.gather_documents import bring_gathered_rows
from longspan.train.step_inputs import StepDocuments, StepInputs, check_step_arguments

if TYPE_CHECKING:
    from longspan.train.terms.document_loss import DocumentLoss


_NOWHERE = np.arange(0)  # of a document's positions: its values are there by name


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
    inputs = _plan_and_check(model, documents, choice, world, share_prefixes=options.share_prefixes)
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


def _plan_and_check(
    model: nn.Module, documents: Any, choice: PlannerConfig | Plan, world: World, *, share_prefixes: bool
) -> StepInputs:
    """Plan documents by `choice`, if it is no plan, and return what the passes run over, checked.

    With `share_prefixes` documents that begin alike may be planned, and read, with common prefixes apart.
    """
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
    options = choice.options  # priced for forward passes, with the rows that the model takes
    multiple = call_rules(language_model).row_multiple
    rows = options.row_multiple if options.row_multiple % multiple == 0 else multiple
    targets = sum(documents.targets_by_document)
    options = replace(options, cost=options.cost.forward_only(), row_multiple=rows, targets=targets)
    choice = replace(choice, options=options)
    documents_to_read: Any = documents
    if share_prefixes and documents.items is None and isinstance(documents.documents, Sequence):
        shared, plan = share_prefixes_where_faster(
            language_model, documents.documents, documents.lengths, choice, world, training=False
        )
        documents_to_read = documents if plan.parents is None else shared
    else:
        plan = cached_plan(choice, documents.lengths, world.home)
    return check_step_arguments(model, plan, documents_to_read, world, backward=False)


def _make_result(inputs: StepInputs, totals: Totals, options: EvaluationOptions) -> Evaluation:
    """Return the result of an evaluation from its sums; every metric is a mean: a sum and what divides it.

    The caller sets degree, seconds and bytes.
    """
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
    numbers = sums[:, 0] if len(loss.columns) == 1 else sums[:, : len(loss.columns)]
    total, _ = sum_set_losses(loss.function, sets, numbers)
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
    """Return totals, of documents' scores, as those of the sets of documents, and the mean loss of sets.

    Each document has its set's loss; a set is a hit if its first document has the highest score.
    """
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
