"""Cases of the oracle on ranks: a step and an evaluation of a two-module model beside the dense model's answer.

An error is the largest difference over the largest exact value of the same tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan import Layout, World
from longspan.evaluation import evaluate
from longspan.model.experts.router import RouterCoefficients
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.model.weights.local_tensors import local_tensor
from longspan.testing import backend
from longspan.train import build_optimizer, run_step
from tests.model.stock import error, gradients_of, own_error, prepare_untried
from tests.train.multimodal.cases import Case
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.encoders import encoder_of
from tests.train.multimodal.reference import HIDDEN, MODALITIES, RATE, ROUTER, Answer, answer, freeze, language_model_of

LIMITS = {"float64": 1e-12, "float32": 1e-5}
# Gradients in float32 may also differ by twice the dense model's own error there (`own_error`): so far may two float32
# computations be apart that are each that far from the truth.
Answers = Mapping[tuple[str, str, str], Answer]


class Errors(NamedTuple):
    """The largest relative errors: of the loss and the gradient norm, of gradients, of weights after a step of SGD, and
    of the losses of documents after it, in an evaluation at another degree."""

    loss: float
    gradients: float
    weights: float
    evaluation: float


def answers_of(cases: Iterable[Case]) -> Answers:
    keys = sorted({case.answer_key for case in cases})
    return {(f, z, d): answer(f, torch.float64, z, documents_of(d)) for f, z, d in keys}


def within_limit(case: Case, errors: Errors) -> bool:
    limit = LIMITS[case.dtype]
    if max(errors) <= limit or case.dtype == "float64":
        return max(errors) <= limit
    family, frozen, documents = case.answer_key
    single, exact = (answer(family, dtype, frozen, documents_of(documents)) for dtype in (torch.float32, torch.float64))
    gradients = limit + 2 * own_error(dict(single.gradients), dict(exact.gradients))
    return max(errors._replace(gradients=0.0)) <= limit and errors.gradients <= gradients


def model_of(case: Case, world: World, encoder_world: World) -> MultimodalModel:
    encoders = {}
    for modality in MODALITIES:
        module = encoder_of(modality, HIDDEN, case.torch_dtype)
        freeze(module, "encoder", case.frozen)
        module = prepare_encoder(module, encoder_world, shard_parameters=case.encoder != "copies")
        encoders[modality] = Encoder(module=module, world=encoder_world, **case.encoder_options(modality))
    language_model = language_model_of(case.family, case.torch_dtype)
    freeze(language_model, "language model", case.frozen)
    return MultimodalModel(encoders, prepare_untried(language_model, world, **case.language_model_options()), world)


def in_worlds(cases: Sequence[Case], look: Callable[[Case, World, World], Any]) -> list[Any]:
    """What `look` returns for each case, those of the same homes after each other in the same two worlds."""
    results, grouped = dict[Case, Any](), dict[tuple[Layout, Layout], list[Case]]()
    for case in cases:
        grouped.setdefault((case.home, case.encoder_home), []).append(case)
    for (home, encoder_home), alike in grouped.items():
        with World(home, backend=backend(), timeout=60) as world, World(encoder_home, backend=backend()) as other:
            results |= {case: look(case, world, other) for case in alike}
    return [results[case] for case in cases]


def run(rank: int, cases: Sequence[Case], answers: Answers) -> list[Errors]:
    return in_worlds(cases, lambda case, *worlds: errors_of(case, answers[case.answer_key], *worlds))


def errors_of(case: Case, exact: Answer, world: World, encoder_world: World) -> Errors:
    """A step of SGD, then an evaluation at another degree that changes nothing."""
    documents, model = documents_of(case.documents), model_of(case, world, encoder_world)
    optimizer = build_optimizer(model, "sgd", lr=RATE)
    router = RouterCoefficients(*ROUTER) if case.family == "qwen3-moe" else None
    weights = _local(model)[::2]
    result = run_step(model, case.plan(), documents, world, optimizer, router=router)
    assert result.grad_norm is not None and result.targets == documents.targets
    after = _local(model)
    evaluation = evaluate(model, documents, case.evaluation(), world)
    assert all(map(_same, after, _local(model))), f"an evaluation changed parameters or gradients: {case}"
    losses = zip(evaluation.document_losses, exact.losses_after, strict=True)
    return Errors(
        loss=max(abs(result.loss / exact.loss - 1), abs(result.grad_norm - exact.norm) / (exact.norm or 1)),
        gradients=worst_gradient(model, exact.gradients),
        weights=max(map(_update_error, weights, after[::2], after[1::2])),
        evaluation=max(abs(loss.sum - wanted) / max(wanted, 1) for loss, wanted in losses),
    )


def _local(model: nn.Module) -> list[Tensor | None]:
    tensors = [x for parameter in model.parameters() for x in (parameter, parameter.grad)]
    return [None if x is None else local_tensor(x).detach().clone() for x in tensors]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def worst_gradient(model: nn.Module, exact: Mapping[str, Tensor]) -> float:
    """Infinite where a gradient is missing that is not zero, or where one is that the dense model does not have."""
    gradients, worst = gradients_of(model), 0.0
    for name, _ in model.named_parameters():
        if (mine := gradients.get(name)) is None or name not in exact:
            extra, lacking = mine is not None and bool(mine.any()), bool(name in exact and exact[name].any())
            worst = max(worst, float("inf") if extra or lacking else 0.0)
        else:
            worst = max(worst, error(mine.double(), exact[name]))
    return worst


def _update_error(before: Tensor | None, after: Tensor | None, gradient: Tensor | None) -> float:
    """How far this rank's part of a parameter is from a step of SGD along its gradient, which others compare."""
    assert before is not None and after is not None
    return error(after, before if gradient is None else before - RATE * gradient)


def worst_of_ranks(answers: Sequence[Sequence[Errors]]) -> list[Errors]:
    return [Errors(*map(max, zip(*of_case, strict=True))) for of_case in zip(*answers, strict=True)]
