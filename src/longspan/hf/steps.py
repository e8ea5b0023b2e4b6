"""One optimizer step of a Trainer: its batches are one plan, and its loss the coefficients of one `run_step`."""

import logging
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.data.document import Document
from longspan.hf.facade import Facade, with_coefficients
from longspan.model.adapters import model_inside
from longspan.train import PlanChoice, clip_grad_norm, run_step, token_log_probs
from longspan.train import grad_norm as norm_of
from longspan.train.plans import cost_of_run, query_heads

_log = logging.getLogger(__name__)


class StepsPart:
    """What a Trainer does in a step, over plans."""

    @cached_property
    def _choices(self) -> dict[bool, PlanChoice]:
        """Who plans training (True) and evaluation (False), by the cost of the model."""
        config, model = self.longspan.config(), model_inside(self.model).config
        gpu, slots = self.world.device.type == "cuda", self.world.home.slots
        cost = cost_of_run(config, model, _log.info, gpu=gpu, slots=slots)
        heads = query_heads(model)
        return {
            True: PlanChoice.training(config, cost=cost, heads=heads),
            False: PlanChoice.evaluation(config, cost=cost, heads=heads),
        }

    def _plan(self, documents: list[Document], *, training: bool) -> Any:
        targets = sum(document.targets for document in documents)
        lengths = [len(document) for document in documents]
        return self._choices[training].plan(lengths, self.world.home, targets=targets)

    def _token_values(self, facade: Facade, documents: list[Document]) -> Any:
        """Values of documents' tokens from one forward pass, without gradients."""
        self._agree_on_rows(documents)
        prepared = facade.prepared
        training = prepared.training
        plan = self._plan(documents, training=training)
        try:
            return token_log_probs(
                prepared, plan, documents, self.world, **({"also": facade.head.values} if facade.head.values else {})
            )
        finally:
            prepared.train(training)

    def _agree_on_rows(self, documents: list[Document]) -> None:
        """Raise CommError on all ranks unless they hold the same documents: equal lengths are not enough."""
        digest = blake2b(digest_size=16)
        for document in documents:
            digest.update(np.int64(len(document)).tobytes() + document.ids.tobytes() + document.labels().tobytes())
        self.world.control.agree(
            digest.hexdigest(),
            what="batches of a Trainer",
            hint="all ranks of a longspan trainer read the same rows; seed samplers, collators and datasets alike",
        )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take the Trainer's own loss of a batch; the last batch of an accumulation runs the step."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._run_step()
        return loss

    def _run_step(self) -> None:
        called, self._facade.called = self._facade.called, []
        documents = with_coefficients(called)
        plan = self._plan(documents, training=True)
        self._facade.prepared.train()
        with torch.autocast(self.args.device.type, enabled=False):
            run_step(
                self._facade.prepared,
                plan,
                documents,
                self.world,
                step=self.state.global_step,
                loss=lambda log_probs, at: at["coefficient"] * log_probs,
                divisor=1,
            )

    def _clip_grad_norm(self, model: Any) -> float:
        return clip_grad_norm(self._facade.prepared, self.args.max_grad_norm, self.world)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        return norm_of(self._facade.prepared, self.world) if grad_norm is None else grad_norm
