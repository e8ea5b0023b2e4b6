"""Plans of training steps: from the step alone, the same whether another process makes them ahead or not."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from longspan.layout import Layout
from longspan.train.config import ContextConfig
from longspan.train.order import StepOrder
from longspan.train.plans import PlanChoice, StepPlanner, plans_of_steps

LENGTHS = np.random.default_rng(0).integers(2, 400, 80)
HOME = Layout(ranks=6)
DYNAMIC = ContextConfig(planner="dynamic", max_tokens_per_slot=256, plan_ahead=2)


def order() -> StepOrder:
    return StepOrder(LENGTHS, tokens_per_step=2000, seed=3, eval_documents=4)


def test_a_planner_that_has_travelled_makes_the_same_plans() -> None:
    planner = StepPlanner(PlanChoice.training(DYNAMIC), order(), HOME)
    travelled = pickle.loads(pickle.dumps(planner))
    for step in (5, 0, 19):
        plan = planner(step)
        assert travelled(step) == plan
        assert list(plan.lengths) == LENGTHS[list(order().documents_of_step(step))].tolist()


@pytest.mark.parametrize("context", [DYNAMIC, replace(DYNAMIC, planner="fixed", context_parallel_size=2)], ids=str)
def test_plans_made_ahead_are_those_made_inline(context: ContextConfig) -> None:
    with (
        plans_of_steps(context, order(), HOME) as ahead,
        plans_of_steps(replace(context, plan_ahead=0), order(), HOME) as inline,
    ):
        assert ahead.ahead == (2 if context.planner == "dynamic" else 0)
        for step in (4, 5, 6, 63, 64, 65, 4):
            assert ahead.plan(step) == inline.plan(step)
