"""What checks of the zoo compare with: tiny models and attention, dense and in float64, in one process.

A model's answer is that of the unchanged transformers model to documents one by one; attention is written out with
masks. Nothing here uses longspan's own layers.
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
    whole_float64,
)
from longspan.model import prepare
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.train.step import StepResult, run_step

VOCABULARY = 67
LENGTHS = (13, 6, 22, 9)
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_configuration(name: str = "Qwen3Config", **changes: Any) -> PreTrainedConfig:
    """Return a configuration of a class of transformers, by the class's name, at _SIZES with these `changes`."""
    return getattr(transformers, name)(**(_SIZES | changes))


def draw_documents(lengths: Sequence[int] = LENGTHS, mask: Callable[[int, int], bool] | None = None) -> list[Document]:
    """Draw documents of random ids; `mask` says of a document's number and a position whether it is a target."""
    random = np.random.default_rng(0)
    documents = list[Document]()
    for number, length in enumerate(lengths):
        ids = random.integers(0, VOCABULARY, length)
        flags = None if mask is None else [mask(number, position) for position in range(length)]
        documents.append(Document(ids, loss_mask=flags))
    return documents


def plan_documents(documents: Sequence[Document], world: World, cp: int = 2, **options: Any) -> Plan:
    """Plan documents at the degree `cp`, with as many targets as the documents have."""
    targets = sum(document.targets for document in documents)
    return plan_fixed([len(d) for d in documents], world.home, cp, targets=targets, **options)


def dense_log_probs(config: PreTrainedConfig, documents: Sequence[Document]) -> list[Tensor]:
    """Compute the log-probability of each token, (length,) for each document, one by one; 0 where it is no target."""
    with whole_float64(), torch.no_grad():
        model = make_stock_model(config, torch.float64).eval()
        return [_document_log_probs(model, document) for document in documents]


def dense_answer(config: PreTrainedConfig, documents: Sequence[Document]) -> Answer:
    """Compute the mean cross entropy over all targets, and its gradients, of documents one by one."""
    with whole_float64():
        model: Any = make_stock_model(config, torch.float64)
        targets = sum(document.targets for document in documents)
        loss = torch.stack([-_document_log_probs(model, d).sum() for d in documents]).sum() / targets
        loss.backward()
    return Answer(loss.item(), collect_gradients(model))


def _document_log_probs(model: Any, document: Document) -> Tensor:
    """Return the log-probability of each token of a document, (length,); 0 for the first and all that are no target."""
    ids, labels = torch.from_numpy(document.ids), torch.from_numpy(document.labels())
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    is_target = labels[1:] != NO_TARGET
    log_probs = -F.cross_entropy(logits, labels[1:].where(is_target, 0), reduction="none")
    return F.pad(torch.where(is_target, log_probs, 0.0), (1, 0))


def make_model(config: PreTrainedConfig, world: World) -> Any:
    """Make a model with the weights of the dense one, in float64, and prepare it for the world."""
    return prepare(make_tiny_model(config, torch.float64), world)


def step_error(
    world: World, config: PreTrainedConfig, documents: Sequence[Document], plan: Plan | None = None, **options: Any
) -> float:
    """Return this rank's worst relative error of a step's loss, gradient norm and gradients, from the dense model's.

    Without a `plan` documents are planned at degree 2; `options` are those of `run_step`.
    """
    answer = dense_answer(config, documents)
    with whole_float64():
        model = make_model(config, world)
        result = run_step(model, plan or plan_documents(documents, world), documents, world, **options)
    return max(loss_error(result.loss, answer.loss), model_error(model, answer, world), _norm_error(result, answer))


def model_error(model: Any, answer: Answer, world: World) -> float:
    """Return the worst relative error of this rank's gradients, and of those that no rank has, which count as 0.

    Every rank calls it. Infinite where there is nothing to compare.
    """
    errors = gradient_errors(collect_gradients(model), answer)
    names_of_ranks = world.control.gather_objects([*errors], "names of gradients")
    names = {name for rank_names in names_of_ranks for name in rank_names}
    return max([*errors.values(), *missing_errors(names, answer).values()], default=float("inf"))


def _norm_error(result: StepResult, answer: Answer) -> float:
    """Return the relative error of the gradient norm that a step reports; 0 if it reports none."""
    return 0.0 if result.grad_norm is None else loss_error(result.grad_norm, answer.norm)


def tensor_error(result: Tensor, exact: Tensor) -> float:
    """Return the relative error of a tensor in its 2-norm; infinite for another shape and for values not finite."""
    if result.shape != exact.shape:
        return float("inf")
    error = float((result - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, causal: bool = True) -> Tensor:
    """Attend inside each document of packed rows by a mask: q (S, N, H), k, v (S, K, H) to (S, N, H)."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = torch.arange(len(documents))
    seen = documents[:, None] == documents
    if causal:
        seen &= rows <= rows[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("nqk,knh->qnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
