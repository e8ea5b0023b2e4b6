"""Checkpoints of an encoder and a language model: saved under two homes, and gone on with under two others.

Weights, moments, losses and gradient norms of AdamW steps equal those of training that never stopped: bit by bit under
the same homes, to 1e-12 under others. The gradient norm is that of one dense process under all of them.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from longspan import Layout, World, plan_dynamic, prepare, run_step, save_model
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, clip_grad_norm, grad_norm, load_checkpoint, save_checkpoint
from tests.model.stock import gradients_of, weights_of, worst
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.encoders import encoder_of
from tests.train.multimodal.reference import HIDDEN, answer, language_model_of

BOUND = 1e-12 if backend() == "gloo" else 1e-5
LR = {"encoders": 1e-3, "language_model": 3e-3}


def tower() -> nn.Module:
    """The encoder of images; nothing ever goes through `unused`, as through the last layer of a tower in LLaVA."""
    module = encoder_of("image", HIDDEN, torch.float64)
    module.add_module("unused", nn.Linear(4, 4, dtype=torch.float64).requires_grad_())
    nn.init.ones_(module.get_parameter("unused.weight"))
    nn.init.zeros_(module.get_parameter("unused.bias"))
    return module


@dataclass(frozen=True)
class Homes:
    """The language model's home and the encoder's, and whether each module's parameters are sharded or copied."""

    language_model: Layout
    encoder: Layout
    sharded: tuple[bool, bool] = (True, True)


STRAIGHT = Homes(Layout(4, tp=2), Layout(4))
ON_TWO = Homes(Layout(2), Layout(2, tp=2), sharded=(False, True))
LEGS = [  # after a first one on two ranks
    Homes(Layout(4), Layout(4, tp=2)),
    Homes(Layout(4, pp=2), Layout(4), sharded=(True, False)),
    Homes(Layout(4, pp=2, tp=2), Layout(4, dp_replicate=2)),
]


@dataclass(frozen=True)
class Found:
    numbers: tuple[float, float]
    tensors: dict[str, Tensor]


def _opened(homes: Homes, stack: ExitStack) -> tuple[MultimodalModel, Optimizer, World]:
    of_model, of_encoder = homes.sharded
    world, beside = (
        stack.enter_context(World(h, backend=backend(), timeout=60)) for h in (homes.language_model, homes.encoder)
    )
    encoder = Encoder(module=prepare_encoder(tower(), beside, shard_parameters=of_encoder), world=beside)
    language_model = prepare(language_model_of("qwen3", torch.float64), world, probe=False, shard_parameters=of_model)
    model = MultimodalModel({"image": encoder}, language_model, world)
    return model, build_optimizer(model, lr=LR, weight_decay=0.1), world


def _train(homes: Homes, folder: Path, first: int, last: int) -> list[Found]:
    """Steps from `first`, whose checkpoint is loaded unless it is 0, to `last`; each is saved."""
    found, docs = list[Found](), documents_of("packed")
    with ExitStack() as stack:
        model, optimizer, world = _opened(homes, stack)
        if first:
            assert load_checkpoint(folder / f"step-{first:06d}", model, optimizer, world)["step"] == first
        plan = plan_dynamic(docs.lengths, world.home, targets=docs.targets, max_tokens_per_slot=60)
        for step in range(first, last):
            result = run_step(model, plan, docs, world, optimizer=optimizer, max_grad_norm=0.5)
            assert result.grad_norm is not None and result.grad_norm > 0.5
            save_checkpoint(folder, model, optimizer, world, step=step + 1)
            found.append(Found((result.loss, result.grad_norm), _all_ranks(_tensors(model, optimizer), world)))
    return found


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = weights_of(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).to(
                "cpu", copy=True
            )
    return tensors


