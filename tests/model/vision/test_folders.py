"""Vision-language folders: read whole or a part at a time, trained, saved again under the class's own names."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from longspan import EncoderHome, Layout, World, load_model, plan_fixed, prepare, run_step, save_model
from longspan.errors import ModelError
from longspan.model.vision.image_tokens import image_tokens
from longspan.testing import run_ranks
from longspan.train import build_optimizer, load_checkpoint, save_checkpoint
from tests.model.stock import weights_of
from tests.model.vision.documents import documents_of
from tests.model.vision.joined import own_names
from tests.model.vision.models import config_of, tiny

NAME = "qwen3-vl-untied"
HOMES = {"cp": (Layout(2), Layout(2)), "tp": (Layout(2, tp=2), Layout(2, tp=2)), "pp": (Layout(2, pp=2), Layout(2))}


def _trained(rank: int, folder: Path) -> dict[str, Tensor]:
    """The weights after a step under one pair of homes, as they are under others that load its checkpoint."""
    documents, weights = documents_of(image_tokens(config_of(NAME))), dict[str, dict[str, Tensor]]()
    for kind, (home, encoder) in HOMES.items():
        with World(home, backend="gloo") as world:
            model = prepare(
                load_model(folder, dtype="float64", sharded=kind != "tp"),
                world,
                encoder=EncoderHome(home=encoder, max_rows_per_slot=8, recompute=True),
                probe=False,
            )
            optimizer = build_optimizer(model, lr={"encoders": 0.1, "language_model": 0.05})
            if kind == "cp":
                plan = plan_fixed(documents.lengths, home, cp=2, targets=documents.targets)
                run_step(model, plan, documents, world, optimizer=optimizer)
                save_checkpoint(folder / "checkpoints", model, optimizer, world, step=1)
            else:
                load_checkpoint(folder / "checkpoints" / "step-000001", model, optimizer, world)
            save_model(model, folder / kind, world)
            weights[kind] = own_names(model, weights_of(model), world)
    assert all(torch.equal(x, weights["cp"][n]) for kind in weights.values() for n, x in kind.items())
    return weights["cp"]


@pytest.mark.whole
def test_a_folder_is_trained_and_saved_again(tmp_path: Path) -> None:
    stock = tiny(NAME)
    stock.save_pretrained(tmp_path)
    (trained, _) = run_ranks(_trained, 2, tmp_path)
    before = dict(stock.named_parameters())
    assert trained.keys() == before.keys()
    assert all(
        not torch.equal(trained[n], before[n]) for n in ("lm_head.weight", "model.visual.merger.linear_fc2.weight")
    )
    for kind in HOMES:
        saved = AutoModelForImageTextToText.from_pretrained(tmp_path / kind, dtype=torch.float64)
        assert type(saved) is type(stock) and (tmp_path / kind / "config.json").is_file()
        assert all(torch.equal(x, trained[name]) for name, x in saved.named_parameters())


def test_random_weights_and_the_class_of_a_configuration() -> None:
    names = {name for name, _ in tiny("llava-clip").named_parameters()}
    for sharded in (False, True):
        model = load_model(config=config_of("llava-clip"), sharded=sharded)
        assert {name for name, _ in model.named_parameters()} == names
    assert type(load_model(config=config_of("qwen3.5"), images=True)).__name__ == "Qwen3_5ForConditionalGeneration"
    with pytest.raises(ModelError, match="LlamaConfig stands for no model from images and text to text"):
        load_model(config=config_of("llava-clip").get_text_config(), images=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_drawn_weights_fill_both_modules(sharded: bool) -> None:
    with World(Layout(1), backend="gloo") as world:
        model = load_model(config=config_of("llava-clip"), sharded=sharded)
        joined = prepare(model, world, encoder=Layout(1), probe=False)
        assert all(x.isfinite().all() and not x.is_meta for x in weights_of(joined).values())
