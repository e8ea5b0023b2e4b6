"""Evaluation of the weights as they are, at any degree: the same step as training, with another plan and no backward.

Each held-out document counts once, whatever the degree. Nothing is rebound: the degree is in the plan.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.plan import Plan
from longspan.train.data import Corpus
from longspan.train.plans import PlanChoice, degrees_to_compare
from longspan.train.step import run_step


@dataclass(frozen=True)
class Evaluation:
    """The loss over the held-out documents: the sum over `targets` predicted tokens, divided by their number."""

    step: int
    cp: int
    loss: float
    documents: int
    tokens: int
    targets: int
    seconds: float
    plan: Plan

    def row(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl."""
        return {
            "step": self.step,
            "eval_loss": self.loss,
            "eval_tokens": self.tokens,
            "eval_targets": self.targets,
            "cp": self.cp,
            "seconds": round(self.seconds, 6),
        }


def evaluate(
    model: nn.Module, corpus: Corpus, documents: Sequence[int], choice: PlanChoice, world: World, *, step: int
) -> Evaluation:
    """The loss of these documents under a plan of `choice`; all ranks call it together.

    >>> evaluate(model, corpus, order.evaluation, PlanChoice.evaluation(config.context), world, step=100).loss
    """
    started = time.perf_counter()
    given = corpus.select(documents)
    plan = choice.plan(given.lengths, world.home)
    world.prepare(plan)
    result = run_step(model, plan, given, world, backward=False, step=step)
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
    model: nn.Module, corpus: Corpus, documents: Sequence[int], choice: PlanChoice, world: World, *, step: int
) -> tuple[Evaluation, ...]:
    """The same documents at degree 1, 2, 4, … as far as they divide the slots, each under a cap that holds them."""
    longest = max(corpus.select(documents).lengths)
    choices = [choice.at_degree(degree, longest=longest) for degree in degrees_to_compare(world.home)]
    return tuple(evaluate(model, corpus, documents, c, world, step=step) for c in choices)


def comparison_table(evaluations: Sequence[Evaluation]) -> str:
    """The losses of one set of weights at several degrees, with their relative difference to the first, as text."""
    first = evaluations[0]
    lines = [
        f"evaluation loss of the weights after step {first.step}: {first.documents} documents, {first.tokens} tokens",
        f"{'cp':>4}  {'loss':>14}  {'relative difference':>20}  {'micro-batches':>13}  {'seconds':>8}",
    ]
    for found in evaluations:
        difference = abs(found.loss - first.loss) / abs(first.loss) if first.loss else 0.0
        lines.append(
            f"{found.cp:>4}  {found.loss:>14.9f}  {difference:>20.1e}  {len(found.plan.micro_batches):>13}  "
            f"{found.seconds:>8.2f}"
        )
    return "\n".join(lines)


def save_plan(plan: Plan, folder: Path, name: str) -> None:
    """Keep a plan as `folder/name.json`, for the report."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
