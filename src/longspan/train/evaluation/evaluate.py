"""Evaluation of the weights as they are, at any degree: the same step as training, with another plan and no backward.

Each held-out document counts once, whatever the degree. Nothing is rebound: the degree is in the plan.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from longspan.comm import World
from longspan.plan import Plan
from longspan.train.config.sections import RunConfig
from longspan.train.data.documents import Corpus
from longspan.train.disk import write_atomically
from longspan.train.evaluation.result import Evaluation
from longspan.train.plans import PlanChoice, degrees_to_compare
from longspan.train.step import run_step


def evaluate(
    model: nn.Module,
    corpus: Corpus,
    documents: Sequence[int],
    choice: PlanChoice,
    world: World,
    *,
    step: int,
    config: RunConfig,
) -> Evaluation:
    """The loss of these documents under a plan of `choice`; all ranks call it together.

    How many rows become logits at a time is taken from `config`.

    >>> choice = PlanChoice.evaluation(config.context)
    >>> evaluate(model, corpus, order.evaluation, choice, world, step=100, config=config).loss
    """
    started = time.perf_counter()
    given = corpus.select(documents)
    plan = choice.plan(given.lengths, world.home)
    world.prepare(plan)
    chunk = config.train.loss_chunk_rows
    result = run_step(model, plan, given, world, backward=False, step=step, loss_chunk_rows=chunk)
    widest = max(group.degree for batch in plan.micro_batches for group in batch.groups)
    return Evaluation(
        step=step,
        cp=choice.degree if choice.planner != "dynamic" else widest,
        loss=result.loss,
        documents=len(given),
        tokens=plan.tokens,
        targets=plan.targets,
        seconds=time.perf_counter() - started,
        plan=plan,
    )


def compare_degrees(
    model: nn.Module,
    corpus: Corpus,
    documents: Sequence[int],
    choice: PlanChoice,
    world: World,
    *,
    step: int,
    config: RunConfig,
) -> tuple[Evaluation, ...]:
    """The same documents at degree 1, 2, 4, … as far as they divide the slots, each under a cap that holds them.

    Degrees to which a2a cannot deal out the query heads are left out.
    """
    longest = max(corpus.select(documents).lengths)
    choices = [choice.at_degree(degree, longest=longest) for degree in degrees_to_compare(world.home, choice)]
    return tuple(evaluate(model, corpus, documents, c, world, step=step, config=config) for c in choices)


def save_plan(plan: Plan, folder: Path, name: str) -> None:
    """Keep a plan as `folder/name.json`, for the report."""
    folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{name}.json", plan.to_json())
