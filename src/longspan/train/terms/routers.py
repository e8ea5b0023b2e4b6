"""The routers of a model with experts: their losses in the gradient, and their statistics in the result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from longspan.model.experts.router import RouterStatistics
from longspan.train.passes import Passes, Term


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
