"""One step, for training and for evaluation: a plan's micro-batches through a model, and one sum over slots at the end.

    result = run_step(model, plan, documents, world, optimizer=optimizer)       # training
    result = run_step(model, wide_plan, documents, world, backward=False)       # evaluation, at any other degree

Nothing is installed or rebound between the two: they are two plans. In free mode a slot runs the micro-batches that it
is in, at its own pace; over sharded parameters these are gathered before, and a closing micro-batch sums gradients. Not
covered: the learning rate, which is the caller's.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import SequenceShard, World, bind
from longspan.errors import DataError, ModelError, PlanError
from longspan.layout import Partition
from longspan.model.hf import is_prepared, refuse_unprepared, vocabulary_size
from longspan.model.moe import router_step
from longspan.model.parallelize import fsdp_modules, gradients_summed_over_slots, parameters_gathered, reshard
from longspan.model.pipeline import PipelinedModel
from longspan.model.router import RouterCoefficients, RouterLosses, RouterStep
from longspan.model.tensor_parallel import row_multiple
from longspan.plan import MicroBatch, Plan
from longspan.train.chunked_loss import chunked_cross_entropy
from longspan.train.loss import NO_TARGET, Rows, read_rows, summed_cross_entropy
from longspan.train.optim import clip_gradients, grad_norm
from longspan.train.pipelined import counted_parameters, makes_loss, no_rows, norm_over_stages, run_through_stages
from longspan.train.readers import exchange_of, move_to_owners, read_held


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


class _Work(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host."""

    shard: SequenceShard
    ids: Rows
    labels: Rows


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
    readers: Partition | None = None,
) -> StepResult:
    """Run every micro-batch of a plan and return the loss, a sum over targets divided by the plan's targets.

    `documents[d]` is document d of the plan: it has a length and is indexed by an int64 array of positions, of which a
    rank asks for its own. With `backward`, gradients are added to `.grad` as a plain sum over slots; with an
    `optimizer`, they are zeroed before, clipped to `max_grad_norm` if given, and a step is taken. Without `backward`,
    the model runs in evaluation mode and keeps no graph; its mode is restored. `step` appears in errors.
    `loss_chunk_rows` is how many rows' logits are formed at a time (0: by a budget of bytes). `router` says what the
    losses of routers weigh in the gradient (None: what the model's configuration says).

    `readers` says which rows each slot reads, counted through the plan's documents by their ids (`whole_documents`):
    rows that another slot computes then travel there. By default each rank reads what it computes.

    All ranks call it together, with the same plan. Raises PlanError for a plan that does not fit the home or the
    documents, CommError where ranks hold different plans, DataError for documents that cannot be read or hold ids
    outside the vocabulary, on every rank, before the model runs.
    """
    started = time.perf_counter()
    _check(model, plan, documents, world, optimizer, backward, max_grad_norm)
    if step is not None:
        world.step = step
    routing = router_step(model, world, plan.tokens, router)
    work = _read_together(model, plan, documents, world, readers)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    named = world.watch.naming("forward and backward passes", world.home.ranks)
    with named, _mode(model, training=backward), torch.set_grad_enabled(backward):
        loss_sum = _run_micro_batches(model, plan, work, world, backward, loss_chunk_rows, routing)
    own = [loss_sum, float(sum((w.labels != NO_TARGET).sum() for w in work)) if makes_loss(model) else 0.0]
    totals = world.sum_over_stages([*own, *(routing.sums() if routing else [])])
    _check_count(plan, totals[1])
    with world.watch.naming("gradient norm and optimizer", world.home.ranks):
        norm = _finish(model, world, optimizer, max_grad_norm) if backward else None
    return StepResult(
        loss=totals[0] / max(plan.targets, 1),
        loss_sum=totals[0],
        targets=plan.targets,
        tokens=plan.tokens,
        grad_norm=norm,
        seconds=time.perf_counter() - started,
        rows=sum(w.shard.local_rows for w in work),
        micro_batches=len(plan.micro_batches),
        router=routing.losses(totals[2:]) if routing else None,
    )


