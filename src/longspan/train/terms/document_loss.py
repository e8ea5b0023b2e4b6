"""A loss of whole documents: a function of the log-probabilities of each document of a set."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.comm.all_ranks import is_first_rank
from longspan.errors import LossError, plural
from longspan.layout import Floats
from longspan.model.seams.randomness import refuse_two_pass_dropout
from longspan.plain_text import short_text
from longspan.plan import Plan
from longspan.train.log_probs import check_value_names
from longspan.train.loss import Head
from longspan.train.passes import Passes, run_passes
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch
from longspan.train.terms.collected_log_probs import CollectedLogProbs
from longspan.train.terms.loss_tokens import BatchTargets
from longspan.train.terms.micro_batch_loss import SameOnRanks, check_scalar, loss_with_slopes, refuse_head_dropout

SetFunction = Callable[[Tensor, tuple[int, ...]], Tensor]


class LossUnits(NamedTuple):
    """What an evaluation's loss is the mean of: n units of a `kind` ("pair", "answer" or "set").

    `documents` are those of each; `figures` has n numbers by name, the "loss" first.
    """

    kind: str
    documents: tuple[tuple[int, ...], ...]
    figures: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class DocumentLoss:
    """A loss of sets of documents, as `loss=` of `run_step`: pairs of DPO, or groups of one prompt's answers.

    >>> def dpo(sums, documents):                       # of one pair: the preferred answer and the other one
    ...     chosen, rejected = sums - reference[list(documents)]
    ...     return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    >>> run_step(model, plan, documents, world, optimizer, loss=DocumentLoss(dpo, sets=[(0, 1), (2, 3)]))

    `function(sums, documents)` gets the numbers of a set's documents and, in their order, the sum of the
    log-probabilities of each one's targets, times their weights: float64 on the host. It returns a scalar, and must be
    the same on every rank. The step's loss is the sum over `sets` (None: one set of all documents) divided by
    `divisor=`, by default the number of sets.

    `columns` names several numbers of tokens in place of their weights: the function gets (k, columns) sums then.
    `also` as of `token_log_probs`; its sums, by the first weights, are no arguments of the function. `figures` makes
    what the step's result and evaluations tell beside the loss of all documents' sums (D, columns and also), and
    `units` what evaluations tell of each unit that the loss is the mean of, by default the loss of each set.
    """

    function: SetFunction
    sets: Sequence[Sequence[int]] | None = None
    columns: Sequence[str] = (WEIGHTS,)
    also: Sequence[str] = ()
    figures: Callable[[Floats], Mapping[str, float]] | None = None
    units: Callable[[Floats], LossUnits] | None = None

    def check_sets(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Return the sets, checked against a plan.

        Raises LossError for documents that the plan has not, for empty sets, and for a document twice in a set.
        """
        count = len(plan.lengths)
        if not callable(self.function):
            raise LossError(
                f"the function of a DocumentLoss is {short_text(self.function)}; give a function of (sums, documents)"
            )
        if self.sets is None:
            return (plan.whole_documents,) if count else ()  # prefixes predict nothing
        try:
            listed = list(self.sets)
        except TypeError as error:
            raise LossError(
                f"the sets of a DocumentLoss are {short_text(self.sets)}; give a list of sets: [(0, 1), (2, 3)]"
            ) from error
        sets = list[tuple[int, ...]]()
        for index, given in enumerate(listed):
            try:
                if any(isinstance(document, bool) for document in given):
                    raise TypeError("a bool is no number of a document")
                documents = tuple(operator.index(document) for document in given)
            except TypeError as error:
                raise LossError(
                    f"set {index} of a DocumentLoss is {short_text(given)}; give its documents' numbers, as integers: "
                    "sets=[(0, 1), (2, 3)]"
                ) from error
            if not documents or len(set(documents)) != len(documents):
                raise LossError(
                    f"set {index} of a DocumentLoss is {short_text(documents)}; give each document of a set once"
                )
            if min(documents) < 0 or max(documents) >= count:
                raise LossError(
                    f"set {index} of a DocumentLoss is {short_text(documents)}, the plan has documents 0 to "
                    f"{count - 1}; give their numbers in the plan"
                )
            sets.append(documents)
        return tuple(sets)


