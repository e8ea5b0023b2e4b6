"""A loss of whole documents through the passes of a step: its sums, the coefficients of documents, their gradients.

Where a micro-batch holds every document of a set, sums are added up over the slots inside that micro-batch's pass,
before its gradients are made: the head runs twice, the model once. In a pipeline this is done on the last stage. The
sums of other sets come from one more forward pass over the micro-batches that hold their documents. So do all sums in
free mode, where slots are at different micro-batches.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from longspan.comm import World, on_all_ranks, to_device
from longspan.errors import ModelError, counted
from longspan.model.lora.adapters import adapter_of, is_adapted
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.call_rules import refuse_dropout_in_two_passes
from longspan.plan import Plan
from longspan.train.loss import Head, chunked_log_probs, chunked_loss
from longspan.train.own_loss.document_loss import SetFunction, Sums, loss_of_sets
from longspan.train.own_loss.loss_rows import BatchTargets
from longspan.train.own_loss.same_on_ranks import SameOnRanks
from longspan.train.own_loss.token_log_probs import log_probs_of_passes
from longspan.train.passes import Passes
from longspan.train.reading.read_rows import LocalBatch


class DocumentPasses:
    """The sets of one step; given to its passes as `measure` once `look_ahead` has run.

    An error of the caller's function is kept in `error`, and the passes go on.
    """

    def __init__(
        self, function: SetFunction, sets: Sequence[tuple[int, ...]], plan: Plan, world: World, chunk_rows: int
    ) -> None:
        self.error: Exception | None = None
        self.forward_twice = 0  # micro-batches that look_ahead runs
        self._check = SameOnRanks()
        self._function, self._plan, self._world, self._chunk_rows = function, plan, world, chunk_rows
        self._coefficients: Sums = np.zeros(len(plan.lengths))  # of sets that are not in one micro-batch
        self._loss_ahead = 0.0
        self._index = {
            document: index
            for index, micro_batch in enumerate(plan.micro_batches)
            for group in micro_batch.groups
            for document in group.documents
        }
        self._inside: dict[int, list[tuple[int, ...]]] = {}  # sets by the micro-batch that holds them
        self._across: list[tuple[int, ...]] = []
        for documents in sets:
            indices = {self._index.get(document, -1) for document in documents}
            if len(indices) == 1 and plan.mode == "lockstep":
                self._inside.setdefault(indices.pop(), []).append(documents)
            else:
                self._across.append(documents)

    def refuse_dropout(self, model: nn.Module) -> None:
        """Raise ModelError where dropout would make the two forward passes of a set differ; entered by all ranks."""
        if self._across:
            sets = counted(len(self._across), "set")
            refuse_dropout_in_two_passes(model, f"{sets} of documents in several micro-batches")
        adapter = adapter_of(model)
        rate = adapter.dropout if adapter is not None and self._inside else 0.0
        if rate and self._world.control.any_rank(_head_is_adapted(model)):
            raise on_all_ranks(
                ModelError(
                    "a DocumentLoss makes the logits of a micro-batch twice, which dropout of the head's adapter would "
                    f"make differ; set lora_dropout ({rate:g}) to 0.0, or leave the head out of the adapter"
                )
            )

    def look_ahead(self, passes: Passes, batches: Sequence[LocalBatch]) -> None:
        """The coefficients of sets that are not in one micro-batch, from a forward pass; entered by all ranks."""
        indices = sorted({self._index.get(document, -1) for documents in self._across for document in documents})
        if not indices:
            return
        needed = {id(self._plan.micro_batches[index]) for index in indices}
        ahead = [batch for batch in batches if id(batch.shard.micro_batch) in needed]
        sums = log_probs_of_passes(passes, ahead, self._chunk_rows).sums
        self._loss_ahead, self._coefficients = self._of_sets(self._across, sums)
        self.forward_twice = len(indices)

    def loss_ahead(self) -> float:
        """This rank's part of the loss of the sets of `look_ahead`, which one rank counts."""
        return self._loss_ahead if self._world.rank == self._world.home.ranks[0] else 0.0

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """This rank's part of the losses of sets that the micro-batch holds; gradients of all its documents."""
        targets, coefficients, loss = BatchTargets(batch, hidden.device), self._coefficients, 0.0
        if sets := self._sets_of(batch):
            log_probs = chunked_log_probs(hidden, targets.targets, head, self._chunk_rows).double().cpu().numpy()
            local = np.bincount(targets.documents, log_probs * targets.weights, minlength=len(coefficients))
            held = sorted({document for documents in sets for document in documents})
            sums = np.zeros(len(coefficients))
            sums[held] = self._world.control.sum_over_slots(local[held].tolist(), "log-probabilities of documents")
            loss, inside = self._of_sets(sets, sums)
            coefficients = coefficients + inside
        total = torch.tensor(loss if self._world.slot == 0 else 0.0, dtype=torch.float64, device=hidden.device)
        if not torch.is_grad_enabled():
            return total
        slopes = to_device(coefficients[targets.documents] * targets.weights, hidden.device)

        def slopes_alone(log_probs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            return log_probs.new_zeros((), dtype=torch.float64), slopes[part]

        return total + chunked_loss(hidden, targets.targets, slopes_alone, head, self._chunk_rows)

    def difference(self) -> bool:
        """Whether the function gave other losses or derivatives on some ranks; entered by all."""
        return self._check.differs(self._world)

    def _sets_of(self, batch: LocalBatch) -> list[tuple[int, ...]]:
        groups = batch.shard.micro_batch.groups
        return self._inside.get(self._index[groups[0].documents[0]], []) if groups else []

    def _of_sets(self, sets: Sequence[tuple[int, ...]], sums: Sums) -> tuple[float, Sums]:
        if self.error is None:
            try:
                loss, coefficients = loss_of_sets(self._function, sets, sums)
                self._check.add(loss, coefficients, inside=sets is not self._across)
                return loss, coefficients
            except Exception as error:  # of the caller's function
                self.error = error
        return 0.0, np.zeros(len(sums))


def _head_is_adapted(model: nn.Module) -> bool:
    stages = [stage.model for stage in model.stages if stage.last] if isinstance(model, PipelineModel) else [model]
    heads = (stage.get_output_embeddings() for stage in stages if hasattr(stage, "get_output_embeddings"))  # pyright: ignore
    return any(isinstance(head, nn.Module) and is_adapted(head) for head in heads)
