"""Adapters on the language model of a vision-language model, and a tower that is frozen under a trained projector."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import Layout, World, plan_fixed, prepare, run_step, save_model
from longspan.doctor.stock import whole_float64
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.take_apart import freeze_images
from longspan.model.vision.image_tokens import image_tokens
from longspan.testing import run_ranks
from tests.model.stock import gradients_of
from tests.model.vision.documents import Answer, answer_of, documents_of
from tests.model.vision.joined import BOUND
from tests.model.vision.models import config_of, tiny

peft = pytest.importorskip("peft")
NAME = "qwen3-vl"
OF_TEXT = r".*language_model\.layers.*\.(q_proj|v_proj|up_proj)"


def adapted(targets: str = OF_TEXT) -> Any:
    """A model with adapters that are not zero."""
    model = peft.get_peft_model(tiny(NAME), peft.LoraConfig(r=4, target_modules=targets))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def beside(trained: str) -> Any:
    """A model with adapters in whose tower and projector this is trained."""
    model = adapted()
    freeze_images(model.get_base_model(), trained)  # pyright: ignore[reportArgumentType]
    return model


def with_projector() -> Any:
    """A model of whose images the projector alone is trained."""
    model = tiny(NAME)
    freeze_images(model, "projector")
    return model


def _errors(rank: int, make: Any, answer: Answer, folder: Path | None) -> dict[str, float]:
    documents = documents_of(image_tokens(config_of(NAME)))
    with whole_float64(), World(Layout(2)) as world:
        model = prepare(make(), world, encoder=Layout(2), probe=False)
        plan = plan_fixed(documents.lengths, world.home, cp=2, targets=documents.targets, max_tokens_per_slot=28)
        result, gradients = run_step(model, plan, documents, world), gradients_of(model)
        if folder is not None:
            save_model(model, folder, world)
        names = {own.removeprefix("language_model."): name for own, name in map_stock_names(gradients).items()}
        return answer.errors(result.loss, {own: gradients[name] for own, name in names.items()})


@pytest.mark.whole
def test_a_frozen_tower_under_a_trained_projector() -> None:
    answer = answer_of(NAME, trained=partial(freeze_images, trained="projector"))
    assert not any(".blocks." in name for name in answer.gradients)
    for errors in run_ranks(_errors, 2, with_projector, answer, None):
        assert max(errors.values()) < BOUND, errors


@pytest.mark.whole
@pytest.mark.parametrize("trained", ["none", "projector", "all"])
def test_adapters_beside_images(trained: str, tmp_path: Path) -> None:
    answer = answer_of(NAME, make=lambda: beside(trained).get_base_model())
    others = [name for name in answer.gradients if "lora_" not in name]
    assert len(answer.gradients) > len(others) and bool(others) == (trained != "none")
    assert all("merger" in name for name in others) or trained == "all"
    for errors in run_ranks(_errors, 2, partial(beside, trained), answer, tmp_path / "adapter"):
        assert max(errors.values()) < BOUND, errors
    loaded = peft.PeftModel.from_pretrained(tiny(NAME), tmp_path / "adapter", torch_device="cpu")
    saved = dict(beside(trained).get_base_model().named_parameters())
    for name, x in loaded.get_base_model().named_parameters():
        if "lora_" in name or ".modules_to_save." in name:
            assert torch.equal(x, saved[name.replace(".modules_to_save.default", "")]), name
