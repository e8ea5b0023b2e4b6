"""The loss of one step: what `run_step` is given as `loss=` and `divisor=`, checked, and what its passes make of it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn

from longspan.comm import World, on_all_ranks, raise_first_error
from longspan.errors import LongspanError, LossError, shortened
from longspan.plan import Plan
from longspan.train.loss import CrossEntropy
from longspan.train.own_loss.document_loss import DocumentLoss
from longspan.train.own_loss.document_passes import DocumentPasses
from longspan.train.own_loss.token_loss import LossFunction, TokenLoss
from longspan.train.passes import Passes
from longspan.train.reading.read_rows import LocalBatch

Loss = LossFunction | DocumentLoss | None


@dataclass(frozen=True)
class StepLoss:
    """How a step makes its loss of rows, and what it divides their sum by."""

    measure: CrossEntropy | TokenLoss | DocumentPasses
    divisor: float

    @property
    def forward_twice(self) -> int:
        """How many micro-batches run forward once more."""
        return self.measure.forward_twice if isinstance(self.measure, DocumentPasses) else 0

    def check(self, model: nn.Module, *, backward: bool) -> None:
        """Raise ModelError for a model whose two forward passes would differ; entered by all ranks."""
        if backward and isinstance(self.measure, DocumentPasses):
            self.measure.refuse_dropout(model)

    def look_ahead(self, passes: Passes, batches: Sequence[LocalBatch]) -> float:
        """What comes before the passes of the step; this rank's part of the loss that is then known."""
        if not isinstance(self.measure, DocumentPasses):
            return 0.0
        self.measure.look_ahead(passes, batches)
        return self.measure.loss_ahead()

    def raise_error(self, world: World) -> None:
        """Raise what the caller's function raised on any rank, on every rank, which all enter.

        Raises LossError where a function of documents gave other values on some ranks.
        """
        if isinstance(self.measure, CrossEntropy):
            return
        error = _named(self.measure.error, world)
        if world.control.any_rank(error is not None):
            raise_first_error(world, error)
        if isinstance(self.measure, DocumentPasses) and self.measure.difference():
            raise on_all_ranks(
                LossError(
                    "the function of a DocumentLoss gave other losses or derivatives on some ranks; let it depend on "
                    "sums, on the numbers of documents, and on values that are the same on every rank"
                )
            )


def step_loss(loss: Loss, divisor: float | None, plan: Plan, world: World, chunk_rows: int) -> StepLoss:
    """The loss of a step of this plan; entered by all ranks.

    Raises LossError on every rank for a loss or a divisor that is none on any. Where one was given, raises CommError
    for ranks that were given others, or nothing.
    """
    if loss is None and divisor is None:
        return _read(None, None, plan, world, chunk_rows)[0]
    terms, described, failure = None, "", None
    try:
        terms, described = _read(loss, divisor, plan, world, chunk_rows)
    except Exception as error:  # sets may be anything: the other ranks must learn of it
        failure = _named(error, world)
    if world.control.agree(_digest("a loss or a divisor"), flag=failure is not None, what=_WHAT, hint=_HINT):
        raise_first_error(world, failure)
    assert terms is not None
    world.control.agree(_digest(described), what=_WHAT, hint=_HINT)
    return terms


_WHAT = "losses, sets or divisors"
_HINT = "Give every rank the same sets and divisor=, and all of them a loss= of the same kind, or none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(loss: Loss, divisor: Any, plan: Plan, world: World, chunk_rows: int) -> tuple[StepLoss, str]:
    """The loss of a step, and in words what must be the same on every rank."""
    if loss is not None and not isinstance(loss, DocumentLoss) and not callable(loss):
        raise LossError(f"loss is {shortened(loss)}; give a function of (log_probs, at), a DocumentLoss, or None")
    if isinstance(loss, DocumentLoss):
        sets = loss.sets_of(plan)
        measure, default = DocumentPasses(loss.function, sets, plan, world, chunk_rows), len(sets)
    else:
        sets, default = (), plan.targets
        measure = CrossEntropy(chunk_rows) if loss is None else TokenLoss(loss, chunk_rows)
    by = float(max(default, 1)) if divisor is None else checked_divisor(divisor)
    return StepLoss(measure, by), f"{type(measure).__name__} {by} {sets}"


def checked_divisor(divisor: Any) -> float:
    """What a loss is divided by: a number, or an array or a tensor of one. Raises LossError for what is none."""
    number = divisor
    if isinstance(divisor, Tensor | np.ndarray) and math.prod(divisor.shape) == 1:
        number = divisor.item()
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number) or number <= 0:
        raise LossError(
            f"divisor is {shortened(divisor)}; give a positive number, the same on every rank: the number of "
            "documents, or of targets, or of prompts"
        )
    return float(number)


def _named(error: Exception | None, world: World) -> LongspanError | None:
    if error is None or isinstance(error, LongspanError):
        return error
    named = LossError(f"the loss failed on rank {world.rank}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
