"""The routers of a model with experts: their losses in the gradient, and their statistics in the result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from longspan.model.experts.moe import make_router_statistics
from longspan.model.experts.router import RouterCoefficients, RouterStatistics
from longspan.train.passes import Passes, Term
from longspan.train.step_inputs import StepInputs


def router_terms(inputs: StepInputs, coefficients: RouterCoefficients | None) -> list[Term]:
    """Return the term of a model's routers; none for a model whose routers have no loss that is known.

    A shared row counts in each document that has it. Raises ModelError for coefficients of a model without such a loss.
    """
    tokens = inputs.plan.separate_tokens
    statistics = make_router_statistics(inputs.language_model, inputs.world, tokens, coefficients)
    return [] if statistics is None else [RoutersTerm(statistics)]


class RoutersTerm(Term):
    """The routers of a model with experts: their losses in the gradient, and their statistics in the result."""

    def __init__(self, statistics: RouterStatistics) -> None:
        self._statistics = statistics

    def extend_passes(self, passes: Passes) -> Passes:
        return replace(passes, routing=self._statistics)

    def sums(self) -> list[float] | Tensor:
        return self._statistics.sums()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        return {"router": self._statistics.losses(sums)}
