"""One step, for training and for evaluation: a plan's micro-batches through a model, and one sum over slots at the end.

    result = run_step(model, plan, documents, world, optimizer=optimizer)       # training
    result = run_step(model, wide_plan, documents, world, backward=False)       # evaluation, at any other degree

Nothing is installed or rebound between the two: they are two plans. A step checks (`step_inputs.py`), reads
(`read_rows.py`), runs its passes (`passes.py`), reduces, clips and updates (`step_end.py`); what features
add to it are its terms (`terms/`): a step enters no module of a feature that is off. The learning rate is the caller's.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import LossError
from longspan.model.kinds import score_columns
from longspan.model.marks import refuse_other_parameters
from longspan.plan import Plan
from longspan.train.loss import CrossEntropy
from longspan.train.passes import Passes, launch_passes, read_step_batches
from longspan.train.step_end import StepEnd
from longspan.train.step_inputs import check_step_arguments, check_temperature, check_update_arguments
from longspan.train.terms.step_terms import step_terms

if TYPE_CHECKING:
    from longspan.model.experts.router import RouterCoefficients, RouterLosses
    from longspan.train.terms.distillation import Distillation
    from longspan.train.terms.document_loss import DocumentLoss
    from longspan.train.terms.encoding import EncoderTimes
    from longspan.train.terms.loss_tokens import LossFunction
    from longspan.train.terms.micro_batch_loss import MicroBatchLoss
    from longspan.train.terms.mtp import MtpLoss


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank except `seconds`, `rows` and `slot_ratio`.

    `loss` is `loss_sum / divisor`, where the divisor is the plan's `targets` unless another was given; `tokens` the
    documents' rows; `rows` those that this rank computed, padding included; `grad_norm` (before clipping) is None
    without a backward pass. `router`: balance and z of a model with experts, without their coefficients; they are not
    in `loss`. `forward_twice`: micro-batches that a DocumentLoss ran forward once more, for sets in several of them.
    `mtp_losses`: the mean cross entropy of each depth of multi-token prediction, without its weight; not in `loss`.
    `encoders`: what encoders took of a step with a backward pass; None without images and the like. `slot_ratio`: this
    slot's seconds for its rows' loss over those of the other slots for as many; None if they were not timed.
    `figures` are those of a DocumentLoss or Distillation, by name.
    """

    loss: float
    loss_sum: float
    targets: int
    tokens: int
    grad_norm: float | None
    seconds: float
    rows: int
    micro_batches: int
    router: "RouterLosses | None" = None
    divisor: float = 1.0
    forward_twice: int = 0
    mtp_losses: tuple[float, ...] = ()
    encoders: "EncoderTimes | None" = None
    slot_ratio: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


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
    router: "RouterCoefficients | None" = None,
    loss: "LossFunction | DocumentLoss | MicroBatchLoss | Distillation | None" = None,
    divisor: float | None = None,
    mtp: "MtpLoss | None" = None,
    time_slots: bool = False,
    temperature: float = 1.0,
    host_work: Callable[[], None] | None = None,
) -> StepResult:
    """Run every micro-batch of a plan and return the loss: a sum over targets, divided by the plan's targets.

    `documents[d]` is document d of the plan: it has a length and is indexed by an int64 array of positions, those that
    a rank holds. Of what `share_prefixes` returns, losses and numbers of tokens are those of whole documents. With
    `backward`, gradients are added to `.grad` as a plain sum over slots; with an `optimizer`, they are zeroed before,
    clipped to `max_grad_norm` if given, and a step is taken; AdamW in one pass, as `build_optimizer` makes it, clips
    within its update and leaves `.grad` as it is. `step` appears in errors.

    A model in training mode runs as it is: modules in it that were put in evaluation mode (frozen ones, say) stay so. A
    model in evaluation mode is put in training mode, all of it. Without `backward` all of it runs in evaluation mode
    and keeps no graph. Every module's mode is restored.

    A MultimodalModel takes documents with items (MediaDocuments): its encoders run before and after the language model.

    The loss is the cross entropy, of documents with weights (`Document`) times the weight of each token, or one's own:
    `loss(log_probs, at)` gets the log-probabilities (t,) of some targets, in float32 (float64 for float64 logits), and
    a LossTokens that describes them, and returns their losses (t,), each of its own row only. Weights are then
    `at["weights"]`, and multiply nothing by themselves. A DocumentLoss is a function of documents' sums, a
    MicroBatchLoss one of all tokens of a micro-batch, a Distillation one of whole distributions, with a teacher's.
    `divisor`, the same on every rank, is what the sum of the losses is divided by (None: the plan's targets, the number
    of sets of a DocumentLoss, 1 of a MicroBatchLoss).

    `loss_chunk_rows` is how many rows' logits are formed at a time (0: by a budget of bytes). `router` holds the
    weights of the routers' losses in the gradient (None: those of the model's configuration); `mtp` runs the depths of
    multi-token prediction that `add_mtp` gave the model, and puts their losses into the gradient. `time_slots`
    compares how fast slots work (`StepResult.slot_ratio`). `temperature` divides logits before the softmax, as tokens
    of a policy are sampled. `host_work` is called once the step is launched, before the host waits for the device: work
    of the host for the next step, which raises nothing and enters no collective.

    All ranks call it together, with the same plan. Raises PlanError for a plan that does not fit the home or the
    documents, CommError where ranks hold different plans, DataError for documents that cannot be read or hold ids
    outside the vocabulary, on every rank, before the model runs; LossError on every rank after the passes where the
    loss failed on any, when weights are as before and gradients are of no use. With an `optimizer`, raises
    NonFiniteError on every rank where the loss or the gradient norm is not finite: weights and the optimizer's state
    are as before the step.
    """
    started = time.perf_counter()
    check_update_arguments(optimizer, max_grad_norm, backward=backward)
    if optimizer is not None:
        refuse_other_parameters(model, optimizer)
    check_temperature(temperature, has_mtp=mtp is not None)
    inputs = check_step_arguments(model, plan, documents, world, backward=backward)
    if temperature != 1 and score_columns(inputs.language_model):
        raise LossError(
            f"temperature is {temperature:g}, and the model makes scores, which have none; leave it out"
        )
    if step is not None:
        world.step = step
    terms = step_terms(
        inputs,
        loss=loss,
        divisor=divisor,
        router=router,
        mtp=mtp,
        chunk_rows=loss_chunk_rows,
        time_slots=time_slots,
    )
    batches = read_step_batches(inputs, terms, temperature)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    loss_fn = CrossEntropy(loss_chunk_rows)  # the term of `loss` and `divisor` puts its own in place of these two
    passes = Passes.with_terms(inputs, terms, loss_fn, divisor=float(max(plan.targets, 1)), temperature=temperature)
    loss_sum = launch_passes(passes, batches)
    for term in terms:
        term.raise_error()
    with world.watch.name_collectives("gradient norm and optimizer", world.home.ranks):
        sums = StepEnd(model, passes, batches, optimizer, max_grad_norm, host_work or (lambda: None)).finish_step(
            loss_sum
        )
        term_results = [term.results(values) for term, values in zip(terms, sums.by_term, strict=True)]
    return StepResult(
        loss=sums.loss / passes.divisor,
        loss_sum=sums.loss,
        targets=plan.targets,
        tokens=plan.tokens,
        grad_norm=sums.norm if backward else None,
        seconds=time.perf_counter() - started,
        rows=sum(batch.shard.local_rows for batch in batches),
        micro_batches=len(plan.micro_batches),
        divisor=passes.divisor,
        **{name: value for results in term_results for name, value in results.items()},
    )
