"""The terms of a step, by what its model and arguments have. A step enters no module of a feature that is off.

All terms are imported here. Whether the model has routers or an adapter is read from its attributes, so that a step
without them calls nothing of theirs.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from longspan.comm import World, on_all_ranks, raise_first_error
from longspan.errors import LongspanError, LossError, short_text
from longspan.model.experts.moe import router_statistics
from longspan.model.experts.router import RouterCoefficients, RouterStatistics
from longspan.model.lora.without_adapter import refuse_adapter_left_out
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan
from longspan.train.loss import CrossEntropy
from longspan.train.passes import Passes, Term, default_divisor
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.reading.step_inputs import StepInputs
from longspan.train.terms.document_loss import DocumentLoss, DocumentPasses
from longspan.train.terms.mtp import DepthsTerm, MtpLoss
from longspan.train.terms.token_loss import LossFunction, TokenLoss

Loss = LossFunction | DocumentLoss | None


class LossTerm(Term):
    """How a step makes its loss of rows, and what it divides their sum by.

    Made by all ranks together. Raises LossError on every rank where one rank's loss or divisor cannot be used,
    CommError where ranks have different ones, or some have neither.
    """

    def __init__(self, loss: Loss, divisor: float | None, plan: Plan, world: World, chunk_rows: int) -> None:
        """Read the loss, and agree with all ranks that its kind, its divisor and its sets are the same.

        The first comparison, of a text that is the same on all ranks that have a loss or a divisor, tells them whether
        reading failed on any, so that all raise; the second one compares what was read.
        """
        self._world = world
        loss_text, failure = "", None
        try:
            self.measure: CrossEntropy | TokenLoss | DocumentPasses
            self.divisor: float
            self.measure, self.divisor, loss_text = _read_loss(loss, divisor, plan, world, chunk_rows)
        except Exception as error:  # sets may be anything: the other ranks must learn of it
            failure = _to_loss_error(error, world)
        if world.control.agree(
            _text_digest("a loss or a divisor"), flag=failure is not None, what=_COMPARISON, hint=_HINT
        ):
            raise_first_error(world, failure)
        world.control.agree(_text_digest(loss_text), what=_COMPARISON, hint=_HINT)

    def check_inputs(self, inputs: StepInputs) -> None:
        """Raise ModelError for a model whose two forward passes would differ."""
        if inputs.backward and isinstance(self.measure, DocumentPasses):
            self.measure.refuse_dropout(inputs.language_model)

    def extend_passes(self, passes: Passes) -> Passes:
        """Return the passes with this loss and divisor."""
        return replace(passes, measure=self.measure, divisor=self.divisor)

    def prepare_passes(self, passes: Passes, batches: Sequence[LocalBatch]) -> float:
        """Run the pass ahead of a DocumentLoss; returns the loss of its sets."""
        if not isinstance(self.measure, DocumentPasses):
            return 0.0
        self.measure.look_ahead(passes, batches)
        return self.measure.loss_ahead()

    def raise_error(self) -> None:
        """Raise what the caller's function raised on any rank, on every rank.

        Raises LossError where a function of documents gave other values on some ranks.
        """
        if isinstance(self.measure, CrossEntropy):  # calls no function of the caller's
            return
        error = None if self.measure.error is None else _to_loss_error(self.measure.error, self._world)
        if self._world.control.any_rank(error is not None):
            raise_first_error(self._world, error)
        if isinstance(self.measure, DocumentPasses) and self.measure.differs_on_ranks():
            raise on_all_ranks(
                LossError(
                    "the function of a DocumentLoss gave other losses or derivatives on some ranks; let it depend on "
                    "sums, on the numbers of documents, and on values that are the same on every rank"
                )
            )

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return how many micro-batches ran forward once more."""
        return {"forward_twice": self.measure.forward_twice if isinstance(self.measure, DocumentPasses) else 0}


