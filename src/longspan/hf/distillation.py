"""TRL's GKDTrainer over plans, of the rows as they are: a token's divergence stands for minus its log-probability.

So steps run ahead, evaluations count and gradients are compared as those of the mean cross entropy are (`steps.py`).
Trainers of TRL that distil otherwise are refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from longspan.data.document import Document
from longspan.errors import ConfigError
from longspan.hf.facade import Facade
from longspan.hf.scores import COEFFICIENT
from longspan.hf.steps import CollectedTokens, StepsPart
from longspan.plan import Plan
from longspan.train import run_step
from longspan.train.divergence import RowDivergences
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch
from longspan.train.terms.distillation import Distillation
from longspan.train.terms.loss_tokens import BatchTargets

_OFFLINE = "GKDTrainer"
_OTHERS = (
    "DistillationTrainer",
    "ServerDistillationTrainer",
    "AsyncDistillationTrainer",
    "SDFTTrainer",
    "SDPOTrainer",
    "GOLDTrainer",
    "IWOPDTrainer",
)
_ADVICE = (
    "use GKDTrainer with lmbda=0.0 over answers that are there, or longspan train with teacher.path "
    "(docs/distillation.md)"
)


def is_distilling(kind: type[Any]) -> bool:
    """Return whether a Trainer class is TRL's GKDTrainer, or one of its."""
    return any(base.__name__ == _OFFLINE and base.__module__.startswith("trl.") for base in kind.__mro__)


def refuse_distillation(kind: type[Any], args: Any) -> None:
    """Raise ConfigError for a trainer that distils in a way that longspan does not run, or with such arguments."""
    of_trl = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("trl.")]
    if name := next((name for name in of_trl if name in _OTHERS), None):
        raise ConfigError(f"{name} is not run by a longspan trainer, which distils rows as they are; {_ADVICE}")
    if not is_distilling(kind):
        return
    for name in ("lmbda", "seq_kd"):
        if value := getattr(args, name):
            raise ConfigError(
                f"args.{name} is {value!r}: {_OFFLINE} would make answers by generate of a model that longspan shards, "
                f"amid a step; set lmbda=0.0 and seq_kd=False"
            )
    for method in ("compute_loss", "generalized_jsd_loss"):
        owner = next(base for base in kind.__mro__ if method in vars(base) and "longspan.hf" not in base.__module__)
        if not owner.__module__.startswith("trl."):
            raise ConfigError(
                f"{owner.__name__} has a {method} of its own: the loss of a longspan {_OFFLINE} is longspan's, as "
                "logits of all rows are never there; write a loop with longspan.train.Distillation"
            )


@dataclass(frozen=True, eq=False)
class CollectedDivergences(Distillation):
    """A Distillation that keeps minus the divergence of each token."""

    tokens: CollectedTokens = field(kw_only=True)

    def keep_rows(self, batch: LocalBatch, part: slice, rows: RowDivergences) -> None:
        """Keep those of some of a micro-batch's targets."""
        targets = BatchTargets(batch, rows.losses.device)
        self.tokens.add_tokens(targets.documents[part], targets.path_positions[part], -rows.losses[None])


class DistillationPart(StepsPart):
    """What a GKDTrainer does in a step, over plans."""

    # The teacher, once it is prepared.
    _teacher: Any = None

    def _prepare_teacher(self) -> None:
        """Entered by all ranks, after the model is prepared."""
        teacher = getattr(self, "teacher_model", None)
        if is_distilling(type(self)) and isinstance(teacher, PreTrainedModel) and self._teacher is None:
            self._teacher = teacher.requires_grad_(False)
            self._prepare_model(teacher, Facade(lambda: teacher, self._token_values), training=False)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """Take the Trainer's loss, in whose place a GKDTrainer has the mean of the divergences of a batch's targets, at
        temperature 1, as TRL's.
        """
        if not is_distilling(type(self)):
            return super().compute_loss(model, inputs, *args, **keywords)
        return self._mean_of_divergences(inputs, *args, **keywords)

    def _mean_of_divergences(
        self, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        entries = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        logits_of = self._facade.logits_of
        self._facade.logits_of = None
        output = self._facade(**entries, labels=inputs["labels"], num_items_in_batch=num_items_in_batch)
        self._facade.logits_of = logits_of
        if not return_outputs:
            return output["loss"]
        return output["loss"], output if logits_of is None else self._facade(**entries)

    def _plan_documents(
        self, model: Any, documents: Sequence[Document], *, training: bool
    ) -> tuple[Sequence[Document], Plan]:
        if is_distilling(type(self)):
            documents = list(map(_weigh_by_coefficient, documents))
        return super()._plan_documents(model, documents, training=training)

    def _step_loss(self, collected: CollectedTokens) -> Any:
        if not is_distilling(type(self)):
            return super()._step_loss(collected)
        return CollectedDivergences(self._teacher, beta=self.beta, tokens=collected)

    def _token_values(self, facade: Facade, documents: list[Document]) -> Any:
        if not is_distilling(type(self)):
            return super()._token_values(facade, documents)
        self._check_same_documents(documents)
        model = facade.inner_model
        training = model.training
        shared, plan = self._plan_documents(model, documents, training=training)
        collected = CollectedTokens([len(document) for document in documents], ())
        try:
            with torch.autocast(self.args.device.type, enabled=False):
                run_step(
                    model, plan, shared, self.world, backward=False, loss=self._step_loss(collected), divisor=1
                )
            return collected.sum_over_ranks(self.world)
        finally:
            model.train(training)


def _weigh_by_coefficient(document: Document) -> Document:
    """A coefficient is of minus the divergence."""
    values = document.token_values(np.arange(len(document)))
    return document.with_values(**{WEIGHTS: -values[COEFFICIENT]}) if COEFFICIENT in values else document
