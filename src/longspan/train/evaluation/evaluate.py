"""Evaluation of the weights as they are, at any degree: the same step as training, with another plan and no backward.

Each held-out document counts once, whatever the degree. Nothing is rebound: the degree is in the plan.
"""

import time

from torch import nn

from longspan.comm import World
from longspan.layout import Layout
from longspan.train.data.documents import Documents
from longspan.train.evaluation.result import Evaluation
from longspan.train.plans import PlanChoice, degrees_to_compare
from longspan.train.step import run_step


def evaluate(
    model: nn.Module, documents: Documents, choice: PlanChoice, world: World, *, step: int, loss_chunk_rows: int
) -> Evaluation:
    """The loss of these documents under a plan of `choice`; all ranks call it together.

    >>> held_out = corpus.select(order.evaluation)
    >>> choice = PlanChoice.evaluation(config)
    >>> evaluate(model, held_out, choice, world, step=100, loss_chunk_rows=0).loss
    """
    started = time.perf_counter()
    plan = choice.plan(documents.lengths, world.home)
    world.prepare(plan)
    result = run_step(model, plan, documents, world, backward=False, step=step, loss_chunk_rows=loss_chunk_rows)
    widest = max(group.degree for batch in plan.micro_batches for group in batch.groups)
    return Evaluation(
        step=step,
        cp=choice.degree if choice.planner != "dynamic" else widest,
        loss=result.loss,
        documents=len(documents),
        tokens=plan.tokens,
        targets=plan.targets,
        seconds=time.perf_counter() - started,
        plan=plan,
    )


def choices_at_degrees(choice: PlanChoice, documents: Documents, home: Layout) -> list[PlanChoice]:
    """A choice at degree 1, 2, 4, … as far as they divide the slots, each under a cap that holds these documents.

    Degrees at which a2a cannot split the query heads evenly are left out.
    """
    longest = max(documents.lengths)
    return [choice.at_degree(degree, longest=longest) for degree in degrees_to_compare(home, choice)]
