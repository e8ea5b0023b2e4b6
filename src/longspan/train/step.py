"""One step, for training and for evaluation: a plan's micro-batches through a model, and one sum over slots at the end.

    result = run_step(model, plan, documents, world, optimizer=optimizer)       # training
    result = run_step(model, wide_plan, documents, world, backward=False)       # evaluation, at any other degree

Nothing is installed or rebound between the two: they are two plans. What is refused is in `step_check.py`, how rows are
read in `local_batch.py`, how they go through the model in `passes.py`, norm and clipping in `gradients.py`. The
learning rate is the caller's.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.data.document import NO_TARGET
from longspan.errors import PlanError
from longspan.model.experts.moe import router_statistics
from longspan.model.experts.router import RouterCoefficients, RouterLosses
from longspan.model.lora.without_adapter import refuse_adapter_left_out
from longspan.model.multimodal.multimodal_model import check_world, language_model_of
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan import Plan
from longspan.train.encoding import EncoderTimes, items_of, read_encoding
from longspan.train.gradients import check_finite, clip_gradients, square_sum_of_modules
from longspan.train.mtp.loss import MtpLoss, WithDepths, check_mtp, count_targets
from longspan.train.own_loss.document_loss import DocumentLoss
from longspan.train.own_loss.step_loss import step_loss
from longspan.train.own_loss.token_loss import LossFunction
from longspan.train.passes import Passes, run_passes
from longspan.train.reading.local_batch import read_local_batches
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.step_check import check_step, check_update


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank but for `seconds` and `rows`.

    `loss` is `loss_sum / divisor`, and the divisor the plan's `targets` where no other was given; `tokens` the
    documents' rows; `rows` those that this rank computed, padding included; `grad_norm` (before clipping) is None
    without a backward pass. `router`: balance and z of a model with experts, without their coefficients; they are not
    in `loss`. `forward_twice`: micro-batches that a DocumentLoss ran forward once more, for sets in several of them.
    `mtp_losses`: the mean cross entropy of each depth of multi-token prediction, without its weight; not in `loss`.
    `encoders`: what encoders took of a step with a backward pass; None without images and the like.
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
    divisor: float = 1.0
    forward_twice: int = 0
    mtp_losses: tuple[float, ...] = ()
    encoders: EncoderTimes | None = None


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
    loss: LossFunction | DocumentLoss | None = None,
    divisor: float | None = None,
    mtp: MtpLoss | None = None,
) -> StepResult:
    """Run every micro-batch of a plan and return the loss: a sum over targets, divided by the plan's targets.

    `documents[d]` is document d of the plan: it has a length and is indexed by an int64 array of positions, of which a
    rank asks for its own. With `backward`, gradients are added to `.grad` as a plain sum over slots; with an
    `optimizer`, they are zeroed before, clipped to `max_grad_norm` if given, and a step is taken. `step` appears in
    errors.

    A model in training mode runs as it is: modules in it that were put in evaluation mode (frozen ones, say) stay so. A
    model in evaluation mode is put in training mode, all of it. Without `backward` all of it runs in evaluation mode
    and keeps no graph. Every module's mode is restored.

    A MultimodalModel takes documents with items (ItemDocuments): its encoders run before and after the language model.

    The loss is the cross entropy, of documents with weights (`Document`) times the weight of each token, or one's own:
    `loss(log_probs, at)` gets the log-probabilities (t,) of some targets, in float32 (float64 for float64 logits), and
    a LossRows that says which they are, and returns their losses (t,), each of its own row alone. Weights are then
    `at["weights"]`, and multiply nothing by themselves. A DocumentLoss is a function of documents' sums. `divisor`,
    the same on every rank, is what the sum of the losses is divided by (None: the plan's targets, the number of sets of
    a DocumentLoss).

    `loss_chunk_rows` is how many rows' logits are formed at a time (0: by a budget of bytes). `router` holds the
    weights of the routers' losses in the gradient (None: those of the model's configuration); `mtp` runs the depths of
    multi-token prediction that `add_mtp` gave the model, and puts their losses into the gradient.

    All ranks call it together, with the same plan. Raises PlanError for a plan that does not fit the home or the
    documents, CommError where ranks hold different plans, DataError for documents that cannot be read or hold ids
    outside the vocabulary, on every rank, before the model runs; LossError on every rank after the passes where the
    loss failed on any, when weights are as before and gradients are of no use. With an `optimizer`, raises
    NonFiniteError on every rank where the loss or the gradient norm is not finite: weights and the optimizer's state
    are as before the step.
    """
    started = time.perf_counter()
    check_update(optimizer, max_grad_norm, backward=backward)
    check_world(model, world)
    if backward:
        refuse_adapter_left_out(model)
    language_model, items = language_model_of(model), items_of(model, plan, documents)
    check_step(language_model, plan, documents, world, items, backward=backward)
    if step is not None:
        world.step = step
    terms = step_loss(loss, divisor, plan, world, loss_chunk_rows)
    terms.check(language_model, backward=backward)
    depths = check_mtp(mtp, language_model, world)
    routing = router_statistics(language_model, world, plan.tokens, router)
    batches = read_local_batches(language_model, plan, documents, world, items, depths)
    encoding = read_encoding(model, plan, documents, items, backward=backward, depths=depths)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    measure = terms.measure
    if mtp is not None:
        targets = count_targets(batches, depths, language_model, world)
        measure = WithDepths(measure, mtp, targets, divisor=terms.divisor, chunk_rows=loss_chunk_rows, world=world)
    passes = Passes(
        model=language_model,
        plan=plan,
        world=world,
        backward=backward,
        measure=measure,
        divisor=terms.divisor,
        routing=routing,
        depths=depths,
    )
    with nullcontext() if encoding is None else encoding.around(plan.micro_batches, batches):
        loss_sum = terms.look_ahead(passes, batches) + run_passes(passes, batches)
    terms.raise_error(world)
    with world.watch.naming("gradient norm and optimizer", world.home.ranks):
        squares = square_sum_of_modules(model, world) if backward else 0.0
        result = _summed_over_ranks(passes, batches, loss_sum, squares)
        if optimizer is not None:
            blame = list if encoding is None else encoding.not_finite
            check_finite(model, world, loss=result.loss, norm=result.grad_norm or 0.0, not_finite=blame)
            _update(model, optimizer, max_grad_norm, result)
        encoders = encoding.times() if encoding is not None and backward else None
    result = replace(result, forward_twice=terms.forward_twice, encoders=encoders)
    return replace(result, seconds=time.perf_counter() - started)


def _summed_over_ranks(passes: Passes, batches: Sequence[LocalBatch], loss_sum: float, squares: float) -> StepResult:
    """The result of the step over all ranks, without its seconds. Raises PlanError where targets are missing."""
    model, plan, world, routing = passes.model, passes.plan, passes.world, passes.routing
    makes_loss = not isinstance(model, PipelineModel) or any(stage.last for stage in model.stages)
    targets = sum((batch.labels != NO_TARGET).sum() for batch in batches) if makes_loss else 0
    with_depths = passes.measure if isinstance(passes.measure, WithDepths) else None
    of_depths = with_depths.sums() if with_depths else []
    of_slot = [loss_sum, float(targets), *of_depths, *(routing.sums() if routing else [])]
    once = of_slot if world.coordinates.tp == 0 else [0.0] * len(of_slot)  # its tensor-parallel ranks hold the same
    squares, loss_sum, counted, *sums = world.control.sum_over_ranks([squares, *once], "loss and gradient norm")
    if counted != plan.targets:
        raise PlanError(
            f"the slots counted {counted:.0f} targets, the plan has {plan.targets}; is a document left out?"
        )
    return StepResult(
        loss=loss_sum / passes.divisor,
        loss_sum=loss_sum,
        targets=plan.targets,
        tokens=plan.tokens,
        grad_norm=math.sqrt(squares) if passes.backward else None,
        seconds=0.0,
        rows=sum(batch.shard.local_rows for batch in batches),
        micro_batches=len(plan.micro_batches),
        router=routing.losses(sums[passes.depths :]) if routing else None,
        divisor=passes.divisor,
        mtp_losses=with_depths.means(sums[: passes.depths]) if with_depths else (),
    )


def _update(model: nn.Module, optimizer: Optimizer, max_norm: float | None, result: StepResult) -> None:
    """A step of the optimizer along clipped gradients."""
    assert result.grad_norm is not None
    if max_norm is not None:
        clip_gradients(model.parameters(), max_norm, result.grad_norm)
    optimizer.step()
