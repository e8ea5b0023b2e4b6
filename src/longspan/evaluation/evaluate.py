"""Evaluation of the weights as they are, at any degree: the passes of training with another plan and no backward.

Each document counts once, whatever the degree. Nothing is rebound: the degree is in the plan. The plan runs in portions
of micro-batches (`portions.py`).
"""

import math
import time
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.data.documents import Documents
from longspan.errors import PlanError
from longspan.evaluation.metrics import EvaluationOptions, Mean, MeasuredDocuments
from longspan.evaluation.passkey import PasskeyDocuments
from longspan.evaluation.portions import Portions
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import Totals
from longspan.layout import Layout
from longspan.model.multimodal.multimodal_model import MultimodalModel, check_world
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.train.memory.live_bytes import measure_added_peak
from longspan.train.plans import PlanChoice, degrees_to_compare
from longspan.train.reading.step_inputs import StepDocuments, StepInputs
from longspan.train.step_check import check_step


def evaluate(
    model: nn.Module, documents: Any, choice: PlanChoice | Plan, world: World, options: EvaluationOptions | None = None
) -> Evaluation:
    """Loss and metrics of these documents under a plan of `choice`, or a given one; all ranks call it together.

    >>> result = evaluate(model, documents, PlanChoice.fixed(4, max_tokens_per_slot=2048), world)
    >>> result.loss, result.perplexity, result.metrics["token_accuracy"].value

    `documents[d]` is document d: it has a length and is indexed by an int64 array of positions, those that a rank
    holds; MeasuredDocuments bring metrics as well. Parameters, gradients, modes of modules and states of random
    generators are afterwards as they were before, also where it raises; `world.step` does not change.

    Raises PlanError for documents that fit no plan, EvaluationError for a metric that gives no (sum, count), DataError
    for documents that cannot be read, and EvaluationStopped where `options` stop it: each on all ranks.
    """
    started, options = time.perf_counter(), options or EvaluationOptions()
    measured = documents if isinstance(documents, MeasuredDocuments) else None
    if measured is not None:
        options = replace(options, document_metrics={**options.document_metrics, **measured.metrics})
    inputs = _check_inputs(model, documents, choice, world)
    plan, naming = inputs.plan, world.watch.naming("evaluation", world.home.ranks, step=options.step)
    with naming, measure_added_peak(world.device) as memory:
        portions = Portions(inputs, options, started)
        totals = portions.run()
    if totals.rows != plan.targets:
        raise PlanError(
            f"the slots counted {totals.rows} targets, the plan has {plan.targets}; is a document left out?"
        )
    widest = max((group.degree for batch in plan.micro_batches for group in batch.groups), default=1)
    result = replace(
        _result(inputs, totals, options),
        cp=widest if isinstance(choice, Plan) or choice.planner == "dynamic" else choice.degree,
        seconds=time.perf_counter() - started,
        activation_bytes=None if memory.bytes is None else world.control.largest(memory.bytes - portions.gathered),
    )
    if measured is not None:
        result = replace(result, **measured.figures(result.document_metrics, step=result.step, cp=result.cp))
    return result


def _check_inputs(model: nn.Module, documents: Any, choice: PlanChoice | Plan, world: World) -> StepInputs:
    """What the evaluation runs over, under a plan that is given, or made by a choice."""
    if isinstance(choice, Plan):
        return check_step(model, choice, documents, world, backward=False)
    language_model = model
    if isinstance(model, MultimodalModel):
        check_world(model, world)
        language_model = model.language_model
    documents = StepDocuments(model, documents, _lengths(documents))
    plan = _cached_plan(_forward_choice(choice, language_model, documents), documents.lengths, world.home)
    return check_step(model, plan, documents, world, backward=False)


def _result(inputs: StepInputs, totals: Totals, options: EvaluationOptions) -> Evaluation:
    """The result, without its degree, seconds and bytes."""
    plan, targets = inputs.plan, inputs.documents.targets
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
        by_length=totals.by_length(plan.lengths, targets),
        document_losses=tuple(
            Mean(loss, count) for loss, count in zip(totals.documents.tolist(), targets, strict=True)
        ),
        document_metrics={
            name: tuple(Mean(*pair) for pair in sums.T.tolist())
            for name, sums in zip(options.document_metrics, totals.document_metrics, strict=True)
        },
    )


# ---- the plan of an evaluation, priced for forward passes only


def choices_at_degrees(choice: PlanChoice, documents: Documents | PasskeyDocuments, home: Layout) -> list[PlanChoice]:
    """A choice at degree 1, 2, 4, … as far as they divide the slots, each under a cap that holds these documents.

    Degrees at which a2a cannot split the query heads evenly are left out.
    """
    longest = max(documents.lengths)
    return [choice.at_degree(degree, longest=longest) for degree in degrees_to_compare(home, choice)]


@lru_cache(maxsize=8)
def _cached_plan(choice: PlanChoice, lengths: tuple[int, ...], home: Layout) -> Plan:
    """The plan of a set of documents, made once: a dynamic plan takes longer than the evaluation of a few."""
    return choice.plan(lengths, home)


def _forward_choice(choice: PlanChoice, model: nn.Module, documents: StepDocuments) -> PlanChoice:
    """The choice priced for forward passes only, with the documents' targets and the rows that a model needs."""
    multiple, options = call_rules(model).row_multiple, choice.options
    rows = options.row_multiple if options.row_multiple % multiple == 0 else multiple
    targets = sum(documents.targets)
    return replace(
        choice, options=replace(options, cost=options.cost.forward_only(), row_multiple=rows, targets=targets)
    )


def _lengths(documents: Any) -> tuple[int, ...]:
    lengths = getattr(documents, "lengths", None)
    return tuple(len(documents[d]) for d in range(len(documents))) if lengths is None else tuple(map(int, lengths))
