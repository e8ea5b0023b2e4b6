"""The terms of a step: what the features that are on add to it. The module of a feature that is off is not imported."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longspan.model.kinds import score_columns
from longspan.model.marks import is_multimodal
from longspan.train.passes import Passes, Term
from longspan.train.step_inputs import StepInputs

if TYPE_CHECKING:
    from longspan.model.experts.router import RouterCoefficients, RouterStatistics
    from longspan.train.terms.distillation import Distillation
    from longspan.train.terms.document_loss import DocumentLoss
    from longspan.train.terms.loss_tokens import LossFunction
    from longspan.train.terms.micro_batch_loss import MicroBatchLoss
    from longspan.train.terms.mtp import MtpLoss


@dataclass(eq=False)
class RoutersTerm(Term):
    """The routers of a model with experts: their losses in the gradient, and their statistics in the result."""

    _statistics: "RouterStatistics"

    def extend_passes(self, passes: Passes) -> Passes:
        return replace(passes, routing=self._statistics)

    def sums(self) -> list[float] | Tensor:
        return self._statistics.sums()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        return {"router": self._statistics.losses(sums)}


def step_terms(
    inputs: StepInputs,
    *,
    loss: "LossFunction | DocumentLoss | MicroBatchLoss | Distillation | None",
    divisor: float | None,
    router: "RouterCoefficients | None",
    mtp: "MtpLoss | None",
    chunk_rows: int,
    time_slots: bool,
) -> tuple[Term, ...]:
    """Make all terms of a step of `run_step`, checked; an empty tuple in most runs. Entered by all ranks.

    Raises what the terms raise for a model or arguments that they cannot take.
    """
    model = inputs.language_model
    terms = list[Term]()
    has_coefficient = hasattr(getattr(model, "config", None), "router_aux_loss_coef")
    has_routers = has_coefficient or (router is not None and router.any)
    if inputs.backward and getattr(model, "adapter", None) is not None:
        from longspan.model.adapters.disable_adapter import refuse_adapter_left_out

        refuse_adapter_left_out(inputs.model)
    depth_terms = list[Term]()
    if mtp is not None:
        from longspan.train.terms.mtp import DepthsTerm

        depth_terms.append(DepthsTerm(mtp, inputs, chunk_rows))
    scores = score_columns(model)
    if scores and loss is None:
        from longspan.train.terms.scores import configured_loss

        loss = configured_loss(model)
    if loss is not None or divisor is not None:
        from longspan.train.terms.distillation import Distillation, DistillationTerm
        from longspan.train.terms.loss_term import LossTerm

        make_term = DistillationTerm if isinstance(loss, Distillation) else LossTerm
        terms.append(make_term(loss, divisor, inputs, chunk_rows, scores))  # pyright: ignore[reportArgumentType]
    # They stand behind the loss: to its function they add the losses of depths.
    terms += depth_terms
    if has_routers:
        from longspan.model.experts.router import make_router_statistics

        tokens = inputs.plan.separate_tokens  # a shared row counts in each document that has it
        if (statistics := make_router_statistics(model, inputs.world, tokens, router)) is not None:
            terms.append(RoutersTerm(statistics))
    if time_slots:
        from longspan.train.terms.slot_pace import SlotPaceTerm

        terms.append(SlotPaceTerm(inputs.world))  # last: it times the loss function that all others have made
    return (*encoder_terms(inputs, sum(term.depths for term in terms)), *terms)


def encoder_terms(inputs: StepInputs, depths: int = 0) -> tuple[Term, ...]:
    """Return the terms that make inputs of the language model: its encoders. Evaluations have no others."""
    model: Any = inputs.model
    if not is_multimodal(model):
        return ()
    from longspan.train.terms.encoders_term import EncodersTerm

    items = inputs.documents.items
    assert items is not None, "documents of a MultimodalModel have items"
    return (EncodersTerm(model, inputs, items, depths),)