def _run_micro_batches(
    model: nn.Module,
    plan: Plan,
    work: Sequence[_Work],
    world: World,
    backward: bool,
    chunk_rows: int,
    routing: RouterStep | None,
) -> float:
    """This rank's sum of the loss; with backward, gradients of the sum over slots, divided by the plan's targets."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    with gradients_summed_over_slots(model, world) if backward else _resharded(model):
        if isinstance(model, PipelinedModel):
            settings = {"backward": backward, "chunk_rows": chunk_rows, "routing": routing}
            return run_through_stages(model, plan, work, world, **settings)
        free = plan.mode == "free"
        with parameters_gathered(model) if free else nullcontext():
            if routing is not None and backward and routing.coefficients.balance:
                _count_loads(model, work[0 if free else 1 :], routing)
            if routing is not None and backward and free:
                routing.settle()
            for i, (shard, ids, labels) in enumerate(work):
                loss = _loss(model, ids, torch.from_numpy(labels).to(world.device), shard, chunk_rows, routing)
                if backward:
                    if routing is not None and i == 0 and not free:
                        routing.settle()
                    (loss / max(plan.targets, 1)).backward()
                total += loss.detach()
        if backward and free and (fsdp_modules(model) or not work):
            _closing_micro_batch(model, plan, world, routing)
    return total.item()


def _closing_micro_batch(model: nn.Module, plan: Plan, world: World, routing: RouterStep | None) -> None:
    """A pass over padding alone: over sharded parameters it sums the gradients of all slots, which all enter it."""
    shard = bind(MicroBatch(), world).with_padding(minimum=1, multiple=plan.row_multiple)
    ids, labels = no_rows(shard)
    _loss(model, ids, torch.from_numpy(labels).to(world.device), shard, 0, routing).backward()


@torch.no_grad()
def _count_loads(model: nn.Module, work: Sequence[_Work], routing: RouterStep) -> None:
    """A forward pass of micro-batches whose routing must be known before the first backward pass."""
    for shard, ids, _ in work:
        tokens, positions = torch.from_numpy(ids).to(shard.device)[None], shard.position_ids[None]
        none: dict[str, Any] = {"row_loss": lambda hidden, head: hidden.new_zeros(())}
        model(input_ids=tokens, position_ids=positions, shard=shard, router=routing.tally(counting=True), **none)


def _loss(
    model: nn.Module, ids: Rows, labels: Tensor, shard: SequenceShard, chunk_rows: int, routing: RouterStep | None
) -> Tensor:
    """The sum of the cross entropy of the local rows; a model of the caller's own returns logits (1, T, V)."""
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids).to(shard.device)[None], "shard": shard}
    inputs["position_ids"] = shard.position_ids[None]
    if routing is not None:
        inputs["router"] = routing.tally()
    if is_prepared(model):
        return model(**inputs, row_loss=lambda hidden, head: chunked_cross_entropy(hidden, labels, head, chunk_rows))
    out = model(**inputs)
    return summed_cross_entropy((out if isinstance(out, Tensor) else out.logits).squeeze(0), labels)


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


def _read_together(
    model: nn.Module, plan: Plan, documents: Any, world: World, readers: Partition | None
) -> list[_Work]:
    """Bind every micro-batch and get this rank's rows; where any rank cannot read, every rank raises DataError."""
    work, failure, vocabulary, held = list[_Work](), None, vocabulary_size(model), None
    exchange = None if readers is None else exchange_of(plan, readers)
    reads = not isinstance(model, PipelinedModel) or model.reads_tokens
    try:
        for micro_batch in plan.micro_batches:
            if plan.mode == "free" and not micro_batch.groups_of(world.slot):
                continue  # in lockstep: a dummy
            shard = bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)
            here = reads and readers is None
            work.append(_Work(shard, *(read_rows(documents, shard, vocabulary) if here else no_rows(shard))))
        if readers is not None and reads:
            held = read_held(documents, plan, readers, world.slot, vocabulary)
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = error
    # The first collective of a step: it compares the plans too, of which a rank has none if it cannot read them.
    if world.agree(plan.digest(), flag=failure is not None):
        told = world.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        rank, message = next((rank, m) for rank, m in zip(world.home.ranks, told, strict=True) if m is not None)
        raise DataError(f"rank {rank} could not read its rows: {message}") from failure
    if held is not None and exchange is not None:
        moved = move_to_owners(held, exchange, [w.shard for w in work], world)
        return [_Work(w.shard, *rows) for w, rows in zip(work, moved, strict=True)]
    return work


def _check(
    model: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    optimizer: Optimizer | None,
    backward: bool,
    max_grad_norm: float | None,
) -> None:
    refuse_unprepared(model)
    if world.home.pp > 1 and not isinstance(model, PipelinedModel):
        raise ModelError(
            f"the home has pp {world.home.pp}, but {type(model).__name__} is not cut into stages; call model = "
            "longspan.prepare(model, world), or use a home without pp"
        )
    if plan.slots != world.home.slots:
        raise PlanError(f"the plan is for {plan.slots} slots, the home has {world.home.slots}; plan for this home")
    if optimizer is not None and not backward:
        raise ModelError("an optimizer without backward has no gradients; leave out one of optimizer, backward=False")
    if max_grad_norm is not None and optimizer is None:
        raise ModelError(f"max_grad_norm {max_grad_norm} without an optimizer clips nothing; pass both, or neither")
    for name in ("pp", "ep"):
        if plan.mode == "free" and (degree := getattr(world.home, name)) > 1:
            raise PlanError(
                f"the plan is in free mode, where slots are at different micro-batches, but the home has {name} "
                f"{degree}, under which all of them wait for each other in every layer; plan with mode='lockstep'"
            )
    if plan.row_multiple % (multiple := row_multiple(model)):
        raise PlanError(
            f"the plan has row_multiple {plan.row_multiple}, the model is sequence-parallel over tp {multiple}; plan "
            f"with row_multiple={multiple}"
        )
    _check_documents(plan, documents)


def _check_documents(plan: Plan, documents: Any) -> None:
    for document, planned in enumerate(plan.lengths):
        try:
            found = len(documents[document])
        except (IndexError, KeyError) as error:
            raise PlanError(f"the plan has {len(plan.lengths)} documents, document {document} was not given") from error
        if found != planned:
            raise PlanError(
                f"document {document} has {found} tokens, the plan laid out {planned}; plan from the lengths of the "
                "documents that the step is given"
            )
    if plan.targets != (count := sum(plan.lengths) - len(plan.lengths)):
        raise PlanError(
            f"the plan divides the loss by {plan.targets} targets, its {len(plan.lengths)} documents have {count} "
            "(length - 1 each); plan without targets="
        )


def _check_count(plan: Plan, counted: float) -> None:
    if counted != plan.targets:
        raise PlanError(
            f"the slots counted {counted:.0f} targets, the plan has {plan.targets}; is a document left out?"
        )


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
