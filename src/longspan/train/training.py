"""A model under training as one rank has it: with its optimizer, and one step of it under a plan.

Nothing here needs a corpus or a run's folder: `longspan train` and `longspan bench step` build on the same functions.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from longspan.comm import World
from longspan.config.keys import key_values
from longspan.config.loss_arguments import loss_arguments
from longspan.config.memory_keys import form_of_config
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, TrainConfig
from longspan.config.text_values import NamedGroup
from longspan.model.experts.router import RouterCoefficients
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Cost, Plan
from longspan.resolve.planner_config import PlannerConfig, query_heads
from longspan.train.optim.offload_states import OffloadedStates, offload_optimizer_states
from longspan.train.optim.optimizer import OptimizerChoice
from longspan.train.optim.optimizer_classes import OPTIMIZERS
from longspan.train.optim.parameter_groups import parameter_groups
from longspan.train.optim.schedule import Schedule
from longspan.train.optim.sharded_trial import check_sharded_update
from longspan.train.optim.stochastic_rounding import RoundingBits
from longspan.train.run_model.prepare import AnyModel
from longspan.train.step import StepResult, run_step
from longspan.train.step_figures import StepFigures, make_step_figures

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan
    from longspan.train.terms.distillation import Distillation
    from longspan.train.terms.document_loss import DocumentLoss
    from longspan.train.terms.mtp import MtpLoss


def build_run_optimizer(
    config: RunConfig, world: World, model: AnyModel, *, memory: "MemoryPlan | None" = None
) -> Optimizer:
    """Build the optimizer of a run's configuration over the parameters of a prepared model; entered by all ranks.

    What `memory` chose takes the place of the keys of memory. Each group gets an `initial_lr`: a step's rate is the
    schedule's in proportion to it. Raises ConfigError for a class that does not update sharded parameters as whole
    ones, and for states that cannot move to the host.
    """
    choice = OptimizerChoice.from_section(config.optimizer)
    if choice.name not in OPTIMIZERS:
        check_sharded_update(choice, model, world)
    named_groups = [*map(NamedGroup.from_text, config.optimizer.groups)]
    rates = {"": config.optimizer.lr} if named_groups else None
    if isinstance(model, MultimodalModel) and config.encoder.lr:
        rates = {"encoders": config.encoder.lr, "language_model": config.optimizer.lr}
    groups = parameter_groups(model, choice.name, choice.weight_decay, rates, named_groups)
    rounding = RoundingBits(model, world) if config.optimizer.stochastic_rounding else None
    optimizer = choice.build(groups, rounding=rounding)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    form = form_of_config(config) if memory is None else memory
    if form.states_on_host(trains_all=not config.lora.rank):
        return offload_optimizer_states(optimizer, world, hidden_in=model)
    return optimizer


@dataclass(frozen=True)
class Training:
    """A prepared model, its optimizer, the cost that plans are priced by, and the plan of memory, if one was made; and
    the prepared teacher, if it has one."""

    config: RunConfig
    world: World
    model: AnyModel
    optimizer: Optimizer
    cost: Cost
    memory: "MemoryPlan | None" = field(default=None, kw_only=True)
    teacher: AnyModel | None = field(default=None, kw_only=True)

    @property
    def training_choice(self) -> PlannerConfig:
        """How steps are planned."""
        return PlannerConfig.training(self.config, cost=self.cost, heads=self.heads)

    def evaluation_choice(self, entry: EvalConfig | None = None) -> PlannerConfig:
        """How evaluations are planned: of a set, or (None) of the documents that the run holds out."""
        return PlannerConfig.evaluation(self.config, entry, cost=self.cost, heads=self.heads)

    @property
    def heads(self) -> int | None:
        """The query heads by which groups may share documents, of model and teacher."""
        return query_heads(self.model.config, getattr(self.teacher, "config", None))

    @property
    def time_slots(self) -> bool:
        """Whether steps time each slot, so that a slow one is named: on GPUs."""
        return self.world.device.type == "cuda"

    @property
    def router(self) -> RouterCoefficients:
        """The weights of the routers' losses in the gradient."""
        balance = self.config.train.router_aux_loss_coef
        own = None if isinstance(balance, str) else balance
        return RouterCoefficients(balance=own, z=self.config.train.router_z_loss_coef)

    @property
    def mtp_loss(self) -> "MtpLoss | None":
        """The argument `mtp` of a run's steps; None without depths."""
        if not self.config.mtp.num_layers:
            return None
        from longspan.train.terms.mtp import MtpLoss

        return MtpLoss(self.config.mtp.loss_scaling_factor)

    @cached_property
    def distillation(self) -> "Distillation | None":
        """The loss under the teacher; None without one."""
        if self.teacher is None:
            return None
        from longspan.train.terms.distillation import Distillation

        return Distillation(self.teacher, **key_values(self.config.distillation))

    @cached_property
    def figures(self) -> StepFigures:
        """What a step's seconds are compared with; made on first use."""
        return make_step_figures(self.config, self.model, self.world, self.cost)

    def take_step(
        self, plan: Plan, documents: Any, step: int, host_work: Callable[[], None] | None = None
    ) -> StepResult:
        """Take the optimizer step `step`, counted from 0, at its learning rate; `host_work` as of `run_step`. All ranks
        enter.

        It makes the communicators that the plan needs, sets the rates of the optimizer's groups, and seeds dropout of
        adapters. Call `finish_update` before anything but the next step reads parameters.
        """
        config = self.config.train
        self.world.prepare(plan)
        if self.config.lora.dropout:  # a step has the same masks after a restart, whatever ran before it
            torch.manual_seed(zlib.crc32(repr((config.seed, step, self.world.rank)).encode()))
        schedule = Schedule.of(self.config.optimizer, config.steps)
        rate = schedule.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (group["initial_lr"] / schedule.lr) if rate else 0.0  # optimizer.lr may be 0
        return run_step(
            self.model,
            plan,
            documents,
            self.world,
            optimizer=self.optimizer,
            max_grad_norm=self.config.optimizer.max_grad_norm or None,
            # Errors count steps from 1.
            step=step + 1,
            router=self.router,
            mtp=self.mtp_loss,
            loss=self.distillation or loss_of_documents(getattr(documents, "whole", documents), config),
            time_slots=self.time_slots,
            host_work=host_work,
        )

    def finish_update(self) -> None:
        """End the last step's update, where it goes on behind the next forward pass."""
        if isinstance(self.optimizer, OffloadedStates):
            self.optimizer.finish_step()


def loss_of_documents(documents: Any, train: TrainConfig) -> "DocumentLoss | None":
    """Return the loss of a corpus' documents that are preferences or pairs, by the keys of [train]; else None.

    None leaves a step with the model's own loss: the cross entropy, or that of its scores.
    """
    if train.loss:
        from longspan.train.terms.preferences import preference_loss

        return preference_loss(documents, train)
    margins = getattr(documents, "margins", None)
    if margins is None:
        return None
    from longspan.train.terms.scores import reward_loss

    pairs = [(2 * i, 2 * i + 1) for i in range(len(margins))]
    return reward_loss(pairs, margins=margins, **loss_arguments(train))