def sum_set_losses(function: SetFunction, sets: Sequence[tuple[int, ...]], sums: Floats) -> tuple[float, Floats]:
    """Sum the losses of some sets; return the sum and its derivative by the numbers in `sums`, (D,) or (D, L).

    `function` is called once for each set. Derivatives are 0 for documents of no set. Raises LossError where the
    function gives no scalar.
    """
    total = 0.0
    coefficients = np.zeros_like(sums)
    for documents in sets:
        leaf = torch.from_numpy(sums[list(documents)]).requires_grad_()
        with torch.enable_grad():
            loss = check_scalar(function(leaf, documents), "DocumentLoss", documents)
        total += loss.item()
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
            if gradient is not None:
                np.add.at(coefficients, list(documents), gradient.numpy())
    return total, coefficients


def loss_units(loss: DocumentLoss, sets: Sequence[tuple[int, ...]], sums: Floats) -> LossUnits:
    """Return what an evaluation tells of each unit of a loss, by the sums of documents, (D,) scores or (D, columns and
    also).
    """
    if loss.units is not None:
        return loss.units(sums)
    numbers = sums
    if sums.ndim > 1:
        width = len(loss.columns)
        numbers = sums[:, 0] if width == 1 else sums[:, :width]
    losses = tuple(
        float(loss.function(torch.from_numpy(numbers[list(documents)]), documents)) for documents in sets
    )
    return LossUnits("set", tuple(sets), {"loss": losses})


