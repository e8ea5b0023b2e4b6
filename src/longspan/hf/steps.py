"""One optimizer step of a Trainer: its batches are one plan, and its loss the coefficients of one `run_step`."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.training_args import ParallelMode

from longspan.data.document import Document
from longspan.errors import NonFiniteError
from longspan.hf.ahead import (
    CollectedTokens,
    ComingStep,
    HostBatches,
    documents_digest,
    move_to_device,
    read_step,
    same_coefficients,
)
from longspan.hf.facade import AheadBatch, Facade, Offset, document_entries, documents_with_coefficients, versions_of
from longspan.hf.one_process import StockTrainer
from longspan.model.adapters import unwrap_model
from longspan.model.seams.call_rules import refuse_two_pass_dropout
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import Cost, Plan
from longspan.train import PlanChoice, RouterCoefficients, TokenLogProbs, clip_grad_norm, run_step, token_log_probs
from longspan.train import grad_norm as norm_of
from longspan.train.gradients import check_finite, clip_gradients
from longspan.train.plans import find_run_cost, query_heads

_log = logging.getLogger(__name__)


class StepsPart(StockTrainer):
    """What a Trainer does in a step, over plans.

    A step whose loss is the mean cross entropy of its tokens takes one pass: it runs ahead of the Trainer's loss with
    the coefficients of that, and its values of tokens answer the Trainer's calls. What the loss then leaves in their
    gradients is compared with these; where it differs, the step runs again with what it left, and no later one ahead.
    """

    _runs_ahead = True  # whether steps run ahead of the Trainer's loss

    _coming_batches: Sequence[Any] = ()  # batches of the optimizer step that begins; () once its first batch is called
    _moved: Sequence[tuple[Any, Any]] = ()  # batches of this optimizer step on the host, and on the device
    _next_step: ComingStep | None = None  # prepared while the device worked on the step before
    _batch_count = 1  # how many batches the newest step has
    _coming_targets: float | None = None  # targets of the batches that come, where the Trainer counts them
    _norm_and_versions: tuple[float, Any] = 0.0, None  # of the last step's gradients; see `gradient_versions`
    _guessed_documents: Sequence[Document] = ()  # documents that ran ahead since the last optimizer step
    _last_plan: tuple[Any, Any] = None, None  # what the newest plan is made for, and the plan
    _was_cut_short = False  # whether a callback ended an epoch before all batches of a step came to the model

    @cached_property
    def _host_batches(self) -> HostBatches:
        return HostBatches()

    @cached_property
    def _cost(self) -> Cost:  # by which plans are made
        config, model = self._config, unwrap_model(self.model).config
        gpu, slots = self.world.device.type == "cuda", self.world.home.slots
        return find_run_cost(config, model, _log.info, gpu=gpu, slots=slots, memory=self.memory_plan)

    @cached_property
    def _choices(self) -> dict[bool, PlanChoice]:
        """Return how training (True) and evaluation (False) are planned, by the cost of the model."""
        config, heads, cost = self._config, query_heads(unwrap_model(self.model).config), self._cost
        return {
            True: PlanChoice.training(config, cost=cost, heads=heads),
            False: PlanChoice.evaluation(config, cost=cost, heads=heads),
        }

    def _cached_plan(self, documents: list[Document], *, training: bool) -> Any:
        """Return the plan of documents; the last one is kept, as both passes of a step have the same."""
        targets = sum(document.targets for document in documents)
        lengths = [len(document) for document in documents]
        key = (training, targets, lengths)
        if self._last_plan[0] != key:
            self._last_plan = key, self._make_plan(documents, training=training)
        return self._last_plan[1]

    def _make_plan(self, documents: Sequence[Document], *, training: bool) -> Plan:
        """Plan documents by the planner of training or of evaluation."""
        targets = sum(document.targets for document in documents)
        lengths = [len(document) for document in documents]
        return self._choices[training].plan(lengths, self.world.home, targets=targets)

    def _token_values(self, facade: Facade, documents: list[Document]) -> Any:
        """Return values of documents' tokens from one forward pass, without gradients."""
        self._agree_on_rows(documents)
        prepared = facade.inner_model
        training = prepared.training
        plan = self._cached_plan(documents, training=training)
        head = facade.head
        try:
            with torch.autocast(self.args.device.type, enabled=False):
                return token_log_probs(
                    prepared, plan, documents, self.world, also=head.values, temperature=head.temperature
                )
        finally:
            prepared.train(training)  # the pass has put the model into evaluation mode

    def _agree_on_rows(self, documents: list[Document], digest: str = "") -> None:
        """Raise CommError on all ranks unless their documents are the same, by `digest` ("": it is computed here)."""
        self.world.control.agree(
            digest or documents_digest(documents),
            what="batches of a Trainer",
            hint="all ranks of a longspan trainer read the same rows; seed samplers, collators and datasets alike",
        )

    # ---- a step

    def _prepare_for_training(self, *args: Any) -> Any:
        """Prepare for training as the Trainer does, and drop what an earlier training left that was stopped in a step.

        The Trainer begins with gradients of zero, so batches and documents of that step must not count either.
        """
        self._coming_batches, self._guessed_documents, self._was_cut_short, self._next_step = (), (), False, None
        self._facade.called, self._facade.ahead = [], []
        return super()._prepare_for_training(*args)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader; its batches stay on the host unless a class below has a step that reads them."""
        loader = super().get_train_dataloader()
        if self.is_in_train and not self._has_step_below:
            self._host_batches.take_over_loader(loader)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return a step's batches and targets, and keep both to run ahead; on the CPU, `float` waits for no device."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, torch.device("cpu"))
        self._coming_batches, self._coming_targets = batches, None if items is None else float(items)
        if self._facade.ahead:  # answers are left of the step before: a callback ended its epoch amid its batches
            self._was_cut_short, self._facade.ahead = True, []
        return batches, move_to_device(items, device) if isinstance(items, Tensor) else items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """Take the Trainer's loss; the facade gets the labels of a `compute_loss_func` here: its calls come without."""
        self._facade.labels_apart = inputs.get("labels") if callable(self.compute_loss_func) else None
        try:
            return super().compute_loss(model, inputs, *args, **keywords)
        finally:
            self._facade.labels_apart = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take the Trainer's own loss of a batch; the last batch of an accumulation runs the step."""
        batches, self._coming_batches = self._coming_batches, ()
        if batches:
            self._moved = [(batch, move_to_device(batch, self.args.device)) for batch in batches]
            self._batch_count, self._norm_and_versions = len(batches), (0.0, None)
            if self._runs_ahead:
                self._run_ahead(batches)
        inputs = next((moved for batch, moved in self._moved if batch is inputs), inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._moved = ()
            self._finish_step()
        return self._loss_on_host(loss)

    def _loss_on_host(self, loss: Tensor) -> Tensor:
        """Return a loss on the host, and move the Trainer's sum of losses there: logging then waits for no update."""
        loss_sum = getattr(self, "_tr_loss", None)
        if loss_sum is None or self.args.parallel_mode != ParallelMode.NOT_PARALLEL:  # it may be gathered on devices
            return loss
        if loss_sum.device.type != "cpu":
            self._tr_loss: Tensor = loss_sum.cpu()
        return loss.cpu()

    def _prepare_input(self, data: Any) -> Any:
        """Return data on the Trainer's device; tensors that are there already are returned themselves."""
        return move_to_device(data, self.args.device) if isinstance(data, Tensor) else super()._prepare_input(data)

    def _run_ahead(self, batches: Sequence[Any]) -> None:
        """Run a step as if its loss were the cross entropy, whose coefficients are known before the Trainer's loss.

        If the Trainer's loss then has other coefficients, `_finish_step` runs the step again. A step without targets,
        or with a batch without labels, has no cross entropy and does not run ahead.
        """
        step, self._next_step = self._next_step, None
        if step is None or not step.has_batches(batches):
            step = self._read_coming_step(batches, self._coming_targets)
        if step is None:
            return
        values = self._run_step(step.documents, names=self._facade.head.values, coming=step)
        # A step that goes on after a stream's end runs in two parts.
        self._guessed_documents = [*self._guessed_documents, *step.documents]
        self._facade.ahead = [
            AheadBatch(entries, rows, Offset(values, first), versions_of(entries))
            for entries, rows, first in zip(
                [document_entries(moved) for _, moved in self._moved], step.rows, step.firsts, strict=True
            )
        ]

    def _read_coming_step(self, batches: Sequence[Any], items: float | None) -> ComingStep | None:
        """Read batches into the step of their mean cross entropy; None without a target, or if a batch lacks labels."""
        if not all(isinstance(batch, Mapping) and {"input_ids", "labels"} <= batch.keys() for batch in batches):
            return None
        rows, documents, firsts = read_step(batches, items)
        if not documents:
            return None
        plan = self._make_plan(documents, training=True)
        versions = [versions_of(document_entries(batch)) for batch in batches]
        return ComingStep(batches, rows, documents, firsts, documents_digest(documents), plan, versions)

    def _work_meanwhile(self) -> None:
        """Prepare the next step, then wait for the device."""
        self._prepare_next_step()
        if self.world.device.type == "cuda":
            torch.cuda.current_stream(self.world.device).synchronize()

    def _prepare_next_step(self) -> None:
        """Make the next step's batches, documents and plan while the device works; the step itself raises errors."""
        if self._next_step is not None or self.state.global_step + 1 >= self.state.max_steps:
            return
        with suppress(Exception):
            batches = self._host_batches.make_batches(self._batch_count)
            # At an epoch's end no new batch is held back: `make_batches` then begins with this step's last one.
            is_new = all(batch is not old for batch in batches for old, _ in self._moved)
            if batches and is_new and self._runs_ahead:
                items = self._get_num_items_in_batch(batches, torch.device("cpu"))
                self._next_step = self._read_coming_step(batches, None if items is None else float(items))

    def _finish_step(self) -> None:
        """Run the step by the coefficients that the Trainer's loss left, unless it ran ahead with the same ones.

        Raises NonFiniteError if they are not finite. After another loss than the guessed one no step runs ahead.
        """
        calls, self._facade.called = self._facade.called, []
        guessed, self._guessed_documents = self._guessed_documents, ()
        cut, self._was_cut_short = self._was_cut_short, False
        uncalled, self._facade.ahead = self._facade.ahead, []  # of a step that a callback ended with its epoch
        for number, batch in enumerate(calls):
            if not batch.is_finite():
                raise NonFiniteError(
                    f"step {self.state.global_step}: the loss of {type(self).__name__} has derivatives that are not "
                    f"finite, in batch {number + 1} of {len(calls)} of the step; weights and optimizer are as before "
                    "the step. Look in compute_loss for a division by 0, a logarithm of 0 or an overflow"
                )
        documents = documents_with_coefficients(calls)
        if guessed and not uncalled and same_coefficients(documents, guessed, calls[0].leaf.dtype):
            return
        if guessed:
            self._facade.inner_model.zero_grad()  # drops the gradients of the guess
        if guessed and not cut:  # a step that a callback cut says nothing about the loss
            self._runs_ahead = False
            _log.info("the loss is not the mean cross entropy: each step takes one forward pass more")
        refuse_two_pass_dropout(self._facade.inner_model, "losses that are not the mean cross entropy")
        documents = [d for d in documents if np.any(d.token_values(np.arange(len(d)))["coefficient"])]
        if documents:
            self._run_step(documents)
            return
        self._norm_and_versions = 0.0, None  # all coefficients are 0, and so are the gradients, without a pass
        for parameter in self._facade.inner_model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def _run_step(
        self, documents: list[Document], names: tuple[str, ...] = (), coming: ComingStep | None = None
    ) -> TokenLogProbs:
        """Run a step that adds the gradients of documents with coefficients; return log-probabilities of their tokens.

        `names` are further values of tokens to return; `coming` is the step as it was read ahead, with digest and plan.
        """
        self._agree_on_rows(documents, coming.digest if coming else "")
        facade, plan = self._facade, coming.plan if coming else self._cached_plan(documents, training=True)
        collected = CollectedTokens(plan.lengths, names)
        facade.inner_model.train()
        with torch.autocast(self.args.device.type, enabled=False):
            result = run_step(
                facade.inner_model,
                plan,
                documents,
                self.world,
                step=self.state.global_step,
                router=RouterCoefficients(balance=0.0),  # routers' balance losses are refused at construction
                loss=collected,
                divisor=1,  # the coefficients are divided already
                temperature=facade.head.temperature,
                meanwhile=self._work_meanwhile,
            )
        assert result.grad_norm is not None
        self._norm_and_versions = result.grad_norm, gradient_versions(facade.inner_model)
        return collected.sum_over_ranks(self.world)

    @property
    def _has_step_below(self) -> bool:
        """Whether a class below this one has a `training_step`, which may change gradients and read batches."""
        return type(self).training_step is not StepsPart.training_step or "training_step" in vars(self)

    def _clip_grad_norm(self, model: Any) -> float:
        """Clip gradients and return their norm, which is the step's own if nothing has written to gradients since."""
        model, (norm, versions), limit = self._facade.inner_model, self._norm_and_versions, self.args.max_grad_norm
        if self._has_step_below or versions != gradient_versions(model):
            return clip_grad_norm(model, limit, self.world)
        check_finite(model, self.world, norm=norm)
        clip_gradients(model.parameters(), limit, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """Return the norm of all ranks' gradients, `grad_norm` if clipping gave it already."""
        return norm_of(self._facade.inner_model, self.world) if grad_norm is None else grad_norm


def gradient_versions(model: Any) -> list[tuple[int, int]]:
    """Return which tensors the gradients of a model are, and how often each was written to.

    >>> before = gradient_versions(model)
    >>> before == gradient_versions(model)      # nothing has changed them meanwhile
    True
    """
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    return [(gradient.data_ptr(), gradient._version) for gradient in gradients]