def _all_ranks(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    return {name: x for part in world.control.gather_objects(tensors) for name, x in part.items()}


def _language_model_alone(homes: Homes, folder: Path) -> None:
    with ExitStack() as stack:
        model, _, world = _opened(homes, stack)
        load_checkpoint(folder, model, None, world)
        save_model(model.language_model, folder.with_name("model"), world)


def _norms(homes: Homes, expected: dict[str, Tensor]) -> float:
    """How far the gradient norm and clipped gradients are from those of the dense process."""
    wanted = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    docs = documents_of("packed")
    with ExitStack() as stack:
        model, _, world = _opened(homes, stack)
        run_step(
            model, plan_dynamic(docs.lengths, world.home, targets=docs.targets, max_tokens_per_slot=60), docs, world
        )
        assert clip_grad_norm(model, wanted / 4, world) == pytest.approx(wanted, rel=BOUND)
        assert grad_norm(model, world) == pytest.approx(wanted / 4, rel=1e-5)  # torch adds 1e-6 to the norm
        clipped = _all_ranks(gradients_of(model), world)
        return worst(clipped, {name: wanted / 4 / (wanted + 1e-6) * g for name, g in expected.items()})


@dataclass(frozen=True)
class All:
    """Steps in one go, one of them again from its checkpoint, steps of legs, and what norms are off by, under each."""

    straight: list[Found]
    again: Found
    legs: list[Found]
    norms: list[float]


def _on_two(rank: int, folder: Path) -> list[Found]:
    return _train(ON_TWO, folder / "legs", 0, 1)


def _on_four(rank: int, folder: Path, expected: dict[str, Tensor]) -> All:
    straight = _train(STRAIGHT, folder / "straight", 0, 1 + len(LEGS))
    (again,) = _train(STRAIGHT, folder / "straight", 1, 2)
    _language_model_alone(LEGS[1], folder / "straight/step-000004")
    legs = [_train(homes, folder / "legs", step, step + 1)[0] for step, homes in enumerate(LEGS, start=1)]
    return All(straight, again, legs, [_norms(homes, expected) for homes in (STRAIGHT, *LEGS)])


pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[All]:
    first = run_ranks(_on_two, 2, folder)
    exact = answer("qwen3", torch.float64, "nothing", documents_of("packed"))
    every = run_ranks(_on_four, 4, folder, exact.gradients)
    return [replace(of_rank, legs=[*first[0], *of_rank.legs]) for of_rank in every]


def test_the_next_step_is_the_same_bit_by_bit_under_the_same_homes(found: list[All]) -> None:
    for of_rank in found:
        straight = of_rank.straight[1]
        if backend() == "gloo":
            assert of_rank.again.numbers == straight.numbers
        assert worst(of_rank.again.tensors, straight.tensors) <= (0.0 if backend() == "gloo" else BOUND)


def test_training_goes_through_homes_of_both_modules(found: list[All]) -> None:
    for of_rank in found:
        for straight, leg in zip(of_rank.straight, of_rank.legs, strict=True):
            assert leg.numbers == pytest.approx(straight.numbers, rel=BOUND)
            assert worst(leg.tensors, straight.tensors) < BOUND
        names = of_rank.legs[-1].tensors
        assert "encoders.image.blocks.0.mlp.fc1.bias.exp_avg_sq" in names and "encoders.image.unused.weight" in names
        assert "encoders.image.unused.weight.exp_avg" not in names


def test_the_norm_counts_every_element_of_both_modules_once(found: list[All]) -> None:
    assert all(max(of_rank.norms) < BOUND for of_rank in found)


def test_the_language_model_is_saved_for_stock_transformers(found: list[All], folder: Path) -> None:
    model, trained = AutoModelForCausalLM.from_pretrained(folder / "straight/model"), found[0].straight[-1].tensors
    names = {
        name for name in trained if name.startswith("language_model.") and not name.endswith(("step", "avg", "sq"))
    }
    assert {f"language_model.{name}" for name, _ in model.named_parameters()} == names
    assert all(torch.equal(x, trained[f"language_model.{name}"]) for name, x in model.named_parameters())
