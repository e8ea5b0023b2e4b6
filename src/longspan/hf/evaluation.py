"""A Trainer's evaluations and predictions over plans, with logits where these are wanted."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.data.document import Document
from longspan.hf.facade import Facade
from longspan.hf.one_process import StockTrainer
from longspan.hf.refusals import has_cross_entropy_loss
from longspan.train.loss import Head
from longspan.train.passes import Passes, read_step_batches, run_passes
from longspan.train.prefix_sharing import cached_plan
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.step_inputs import check_step_arguments
from longspan.train.terms.step_terms import encoder_terms


class EvaluationPart(StockTrainer):
    """What a Trainer does in an evaluation; where metrics or predictions are wanted, the model answers with logits.

    `eval_loss` is the Trainer's own figure, a mean of the means of batches; `eval_token_loss` is that over tokens.
    """

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **keywords: Any) -> Any:
        """Run the Trainer's loop, over a prepared model, and add the loss over tokens to its metrics."""
        self._prepare_once()
        self._facade.evaluated = (0.0, 0)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **keywords)
        total, tokens = self._facade.evaluated
        if tokens and has_cross_entropy_loss(self):
            output.metrics[f"{metric_key_prefix}_token_loss"] = total / tokens
        return output

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, **keywords: Any) -> Any:
        """Take the Trainer's step, in which the model answers with logits where more than the loss is wanted."""
        self._facade.logits_of = None if prediction_loss_only else self._document_logits
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, **keywords)
        finally:
            self._facade.logits_of = None

    def _document_logits(self, facade: Facade, documents: Sequence[Document]) -> list[Tensor]:
        """Entered by all ranks: (length, V) of each document, in the model's dtype, on every rank."""
        self._check_same_documents(documents)
        targets = sum(document.targets for document in documents)
        plan = cached_plan(self._choices[False], tuple(map(len, documents)), self.world.home, targets=targets)
        # These are the logits of this rank's rows.
        logits_of_batches: list[Tensor] = []

        def keep_logits(batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
            """Keep the logits of a micro-batch, and return a loss of 0, which nothing reads."""
            logits_of_batches.append(head(hidden))
            return hidden.new_zeros((), dtype=torch.float64)

        gathered: dict[int, Tensor] = {}
        with torch.autocast(self.args.device.type, enabled=False):
            inputs = check_step_arguments(facade.inner_model, plan, documents, self.world, backward=False)
            terms = encoder_terms(inputs)
            batches = read_step_batches(inputs, terms)
            run_passes(Passes.with_terms(inputs, terms, keep_logits), batches)
            for batch, logits in zip(batches, logits_of_batches, strict=True):
                rows = batch.shard.gather(logits.detach())
                numbers = [d for group in batch.shard.micro_batch.groups for d in group.documents]
                lengths = [plan.lengths[d] for d in numbers]
                gathered |= dict(zip(numbers, rows.split(lengths), strict=True))
        return [gathered[d] for d in range(len(plan.lengths))]
