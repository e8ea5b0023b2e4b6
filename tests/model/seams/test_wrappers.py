"""Text through a model of several modalities equals the stock model; anything but text is refused by name."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from longspan.comm import World, bind
from longspan.doctor.stock import whole_float64
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model, prepare, save_model
from longspan.model.exactness.check_model import refuse_unsupported
from longspan.model.layers import decoder_layers, other_towers
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.seams.families import LENGTHS, errors_of
from tests.model.seams.wrappers import here, plain_texts, tiny
from tests.model.stock import dense_answer, weights_of

CASES = {2: ((2, "p2p", "full", True), (2, "all_gather", "none", False)), 3: ((3, "p2p", "full", True),)}
MORE = ("gemma3", "gemma4")  # by copies, and over three ranks


def _errors(rank: int, ranks: int, names: Sequence[str]) -> dict[tuple[object, ...], tuple[float, float]]:
    errors, documents = {}, plain_texts()
    with World(Layout(ranks=ranks), backend=backend()) as world, whole_float64():
        for name in names:
            stock = dense_answer(tiny(name), documents)
            for cp, kind, recompute, shard in CASES[ranks][: None if name in MORE else 1]:
                options = {"activation_checkpointing": recompute, "shard_parameters": shard, "documents": documents}
                make = partial(tiny, name)
                errors[name, cp, kind] = errors_of(make, world, stock, cp=cp, cp_comm_type=kind, **options)
    return errors


@cache
def _results(ranks: int) -> list[dict[tuple[object, ...], tuple[float, float]]]:
    return run_ranks(_errors, ranks, ranks, [name for name in here() if ranks == 2 or name in MORE])


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, name) for name in here()] + [pytest.param(3, name, marks=pytest.mark.whole) for name in MORE],
)
def test_text_equals_the_stock_model(ranks: int, name: str) -> None:
    for errors in _results(ranks):
        of_name = {case: pair for case, pair in errors.items() if case[0] == name}
        assert of_name and max(max(pair) for pair in of_name.values()) < 1e-12, of_name


def _trained(rank: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Weights after a step, those of the folder that was saved, read sharded, and what is said of an image."""
    documents = plain_texts()
    with World(Layout(ranks=2), backend=backend()) as world:
        model = prepare(load_model(folder, dtype="float32", sharded=True), world)
        optimizer = build_optimizer(model, lr=0.1)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        run_step(model, plan, documents, world, optimizer=optimizer)
        save_model(model, folder / "saved", world)
        again = prepare(load_model(folder / "saved", dtype="float32", sharded=True), world)
        shard = bind(plan.micro_batches[0], world).with_padding()
        ids = torch.ones(1, shard.local_rows, dtype=torch.long)
        with pytest.raises(ModelError) as refused:
            model(
                input_ids=ids, position_ids=shard.position_ids[None], shard=shard, pixel_values=torch.zeros(1, 3, 8, 8)
            )
        return weights_of(model), weights_of(again), str(refused.value)


def test_training_from_a_folder_leaves_the_towers_alone(tmp_path: Path) -> None:
    stock = tiny("gemma3").float()
    stock.save_pretrained(tmp_path)
    towers = {id(parameter) for tower in other_towers(stock) for parameter in tower.parameters()}
    for trained, saved, refused in run_ranks(_trained, 2, tmp_path):
        for name, parameter in stock.named_parameters():
            assert torch.equal(trained[name], saved[name])
            assert torch.equal(trained[name], parameter) == (id(parameter) in towers), name
        assert "Gemma3ForConditionalGeneration got pixel_values=" in refused.replace("FSDP", "")
        assert "longspan.MultimodalModel, docs/bridge.md" in refused


def test_layers_and_towers() -> None:
    model = tiny("gemma3")
    assert [*decoder_layers(model)] == [f"model.language_model.layers.{i}" for i in range(2)]
    assert [type(tower).__name__ for tower in other_towers(model)] == ["SiglipVisionModel", "Gemma3MultiModalProjector"]


def test_heads_that_are_no_language_model_name_the_class_that_is() -> None:
    config = tiny("gemma3").config
    with torch.device("meta"):
        model = transformers.Gemma3ForSequenceClassification(config)
    with pytest.raises(ModelError, match=r"its head \(ForSequenceClassification\) is .*; use Gemma3ForCausalLM"):
        refuse_unsupported(model)
