"""Encoders over their own homes, sharded and copied, split over tp and recomputed, equal one dense process."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.layout import Layout
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.model.placement.sharding import gradients_summed_over_slots
from longspan.testing import backend, run_ranks
from longspan.train.gradients import grad_norm
from tests.model.multimodal.encoders import dense_answer, encoder, items_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# A softmax does not change where every key has the same number added: what adds one has a true gradient of zero, of
# which rounding leaves 1e-14 in float64. Its error is measured against the largest gradient of the encoder.
ZERO = ("k_proj.bias", "k_norm.bias")
# Items of each slot in two waves, by number of slots; a slot without items runs item 0, whose rows go nowhere.
DEALT = {
    1: ([[0, 1, 2, 3]], [[4, 5, 6]]),
    2: ([[0, 1, 2, 3], [4]], [[], [5, 6]]),
    4: ([[0, 1, 2], [3], [], [4]], [[5], [], [], [6]]),
}
KINDS = ("sharded", "copies", "sharded, recomputed", "copies, recomputed")
Case = tuple[str, torch.dtype, str]


_answer = cache(dense_answer)


def _prepared(case: Case, world: World) -> nn.Module:
    family, dtype, kind = case
    return prepare_encoder(
        encoder(family, dtype),
        world,
        shard_parameters="sharded" in kind,
        activation_checkpointing="recomputed" in kind,
    )


def _encode(module: nn.Module, family: str, dtype: torch.dtype, world: World) -> dict[int, Tensor]:
    """Run both waves forward, then both backward; the rows of this slot's items."""
    items, answer = items_of(family, dtype, world.device), _answer(family, dtype, world.device)
    waves = [wave[world.slot] for wave in DEALT[world.home.slots]]
    encoded = [module([items[i] for i in mine or [0]]) for mine in waves]
    rows = dict[int, Tensor]()
    with gradients_summed_over_slots(module, world):
        for mine, out in zip(waves, encoded, strict=True):
            cotangents = [answer.cotangents[i].to(dtype) for i in mine]
            rows |= dict(zip(mine, out.detach().split([len(c) for c in cotangents]) if mine else (), strict=True))
            cotangent = torch.cat(cotangents) if mine else torch.zeros_like(out)
            out.backward(cotangent)
    return rows


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).double()


def gradient_errors(module: nn.Module, truth: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient, which must be there where a true one is, and only there."""
    largest = max(gradient.norm().item() for gradient in truth.values())
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth.keys(), gradients.keys() ^ truth.keys()
    return {
        name: (whole(gradients[name]) - true).norm().item() / (largest if name.endswith(ZERO) else true.norm().item())
        for name, true in truth.items()
    }


def _compare(home: Layout, cases: Sequence[Case]) -> dict[Case, dict[str, float]]:
    """The largest errors of rows, gradients and the gradients' norm, by case."""
    errors = dict[Case, dict[str, float]]()
    with World(home, backend=backend()) as world:
        for case in cases:
            family, dtype, _ = case
            module, answer = _prepared(case, world), _answer(family, dtype, world.device)
            rows = _encode(module, family, dtype, world)
            norm = torch.stack([g.norm() for g in answer.gradients.values()]).norm().item()
            errors[case] = gradient_errors(module, answer.gradients) | {
                "rows": max([0.0, *((x - answer.rows[i]).norm() / answer.rows[i].norm() for i, x in rows.items())]),
                "norm": abs(grad_norm(module.parameters(), world) - norm) / norm,
            }
    return errors


def _ranks(rank: int, home: Layout, cases: Sequence[Case]) -> dict[Case, dict[str, float]]:
    return _compare(home, cases)


def _check(home: Layout, cases: Sequence[Case]) -> None:
    for rank, errors in enumerate(run_ranks(_ranks, len(home.ranks), home, cases)):
        for case, by_name in errors.items():
            wrong = {name: error for name, error in by_name.items() if not error <= TOLERANCE[case[1]]}
            assert not wrong, (rank, case, wrong)


WHOLE = [(f, d, k) for f in ("clip", "siglip", "qwen2.5-vl", "qwen3-vl", "own") for d in TOLERANCE for k in KINDS]
FEW = [
    ("clip", torch.float64, "copies"),
    ("siglip", torch.float32, "sharded"),
    ("qwen2.5-vl", torch.float64, "sharded, recomputed"),
    ("qwen3-vl", torch.float64, "sharded"),
    ("own", torch.float64, "copies, recomputed"),
    ("own", torch.float32, "copies"),
]
LAYOUTS = {"1 x 4": Layout(4)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_encoder_over_its_home_equals_one_dense_process(layout: str) -> None:
    _check(LAYOUTS[layout], FEW)


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_encoder_in_every_layout_equals_one_dense_process(layout: str) -> None:
    _check(LAYOUTS[layout], WHOLE)
