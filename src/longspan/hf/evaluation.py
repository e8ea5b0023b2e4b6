"""Evaluation and prediction of a Trainer under plans of evaluation: its own figures, and logits of whole batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longspan.data.document import Document
from longspan.hf.facade import Facade
from longspan.hf.one_process import StockTrainer
from longspan.hf.refusals import has_cross_entropy_loss
from longspan.plan import Plan
from longspan.train.loss import Head
from longspan.train.passes import Passes, read_batches, run_passes
from longspan.train.read_rows import LocalBatch
from longspan.train.step import input_terms
from longspan.train.step_inputs import check_step


class EvaluationPart(StockTrainer):
    """What a Trainer does in an evaluation, over plans of evaluation.

    `eval_loss` is the Trainer's own figure, a mean of the means of batches; `eval_token_loss` is that over tokens.
    Where metrics or predictions are wanted, the model answers with logits of the batch's shape.
    """

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **keywords: Any) -> Any:
        """Evaluate or predict as the Trainer does; where the loss is the cross entropy, add its mean over tokens."""
        self._prepare_once()
        self._facade.evaluated = (0.0, 0)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **keywords)
        total, tokens = self._facade.evaluated
        if tokens and has_cross_entropy_loss(self):
            output.metrics[f"{metric_key_prefix}_token_loss"] = total / tokens
        return output

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, **keywords: Any) -> Any:
        """Evaluate a batch; without `prediction_loss_only` the model answers with logits, too."""
        with self._answer_with_logits(not prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, **keywords)

    @contextmanager
    def _answer_with_logits(self, with_logits: bool) -> Iterator[None]:
        self._facade.logits_of = self._document_logits if with_logits else None
        try:
            yield
        finally:
            self._facade.logits_of = None

    def _document_logits(self, facade: Facade, documents: Sequence[Document]) -> list[Tensor]:
        self._agree_on_rows(documents)
        plan = self._cached_plan(documents, training=False)
        with torch.autocast(self.args.device.type, enabled=False):
            return gather_logits(facade.inner_model, plan, documents, self.world)


def gather_logits(model: Any, plan: Plan, documents: Sequence[Document], world: Any) -> list[Tensor]:
    """Return logits (length, V) of all rows of a plan's documents, in the model's dtype, on every rank.

    All ranks enter.
    """
    inputs = check_step(model, plan, documents, world, backward=False)
    terms = input_terms(inputs)
    batches = read_batches(inputs, terms)
    parts: list[Tensor] = []

    def keep_logits(batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Keep the logits of a micro-batch's rows (T, V) on the device; there is no loss."""
        parts.append(head(hidden))
        return hidden.new_zeros((), dtype=torch.float64)

    run_passes(Passes.of(inputs, terms, keep_logits), batches)
    gathered: dict[int, Tensor] = {}
    for batch, local in zip(batches, parts, strict=True):
        rows = batch.shard.gather(local.detach())
        numbers = [d for group in batch.shard.micro_batch.groups for d in group.documents]
        lengths = [plan.lengths[d] for d in numbers]
        gathered |= dict(zip(numbers, rows.split(lengths), strict=True))
    return [gathered[d] for d in range(len(plan.lengths))]