_COMPARISON = "losses, sets or divisors"
_HINT = "Give every rank the same sets and divisor=, and all of them a loss= of the same kind, or none"


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_loss(
    loss: Loss, divisor: Any, plan: Plan, world: World, chunk_rows: int
) -> tuple[CrossEntropy | TokenLoss | DocumentPasses, float, str]:
    """Return the measure and the divisor of a step, and a text of all that must be the same on every rank."""
    if loss is not None and not isinstance(loss, DocumentLoss) and not callable(loss):
        raise LossError(f"loss is {short_text(loss)}; give a function of (log_probs, at), a DocumentLoss, or None")
    if isinstance(loss, DocumentLoss):
        sets = loss.check_sets(plan)
        measure, default = DocumentPasses(loss.function, sets, plan, world, chunk_rows), float(max(len(sets), 1))
    else:
        sets, default = (), default_divisor(plan)
        measure = CrossEntropy(chunk_rows) if loss is None else TokenLoss(loss, chunk_rows)
    used_divisor = default if divisor is None else check_divisor(divisor)
    return measure, used_divisor, f"{type(measure).__name__} {used_divisor} {sets}"


def check_divisor(divisor: Any) -> float:
    """Return the divisor of a loss: a number, or an array or a tensor of one. Raises LossError for anything else."""
    number = divisor
    if isinstance(divisor, Tensor | np.ndarray) and math.prod(divisor.shape) == 1:
        number = divisor.item()
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number) or number <= 0:
        raise LossError(
            f"divisor is {short_text(divisor)}; give a positive number, the same on every rank: the number of "
            "documents, or of targets, or of prompts"
        )
    return float(number)


def _to_loss_error(error: Exception, world: World) -> LongspanError:
    if isinstance(error, LongspanError):
        return error
    loss_error = LossError(f"the loss failed on rank {world.rank}: {type(error).__name__}: {error}")
    loss_error.__cause__ = error
    return loss_error


_CONFIGURED = RouterCoefficients()  # as the model's configuration has them


class AdapterTerm(Term):
    """An adapter that is trained: refused where it is left out, for then nothing would be trained."""

    def check_inputs(self, inputs: StepInputs) -> None:
        """Raise ModelError in a `without_adapter` context, where the adapter is left out of the model."""
        refuse_adapter_left_out(inputs.model)


class RoutersTerm(Term):
    """The routers of a model with experts: their losses in the gradient, and their statistics in the result."""

    def __init__(self, statistics: RouterStatistics) -> None:
        self._statistics = statistics

    def extend_passes(self, passes: Passes) -> Passes:
        """Return the passes with this collection of statistics, which every call of the model adds to."""
        return replace(passes, routing=self._statistics)

    def sums(self) -> list[float] | Tensor:
        """Return this rank's sums: loads and probabilities of experts, and the z losses."""
        return self._statistics.sums()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the routers' losses, without their coefficients."""
        return {"router": self._statistics.losses(sums)}


def input_terms(inputs: StepInputs, depths: int = 0) -> tuple[Term, ...]:
    """Return the terms that make inputs of the language model: its encoders. Evaluations have no others."""
    model, items = inputs.model, inputs.documents.items
    if not isinstance(model, MultimodalModel):
        return ()
    from longspan.train.terms.encoders import EncodersTerm

    assert items is not None, "documents of a MultimodalModel have items"
    return (EncodersTerm(model, inputs, items, depths),)


def step_terms(
    inputs: StepInputs,
    *,
    loss: Loss = None,
    divisor: float | None = None,
    router: RouterCoefficients | None = None,
    mtp: MtpLoss | None = None,
    chunk_rows: int = 0,
) -> tuple[Term, ...]:
    """Make all terms of a step of `run_step`, checked; an empty tuple in most runs. Entered by all ranks.

    Raises what the terms raise for a model or arguments that they cannot take.
    """
    model, terms = inputs.language_model, list[Term]()
    if inputs.backward and getattr(model, "adapter", None) is not None:
        terms.append(AdapterTerm())
    if loss is not None or divisor is not None:
        terms.append(LossTerm(loss, divisor, inputs.plan, inputs.world, chunk_rows))
    for term in terms:  # the others check when they are made
        term.check_inputs(inputs)
    depths = DepthsTerm(mtp, inputs, chunk_rows) if mtp is not None else None
    # `router_statistics` refuses coefficients for a model without routers.
    if hasattr(getattr(model, "config", None), "router_aux_loss_coef") or router not in (None, _CONFIGURED):
        statistics = router_statistics(model, inputs.world, inputs.plan.tokens, router)
        terms += [] if statistics is None else [RoutersTerm(statistics)]
    terms += [] if depths is None else [depths]  # after the loss, to whose measure they add theirs
    return (*input_terms(inputs, 0 if depths is None else depths.depths), *terms)
