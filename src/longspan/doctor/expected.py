"""What the cases of a proof should give: answers of the stock model, computed in one process, and tolerances."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig

from longspan.doctor.cases import Case
from longspan.doctor.outcomes import error_text
from longspan.doctor.stock import (
    NO_ROUTER,
    ROUTER,
    Answer,
    choose_every_expert,
    compute_stock_answer,
    gradient_errors,
    loss_error,
    precision_mode,
)
from longspan.model.exactness.trial_documents import TrialDocument

EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
ROUNDING = 2  # so many times the stock model's own error: in bfloat16, and in float32 where that is above EXACT
ROUNDINGS = 10  # so many times what one rounding of every weight does is still rounding
MOST_NUDGED = 1e-9  # more than rounding of float64 does: a row got another expert


@dataclass(frozen=True)
class Expected:
    """The stock model's answer in one dtype, the tolerance of a case, and the mode in which both are computed.

    `whole`: float64 without casts to float32 (`precision_mode`). `every_expert`: in stock model and case alike each row
    gets every expert.
    """

    answer: Answer
    tolerance: float
    whole: bool
    every_expert: bool = False


class Stock:
    """Answers of the stock model by dtype, with or without losses of routers and images; a text if it cannot run."""

    def __init__(
        self, config: PreTrainedConfig, documents: Sequence[Any], image_documents: Sequence[TrialDocument] = ()
    ) -> None:
        """Store what the stock model runs on: `documents`, and `image_documents` for cases with an encoder."""
        self.config: PreTrainedConfig = config
        self.documents: Sequence[Any] = documents
        self.image_documents: Sequence[TrialDocument] = image_documents

    def compute_answers(self, cases: Sequence[Case]) -> dict[tuple[str, bool, bool], Expected | str]:
        """Compute the expected answer, or why there is none, for every dtype that the cases use.

        Keys are dtype, with losses of routers or not, and with images or not (`Case.answer`). Answers without losses
        of routers are always computed, as they say in which mode a model is prepared.
        """
        keys = dict.fromkeys((case.dtype, False, case.encoder > 0) for case in cases)
        keys |= dict.fromkeys(case.answer for case in cases if case.router_losses)
        answers: dict[tuple[str, bool, bool], Expected | str] = {}
        for name, with_routers, with_images in keys:
            stock = Stock(self.config, self.image_documents) if with_images else self
            try:
                answers[name, with_routers, with_images] = stock._expectation(getattr(torch, name), with_routers)
            except Exception as error:
                answers[name, with_routers, with_images] = error_text(error)
        return answers

    def _expectation(self, dtype: torch.dtype, with_routers: bool) -> Expected:
        """Compute the stock answer in a dtype, and the tolerance of cases that are compared with it.

        In half precision the tolerance is ROUNDING times the error of the stock model's own pass in that precision,
        against float32. There each row gets every expert, because rounding would change which experts are chosen.
        """
        if dtype == torch.float64:
            return self._float64_expectation(with_routers)
        if dtype == torch.float32:
            answer = self._stock_answer(dtype, dtype, with_routers)
            return Expected(answer, self._float32_bound(answer, with_routers), whole=False)
        stock = self._every_expert_stock  # the error of half precision is measured on the stock model itself
        answer, half_answer = (
            stock._stock_answer(dtype, compute_dtype, with_routers) for compute_dtype in (torch.float32, dtype)
        )
        return Expected(
            answer, ROUNDING * _worst_error(half_answer, answer), whole=False, every_expert=stock is not self
        )

    @cached_property
    def _every_expert_stock(self) -> "Stock":
        """Return the stock model whose rows get every expert.

        That is `self` for a model without experts to choose from, and for one whose code fails with every expert,
        which a trial shows.
        """
        config_of_every = choose_every_expert(self.config)
        if config_of_every is self.config:
            return self
        stock = Stock(config_of_every, self.documents)
        try:
            stock._stock_answer(torch.bfloat16, torch.bfloat16, False)
        except Exception:  # of the model's own code
            return self
        return stock

    def _float32_bound(self, answer: Answer, with_routers: bool) -> float:
        """Return EXACT, or what two float32 computations may differ by: gradients that cancel have few digits left.

        That is ROUNDING times the error of the stock model's own float32 pass against float64, if its conditioning
        explains this error. A larger error has other causes, such as a row that got another expert, and EXACT stays.
        EXACT stays too where the model's code cannot run in float64 throughout.
        """
        exact_bound = EXACT[torch.float32]
        try:
            with precision_mode(torch.float64, whole=True):  # scans and norms in float64 too
                exact = self._stock_answer(torch.float32, torch.float64, with_routers)
                most_rounding = self._most_rounding(exact, torch.float32, with_routers)
        except (RuntimeError, TypeError):  # such as a product of two dtypes
            return exact_bound
        error = _worst_error(answer, exact)
        return max(exact_bound, ROUNDING * error) if error <= most_rounding else exact_bound

    def _float64_expectation(self, with_routers: bool) -> Expected:
        """Return the answer in float64 throughout, if the model's code allows it, and EXACT or what rounding may do.

        If the code does not, its own casts to float32 stay, and attention is "sdpa": the eager one casts its softmax
        to float32.
        """
        exact_bound = EXACT[torch.float64]
        try:
            with precision_mode(torch.float64, whole=True):
                answer = self._stock_answer(torch.float64, torch.float64, with_routers)
                most_rounding = self._most_rounding(answer, torch.float64, with_routers)
            return Expected(answer, max(exact_bound, most_rounding), whole=True)
        except (RuntimeError, TypeError):  # such as a product of two dtypes
            answer = self._stock_answer(torch.float64, torch.float64, with_routers, attention="sdpa")
            return Expected(answer, exact_bound, whole=False)

    def _most_rounding(self, exact: Answer, dtype: torch.dtype, with_routers: bool) -> float:
        """Return how far rounding to a dtype can move the stock model's answer, whose weights are of this dtype.

        The conditioning is measured in float64: by how much the answer `exact` changes if every weight does by one
        rounding unit. 0 for a change that is not rounding's.
        """
        nudged = (self._stock_answer(dtype, torch.float64, with_routers, nudge=seed) for seed in (1, 2))
        change = max(_worst_error(answer, exact) for answer in nudged)
        units = torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
        return ROUNDINGS * units * change if change <= MOST_NUDGED else 0.0

    def _stock_answer(
        self, weights: torch.dtype, compute: torch.dtype, with_routers: bool, attention: str = "eager", nudge: int = 0
    ) -> Answer:
        """Return the stock model's answer with weights in one dtype and arithmetic in another, perhaps nudged."""
        router, documents = ROUTER if with_routers else NO_ROUTER, self.documents
        return compute_stock_answer(
            self.config, documents, weights, compute, router=router, attention=attention, nudge=nudge
        )


def _worst_error(answer: Answer, exact: Answer) -> float:
    """Return the largest relative error of an answer's loss and gradients."""
    return max(loss_error(answer.loss, exact.loss), *gradient_errors(answer.gradients, exact).values())
