"""The terms of a step, by what its model and arguments have. A step enters no module of a feature that is off.

All terms are imported here. Whether the model has routers or an adapter is read from its attributes, so that a step
without them calls nothing of theirs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from longspan.model.experts.moe import router_statistics
from longspan.model.experts.router import RouterCoefficients, RouterStatistics
from longspan.model.lora.without_adapter import refuse_adapter_left_out
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.train.passes import Passes, Term
from longspan.train.reading.step_inputs import StepInputs
from longspan.train.terms.encoders import EncodersTerm
from longspan.train.terms.mtp import DepthsTerm, MtpLoss
from longspan.train.terms.step_loss import Loss, LossTerm

_CONFIGURED = RouterCoefficients()  # as the model's configuration has them


class AdapterTerm(Term):
    """An adapter that is trained: refused where it is left out, for then nothing would be trained."""

    def check_inputs(self, inputs: StepInputs) -> None:
        """Raise ModelError in a `without_adapter` context, where the adapter is left out of the model."""
        refuse_adapter_left_out(inputs.model)


class RoutersTerm(Term):
    """The routers of a model with experts: their losses in the gradient, and their statistics in the result."""

    def __init__(self, statistics: RouterStatistics) -> None:
        self._statistics = statistics

    def extend_passes(self, passes: Passes) -> Passes:
        """Return the passes with this collection of statistics, which every call of the model adds to."""
        return replace(passes, routing=self._statistics)

    def sums(self) -> list[float] | Tensor:
        """Return this rank's sums: loads and probabilities of experts, and the z losses."""
        return self._statistics.sums()

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the routers' losses, without their coefficients."""
        return {"router": self._statistics.losses(sums)}


def input_terms(inputs: StepInputs, depths: int = 0) -> tuple[Term, ...]:
    """Return the terms that make inputs of the language model: its encoders. Evaluations have no others."""
    model, items = inputs.model, inputs.documents.items
    if not isinstance(model, MultimodalModel):
        return ()
    assert items is not None, "documents of a MultimodalModel have items"
    return (EncodersTerm(model, inputs, items, depths),)


def step_terms(
    inputs: StepInputs,
    *,
    loss: Loss = None,
    divisor: float | None = None,
    router: RouterCoefficients | None = None,
    mtp: MtpLoss | None = None,
    chunk_rows: int = 0,
) -> tuple[Term, ...]:
    """Make all terms of a step of `run_step`, checked; an empty tuple in most runs. Entered by all ranks.

    Raises what the terms raise for a model or arguments that they cannot take.
    """
    model, terms = inputs.language_model, list[Term]()
    if inputs.backward and getattr(model, "adapter", None) is not None:
        terms.append(AdapterTerm())
    if loss is not None or divisor is not None:
        terms.append(LossTerm(loss, divisor, inputs.plan, inputs.world, chunk_rows))
    for term in terms:  # the others check when they are made
        term.check_inputs(inputs)
    depths = DepthsTerm(mtp, inputs, chunk_rows) if mtp is not None else None
    # `router_statistics` refuses coefficients for a model without routers.
    if hasattr(getattr(model, "config", None), "router_aux_loss_coef") or router not in (None, _CONFIGURED):
        statistics = router_statistics(model, inputs.world, inputs.plan.tokens, router)
        terms += [] if statistics is None else [RoutersTerm(statistics)]
    terms += [] if depths is None else [depths]  # after the loss, to whose measure they add theirs
    return (*input_terms(inputs, 0 if depths is None else depths.depths), *terms)