class DocumentPasses:
    """The sets of one step; its passes call it as their `loss_fn` once `compute_coefficients_ahead` has run.

    A set whose documents are in one micro-batch of a plan in lockstep gets its loss there; the others from a forward
    pass before. An error of the caller's function is kept in `error`, and the passes go on: losses are 0 from then on.
    `sums` (D, columns and also) is this rank's part of the sums of documents, for the loss's figures.
    """

    kind = "DocumentLoss"
    input_name = "sums"

    def __init__(
        self,
        loss: DocumentLoss,
        sets: Sequence[tuple[int, ...]],
        plan: Plan,
        world: World,
        chunk_rows: int,
        scores: int,
    ) -> None:
        """Sort the sets of documents by where their loss can be computed."""
        self.error: Exception | None = None
        self.forward_twice = 0  # micro-batches that `compute_coefficients_ahead` runs
        self.check: SameOnRanks = SameOnRanks()
        self.loss: DocumentLoss = loss
        self._plan = plan
        self._world = world
        self._chunk_rows = chunk_rows
        # The number is that of a row's scores; 0: log-probabilities.
        self._scores = scores
        self._also = check_value_names(loss.also)
        self._width = scores or len(loss.columns)  # numbers of a document that the function gets
        # These are coefficients of sets that are not in one micro-batch.
        self._coefficients: Floats = np.zeros((len(plan.lengths), self._width))
        # These are this rank's part of the sums of documents.
        self.sums: Floats = np.zeros((len(plan.lengths), self._width + len(self._also)))
        # The key is a document.
        self._micro_batch_indices = {
            document: index
            for index, micro_batch in enumerate(plan.micro_batches)
            for group in micro_batch.groups
            for document in group.documents
        }
        self._sets_inside: dict[int, list[tuple[int, ...]]] = {}  # sets by the micro-batch that holds them
        self._sets_across: list[tuple[int, ...]] = []
        for documents in sets:
            # −1: a plan left the document out, for which the step raises when it counts targets.
            indices = {self._micro_batch_indices.get(document, -1) for document in documents}
            if len(indices) == 1 and plan.mode == "lockstep":
                self._sets_inside.setdefault(indices.pop(), []).append(documents)
            else:
                self._sets_across.append(documents)

    def refuse_dropout(self, model: nn.Module) -> None:
        """Raise ModelError where dropout would make the two forward passes of a set differ; entered by all ranks."""
        if self._sets_across:
            sets = plural(len(self._sets_across), "set")
            refuse_two_pass_dropout(model, f"{sets} of documents in several micro-batches")
        if self._sets_inside:
            refuse_head_dropout(model, self._world, "DocumentLoss")

    def compute_coefficients_ahead(self, passes: Passes, batches: Sequence[LocalBatch]) -> float:
        """Compute the coefficients of sets that no micro-batch holds, by a forward pass over the micro-batches of
        their documents; entered by all ranks.

        Returns the loss of these sets on the first rank, 0 on the others. The first rank also adds the sums of their
        documents to `sums`, except those of documents whose sums are added by sets inside a micro-batch.
        """
        # −1, of a document that the plan left out, stands for any micro-batch: the step raises when it counts targets.
        indices = sorted(
            {
                self._micro_batch_indices.get(document, -1)
                for documents in self._sets_across
                for document in documents
            }
        )
        if not indices:
            return 0.0
        needed_batches = {id(self._plan.micro_batches[index]) for index in indices}
        ahead = [batch for batch in batches if id(batch.shard.micro_batch) in needed_batches]
        collected = CollectedLogProbs(
            passes.plan.lengths, self._chunk_rows, self._also, scores=self._scores, columns=self.loss.columns
        )
        run_passes(replace(passes, backward=False, routing=None, loss_fn=collected, depths=0, terms=()), ahead)
        document_sums = collected.gather_tables(passes.world)[1].T
        loss, self._coefficients = self._compute_set_losses(self._sets_across, document_sums, inside=False)
        self.forward_twice: int = len(indices)
        if not is_first_rank(self._world):
            return 0.0
        inside = {d for sets in self._sets_inside.values() for documents in sets for d in documents}
        ahead_alone = sorted({d for documents in self._sets_across for d in documents} - inside)
        self.sums[ahead_alone] += document_sums[ahead_alone]
        return loss

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Return this rank's part of the losses of sets that the micro-batch holds, with the gradients of all its
        documents.

        Derivatives of sets across micro-batches come from the pass before. Sums of documents are exchanged over slots,
        which all enter, if the micro-batch holds a set.
        """
        targets = BatchTargets(batch, hidden.device)
        coefficients = self._coefficients
        loss = 0.0
        groups = batch.shard.micro_batch.groups
        # Any of a micro-batch's documents tells which one it is.
        if groups and (sets := self._sets_inside.get(self._micro_batch_indices[groups[0].documents[0]])):
            numbers = targets.compute_values(hidden, head, self._also, self._chunk_rows).double().cpu().numpy()
            local = np.zeros_like(self.sums)
            document_sums = np.zeros_like(self.sums)
            rows = targets.weighted_rows(numbers, self.loss.columns, self._scores)
            np.add.at(local, targets.documents, rows.T)
            ids = sorted({document for documents in sets for document in documents})
            over_slots = self._world.control.sum_over_slots(local[ids].ravel().tolist(), "numbers of documents")
            document_sums[ids] = np.reshape(over_slots, local[ids].shape)
            self.sums[ids] += local[ids]
            loss, coefficients_inside = self._compute_set_losses(sets, document_sums, inside=True)
            coefficients = coefficients + coefficients_inside
        slopes = targets.weighted_rows(coefficients[targets.documents].T, self.loss.columns, self._width).T
        # Each weighted copy of a log-probability, or the only score, adds to its derivative.
        if self._scores <= 1:
            slopes = slopes.sum(-1)
        return loss_with_slopes(loss, [slopes], self._world, hidden, targets, head, self._chunk_rows)

    def _compute_set_losses(
        self, sets: Sequence[tuple[int, ...]], sums: Floats, *, inside: bool
    ) -> tuple[float, Floats]:
        """(loss, coefficients (D, width)). An error is kept in `error`: both are 0 from then on. `sums` (D, …) are
        those of all ranks, of which the first `width` columns are the function's. Both are noted for the
        comparison of ranks; `inside`: each of the sets is in one micro-batch."""
        numbers = sums[:, : self._width]
        if self.error is None:
            try:
                loss_sums = numbers[:, 0] if self._width == 1 else numbers
                loss, coefficients = sum_set_losses(self.loss.function, sets, loss_sums)
                self.check.add_sums(loss, coefficients, inside=inside)
                return loss, coefficients.reshape(numbers.shape)
            except Exception as error:
                # The caller's function may raise anything.
                self.error = error
        return 0.0, np.zeros_like(numbers)
