"""One step, for training and for evaluation: a plan's micro-batches through a model, and one sum over slots at the end.

    result = run_step(model, plan, documents, world, optimizer=optimizer)       # training
    result = run_step(model, wide_plan, documents, world, backward=False)       # evaluation, at any other degree

Nothing is installed or rebound between the two: they are two plans. What is refused is in `step_check.py`, how rows are
read in `work.py`, how they go through the model in `passes.py` and `pipelined.py`. Not covered: the learning rate,
which is the caller's.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import PlanError
from longspan.model.moe import router_step
from longspan.model.parallelize import gradients_summed_over_slots, reshard
from longspan.model.pipeline import PipelinedModel
from longspan.model.router import RouterCoefficients, RouterLosses
from longspan.plan import Plan
from longspan.train.loss import NO_TARGET
from longspan.train.optim import clip_gradients, grad_norm
from longspan.train.passes import Passes, run_here
from longspan.train.pipelined import counted_parameters, makes_loss, norm_over_stages, run_through_stages
from longspan.train.step_check import check_step, check_update
from longspan.train.work import Work, read_together


@dataclass(frozen=True)
class StepResult:
    """What a step came to, equal on every rank but for `seconds` and `rows`.

    `loss` is `loss_sum / targets`; `tokens` the documents' rows; `rows` those that this rank computed, padding
    included; `grad_norm` (before clipping) is None without a backward pass. `router`: balance and z of a model with
    experts, without their coefficients; they are not in `loss`.
    """

    loss: float
    loss_sum: float
    targets: int
    tokens: int
    grad_norm: float | None
    seconds: float
    rows: int
    micro_batches: int
    router: RouterLosses | None = None


def run_step(
    model: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    optimizer: Optimizer | None = None,
    backward: bool = True,
    max_grad_norm: float | None = None,
    step: int | None = None,
    loss_chunk_rows: int = 0,
    router: RouterCoefficients | None = None,
) -> StepResult:
    """Run every micro-batch of a plan and return the loss, a sum over targets divided by the plan's targets.

    `documents[d]` is document d of the plan: it has a length and is indexed by an int64 array of positions, of which a
    rank asks for its own. With `backward`, gradients are added to `.grad` as a plain sum over slots; with an
    `optimizer`, they are zeroed before, clipped to `max_grad_norm` if given, and a step is taken. Without `backward`,
    the model runs in evaluation mode and keeps no graph; its mode is restored. `step` appears in errors.
    `loss_chunk_rows` is how many rows' logits are formed at a time (0: by a budget of bytes). `router` says what the
    losses of routers weigh in the gradient (None: what the model's configuration says).

    All ranks call it together, with the same plan. Raises PlanError for a plan that does not fit the home or the
    documents, CommError where ranks hold different plans, DataError for documents that cannot be read or hold ids
    outside the vocabulary, on every rank, before the model runs.
    """
    started = time.perf_counter()
    check_update(optimizer, max_grad_norm, backward=backward)
    check_step(model, plan, documents, world)
    if step is not None:
        world.step = step
    routing = router_step(model, world, plan.tokens, router)
    work = read_together(model, plan, documents, world)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    passes = Passes(model, plan, world, backward, loss_chunk_rows, routing)
    loss_sum, losses = _totals(passes, work, _run(passes, work))
    with world.watch.naming("gradient norm and optimizer", world.home.ranks):
        norm = _finish(model, world, optimizer, max_grad_norm) if backward else None
    return StepResult(
        loss=loss_sum / max(plan.targets, 1),
        loss_sum=loss_sum,
        targets=plan.targets,
        tokens=plan.tokens,
        grad_norm=norm,
        seconds=time.perf_counter() - started,
        rows=sum(each.shard.local_rows for each in work),
        micro_batches=len(plan.micro_batches),
        router=losses,
    )


def _run(passes: Passes, work: Sequence[Work]) -> float:
    """This rank's sum of the loss; with backward, gradients of the sum over slots, divided by the plan's targets."""
    model, world, backward = passes.model, passes.world, passes.backward
    run = run_through_stages if isinstance(model, PipelinedModel) else run_here
    named = world.watch.naming("forward and backward passes", world.home.ranks)
    closing = gradients_summed_over_slots(model, world) if backward else _resharded(model)
    with named, _mode(model, training=backward), torch.set_grad_enabled(backward), closing:
        return run(passes, work)


def _totals(passes: Passes, work: Sequence[Work], loss_sum: float) -> tuple[float, RouterLosses | None]:
    """The loss and the routers' losses of all slots, from what each rank has; checks that no target was left out."""
    plan, routing = passes.plan, passes.routing
    targets = sum((each.labels != NO_TARGET).sum() for each in work) if makes_loss(passes.model) else 0
    own = [loss_sum, float(targets), *(routing.sums() if routing else [])]
    loss_sum, counted, *sums = passes.world.sum_over_stages(own)
    if counted != plan.targets:
        raise PlanError(
            f"the slots counted {counted:.0f} targets, the plan has {plan.targets}; is a document left out?"
        )
    return loss_sum, routing.losses(sums) if routing else None


def _finish(model: nn.Module, world: World, optimizer: Optimizer | None, max_grad_norm: float | None) -> float:
    parameters = list(model.parameters())
    norm = grad_norm(counted_parameters(model))
    if isinstance(model, PipelinedModel):
        norm = norm_over_stages(norm, world)
    if optimizer is not None:
        if max_grad_norm is not None:
            clip_gradients(parameters, max_grad_norm, norm)
        optimizer.step()
    return norm.item()


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode inside; every module's own mode is restored."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _resharded(model: nn.Module) -> Iterator[None]:
    """Parameters that evaluation gathers are freed at the end, so that the next update meets none that are stale."""
    try:
        yield
    finally:
        reshard(model)
