"""The forward and backward passes of a step over this rank's micro-batches, where the whole model is on every rank.

In free mode a slot runs the micro-batches that it is in, at its own pace; over sharded parameters these are gathered
before, and a closing micro-batch sums gradients. Models in stages are `passes_in_stages.py`'s.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import World, to_device
from longspan.model.experts.router import RouterStatistics
from longspan.model.placement.sharding import fsdp_modules, parameters_gathered, replicas_summed_at_last
from longspan.model.prepared import is_prepared
from longspan.model.seams.first_pass import awaits_first_pass
from longspan.plan import Plan
from longspan.train.chunked_loss import chunked_cross_entropy
from longspan.train.local_batch import LocalBatch, padding_batch
from longspan.train.loss import summed_cross_entropy


@dataclass(frozen=True)
class Passes:
    """What all passes of one step share: the model and its plan, with or without gradients, and how the loss is made.

    `chunk_rows` is how many rows' logits are formed at a time (0: by a budget of bytes), `routing` what follows the
    routers of a model with experts.
    """

    model: nn.Module
    plan: Plan
    world: World
    backward: bool
    chunk_rows: int
    routing: RouterStatistics | None

    def mean(self, loss_sum: Tensor) -> Tensor:
        """A sum over rows as its part of the step's loss: divided by the plan's targets."""
        return loss_sum / max(self.plan.targets, 1)

    def router(self, *, counting: bool = False) -> dict[str, Any]:
        """The keyword argument by which a model's routers tell what they see in one more micro-batch, if it has any."""
        return {} if self.routing is None else {"router": self.routing.new_sums(counting=counting)}

    @property
    def counts_loads(self) -> bool:
        """Whether a backward pass needs the loads of all micro-batches' experts before it."""
        return self.routing is not None and self.backward and bool(self.routing.coefficients.balance)

    def settle(self) -> None:
        """Fix the loads of experts before the first backward pass; entered by all slots."""
        if self.routing is not None and self.backward:
            self.routing.fix_loads()


def run_here(passes: Passes, work: Sequence[LocalBatch]) -> float:
    """This rank's sum of the loss; with backward, gradients of the sum over slots, divided by the plan's targets."""
    total = torch.zeros((), dtype=torch.float64, device=passes.world.device)
    free = passes.plan.mode == "free"
    if free and awaits_first_pass(passes.model):
        _enter_together(passes)
    with parameters_gathered(passes.model) if free else nullcontext():
        if passes.counts_loads:
            _count_loads(passes, work[0 if free else 1 :])
        if free:
            passes.settle()
        with replicas_summed_at_last(passes.model) as sum_replicas:
            for i, each in enumerate(work):
                loss = _loss(passes, each)
                if i == 0 and not free:
                    passes.settle()
                if i == len(work) - 1:
                    sum_replicas()
                if passes.backward:
                    passes.mean(loss).backward()
                total += loss.detach()
    if passes.backward and free and (fsdp_modules(passes.model) or not work):
        # Over sharded parameters this pass sums the gradients of all slots, which all enter it.
        _loss(passes, padding_batch(passes.plan, passes.world)).backward()
    return total.item()


@torch.no_grad()
def _enter_together(passes: Passes) -> None:
    """A forward pass of padding alone on all slots, with or without work: what the first pass shows, all learn."""
    padding = padding_batch(passes.plan, passes.world)
    passes.model(**_inputs(padding), row_loss=lambda hidden, head: hidden.new_zeros(()))


@torch.no_grad()
def _count_loads(passes: Passes, work: Sequence[LocalBatch]) -> None:
    """A forward pass of micro-batches whose routing must be known before the first backward pass."""
    for each in work:
        router = passes.router(counting=True)
        passes.model(**_inputs(each), **router, row_loss=lambda hidden, head: hidden.new_zeros(()))


def _loss(passes: Passes, work: LocalBatch) -> Tensor:
    """The sum of the cross entropy of the local rows; a model of the caller's own returns logits (1, T, V)."""
    labels = to_device(work.labels, work.shard.device)
    inputs, chunk = _inputs(work) | passes.router(), passes.chunk_rows
    if is_prepared(passes.model):
        return passes.model(**inputs, row_loss=lambda hidden, head: chunked_cross_entropy(hidden, labels, head, chunk))
    out = passes.model(**inputs)
    return summed_cross_entropy((out if isinstance(out, Tensor) else out.logits).squeeze(0), labels)


def _inputs(work: LocalBatch) -> dict[str, Any]:
    shard = work.shard
    return {
        "input_ids": to_device(work.ids, shard.device)[None],
        "position_ids": shard.position_ids[None],
        "shard": shard,
    }
