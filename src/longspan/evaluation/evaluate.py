"""Evaluation of the weights as they are, at any degree: the passes of training with another plan and no backward.

Each document counts once, whatever the degree. Nothing is rebound: the degree is in the plan. The plan runs in portions
of micro-batches (`portions.py`).
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.errors import PlanError
from longspan.evaluation.metrics import Mean, MeasuredDocuments
from longspan.evaluation.options import EvaluationOptions
from longspan.evaluation.plan_of import plan_of
from longspan.evaluation.portions import Portions
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import Totals
from longspan.model.multimodal.multimodal_model import check_world, language_model_of
from longspan.plan import Plan
from longspan.train.encoding import items_of
from longspan.train.memory.live_bytes import added_peak
from longspan.train.plans import PlanChoice
from longspan.train.reading.targets import targets_of_documents
from longspan.train.step_check import check_step


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
    plan = choice if isinstance(choice, Plan) else plan_of(choice, language_model_of(model), documents, world.home)
    items = items_of(model, plan, documents)
    check_step(language_model_of(model), plan, documents, world, items, backward=False)
    with _step_restored(world, options.step), added_peak(world.device) as memory:
        portions = Portions(model, plan, documents, world, options, started)
        totals = portions.run()
    if totals.rows != plan.targets:
        raise PlanError(
            f"the slots counted {totals.rows} targets, the plan has {plan.targets}; is a document left out?"
        )
    widest = max((group.degree for batch in plan.micro_batches for group in batch.groups), default=1)
    result = _result(plan, totals, options, targets_of_documents(documents, plan.lengths, items))
    result = replace(
        result,
        cp=widest if isinstance(choice, Plan) or choice.planner == "dynamic" else choice.degree,
        seconds=time.perf_counter() - started,
        activation_bytes=None if memory.bytes is None else world.control.largest(memory.bytes - portions.gathered),
    )
    if measured is not None:
        result = replace(result, **measured.figures(result.document_metrics, step=result.step, cp=result.cp))
    return result


@contextmanager
def _step_restored(world: World, step: int) -> Iterator[None]:
    before, world.step = world.step, step
    try:
        yield
    finally:
        world.step = before


def _result(plan: Plan, totals: Totals, options: EvaluationOptions, targets: Sequence[int]) -> Evaluation:
    """The result; `targets` is what each document predicts."""
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
