"""The forward and backward passes of a step over this rank's micro-batches, through a whole model or pipeline stages.

`run_step`, `evaluate` and `token_log_probs` all go through `Passes.with_terms` and `run_passes`. What a feature adds to
a step is a `Term`; those that exist are in `terms/`, and a step without such features has none.

In lockstep every slot runs every micro-batch. In free mode a slot runs those that it is in, at its own pace: sharded
parameters are gathered before, and a closing micro-batch of padding sums gradients. In a pipeline every stage of a slot
binds the same micro-batches; the first stage reads token ids, and only the last one makes the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.comm import World, to_device
from longspan.model.fsdp_params import drop_unsummed_gradients, fsdp_modules, reshard
from longspan.model.layers import preserve_modes
from longspan.model.marks import is_pipeline, keep_float8_weights
from longspan.model.seams.call_rules import is_prepared
from longspan.model.sharding import (
    defer_until_last_pass,
    keep_parameters_whole,
    keeps_parameters_gathered,
    sum_gradients_over_slots,
)
from longspan.plan import MicroBatch, Plan
from longspan.train.loss import GivenLogits, Head, TemperedHead
from longspan.train.rows.agreed_reading import read_and_compare_digest, text_digest
from longspan.train.rows.gather_documents import bring_gathered_rows
from longspan.train.rows.read_rows import LocalBatch, padding_batch, read_micro_batches
from longspan.train.step_inputs import StepInputs

if TYPE_CHECKING:
    from longspan.model.experts.router import RouterStatistics
    from longspan.model.pipeline.stages import StageInput

# A function of a batch, its last hidden states (T, D), a head that makes logits of some of them, and the hidden states
# of depths of multi-token prediction, to the sum of losses, with a gradient where gradients are enabled.
LossFn = Callable[..., Tensor]


class Term:
    """What one feature adds to a step; each method is neutral, and a term overrides those that it needs.

    `step_terms` makes and checks the terms of a step. All ranks have the same terms and call them in one order: `read`
    (or, of an evaluation, `read_portion`), `extend_passes`, `passes_context` with `prepare_passes` inside,
    `raise_error`, `sums`, `results`. A term lives for one step, and keeps what it counts in itself. `depths` is how
    many depths of multi-token prediction it runs, `likeliest` how many of a teacher's likeliest tokens it reads of each
    target.
    """

    depths = 0
    likeliest = 0

    def read(self, batches: Sequence[LocalBatch]) -> None:
        """Read what the term needs of a whole step, whose batches have been read; entered by all ranks."""

    def read_portion(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Read what the term needs of some micro-batches of an evaluation, without the other ranks."""

    def extend_passes(self, passes: "Passes") -> "Passes":
        """Return the passes with what the term adds: another loss, say."""
        return passes

    def passes_context(self, batches: Sequence[LocalBatch]) -> AbstractContextManager[None]:
        """Return a context around all passes over these batches."""
        return nullcontext()

    def prepare_passes(self, passes: "Passes", batches: Sequence[LocalBatch]) -> float:
        """Run what comes before the passes; returns this rank's part of the loss that is known then."""
        return 0.0

    def raise_error(self) -> None:
        """Raise, on every rank, an error that was kept until the passes were over."""

    def sums(self) -> list[float] | Tensor:
        """Return numbers of this rank's slot, which are summed over all slots with the loss; may be on the device."""
        return []

    def nonfinite_inputs(self) -> list[str]:
        """Return names of inputs of this rank that are not finite, for an error."""
        return []

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return fields of the StepResult, from `sums()` summed over all slots; entered by all ranks."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What all passes of one step share: model, plan and world, with or without gradients, and how to make the loss.

    `model` is the language model, without encoders. `loss_fn` returns the sum of the losses of a micro-batch's rows,
    whose gradients are divided by `divisor`. `routing` counts the experts' loads of the step, None without experts.
    `depths` of multi-token prediction run where there is a loss. `frees_parameters`: whether passes without backward
    free at their end what FSDP2 has gathered. `temperature` divides logits. `run_before`, if there is one, gets each
    micro-batch and its inputs before the model's pass: another model runs over it first.
    """

    model: nn.Module
    plan: Plan
    world: World
    backward: bool
    loss_fn: LossFn
    divisor: float = 1.0
    routing: "RouterStatistics | None" = None
    frees_parameters: bool = True
    depths: int = 0
    terms: tuple[Term, ...] = ()
    temperature: float = 1.0
    run_before: Callable[[LocalBatch, Mapping[str, Any]], None] | None = None

    @classmethod
    def with_terms(cls, inputs: StepInputs, terms: Sequence[Term], loss_fn: LossFn, **settings: Any) -> "Passes":
        """Return the passes of a step with what its terms add, in the order of `terms`; `settings` are
        further fields.
        """
        passes = cls(
            model=inputs.language_model,
            plan=inputs.plan,
            world=inputs.world,
            backward=inputs.backward,
            loss_fn=loss_fn,
            **settings,
        )
        for term in terms:
            passes = term.extend_passes(passes)
        return replace(passes, terms=tuple(terms))

    def mean_loss(self, loss_sum: Tensor) -> Tensor:
        """Return this rank's share of the step's loss: a sum over targets, divided once for all slots."""
        return loss_sum / self.divisor

    def row_loss(self, batch: LocalBatch) -> Callable[..., Tensor]:
        """Return the function of last hidden states (T, D), head and depths' states that a prepared model calls for
        the loss of this batch.
        """
        return lambda hidden, head, *deeper: self.loss_fn(batch, hidden, self.tempered_head(head), *deeper)

    def tempered_head(self, head: Head) -> Head:
        """Return the head with its logits divided by the step's temperature."""
        return head if self.temperature == 1 else TemperedHead(head, self.temperature)

    def arguments_of_next_call(self, *, counting: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of one more call of the model, which `routing` counts as a micro-batch.

        `counting`: the call only counts the experts' loads, and makes no loss.
        """
        if self.routing is None:
            return {}
        return {"router": self.routing.add_micro_batch(counting=counting)}

    @property
    def needs_loads_first(self) -> bool:
        """Whether a backward pass needs the loads of all micro-batches' experts before it."""
        return self.routing is not None and self.backward and bool(self.routing.coefficients.balance)

    def compute_load_fractions(self) -> None:
        """Sum the loads of experts over slots, as all backward passes take them; entered by all slots before these."""
        if self.routing is not None and self.backward:
            self.routing.compute_load_fractions()


_HINT = (
    "A plan must be made from the same lengths and settings on every rank, loss=, divisor= and mtp= be given on all "
    "ranks or on none, and temperature= be the same"
)


def read_step_batches(inputs: StepInputs, terms: Sequence[Term], temperature: float = 1.0) -> list[LocalBatch]:
    """Read this rank's rows of a whole step, and what its terms need; entered by all ranks.

    Each slot reads the rows that it computes; its ranks of stages in the middle read none. The places of items are
    neither inputs nor targets. Depths of multi-token prediction read as many tokens further ahead. Raises DataError, on
    every rank, where any rank cannot read, and CommError where ranks hold different plans or temperatures.
    """
    depths = sum(term.depths for term in terms)
    likeliest = sum(term.likeliest for term in terms)
    plan = inputs.plan
    inputs = bring_gathered_rows(inputs, depths)
    digest = text_digest(f"{plan.digest()} {float(temperature)}")
    # One message tells that plans are the same and that every rank could read its rows.
    batches = read_and_compare_digest(
        lambda: read_micro_batches(inputs, plan.micro_batches, depths, likeliest), digest, inputs.world, hint=_HINT
    )
    for term in terms:
        term.read(batches)
    return batches


def run_passes(passes: Passes, batches: Sequence[LocalBatch]) -> float:
    """Run all passes; returns this rank's sum of the loss. Gradients are of the sum over slots over the divisor."""
    return launch_passes(passes, batches).item()


def launch_passes(passes: Passes, batches: Sequence[LocalBatch]) -> Tensor:
    """Run all passes and restore every module's mode; returns the sum on the device, which may still compute it.

    With gradients these are summed over slots inside, and dropped after an error. Without, gathered parameters are
    freed at the end. Entered by all ranks.
    """
    model = passes.model
    world = passes.world
    backward = passes.backward
    run = _run_pipeline if is_pipeline(model) else _run_whole_model
    with ExitStack() as stack:
        for term in passes.terms:
            stack.enter_context(term.passes_context(batches))
        loss_ahead = sum(term.prepare_passes(passes, batches) for term in passes.terms)
        stack.enter_context(world.watch.name_collectives("forward and backward passes", world.home.ranks))
        # Parameters that are whole for several passes are quantised once for all of them.
        stay_whole = passes.plan.mode == "free" or is_pipeline(model) or keeps_parameters_gathered(model)
        if stay_whole and len(batches) > 1:
            stack.enter_context(keep_float8_weights(model))
        stack.enter_context(preserve_modes(model))
        stack.enter_context(torch.set_grad_enabled(backward))
        # In a model that is in training mode, frozen modules keep their mode.
        if not (backward and model.training):
            model.train(backward)
        if backward:
            with sum_gradients_over_slots(model, world):
                try:
                    return loss_ahead + run(passes, batches)
                except BaseException:
                    drop_unsummed_gradients(model)
                    raise
        try:
            return loss_ahead + run(passes, batches)
        finally:
            if passes.frees_parameters:
                reshard(model)  # parameters that stay gathered would be stale after the next update


def _run_whole_model(passes: Passes, batches: Sequence[LocalBatch]) -> Tensor:
    """In free mode slots run different numbers of micro-batches, so no collective of all slots may be inside:
    parameters are gathered before all passes, and a last pass over padding sums gradients. In lockstep slots
    enter each pass together. Where loads of experts count for a whole step, every micro-batch runs forward once
    more before the first backward pass; in lockstep the first micro-batch does not, as its own forward pass comes
    before that."""
    model = passes.model
    free = passes.plan.mode == "free"
    total = torch.zeros((), dtype=torch.float64, device=passes.world.device)
    with keep_parameters_whole(model) if free else defer_until_last_pass(model) as finish:
        if passes.needs_loads_first:
            with torch.no_grad():
                for batch in batches[0 if free else 1 :]:
                    arguments = _model_inputs(batch) | passes.arguments_of_next_call(counting=True)
                    model(**arguments, row_loss=lambda hidden, _: hidden.new_zeros(()))
        if free:
            passes.compute_load_fractions()
        for i, batch in enumerate(batches):
            if i == len(batches) - 1:
                finish()
            loss = _batch_loss(passes, batch)
            if i == 0 and not free:
                passes.compute_load_fractions()
            if passes.backward:
                passes.mean_loss(loss).backward()
            total += loss.detach()
    if passes.backward and free and (fsdp_modules(model) or not batches):
        # Over sharded parameters this pass sums the gradients of all slots, which all enter it. Over whole ones it
        # gives a slot without micro-batches its gradients, which are zero.
        _batch_loss(passes, padding_batch(passes.plan, passes.world, passes.depths)).backward()
    return total


def _batch_loss(passes: Passes, batch: LocalBatch) -> Tensor:
    """A float64 scalar. A model that is not prepared returns logits of all rows, which take the place of hidden
    states, with a head that returns them unchanged."""
    inputs = _model_inputs(batch)
    if passes.run_before is not None:
        passes.run_before(batch, inputs)
    inputs |= passes.arguments_of_next_call()
    if passes.depths:
        inputs |= _future_ids(batch)
    if is_prepared(passes.model):
        return passes.model(**inputs, row_loss=passes.row_loss(batch))
    output = passes.model(**inputs)
    logits = (output if isinstance(output, Tensor) else output.logits).squeeze(0)  # (T, V)
    return passes.loss_fn(batch, logits, passes.tempered_head(GivenLogits(logits.shape[-1])))


def _model_inputs(batch: LocalBatch) -> dict[str, Any]:
    """Ids (1, T), and positions (1, T) or the documents' own (n, 1, T)."""
    shard = batch.shard
    ids = to_device(batch.ids, shard.device)[None]  # (1, T)
    return {"input_ids": ids, "position_ids": shard.position_ids[None], "shard": shard} | _own_position_ids(batch)


def _own_position_ids(batch: LocalBatch) -> dict[str, Tensor]:
    if batch.positions is None:
        return {}
    return {"position_ids": to_device(batch.positions, batch.shard.device)[:, None]}


def _future_ids(batch: LocalBatch) -> dict[str, Tensor]:
    """Ids (depths, T) of the tokens 1, 2, … after each row."""
    return {"future_ids": to_device(np.stack([rows.ids for rows in batch.deeper]), batch.shard.device)}


def _run_pipeline(passes: Passes, batches: Sequence[LocalBatch]) -> Tensor:
    """The schedule may need more micro-batches: padding is added. Stages but the last return 0."""
    model: Any = passes.model
    total = torch.zeros((), dtype=torch.float64, device=passes.world.device)
    if passes.needs_loads_first:
        with torch.no_grad():
            model.run_micro_batches([_stage_input(passes, batch, None) for batch in batches], backward=False)
    passes.compute_load_fractions()
    count = model.pipeline_settings.round_up_micro_batches(len(batches)) if passes.backward else len(batches)
    padding = [padding_batch(passes.plan, passes.world, passes.depths) for _ in range(count - len(batches))]
    model.run_micro_batches(
        [_stage_input(passes, batch, total) for batch in (*batches, *padding)], backward=passes.backward
    )
    return total


def _stage_input(passes: Passes, batch: LocalBatch, total: Tensor | None) -> "StageInput":
    """The last stage adds its loss to `total` and returns its share of the step's; None: only loads are counted."""
    from longspan.model.pipeline.stages import StageInput

    ids = to_device(batch.ids, passes.world.device)[None]

    def make_output(part: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
        """Return this micro-batch's share of the step's loss, of the last stage's `part`, and add its
        loss to `total`.
        """
        if total is None:
            return part(**arguments, row_loss=lambda hidden, _: hidden.new_zeros((), dtype=torch.float64))
        future_ids = _future_ids(batch) if passes.depths else {}
        loss = part(**arguments, **future_ids, row_loss=passes.row_loss(batch))
        total.add_(loss.detach())
        return passes.mean_loss(loss)

    return StageInput(
        batch.shard,
        ids,
        make_output,
        passes.arguments_of_next_call(counting=total is None) | _own_position_ids(batch),
    )
