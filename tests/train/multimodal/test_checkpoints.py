"""Checkpoints of an encoder and a language model: saved under two homes, and gone on with under two others.

Weights, moments, losses and gradient norms of AdamW steps equal those of training that never stopped: bit by bit under
the same homes, to 1e-12 under others.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from longspan import Layout, World, plan_dynamic, prepare, run_step, save_model
from longspan.checkpoint import load_checkpoint, save_checkpoint
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from tests.model.stock import weights_of, worst
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.encoders import encoder_of
from tests.train.multimodal.reference import HIDDEN, language_model_of

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


Found = tuple[list[float], dict[str, Tensor]]  # loss and gradient norm of a step; weights and moments of all ranks


def _opened(homes: Homes, stack: ExitStack) -> tuple[MultimodalModel, Optimizer, World]:
    of_model, of_encoder = homes.sharded
    world, beside = (
        stack.enter_context(World(h, backend=backend(), timeout=60)) for h in (homes.language_model, homes.encoder)
    )
    encoder = Encoder(module=prepare_encoder(tower(), beside, shard_parameters=of_encoder), world=beside)
    language_model = prepare(language_model_of("qwen3", torch.float64), world, shard_parameters=of_model)
    model = MultimodalModel({"image": encoder}, language_model, world)
    return model, build_optimizer(model, lr=LR, weight_decay=0.1), world


def _train(homes: Homes, folder: Path, first: int, last: int) -> list[Found]:
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
            parts = world.control.gather_objects(_tensors(model, optimizer))
            found.append(([result.loss, result.grad_norm], {name: x for part in parts for name, x in part.items()}))
    return found


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = weights_of(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).to(
                "cpu", copy=True
            )
    return tensors


def _language_model_alone(homes: Homes, folder: Path) -> None:
    with ExitStack() as stack:
        model, _, world = _opened(homes, stack)
        load_checkpoint(folder, model, None, world)
        save_model(model.language_model, folder.with_name("model"), world)


def _on_two(rank: int, folder: Path) -> list[Found]:
    return _train(ON_TWO, folder / "legs", 0, 1)


def _on_four(rank: int, folder: Path, first: list[Found]) -> None:
    straight = _train(STRAIGHT, folder / "straight", 0, 1 + len(LEGS))
    ((numbers, tensors),) = _train(STRAIGHT, folder / "straight", 1, 2)
    assert numbers == (straight[1][0] if backend() == "gloo" else pytest.approx(straight[1][0], rel=BOUND))
    assert worst(tensors, straight[1][1]) <= (0.0 if backend() == "gloo" else BOUND)
    _language_model_alone(LEGS[1], folder / "straight/step-000004")
    legs = [_train(homes, folder / "legs", step, step + 1)[0] for step, homes in enumerate(LEGS, start=1)]
    for (expected, exact), (numbers, tensors) in zip(straight, [*first, *legs], strict=True):
        assert numbers == pytest.approx(expected, rel=BOUND) and worst(tensors, exact) < BOUND
    assert {"encoders.image.blocks.0.mlp.fc1.bias.exp_avg_sq", "encoders.image.unused.weight"} <= tensors.keys()
    assert "encoders.image.unused.weight.exp_avg" not in tensors
    if rank == 0:
        _compare_with_stock(folder / "straight/model", straight[-1][1])


def _compare_with_stock(folder: Path, trained: dict[str, Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    names = {
        name for name in trained if name.startswith("language_model.") and not name.endswith(("step", "avg", "sq"))
    }
    assert {f"language_model.{name}" for name, _ in model.named_parameters()} == names
    assert all(torch.equal(x, trained[f"language_model.{name}"]) for name, x in model.named_parameters())


@pytest.mark.whole
def test_training_goes_through_homes_of_both_modules(tmp_path: Path) -> None:
    run_ranks(_on_four, 4, tmp_path, run_ranks(_on_two, 2, tmp_path)[0])
