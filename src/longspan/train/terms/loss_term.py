"""The loss and the divisor of a step (`loss=` and `divisor=` of `run_step`), agreed on by all ranks."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from longspan.comm import World, on_all_ranks, raise_first_error
from longspan.errors import LongspanError, LossError
from longspan.plain_text import short_text
from longspan.plan import Plan
from longspan.train.loss import CrossEntropy
from longspan.train.passes import Passes, Term
from longspan.train.rows.agreed_reading import read_and_compare_digest, text_digest
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.step_inputs import StepInputs
from longspan.train.terms.distillation import FIGURES, Distillation, DistillationPasses
from longspan.train.terms.document_loss import DocumentLoss, DocumentPasses
from longspan.train.terms.loss_tokens import LossFunction, TokenLoss
from longspan.train.terms.micro_batch_loss import MicroBatchLoss, MicroBatchPasses, refuse_head_dropout

GivenLoss = LossFunction | DocumentLoss | MicroBatchLoss | Distillation | None
StepLoss = CrossEntropy | TokenLoss | DocumentPasses | MicroBatchPasses | DistillationPasses


class LossTerm(Term):
    """How a step makes its loss of rows, and what it divides their sum by.

    Made by all ranks together. `scores` is how many a row has, 0 of a language model. Raises LossError on every rank
    where one rank's loss or divisor cannot be used, CommError where ranks have different ones, or some have neither.
    """

    def __init__(
        self, loss: GivenLoss, divisor: float | None, inputs: StepInputs, chunk_rows: int, scores: int
    ) -> None:
        """Check the loss and the divisor, which may fail on any rank: all ranks first agree that it did not, then
        compare kind, divisor and sets.
        """
        world = inputs.world
        self._world = world
        read_loss = partial(_check_loss_and_divisor, loss, divisor, inputs.plan, world, chunk_rows, scores)
        names = {"what": "losses, sets or divisors", "hint": _HINT}
        self.loss_fn: StepLoss
        self.divisor: float
        # This digest is the same on all ranks with a LossTerm; a rank without one comes with another to the collective.
        self.loss_fn, self.divisor, loss_text = read_and_compare_digest(
            read_loss, text_digest("a loss or a divisor"), world, _to_loss_error, **names
        )
        world.control.compare_digests(text_digest(loss_text), **names)
        self._targets = float(max(inputs.plan.targets, 1))
        if isinstance(self.loss_fn, DistillationPasses):
            self.loss_fn.check_models(inputs)
        if inputs.backward and isinstance(self.loss_fn, DocumentPasses):
            self.loss_fn.refuse_dropout(inputs.language_model)
        if inputs.backward and isinstance(self.loss_fn, MicroBatchPasses):
            refuse_head_dropout(inputs.language_model, world, "MicroBatchLoss")

    def read(self, batches: Sequence[LocalBatch]) -> None:
        if isinstance(self.loss_fn, DistillationPasses):
            self.loss_fn.check_ids(batches)

    def extend_passes(self, passes: Passes) -> Passes:
        passes = replace(passes, loss_fn=self.loss_fn, divisor=self.divisor)
        if not isinstance(self.loss_fn, DistillationPasses):
            return passes
        if passes.temperature != 1:
            raise LossError(
                f"temperature is {passes.temperature:g} beside a Distillation, which has its own for both models; give "
                f"Distillation(…, temperature={passes.temperature:g})"
            )
        return replace(passes, run_inside=partial(self.loss_fn.run_models, backward=passes.backward))

    def passes_context(self, batches: Sequence[LocalBatch]) -> AbstractContextManager[None]:
        return self.loss_fn.passes_context() if isinstance(self.loss_fn, DistillationPasses) else nullcontext()

    def prepare_passes(self, passes: Passes, batches: Sequence[LocalBatch]) -> float:
        if not isinstance(self.loss_fn, DocumentPasses):
            return 0.0
        return self.loss_fn.compute_coefficients_ahead(passes, batches)

    def raise_error(self) -> None:
        """Raise, on every rank, the error of a caller's function, or LossError where ranks came to different losses."""
        if isinstance(self.loss_fn, CrossEntropy | DistillationPasses):  # calls no function of the caller's
            return
        error = None if self.loss_fn.error is None else _to_loss_error(self.loss_fn.error, self._world)
        if self._world.control.flag_on_any_rank(error is not None):
            raise_first_error(self._world, error)
        if isinstance(self.loss_fn, TokenLoss) or not self.loss_fn.check.differ_on_ranks(self._world):
            return
        raise on_all_ranks(
            LossError(
                f"the function of a {self.loss_fn.kind} gave other losses or derivatives on some ranks; let it depend "
                f"on {self.loss_fn.input_name}, on the numbers of documents, and on values that are the same on every "
                "rank"
            )
        )

    def sums(self) -> list[float] | Tensor:
        if isinstance(self.loss_fn, DistillationPasses):
            return self.loss_fn.sums
        if not isinstance(self.loss_fn, DocumentPasses) or self.loss_fn.loss.figures is None:
            return []
        return self.loss_fn.sums.ravel().tolist()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the figures of a DocumentLoss or Distillation, and how many micro-batches ran twice."""
        if isinstance(self.loss_fn, DistillationPasses):
            divisors = (self.divisor, self.divisor, self._targets, self._targets)
            values = zip(FIGURES, sums, divisors, strict=True)
            return {"figures": {name: value / divisor for name, value, divisor in values}}
        if not isinstance(self.loss_fn, DocumentPasses):
            return {}
        figures = self.loss_fn.loss.figures
        named_figures = {} if figures is None else figures(np.reshape(sums, self.loss_fn.sums.shape))
        return {"forward_twice": self.loss_fn.forward_twice, "figures": named_figures}


_HINT = "Give every rank the same sets and divisor=, and all of them a loss= of the same kind, or none"


def _check_loss_and_divisor(
    loss: GivenLoss, divisor: Any, plan: Plan, world: World, chunk_rows: int, scores: int
) -> tuple[StepLoss, float, str]:
    """The text is the same on all ranks."""
    if (
        loss is not None
        and not isinstance(loss, DocumentLoss | MicroBatchLoss | Distillation)
        and not callable(loss)
    ):
        kinds = "a function of (log_probs, at), a DocumentLoss, a MicroBatchLoss, a Distillation, or None"
        raise LossError(f"loss is {short_text(loss)}; give {kinds}")
    # `compared` are arguments of the loss that are to be the same on all ranks.
    if isinstance(loss, DocumentLoss):
        sets = loss.check_sets(plan)
        loss_fn = DocumentPasses(loss, sets, plan, world, chunk_rows, scores)
        default = float(max(len(sets), 1))
        compared = (*sets, *loss.columns, *loss.also)
    elif isinstance(loss, MicroBatchLoss):
        loss_fn = MicroBatchPasses(loss, plan, world, chunk_rows, scores)  # raises for an `also` that is no list
        default = 1.0
        compared = tuple(loss.also)
    else:
        if isinstance(loss, Distillation):
            loss_fn = DistillationPasses(loss, plan, world, chunk_rows, scores)
        else:
            loss_fn = CrossEntropy(chunk_rows) if loss is None else TokenLoss(loss, chunk_rows)
        default = float(max(plan.targets, 1))
        compared = loss_fn.compared if isinstance(loss_fn, DistillationPasses) else ()
    used_divisor = default if divisor is None else _check_divisor(divisor)
    return loss_fn, used_divisor, f"{type(loss_fn).__name__} {used_divisor} {compared}"


def _check_divisor(divisor: Any) -> float:
    is_one = isinstance(divisor, Tensor | np.ndarray) and math.prod(divisor.shape) == 1
    number = divisor.item() if is_one else divisor
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number) or number <= 0:
        raise LossError(
            f"divisor is {short_text(divisor)}; give a positive number, the same on every rank: the number of "
            "documents, or of targets, or of prompts"
        )
    return float(number)


def _to_loss_error(error: Exception, world: World) -> LongspanError:
    """A LongspanError stays itself."""
    if isinstance(error, LongspanError):
        return error
    loss_error = LossError(f"the loss failed on rank {world.rank}: {type(error).__name__}: {error}")
    loss_error.__cause__ = error
    return loss_error
