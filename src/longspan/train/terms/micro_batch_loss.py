"""A loss of all tokens of a micro-batch's documents together, in one forward pass, whose head makes logits twice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.comm import World, on_all_ranks, to_device
from longspan.errors import LossError, ModelError
from longspan.layout import Floats
from longspan.model.adapted_modules import is_adapted
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plain_text import short_text
from longspan.plan import Plan
from longspan.train.log_probs import check_value_names
from longspan.train.loss import Head, chunked_loss
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.terms.loss_tokens import BatchTargets

TOLERANCE = 1e-6  # relative: hosts of other kinds may differ in the last bits


@dataclass(frozen=True, eq=False)
class MicroBatchTokens:
    """All tokens of a micro-batch's documents, the same on every rank; `documents` are their numbers in the plan.

    `values` have one number for each token, by name, of the documents end to end in this order: float64 tensors on the
    host. They are "log_probs" and what `also=` of the loss names, 0 at tokens without a label; with a head of one score
    "scores", 0 at rows that do not count. A document that continues a shared prefix has the prefix's tokens too, with
    values 0; the prefix itself is none of the documents.
    """

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class MicroBatchLoss:
    """A loss of micro-batches, as `loss=` of `run_step`: of sequences and tokens together, as policy gradients have it.

    >>> def sequence_ratio(tokens):                # of each document the ratio of its mean probability, clipped
    ...     parts = tokens.values["log_probs"].split(tokens.lengths)
    ...     return sum(loss_of(part, document) for part, document in zip(parts, tokens.documents, strict=True))
    >>> run_step(model, plan, documents, world, optimizer, loss=MicroBatchLoss(sequence_ratio), divisor=8)

    `function(tokens)` gets a MicroBatchTokens and returns a scalar, the same on every rank. The step's loss is the sum
    over micro-batches, divided by `divisor=` (by default 1): it should not depend on which documents are together.
    It may have derivatives by log-probabilities or scores, and by "entropy" if `also` names it; `also` as of
    `token_log_probs`. The head makes logits twice; nothing else runs twice. Plans are in lockstep.
    """

    function: Callable[[MicroBatchTokens], Tensor]
    also: Sequence[str] = field(default=())

    def check(self, plan: Plan, scores: int) -> tuple[str, ...]:
        """Return the names in `also`, each once. Raises LossError for unknown names, for what is no function, for a
        plan in free mode and for several scores of a row.
        """
        if not callable(self.function):
            raise LossError(
                f"the function of a MicroBatchLoss is {short_text(self.function)}; give one of (tokens)"
            )
        if plan.mode != "lockstep":
            raise LossError(
                f'a MicroBatchLoss is of whole micro-batches, and the plan is {plan.mode}; use mode="lockstep"'
            )
        if scores > 1 or (scores and self.also):
            raise LossError(
                f"a MicroBatchLoss takes heads of one score, without also=; this one has {scores} scores"
            )
        return check_value_names(self.also)


class MicroBatchPasses:
    """The loss of a step's passes under a MicroBatchLoss; an error of its function is kept in `error`."""

    kind = "MicroBatchLoss"
    input_name = "tokens"

    def __init__(self, loss: MicroBatchLoss, plan: Plan, world: World, chunk_rows: int, scores: int) -> None:
        """Check the loss for this plan, and note what its function gets. Raises LossError as `MicroBatchLoss.check`."""
        self.error: Exception | None = None
        self.check: SameOnRanks = SameOnRanks()
        self._also = loss.check(plan, scores)
        self._names = ("scores" if scores else "log_probs", *self._also)
        self._ahead = 0 if scores else 1  # a log-probability is of the token after a row
        self._function = loss.function
        self._path_lengths = plan.path_lengths
        # The prefixes of several documents predict nothing.
        self._prefixes = set(plan.parents or ())
        self._world = world
        self._chunk_rows = chunk_rows

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Return this rank's part of the micro-batch's loss, with all its gradients."""
        targets = BatchTargets(batch, hidden.device)
        groups = batch.shard.micro_batch.groups
        documents = tuple(d for group in groups for d in group.documents if d not in self._prefixes)
        lengths = tuple(self._path_lengths[d] for d in documents)
        # The end of the last document is left out.
        starts = dict(zip(documents, np.cumsum((0, *lengths)), strict=False))
        starts_of_rows = np.array([starts[d] for d in targets.documents.tolist()], dtype=np.int64)
        # The places are those of this rank's targets in the table.
        places = starts_of_rows + targets.path_positions + self._ahead
        local = np.zeros((len(self._names), sum(lengths)))
        local[:, places] = targets.compute_values(hidden, head, self._also, self._chunk_rows).double().cpu().numpy()
        over_slots = self._world.control.sum_over_slots(local.ravel().tolist(), "values of tokens")
        loss, slopes = self._differentiate(documents, lengths, np.reshape(over_slots, local.shape))
        local_slopes = [slope[places] for slope in slopes.values()]
        return loss_with_slopes(loss, local_slopes, self._world, hidden, targets, head, self._chunk_rows)

    def _differentiate(
        self, documents: tuple[int, ...], lengths: tuple[int, ...], table: Floats
    ) -> tuple[float, dict[str, Floats]]:
        """Derivatives (tokens,) are by the first value, and by entropies where any is not 0. `table` (values,
        tokens) has the micro-batch's documents end to end. An error is kept in `error`: loss and derivatives are
        0 from then on."""
        slopes = {self._names[0]: np.zeros(table.shape[1])}
        if not documents or self.error is not None:
            return 0.0, slopes
        try:
            leaves = [torch.from_numpy(row.copy()).requires_grad_(torch.is_grad_enabled()) for row in table]
            tokens = MicroBatchTokens(documents, lengths, dict(zip(self._names, leaves, strict=True)))
            loss = check_scalar(self._function(tokens), "MicroBatchLoss", documents)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
                slopes |= {
                    n: g.numpy() for n, g in zip(self._names, gradients, strict=True) if g is not None and g.any()
                }
            if others := sorted(slopes.keys() - {self._names[0], "entropy"}):
                raise LossError(f"the loss has a derivative by {others[0]}, which is not computed; detach it")
            self.check.add_sums(loss.item(), np.concatenate([*slopes.values()]), inside=True)
            return loss.item(), slopes
        except Exception as error:
            # The caller's function may raise anything.
            self.error = error
            return 0.0, {self._names[0]: np.zeros(table.shape[1])}


# ---- what every rank computes by itself, of documents as of micro-batches


class SameOnRanks:
    """Sums by which ranks see whether losses that each computes by itself are the same everywhere.

    They are sums of losses and of coefficients. Sets of one micro-batch have sums of their own: in a pipeline only last
    stages compute their losses.
    """

    def __init__(self) -> None:
        self._sums = np.full((2, 2), -np.inf)  # (kind of sets, loss or coefficients); -inf: this rank has none
        self._sizes = np.zeros((2, 2))

    def add_sums(self, loss: float, coefficients: Floats, *, inside: bool) -> None:
        """Add the loss of some sets, and the coefficients of all documents, of any shape; `inside` sets are in one
        micro-batch.

        Coefficients are added with a weight for each, so that swapped ones do not give the same sum.
        """
        coefficients = coefficients.ravel()
        weights = 1.0 + np.sqrt(np.arange(1, len(coefficients) + 1)) % 1.0
        sums = np.array([loss, coefficients @ weights])
        kind = int(inside)
        sums_before = np.where(np.isneginf(self._sums[kind]), 0.0, self._sums[kind])  # -inf: none yet
        self._sums[kind] = sums_before + sums
        self._sizes[kind] += abs(loss), np.abs(coefficients) @ weights

    def differ_on_ranks(self, world: World) -> bool:
        """Return whether the ranks that have sums differ in them.

        Sums that are not finite are not compared: a step with an optimizer raises NonFiniteError for them.
        One collective gives the largest sums, the largest negated sums (so the smallest), and the largest sizes.
        """
        finite = np.isfinite(self._sums)
        negated = np.where(finite, -self._sums, -np.inf)
        values = np.concatenate(
            [np.where(finite, self._sums, -np.inf), negated, np.where(finite, self._sizes, 0.0)]
        )
        extremes = np.array(
            world.control.largest_over_ranks(values.ravel().tolist(), "comparison of losses")
        ).reshape(3, 2, 2)
        spread = extremes[0] + extremes[1]  # the largest less the smallest; -inf where no rank has any
        return bool((spread > TOLERANCE * extremes[2]).any())


def loss_with_slopes(
    loss: float,
    slopes: Sequence[Floats],
    world: World,
    hidden: Tensor,
    targets: BatchTargets,
    head: Head,
    chunk_rows: int,
) -> Tensor:
    """Return this slot's part of a loss that every slot has computed whole, with a gradient by given derivatives.

    The value is `loss` on slot 0, and 0 on the others. `slopes` are the derivatives for this rank's n targets: by
    log-probabilities (n,) or scores (n,) or (n, L), then, if there is a second, by entropies (n,). Where gradients are
    off the head does not run.
    """
    total = torch.tensor(loss if world.slot == 0 else 0.0, dtype=torch.float64, device=hidden.device)
    if not torch.is_grad_enabled():
        return total
    on_device = [to_device(slope, hidden.device) for slope in slopes]

    def zero_loss_and_slopes(log_probs: Tensor, part: slice, logits: Tensor) -> tuple[Tensor, ...]:
        """Return a loss of 0, whose value is in `total` already, and the slopes of these targets; a LossOfRows."""
        return log_probs.new_zeros((), dtype=torch.float64), *(slope[part] for slope in on_device)

    return total + chunked_loss(hidden, targets.targets, zero_loss_and_slopes, head, chunk_rows)


def check_scalar(loss: Any, kind: str, documents: tuple[int, ...]) -> Tensor:
    """Return the loss of these documents as a scalar. Raises LossError for what is no floating-point tensor of one
    number. `kind` names the loss in it.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.sum()
    shape = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"the function of a {kind} gave {shape} for documents {documents}; return a floating-point tensor of one number"
    )


def refuse_head_dropout(model: nn.Module, world: World, loss: str) -> None:
    """Raise ModelError where dropout would make the logits of a micro-batch differ; entered by all ranks.

    `loss` names the kind of loss that makes logits twice.
    """
    adapter = adapter_of_prepared_model(model)
    rate = adapter.dropout if adapter is not None else 0.0
    if not rate:
        return
    # Of a pipeline the last stage has the head.
    stages = [stage.model for stage in model.stages if stage.last] if isinstance(model, PipelineModel) else [model]
    heads = (stage.get_output_embeddings() for stage in stages if hasattr(stage, "get_output_embeddings"))  # pyright: ignore
    if world.control.flag_on_any_rank(any(isinstance(head, nn.Module) and is_adapted(head) for head in heads)):
        raise on_all_ranks(
            ModelError(
                f"a {loss} makes the logits of a micro-batch twice, which dropout of the head's adapter would make "
                f"differ; set lora_dropout ({rate:g}) to 0.0, or leave the head out of the adapter"
            )
        )
