"""The loss and the divisor of a step (`loss=` and `divisor=` of `run_step`), agreed on by all ranks.

A Distillation has a term of its own, in `distillation.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from longspan.comm import World, on_all_ranks, raise_first_error
from longspan.errors import LossError
from longspan.plain_text import short_text
from longspan.plan import Plan
from longspan.train.loss import CrossEntropy
from longspan.train.passes import Passes, Term
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.step_inputs import StepInputs
from longspan.train.terms.agreed_loss import agree_on_loss, to_loss_error
from longspan.train.terms.document_loss import DocumentLoss, DocumentPasses
from longspan.train.terms.loss_tokens import LossFunction, TokenLoss
from longspan.train.terms.micro_batch_loss import MicroBatchLoss, MicroBatchPasses, refuse_head_dropout

GivenLoss = LossFunction | DocumentLoss | MicroBatchLoss | None
StepLoss = CrossEntropy | TokenLoss | DocumentPasses | MicroBatchPasses


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
        self._world = inputs.world
        make_loss = partial(_make_loss, loss, inputs.plan, inputs.world, chunk_rows, scores)
        self.loss_fn: StepLoss
        self.divisor: float
        self.loss_fn, self.divisor = agree_on_loss(make_loss, divisor, inputs.world)
        if inputs.backward and isinstance(self.loss_fn, DocumentPasses):
            self.loss_fn.refuse_dropout(inputs.language_model)
        if inputs.backward and isinstance(self.loss_fn, MicroBatchPasses):
            refuse_head_dropout(inputs.language_model, inputs.world, "MicroBatchLoss")

    def extend_passes(self, passes: Passes) -> Passes:
        return replace(passes, loss_fn=self.loss_fn, divisor=self.divisor)

    def prepare_passes(self, passes: Passes, batches: Sequence[LocalBatch]) -> float:
        if not isinstance(self.loss_fn, DocumentPasses):
            return 0.0
        return self.loss_fn.compute_coefficients_ahead(passes, batches)

    def raise_error(self) -> None:
        """Raise, on every rank, the error of a caller's function, or LossError where ranks came to different losses."""
        if isinstance(self.loss_fn, CrossEntropy):  # calls no function of the caller's
            return
        error = None if self.loss_fn.error is None else to_loss_error(self.loss_fn.error, self._world)
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

    def sums(self) -> list[float]:
        if not isinstance(self.loss_fn, DocumentPasses) or self.loss_fn.loss.figures is None:
            return []
        return self.loss_fn.sums.ravel().tolist()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the figures of a DocumentLoss, and how many micro-batches ran twice."""
        if not isinstance(self.loss_fn, DocumentPasses):
            return {}
        figures = self.loss_fn.loss.figures
        named_figures = {} if figures is None else figures(np.reshape(sums, self.loss_fn.sums.shape))
        return {"forward_twice": self.loss_fn.forward_twice, "figures": named_figures}


def _make_loss(
    loss: GivenLoss, plan: Plan, world: World, chunk_rows: int, scores: int
) -> tuple[StepLoss, float, object]:
    """As `agree_on_loss` takes it."""
    if loss is not None and not isinstance(loss, DocumentLoss | MicroBatchLoss) and not callable(loss):
        kinds = "a function of (log_probs, at), a DocumentLoss, a MicroBatchLoss, a Distillation, or None"
        raise LossError(f"loss is {short_text(loss)}; give {kinds}")
    if isinstance(loss, DocumentLoss):
        sets = loss.check_sets(plan)
        loss_fn = DocumentPasses(loss, sets, plan, world, chunk_rows, scores)
        return loss_fn, float(max(len(sets), 1)), (*sets, *loss.columns, *loss.also)
    if isinstance(loss, MicroBatchLoss):
        # It raises for an `also` that is no list.
        return MicroBatchPasses(loss, plan, world, chunk_rows, scores), 1.0, tuple(loss.also)
    token_loss = CrossEntropy(chunk_rows) if loss is None else TokenLoss(loss, chunk_rows)
    return token_loss, float(max(plan.targets, 1)), ()
