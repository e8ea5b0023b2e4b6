"""What the stock model says in each dtype of the cases, and how far from it a case may be: by rounding alone."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig

from longspan.doctor.cases import Case
from longspan.doctor.every_expert import with_every_expert
from longspan.doctor.ranks import Expected
from longspan.doctor.stock import (
    NO_ROUTER,
    ROUTER,
    Answer,
    gradient_errors,
    loss_error,
    precision,
    stock_answer,
)
from longspan.errors import LongspanError
from longspan.model.exactness.trial_documents import TrialDocument
from longspan.plan.cost.model_shape import read_experts

EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
ROUNDING = 2  # so many times the stock model's own error: in bfloat16, and in float32 where that is above EXACT
MOST_ROUNDING = 1e-3  # in float32: an error of its own beyond half of this is none of rounding
MOST_BESIDE_ROUTERS = 1e-4  # where it may be a row that another expert got


def error_text(error: BaseException) -> str:
    """What an error says, with its type where it is not this package's own."""
    return str(error) if isinstance(error, LongspanError) else f"{type(error).__name__}: {error}"


class Stock:
    """What the stock model says, by dtype, with or without losses of routers and images; a text where it cannot run."""

    def __init__(
        self, config: PreTrainedConfig, documents: Sequence[Any], images: Sequence[TrialDocument] = ()
    ) -> None:
        self.config, self.documents, self.images = config, documents, images

    def expected(self, cases: Sequence[Case]) -> dict[tuple[str, bool, bool], Expected | str]:
        """For every dtype of the cases; with losses of routers where a case wants them and the model has them."""
        keys = dict.fromkeys((case.dtype, False, case.encoder > 0) for case in cases)
        keys |= dict.fromkeys(case.answer for case in cases if case.router_losses)
        answers: dict[tuple[str, bool, bool], Expected | str] = {}
        for name, with_routers, with_images in keys:
            stock = Stock(self.config, self.images) if with_images else self
            try:
                answers[name, with_routers, with_images] = stock._of(getattr(torch, name), with_routers)
            except Exception as error:
                answers[name, with_routers, with_images] = error_text(error)
        return answers

    def _of(self, dtype: torch.dtype, with_routers: bool) -> Expected:
        if dtype == torch.float64:
            return self._exact(with_routers)
        if dtype == torch.float32:
            answer = self._answer(dtype, dtype, with_routers)
            return Expected(answer, self._bound_of_float32(answer, with_routers), whole=False)
        stock = self._without_choice
        answer, own = (stock._answer(dtype, compute, with_routers) for compute in (torch.float32, dtype))
        return Expected(answer, ROUNDING * _worst(own, answer), whole=False, every_expert=stock is not self)

    @cached_property
    def _without_choice(self) -> "Stock":
        """Of the model whose rows get every expert; this one where it has none to choose, or cannot run so."""
        every = with_every_expert(self.config)
        if every is self.config:
            return self
        stock = Stock(every, self.documents)
        try:
            stock._answer(torch.bfloat16, torch.bfloat16, False)
        except Exception:  # of the model's own code
            return self
        return stock

    def _bound_of_float32(self, answer: Answer, with_routers: bool) -> float:
        """EXACT, or what two computations in float32 may differ by: gradients that cancel out have few digits left."""
        least = EXACT[torch.float32]
        for whole in (True, False):  # scans and norms in float64 too, where the model's code can
            try:
                with precision(torch.float64, whole=whole):
                    exact = self._answer(torch.float32, torch.float64, with_routers)
            except (RuntimeError, TypeError):  # two types in one product, say
                continue
            between = ROUNDING * _worst(answer, exact)
            routed = read_experts(self.config.get_text_config()).of_layer > 1
            return max(least, between) if between <= (MOST_BESIDE_ROUTERS if routed else MOST_ROUNDING) else least
        return least

    def _exact(self, with_routers: bool) -> Expected:
        """In float64 all through, where the model's code can."""
        try:
            with precision(torch.float64, whole=True):
                answer = self._answer(torch.float64, torch.float64, with_routers)
            return Expected(answer, EXACT[torch.float64], whole=True)
        except (RuntimeError, TypeError):  # two types in one product, say
            answer = self._answer(torch.float64, torch.float64, with_routers, attention="sdpa")
            return Expected(answer, EXACT[torch.float64], whole=False)

    def _answer(
        self, weights: torch.dtype, compute: torch.dtype, with_routers: bool, attention: str = "eager"
    ) -> Answer:
        router = ROUTER if with_routers else NO_ROUTER
        return stock_answer(self.config, self.documents, weights, compute, router=router, attention=attention)


def _worst(answer: Answer, exact: Answer) -> float:
    return max(loss_error(answer.loss, exact.loss), *gradient_errors(answer.gradients, exact).values())
