"""One optimizer step of a Trainer: its batches are one plan, and its loss the coefficients of one `run_step`."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from transformers.training_args import ParallelMode

from longspan.comm import World, to_device
from longspan.data.document import Document
from longspan.errors import NonFiniteError
from longspan.hf.ahead import (
    AheadBatch,
    BatchesAhead,
    ComingStep,
    OffsetValues,
    coefficients_agree,
    read_step_documents,
)
from longspan.hf.batch_entries import counts_of_writes, document_entries, move_to_device
from longspan.hf.facade import Facade
from longspan.hf.one_process import StockTrainer
from longspan.hf.refusals import refuse_inner_loss, refuse_sharded_loss
from longspan.hf.scores import COEFFICIENT, loss_by_coefficients
from longspan.layout import Integers
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.kinds import score_columns
from longspan.model.marks import refuse_other_parameters
from longspan.model.seams.randomness import refuse_two_pass_dropout
from longspan.model.weights.gradients import add_gradient, exchange_gradients
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import Cost, Plan
from longspan.resolve.planner_config import query_heads
from longspan.train import (
    LossTokens,
    PlannerConfig,
    RouterCoefficients,
    TokenLogProbs,
    clip_grad_norm,
    grad_norm as norm_of,
    run_step,
    token_log_probs,
    token_scores,
)
from longspan.train.gradient_norm import scale_to_norm
from longspan.train.nonfinite import check_finite
from longspan.train.prefix_sharing import log_first_shared_prefixes, share_prefixes_where_faster
from longspan.train.step_end import sum_over_home_on_device, sums_stay_on_device

_log = logging.getLogger(__name__)


def documents_digest(documents: Sequence[Document]) -> str:
    """Return a digest of lengths, ids and labels, in order, by which ranks compare their documents."""
    digest = blake2b(digest_size=16)
    for document in documents:
        digest.update(np.int64(len(document)).tobytes())
        digest.update(document.ids.tobytes())
        digest.update(document.labels().tobytes())
    return digest.hexdigest()


class CollectedTokens:
    """The loss of a step by its documents' coefficients, which also keeps each token's log-probability and values.

    `lengths` are those of the step's documents, `names` those of further values to keep, such as "entropy".
    """

    def __init__(self, lengths: Sequence[int], names: tuple[str, ...]) -> None:
        self._lengths = tuple(lengths)
        self._names = names
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, log_probs: Tensor, at: LossTokens) -> Tensor:
        """Return the losses (t,) of some targets, their coefficients times log-probabilities, and keep their values."""
        values = [log_probs.detach(), *(getattr(at, name) for name in self._names)]
        self._parts.append((at.document, at.position, torch.stack(values)))
        return at["coefficient"] * log_probs

    def add_tokens(self, documents: Integers, positions: Integers, values: Tensor) -> None:
        """Keep values (k, t) of some targets by their document and position, on the host."""
        document, position = (to_device(np.ascontiguousarray(x), values.device) for x in (documents, positions))
        self._parts.append((document, position, values))

    def sum_over_ranks(self, world: World) -> TokenLogProbs:
        """Return the values of all tokens, on every rank; entered by all. On GPUs the device sums them.

        A token's values are on one slot, and 0 on the others, so that sums over ranks are the values themselves.
        """
        starts = np.cumsum((0, *self._lengths))
        table = torch.zeros((1 + len(self._names), starts[-1]), dtype=torch.float64, device=world.device)
        if self._parts and world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            documents, positions, values = (torch.cat(parts, -1) for parts in zip(*self._parts, strict=True))
            # A row's value is that of the token that it predicts.
            at = to_device(starts, world.device)[documents] + positions + 1
            table[:, at] = values.double()
        if sums_stay_on_device(world):
            sums = sum_over_home_on_device(table.flatten(), world).view_as(table).cpu().numpy()
        else:
            flat = table.flatten().cpu().numpy()
            sums = world.control.sum_array_over_ranks(flat, "values of tokens").reshape(table.shape)
        also = dict(zip(self._names, sums[1:], strict=True))
        no_sums = np.zeros(len(self._lengths))  # sums by document, which nothing here reads
        return TokenLogProbs(self._lengths, sums[0], no_sums, also)


def has_coefficients(document: Document) -> bool:
    """Return whether a loss depends on a document; coefficients of several scores are numbered."""
    values = document.token_values(np.arange(len(document)))
    return any(np.any(value) for name, value in values.items() if name.startswith(COEFFICIENT))


class StepsPart(StockTrainer):
    """What a Trainer does in a step, over plans.

    The step runs ahead of the Trainer's loss as the mean cross entropy, and its values of tokens answer the Trainer's
    calls. If the loss leaves other coefficients in them, the step runs again with these, and no later one runs ahead.
    """

    _runs_ahead = True  # whether steps run ahead of the Trainer's loss
    # Some loaders can make batches before they are asked for.
    _batches_ahead: BatchesAhead | None = None
    # batches of the optimizer step that begins; () once its first batch is called
    _coming_batches: Sequence[Any] = ()
    _moved: Sequence[tuple[Any, Any]] = ()  # batches of this optimizer step on the host, and on the device
    _next_step: ComingStep | None = None  # prepared while the device worked on the step before
    _batch_count = 1  # how many batches the newest step has
    _coming_targets: float | None = None  # targets of the batches that come, where the Trainer counts them
    # The last step's gradients have this norm; see `gradient_versions`.
    _norm_and_versions: tuple[float, Any] = 0.0, None
    _guessed_documents: Sequence[Document] = ()  # documents that ran ahead since the last optimizer step
    # `.grad` holds what the Trainer's loss itself leaves, and not these gradients of the documents that ran ahead.
    _guessed_gradients: Sequence[Tensor | None] = ()
    # The newest step's passes have these numbers of nodes in autograd's graph.
    _pass_nodes = range(0)
    # Plans are made by this cost.
    _cost: Cost
    _was_cut_short = False  # whether a callback ended an epoch before all batches of a step came to the model

    @cached_property
    def _choices(self) -> dict[bool, PlannerConfig]:
        config = self._config
        heads = query_heads(unwrap_peft_model(self.model).config)
        cost = self._cost
        return {
            True: PlannerConfig.training(config, cost=cost, heads=heads),
            False: PlannerConfig.evaluation(config, cost=cost, heads=heads),
        }

    def _plan_documents(
        self, model: Any, documents: Sequence[Document], *, training: bool
    ) -> tuple[Sequence[Document], Plan]:
        lengths = tuple(map(len, documents))
        targets = sum(document.targets for document in documents)
        choice = self._choices[training]
        shared, plan = share_prefixes_where_faster(
            model, documents, lengths, choice, self.world, training=training, targets=targets
        )
        log_first_shared_prefixes(plan, self.world)
        return shared, plan

    def _token_values(self, facade: Facade, documents: list[Document]) -> Any:
        """Entered by all ranks. The plan is one of training or of evaluation, as the model's mode is, which is restored
        afterwards."""
        self._check_same_documents(documents)
        prepared = facade.inner_model
        head = facade.head
        training = prepared.training
        shared, plan = self._plan_documents(prepared, documents, training=training)
        read_values = token_log_probs
        options = {"also": head.values, "temperature": head.temperature}
        if score_columns(prepared):
            read_values = token_scores
            options = {}
        try:
            with torch.autocast(self.args.device.type, enabled=False):
                return read_values(prepared, plan, shared, self.world, **options)
        finally:
            prepared.train(training)  # the pass has put the model into evaluation mode

    def _check_same_documents(self, documents: list[Document], digest: str = "") -> None:
        """Entered by all ranks; `digest` is that of this rank's documents, if it is known already."""
        self.world.control.compare_digests(
            digest or documents_digest(documents),
            what="batches of a Trainer",
            hint="all ranks of a longspan trainer read the same rows; seed samplers, collators and datasets alike",
        )

    def _prepare_for_training(self, *args: Any) -> Any:
        """The Trainer begins with gradients of zero after a training that was stopped in a step."""
        self._coming_batches = ()
        self._was_cut_short = False
        self._next_step = None
        self._guessed_documents = ()
        self._guessed_gradients = ()
        self._facade.called, self._facade.ahead = [], []
        return super()._prepare_for_training(*args)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, changed so that batches can be made ahead, and stay on the host until
        `training_step` moves them.

        It stays as it is where the user's class has a step of its own, which may read its batches, and if its kind is
        not DataLoaderShard: others fetch batches in another order.
        """
        loader = super().get_train_dataloader()
        self._batches_ahead = None
        base = getattr(loader, "base_dataloader", None)
        if type(loader) is not DataLoaderShard or base is None or loader.use_stateful_dataloader:
            return loader
        if not self.is_in_train or self._has_step_below:
            return loader
        loader.device = None
        iterate_stock = type(base).__iter__

        def begin_batches() -> BatchesAhead:
            self._batches_ahead = BatchesAhead(iterate_stock(base))
            return self._batches_ahead

        base.__iter__ = begin_batches  # Accelerate calls it by this name, not by iter()
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return a step's batches and the number of their targets, and keep both to run ahead.

        Targets are counted on the CPU, so that reading their number waits for no device, and returned on `device`.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, torch.device("cpu"))
        self._coming_batches = batches
        self._coming_targets = None if items is None else float(items)
        if self._facade.ahead:  # answers are left of the step before: a callback ended its epoch amid its batches
            self._was_cut_short = True
            self._facade.ahead = []
        return batches, move_to_device(items, device) if isinstance(items, Tensor) else items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """Take the Trainer's loss; the facade gets the labels of a `compute_loss_func` here: its calls come without."""
        self._facade.labels_apart = inputs.get("labels") if callable(self.compute_loss_func) else None
        try:
            return super().compute_loss(model, inputs, *args, **keywords)
        finally:
            self._facade.labels_apart = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the Trainer's own loss of a batch, and add the step's gradients after the last batch of the step.

        At the first batch the step of all its batches runs ahead, so that its values answer the Trainer's calls. Only
        if the loss turns out another one than was guessed does the last batch run the step (`_add_gradients`).
        """
        batches = self._coming_batches
        self._coming_batches = ()
        if batches:
            self._moved = [(batch, move_to_device(batch, self.args.device)) for batch in batches]
            self._batch_count = len(batches)
            self._norm_and_versions = (0.0, None)
            if self._runs_ahead:
                self._run_ahead(batches)
        inputs = next((moved for batch, moved in self._moved if batch is inputs), inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        # A step of the user's own that calls loss.backward() leaves its gradients to this call.
        self._add_gradients()
        if self.accelerator.sync_gradients:
            self._moved = ()
            self._facade.called = []
        loss_sum = getattr(self, "_tr_loss", None)
        # In other modes the Trainer may gather its sum of losses on devices.
        if loss_sum is None or self.args.parallel_mode != ParallelMode.NOT_PARALLEL:
            return loss
        # With the Trainer's sum of losses on the host, too, logging waits for no update.
        if loss_sum.device.type != "cpu":
            self._tr_loss: Tensor = loss_sum.cpu()
        return loss.cpu()

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            return move_to_device(data, self.args.device)
        return super()._prepare_input(data)

    def _run_ahead(self, batches: Sequence[Any]) -> None:
        """The gradients are those of the mean cross entropy; they go to `_guessed_gradients`, not `.grad`. A step
        without targets, or with a batch without labels, does not run ahead."""
        step = self._next_step
        self._next_step = None
        if step is None or not step.is_read_from(batches):
            step = self._read_coming_step(batches, self._coming_targets)
        if step is None:
            return
        parameters = list(self._facade.inner_model.parameters())
        # While the step runs, `.grad` holds the guessed gradients, to which it adds.
        trainer_gradients = exchange_gradients(parameters, self._guessed_gradients)
        values = self._run_step(step.documents, names=self._facade.head.values, coming=step)
        self._guessed_gradients = exchange_gradients(parameters, trainer_gradients)
        # added to what is there: a step that goes on after a stream's end runs in two parts
        self._guessed_documents = [*self._guessed_documents, *step.documents]
        all_entries = [document_entries(moved) for _, moved in self._moved]
        self._facade.ahead = [
            AheadBatch(entries, rows, OffsetValues(values, first), counts_of_writes(entries))
            for entries, rows, first in zip(all_entries, step.rows, step.firsts, strict=True)
        ]

    def _read_coming_step(self, batches: Sequence[Any], items: float | None) -> ComingStep | None:
        """None without a target, or if a batch lacks labels. `items` are the targets by which the Trainer divides, None
        if it takes means of batches."""
        if not all(isinstance(batch, Mapping) and {"input_ids", "labels"} <= batch.keys() for batch in batches):
            return None
        rows, documents, firsts = read_step_documents(batches, items)
        if not documents:
            return None
        shared, plan = self._plan_documents(self._facade.inner_model, documents, training=True)
        versions = [counts_of_writes(document_entries(batch)) for batch in batches]
        return ComingStep(batches, rows, documents, shared, firsts, documents_digest(documents), plan, versions)

    def _prepare_next_step_and_wait(self) -> None:
        self._prepare_next_step()
        if self.world.device.type == "cuda":
            torch.cuda.current_stream(self.world.device).synchronize()

    def _prepare_next_step(self) -> None:
        """An error here is dropped: it is raised again where the step is taken."""
        ahead = self._batches_ahead
        if ahead is None or self._next_step is not None or self.state.global_step + 1 >= self.state.max_steps:
            return
        with suppress(Exception):
            batches = ahead.make_next_batches(self._batch_count)
            # At an epoch's end no new batch is held back: `make_next_batches` then begins with this step's last one.
            is_new = all(batch is not old for batch in batches for old, _ in self._moved)
            if batches and is_new and self._runs_ahead:
                items = self._get_num_items_in_batch(batches, torch.device("cpu"))
                self._next_step = self._read_coming_step(batches, None if items is None else float(items))

    def _check_loss(self, loss: Tensor) -> None:
        refuse_sharded_loss(loss)
        refuse_inner_loss(self._facade.inner_model, loss, self._pass_nodes)

    def _add_gradients(self) -> None:
        """After a backward pass of the Trainer's loss through its last batch: the gradients are those of the step that
        ran ahead, if the loss left the guessed coefficients in the leaves. Else the step runs here with the loss's own,
        and no later step runs ahead. A step of the user's own may go backward more than once: then nothing happens
        without new coefficients."""
        calls = self._facade.called
        guessed = self._guessed_documents
        model = self._facade.inner_model
        if not self.accelerator.sync_gradients or not (guessed or any(x.leaf.grad is not None for x in calls)):
            return
        gradients = self._guessed_gradients
        self._guessed_documents = ()
        self._guessed_gradients = ()
        was_cut_short = self._was_cut_short
        self._was_cut_short = False
        uncalled = self._facade.ahead  # batches of a step that a callback ended with its epoch
        self._facade.ahead = []
        self._refuse_infinite_coefficients()
        documents = [document for batch in calls for document in batch.documents_with_coefficients()]
        for batch in calls:
            batch.leaf.grad = None
        if guessed and not uncalled and coefficients_agree(documents, guessed, calls[0].leaf.dtype):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                add_gradient(parameter, gradient)
            return
        if guessed and not was_cut_short:  # a step that a callback cut says nothing about the loss
            self._runs_ahead = False
            _log.info("the loss is not the mean cross entropy: each step takes one forward pass more")
        refuse_two_pass_dropout(model, "losses that are not the mean cross entropy")
        # The loss depends on the documents with coefficients alone.
        documents = [document for document in documents if has_coefficients(document)]
        if documents:
            self._run_step(documents)
            return
        # All coefficients are 0: no pass is needed, and gradients that would be None are 0.
        self._norm_and_versions = 0.0, None
        for parameter in model.parameters():
            if calls and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _refuse_infinite_coefficients(self) -> None:
        calls = self._facade.called
        for number, batch in enumerate(calls):
            refuse_sharded_loss(batch.leaf.grad)
            if not batch.is_finite():
                raise NonFiniteError(
                    f"step {self.state.global_step}: the loss of {type(self).__name__} has derivatives that are not "
                    f"finite, in batch {number + 1} of {len(calls)} of the step; weights and optimizer are as before "
                    "the step. Look in compute_loss for a division by 0, a logarithm of 0 or an overflow"
                )

    def _run_step(
        self, documents: list[Document], names: tuple[str, ...] = (), coming: ComingStep | None = None
    ) -> TokenLogProbs:
        """Entered by all ranks. `names` are further values to collect; `coming` has the plan of a step that was
        prepared."""
        self._check_same_documents(documents, coming.digest if coming else "")
        facade = self._facade
        model = facade.inner_model
        shared, plan = (
            (coming.shared, coming.plan) if coming else self._plan_documents(model, documents, training=True)
        )
        refuse_other_parameters(model, self._torch_optimizer())
        # The next node gets this number; torch has no public form of it.
        first_node = torch.autograd._get_sequence_nr()
        collected = CollectedTokens([len(document) for document in documents], names)
        model.train()
        with torch.autocast(self.args.device.type, enabled=False):
            result = run_step(
                model,
                plan,
                shared,
                self.world,
                step=self.state.global_step,
                router=RouterCoefficients(balance=0.0),  # routers' balance losses are refused at construction
                loss=self._step_loss(collected),
                divisor=1,  # the coefficients are divided already
                temperature=facade.head.temperature,
                host_work=self._prepare_next_step_and_wait,
            )
        self._pass_nodes = range(first_node, torch.autograd._get_sequence_nr())
        if not coming:
            refuse_inner_loss(model)
        assert result.grad_norm is not None
        self._norm_and_versions = result.grad_norm, gradient_versions(model)
        # The sum is empty for scores: nothing reads them here.
        return collected.sum_over_ranks(self.world)

    def _step_loss(self, collected: CollectedTokens) -> Any:
        """The loss of a step by its documents' coefficients, which leaves the values of tokens in `collected`."""
        return loss_by_coefficients if score_columns(self._facade.inner_model) else collected

    @property
    def _has_step_below(self) -> bool:
        """The user's class, or this trainer alone, may have its own `training_step`, which may change gradients."""
        return type(self).training_step is not StepsPart.training_step or "training_step" in vars(self)

    def _clip_grad_norm(self, model: Any) -> float:
        """The step's own norm counts if nothing has written to gradients since."""
        model = self._facade.inner_model
        norm, versions = self._norm_and_versions
        limit = self.args.max_grad_norm
        if self._has_step_below or versions != gradient_versions(model):
            return clip_grad_norm(model, limit, self.world)
        check_finite(model, self.world, norm=norm)
        scale_to_norm(model.parameters(), limit, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        if grad_norm is None:
            return norm_of(self._facade.inner_model, self.world)
        return grad_norm


def gradient_versions(model: Any) -> list[tuple[int, int]]:
    """Return which tensors the gradients of a model are, and how often each was written to."""
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    return [(gradient.data_ptr(), gradient._version) for gradient in gradients]
