"""One optimizer step of a Trainer: its batches are one plan, and its loss the coefficients of one `run_step`."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.comm import World
from longspan.comm.time_limits import TimeLimits
from longspan.data.document import NO_TARGET, Document
from longspan.errors import NonFiniteError
from longspan.hf.facade import AheadBatch, Facade, Offset, read_batch, with_coefficients
from longspan.hf.one_process import StockTrainer
from longspan.model.adapters import unwrap_model
from longspan.model.seams.call_rules import refuse_two_pass_dropout
from longspan.plan import Cost
from longspan.train import (
    LossRows,
    PlanChoice,
    RouterCoefficients,
    TokenLogProbs,
    clip_grad_norm,
    run_step,
    token_log_probs,
)
from longspan.train import grad_norm as norm_of
from longspan.train.plans import find_run_cost, query_heads
from longspan.train.step_figures import is_priced_here

_log = logging.getLogger(__name__)


class StepsPart(StockTrainer):
    """What a Trainer does in a step, over plans.

    A step whose loss is the mean cross entropy of its tokens takes one pass: it runs ahead of the Trainer's loss with
    the coefficients of that, and its values of tokens answer the Trainer's calls. What the loss then leaves in their
    gradients is compared with these; where it differs, the step runs again with what it left, and no later one ahead.
    """

    _guesses = True

    _coming: Sequence[Any] = ()  # batches of the optimizer step that begins
    _guessed: Sequence[Document] = ()  # documents that ran ahead since the last optimizer step
    _last_plan: tuple[Any, Any] = None, None  # what the newest plan is made for, and the plan
    _cut = False  # a callback ended an epoch before the Trainer called the model with all of them

    @cached_property
    def _cost(self) -> Cost:
        config, model = self._config, unwrap_model(self.model).config
        gpu, slots = self.world.device.type == "cuda", self.world.home.slots
        return find_run_cost(config, model, _log.info, gpu=gpu, slots=slots, memory=self.memory_plan)

    @cached_property
    def _limits(self) -> TimeLimits:
        """How long ranks wait for each other in passes; between them, as in a collator, the world's time-out holds."""
        return TimeLimits(self.world, is_automatic=is_priced_here(self._config, self._cost, self.world))

    @cached_property
    def _choices(self) -> dict[bool, PlanChoice]:
        """Return how training (True) and evaluation (False) are planned, by the cost of the model."""
        config, heads, cost = self._config, query_heads(unwrap_model(self.model).config), self._cost
        return {
            True: PlanChoice.training(config, cost=cost, heads=heads),
            False: PlanChoice.evaluation(config, cost=cost, heads=heads),
        }

    def _plan(self, documents: list[Document], *, training: bool) -> Any:
        """The plan of documents; of a step with two passes it is made once."""
        targets = sum(document.targets for document in documents)
        lengths = [len(document) for document in documents]
        about = (training, targets, lengths)
        if self._last_plan[0] != about:
            self._last_plan = about, self._choices[training].plan(lengths, self.world.home, targets=targets)
        return self._last_plan[1]

    def _token_values(self, facade: Facade, documents: list[Document]) -> Any:
        """Return values of documents' tokens from one forward pass, without gradients."""
        self._agree_on_rows(documents)
        prepared = facade.inner_model
        training = prepared.training
        plan = self._plan(documents, training=training)
        head = facade.head
        try:
            limit = self._limits.around_evaluation(facade, plan.predicted_seconds)
            with limit, torch.autocast(self.args.device.type, enabled=False):
                return token_log_probs(
                    prepared, plan, documents, self.world, also=head.values, temperature=head.temperature
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

    # ---- a step

    def _prepare_for_training(self, *args: Any) -> Any:
        """Prepare for training as the Trainer does, and drop what a step that was stopped in the middle left.

        Gradients begin at zero then, and so do the documents of the step.
        """
        self._coming, self._guessed, self._cut = (), (), False
        self._facade.called, self._facade.ahead = [], []
        return super()._prepare_for_training(*args)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the batches of an optimizer step, by which it may run before the Trainer asks for its loss."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._coming = batches
        if self._facade.ahead:
            self._cut, self._facade.ahead = True, []
        return batches, items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """Take the Trainer's loss. It calls the model without the labels that its `compute_loss_func` gets."""
        self._facade.labels_apart = inputs.get("labels") if callable(self.compute_loss_func) else None
        try:
            return super().compute_loss(model, inputs, *args, **keywords)
        finally:
            self._facade.labels_apart = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take the Trainer's own loss of a batch; the last batch of an accumulation runs the step."""
        batches, self._coming = self._coming, ()
        if batches and self._guesses:
            self._run_ahead(batches, num_items_in_batch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._finish_step()
        return loss

    def _run_ahead(self, batches: Sequence[Any], items: Any) -> None:
        """Run a step as that of the cross entropy, whose coefficients are known before the Trainer's loss.

        Each target's coefficient is −1 over the targets of all batches, as the Trainer divides. If its loss then asks
        for others, the step is run again.
        """
        if not all(isinstance(batch, Mapping) and {"input_ids", "labels"} <= batch.keys() for batch in batches):
            return
        batches = [self._prepare_inputs(dict(batch)) for batch in batches]
        documents, firsts = list[Document](), list[int]()
        for batch in batches:
            rows = [document for document in read_batch(_document_entries(batch)).documents if document.targets]
            item_count = 0.0 if items is None else float(items)
            divisor = item_count or max(1, sum(document.targets for document in rows)) * len(batches)
            firsts.append(len(documents))
            documents += [document.with_values(coefficient=-1.0 / divisor) for document in rows]
        if not documents:
            return
        values = self._run_step(documents, names=self._facade.head.values)
        self._guessed = [*self._guessed, *documents]  # a stream that ended in the middle of a step goes on with it
        self._facade.ahead = [
            AheadBatch(batch["input_ids"], batch["labels"], Offset(values, first))
            for batch, first in zip(batches, firsts, strict=True)
        ]

    def _finish_step(self) -> None:
        """Run the step by what the Trainer's loss left, unless it ran ahead with the same coefficients."""
        calls, self._facade.called = self._facade.called, []
        guessed, self._guessed = self._guessed, ()
        cut, self._cut = self._cut, False
        unasked, self._facade.ahead = self._facade.ahead, []
        for number, batch in enumerate(calls):
            if not batch.is_finite():
                raise NonFiniteError(
                    f"step {self.state.global_step}: the loss of {type(self).__name__} has derivatives that are not "
                    f"finite, in batch {number + 1} of {len(calls)} of the step; weights and optimizer are as before "
                    "the step. Look in compute_loss for a division by 0, a logarithm of 0 or an overflow"
                )
        documents = with_coefficients(calls)
        if guessed and not unasked and _same_coefficients(documents, guessed, calls[0].leaf.dtype):
            return
        if guessed:
            self._facade.inner_model.zero_grad()
        if guessed and not cut:
            self._guesses = False
            _log.info("the loss is not the mean cross entropy: each step takes one forward pass more")
        refuse_two_pass_dropout(self._facade.inner_model, "losses that are not the mean cross entropy")
        documents = [d for d in documents if np.any(d.token_values(np.arange(len(d)))["coefficient"])]
        if documents:
            self._run_step(documents)
            return
        for parameter in self._facade.inner_model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def _run_step(self, documents: list[Document], names: tuple[str, ...] = ()) -> TokenLogProbs:
        """Add the gradients of documents with coefficients; returns values of their tokens."""
        self._agree_on_rows(documents)
        facade, plan = self._facade, self._plan(documents, training=True)
        collected = CollectedTokens(plan.lengths, names)
        facade.inner_model.train()
        limit = self._limits.around_step(plan.predicted_seconds)
        with limit, torch.autocast(self.args.device.type, enabled=False):
            run_step(
                facade.inner_model,
                plan,
                documents,
                self.world,
                step=self.state.global_step,
                router=RouterCoefficients(balance=0.0),
                loss=collected,
                divisor=1,
                temperature=facade.head.temperature,
            )
        return collected.sum_over_ranks(self.world)

    def _clip_grad_norm(self, model: Any) -> float:
        return clip_grad_norm(self._facade.inner_model, self.args.max_grad_norm, self.world)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        return norm_of(self._facade.inner_model, self.world) if grad_norm is None else grad_norm


class CollectedTokens:
    """The loss of a step by its documents' coefficients, which keeps values of tokens on the way."""

    def __init__(self, lengths: Sequence[int], names: tuple[str, ...]) -> None:
        self._lengths, self._names = tuple(lengths), names
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, log_probs: Tensor, at: LossRows) -> Tensor:
        """Return log-probabilities (t,) times their coefficients."""
        values = [log_probs.detach(), *(getattr(at, name) for name in self._names)]
        self._parts.append((at.document, at.position, torch.stack(values)))
        return at["coefficient"] * log_probs

    def sum_over_ranks(self, world: World) -> TokenLogProbs:
        """Return the values of all tokens, on every rank; entered by all."""
        starts = np.cumsum((0, *self._lengths))
        sums = np.zeros((1 + len(self._names), starts[-1]))
        if world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            for documents, positions, values in self._parts:
                at = starts[documents.cpu().numpy()] + positions.cpu().numpy() + 1
                sums[:, at] = values.double().cpu().numpy()
        sums = world.control.sum_of_arrays(sums.ravel(), "values of tokens").reshape(sums.shape)
        also = dict(zip(self._names, sums[1:], strict=True))
        return TokenLogProbs(self._lengths, sums[0], np.zeros(len(self._lengths)), also)


def _document_entries(batch: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    return {name: batch[name] for name in names if name in batch}


def _same_coefficients(documents: Sequence[Document], guessed: Sequence[Document], dtype: torch.dtype) -> bool:
    """Return whether what a loss left are the coefficients of a guess, up to the rounding of the loss's dtype."""
    if len(documents) != len(guessed):
        return False
    bound = 4 * torch.finfo(dtype).eps
    for document, guess in zip(documents, guessed, strict=True):
        if len(document) != len(guess):
            return False
        positions = np.flatnonzero(document.labels() != NO_TARGET)
        positions = positions[positions > 0]
        slopes, guesses = (d.token_values(positions)["coefficient"] for d in (document, guess))
        if not np.allclose(slopes, guesses, rtol=bound, atol=0):
            return False
    return True
