"""The loss of one step: what `run_step` is given as `loss=` and `divisor=`, checked, and what its passes make of it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn

from longspan.comm import World, raise_first_error
from longspan.errors import LongspanError, LossError
from longspan.plan import Plan
from longspan.train.loss import CrossEntropy
from longspan.train.own_loss.document_loss import DocumentLoss
from longspan.train.own_loss.document_passes import DocumentPasses
from longspan.train.own_loss.token_loss import LossFunction, TokenLoss
from longspan.train.passes import Passes
from longspan.train.read_rows import LocalBatch

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
        """Raise ModelError for a model whose two forward passes would differ."""
        if backward and isinstance(self.measure, DocumentPasses):
            self.measure.refuse_dropout(model)

    def look_ahead(self, passes: Passes, batches: Sequence[LocalBatch]) -> float:
        """What comes before the passes of the step; this rank's part of the loss that is then known."""
        if not isinstance(self.measure, DocumentPasses):
            return 0.0
        self.measure.look_ahead(passes, batches)
        return self.measure.loss_ahead()

    def raise_error(self, world: World) -> None:
        """Raise what the caller's function raised on any rank, on every rank, which all enter."""
        if isinstance(self.measure, CrossEntropy):
            return
        error = _named(self.measure.error, world)
        if world.control.any_rank(error is not None):
            raise_first_error(world, error)


def step_loss(loss: Loss, divisor: float | None, plan: Plan, world: World, chunk_rows: int) -> StepLoss:
    """The loss of a step of this plan. Raises LossError for a loss or a divisor that is none, before any collective.

    Where one was given, raises CommError for ranks that were given others.
    """
    if loss is not None and not isinstance(loss, DocumentLoss) and not callable(loss):
        raise LossError(f"loss is {loss!r}; give a function of (log_probs, at), a DocumentLoss, or None")
    if isinstance(loss, DocumentLoss):
        sets = loss.sets_of(plan)
        measure, default = DocumentPasses(loss.function, sets, plan, world, chunk_rows), len(sets)
    else:
        sets, default = (), plan.targets
        measure = CrossEntropy(chunk_rows) if loss is None else TokenLoss(loss, chunk_rows)
    if divisor is not None:
        check_divisor(divisor)
    if divisor is not None or loss is not None:
        described = f"{type(measure).__name__} {divisor} {sets}"
        world.control.agree(hashlib.sha256(described.encode()).hexdigest(), what="losses, sets or divisors")
    return StepLoss(measure, float(max(default, 1) if divisor is None else divisor))


def check_divisor(divisor: Any) -> None:
    """Raise LossError for what a loss cannot be divided by."""
    number = isinstance(divisor, Real) and not isinstance(divisor, bool)
    if not number or not math.isfinite(divisor) or divisor <= 0:
        raise LossError(
            f"divisor is {divisor!r}; give a positive number, the same on every rank: the number of documents, or of "
            "targets, or of prompts"
        )


def _named(error: Exception | None, world: World) -> LongspanError | None:
    if error is None or isinstance(error, LongspanError):
        return error
    named = LossError(f"the loss failed on rank {world.rank}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
