"""Checks of a step's arguments on the host, on every rank, before the first collective; and the trial of a model."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import ModelError, PlanError
from longspan.model.exactness.row_trial import try_rows
from longspan.model.multimodal.multimodal_model import MultimodalModel, check_world
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import refuse_unprepared_model
from longspan.model.seams.call_rules import call_rules, refuse_positions, refuse_randomness
from longspan.plan import Plan
from longspan.train.reading.step_inputs import StepDocuments, StepInputs


def check_step(model: nn.Module, plan: Plan, documents: Any, world: World, *, backward: bool) -> StepInputs:
    """Check the arguments of a step, and return what it runs over.

    Raises ModelError, DataError or PlanError if the parts do not belong together. `documents` are the caller's, or
    StepDocuments that were made of them. Before the first step of a model in training or evaluation mode all ranks then
    try its rows together, which raises ModelError on every rank where they influence each other outside attention.
    """
    language_model = model
    if isinstance(model, MultimodalModel):
        check_world(model, world)
        language_model = model.language_model
    if not isinstance(documents, StepDocuments):
        documents = StepDocuments(model, documents, plan.lengths)
    refuse_unprepared_model(language_model)
    rules = call_rules(language_model)
    refuse_randomness(language_model, training=backward)
    _check_home(language_model, plan, world)
    if plan.row_multiple % (multiple := rules.row_multiple):
        raise PlanError(
            f"the plan has row_multiple {plan.row_multiple}, the model is sequence-parallel over tp {multiple}; plan "
            f"with row_multiple={multiple}"
        )
    documents.check_targets(plan)
    refuse_positions(rules.position_table, plan.micro_batches)
    try_rows(language_model, world, backward=backward)
    return StepInputs(model, language_model, plan, documents, world, backward)


def _check_home(model: nn.Module, plan: Plan, world: World) -> None:
    """Raise ModelError or PlanError for a model or a plan of another home, or for free mode with stages or experts."""
    if world.home.pp > 1 and not isinstance(model, PipelineModel):
        raise ModelError(
            f"the home has pp {world.home.pp}, but {type(model).__name__} is not cut into stages; call model = "
            "longspan.prepare(model, world), or use a home without pp"
        )
    if plan.slots != world.home.slots:
        raise PlanError(f"the plan is for {plan.slots} slots, the home has {world.home.slots}; plan for this home")
    for name in ("pp", "ep"):
        if plan.mode == "free" and (degree := getattr(world.home, name)) > 1:
            raise PlanError(
                f"the plan is in free mode, where slots are at different micro-batches, but the home has {name} "
                f"{degree}, under which all of them wait for each other in every layer; plan with mode='lockstep'"
            )


def check_update(optimizer: Optimizer | None, max_grad_norm: float | None, *, backward: bool) -> None:
    """Raise ModelError for an update without gradients or that torch's kernels refuse, or a norm that clips nothing."""
    if optimizer is not None and not backward:
        raise ModelError("an optimizer without backward has no gradients; leave out one of optimizer, backward=False")
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        _refuse_mixture(index, group)
    if max_grad_norm is not None and optimizer is None:
        raise ModelError(f"max_grad_norm {max_grad_norm} without an optimizer clips nothing; pass both, or neither")


def _refuse_mixture(index: int, group: dict[str, Any]) -> None:
    """Raise ModelError for sharded and plain parameters in one group that torch updates by one kernel."""
    parameters = group["params"]
    sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
    if not 0 < sharded < len(parameters):
        return
    by_default = group.get("foreach") is None and any(parameter.is_cuda for parameter in parameters)  # torch's default
    if group.get("fused") or group.get("foreach") or by_default:
        raise ModelError(
            f"group {index} of the optimizer has {sharded} sharded parameters and {len(parameters) - sharded} plain "
            "ones, which torch's fused and foreach kernels do not take together; use longspan.train.build_optimizer, "
            "put them in groups of their own, or pass foreach=False"
        )
