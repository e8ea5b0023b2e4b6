"""What checks of the zoo compare with: the unchanged transformers model, to documents one by one, in one process.

Checks run under `whole_float64`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.data.document import NO_TARGET, Document
from longspan.doctor.stock import (
    Answer,
    collect_gradients,
    gradient_errors,
    loss_error,
    make_stock_model,
    missing_errors,
)
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.train.step import run_step
from tests.model.stock import SIZES, prepare_untried

LENGTHS = (13, 6, 22, 9)


def tiny_configuration(name: str = "Qwen3Config", **changes: Any) -> PreTrainedConfig:
    return getattr(transformers, name)(**(SIZES | changes))


def draw_documents(lengths: Sequence[int] = LENGTHS, mask: Callable[[int, int], bool] | None = None) -> list[Document]:
    """Documents of random ids; `mask` says of a document's number and a position whether it is a target."""
    random, documents = np.random.default_rng(0), list[Document]()
    for number, length in enumerate(lengths):
        flags = None if mask is None else [mask(number, position) for position in range(length)]
        documents.append(Document(random.integers(0, SIZES["vocab_size"], length), loss_mask=flags))
    return documents


def plan_documents(documents: Sequence[Document], world: World, cp: int = 2, **options: Any) -> Plan:
    targets = sum(document.targets for document in documents)
    return plan_fixed([len(d) for d in documents], world.home, cp, targets=targets, **options)


def dense_log_probs(config: PreTrainedConfig, documents: Sequence[Document]) -> list[Tensor]:
    """The log-probability of each token, (length,) for each document, one by one; 0 where it is no target."""
    with torch.no_grad():
        model = make_stock_model(config, torch.float64).eval()
        return [_document_log_probs(model, document) for document in documents]


def dense_answer(config: PreTrainedConfig, documents: Sequence[Document]) -> Answer:
    """The mean cross entropy over all targets, and its gradients, of documents one by one."""
    model: Any = make_stock_model(config, torch.float64)
    targets = sum(document.targets for document in documents)
    loss = torch.stack([-_document_log_probs(model, d).sum() for d in documents]).sum() / targets
    loss.backward()
    return Answer(loss.item(), collect_gradients(model))


def _document_log_probs(model: Any, document: Document) -> Tensor:
    ids, labels = torch.from_numpy(document.ids), torch.from_numpy(document.labels())
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    is_target = labels[1:] != NO_TARGET
    log_probs = -F.cross_entropy(logits, labels[1:].where(is_target, 0), reduction="none")
    return F.pad(torch.where(is_target, log_probs, 0.0), (1, 0))


def make_model(config: PreTrainedConfig, world: World) -> Any:
    """A prepared model with the weights of the dense one."""
    return prepare_untried(make_tiny_model(config, torch.float64), world)


def step_error(
    world: World, config: PreTrainedConfig, documents: Sequence[Document], plan: Plan | None = None
) -> float:
    """This rank's worst relative error of a step's loss, gradient norm and gradients; by default at degree 2."""
    answer, model = dense_answer(config, documents), make_model(config, world)
    result = run_step(model, plan or plan_documents(documents, world), documents, world)
    norm = 0.0 if result.grad_norm is None else loss_error(result.grad_norm, answer.norm)
    return max(loss_error(result.loss, answer.loss), model_error(model, answer, world), norm)


def model_error(model: Any, answer: Answer, world: World) -> float:
    """The worst error of this rank's gradients, and of those that no rank has, which count as 0; all ranks call it."""
    errors = gradient_errors(collect_gradients(model), answer)
    names = {name for of_rank in world.control.gather_objects([*errors], "names of gradients") for name in of_rank}
    return max([*errors.values(), *missing_errors(names, answer).values()], default=float("inf"))
