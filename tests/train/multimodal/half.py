"""A step in bfloat16, whose error is measured against float64 and by that of one process in bfloat16."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from longspan import World, run_step
from tests.model.stock import gradients_of
from tests.train.multimodal.cases import Case
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.oracle import in_worlds, model_of, module_of
from tests.train.multimodal.reference import Answer, answer

Distances = dict[str, float]  # by module


def half_answers(case: Case) -> tuple[Answer, Distances]:
    """The dense model's answer in float64, and how far that in bfloat16 is from it."""
    documents = documents_of(case.documents)
    exact, alone = (answer(case.family, dtype, case.frozen, documents) for dtype in (torch.float64, torch.bfloat16))
    return exact, distances(alone.gradients, exact.gradients)


def half(rank: int, case: Case, exact: Answer) -> Distances:
    """How far the gradients of a step in bfloat16 are from the exact ones."""
    case = replace(case, dtype="bfloat16")
    documents = documents_of(case.documents)

    def step(case: Case, world: World, encoder_world: World) -> Distances:
        model = model_of(case, world, encoder_world)
        run_step(model, case.plan(), documents, world)
        return distances(gradients_of(model), exact.gradients)

    return in_worlds([case], step)[0]


def distances(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Distances:
    """By module, the norm of the difference of all its gradients over their norm."""
    squares = dict[str, list[float]]()
    for name, wanted in exact.items():
        sums = squares.setdefault(module_of(name), [0.0, 0.0])
        sums[0] += (gradients[name].double() - wanted).square().sum().item()
        sums[1] += wanted.square().sum().item()
    return {module: (off / whole) ** 0.5 for module, (off, whole) in squares.items() if whole}
