"""Adding depths: which weights they get, what is saved and read again, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Layout, MtpLoss, World, add_mtp, load_model, plan_fixed, prepare, run_step, save_model
from longspan.errors import CommError, LongspanError, LossError, ModelError
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.testing import run_ranks
from longspan.train import build_optimizer, load_checkpoint, save_checkpoint
from tests.model.mtp.dense import LENGTHS, with_depths
from tests.model.seams.families import FAMILIES
from tests.model.stock import config_of, prepare_untried, texts, tiny, weights_of


def _depths(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in weights.items() if name.startswith("mtp.")}


def test_names_are_under_one_prefix_and_embedding_and_head_are_the_models_own() -> None:
    stock, model = tiny("llama"), add_mtp(tiny("llama"), 2)
    assert list(model.state_dict())[: len(stock.state_dict())] == list(stock.state_dict())
    added = [name for name in model.state_dict() if name not in stock.state_dict()]
    layer = [f"mtp_block.{name}" for name in model.model.layers[1].state_dict()]
    inside = [*layer, "eh_proj.weight", *(f"{norm}.weight" for norm in ("enorm", "hnorm", "post_norm"))]
    assert sorted(added) == sorted(f"mtp.layers.{depth}.{name}" for depth in (0, 1) for name in inside)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(model(ids).logits, stock(ids).logits)


def test_drawn_weights_depend_on_the_seed_alone() -> None:
    def drawn(seed: int, *, sharded: bool) -> dict[str, Tensor]:
        with World(Layout(ranks=1), backend="gloo") as world:
            model = add_mtp(load_model(preset="qwen3-tiny", vocab_size=64, sharded=sharded), 2, seed=seed)
            return _depths(weights_of(prepare(model, world)))

    first, again, other = drawn(0, sharded=False), drawn(0, sharded=True), drawn(1, sharded=False)
    assert all(torch.equal(first[name], again[name]) for name in first) and first.keys() == again.keys()
    changed = [name for name in first if not torch.equal(first[name], other[name])]
    assert len(changed) == sum("proj" in name for name in first)
    assert all(x.eq(1).all() for name, x in first.items() if name.endswith("norm.weight"))
    assert not torch.equal(first["mtp.layers.0.eh_proj.weight"], first["mtp.layers.1.eh_proj.weight"])


HOMES = {"cp": Layout(2), "tp": Layout(2, tp=2), "pp": Layout(2, pp=2), "ep": Layout(2, ep=2)}


def _round_trip(rank: int, home: Layout, folder: Path) -> list[dict[str, Tensor]]:
    """Weights that are here of a model that was trained for a step, and as a folder and a checkpoint have them."""

    def made() -> Any:
        return (with_depths("qwen3-moe", 2, layers=3) if home.ep > 1 else with_depths("llama", 2)).float()

    with World(home) as world:
        model = prepare_untried(made(), world)
        optimizer = build_optimizer(model, "adamw", lr=1e-2)
        run_step(model, plan_fixed(LENGTHS, home, cp=home.slots), texts(LENGTHS), world, optimizer, mtp=MtpLoss())
        save_model(model, folder / "model", world)
        save_checkpoint(folder / "checkpoint", model, optimizer, world, step=1)
        weights = [weights_of(model)]
    for there, sharded in ((Layout(ranks=2), False), (home, True)):
        with World(there) as world:
            model = add_mtp(load_model(folder / "model", sharded=sharded), 2, weights=folder / "model")
            other = prepare_untried(made(), world)
            optimizer = build_optimizer(other, "adamw", lr=1e-2)
            load_checkpoint(folder / "checkpoint" / "step-000001", other, optimizer, world)
            weights += [weights_of(prepare_untried(model, world)), weights_of(other)]
    return weights


@pytest.mark.parametrize("home", ["cp", *(pytest.param(home, marks=pytest.mark.whole) for home in ("tp", "pp", "ep"))])
def test_saved_depths_are_read_again_and_stock_transformers_reads_the_rest(home: str, tmp_path: Path) -> None:
    ranks = run_ranks(_round_trip, 2, HOMES[home], tmp_path)
    saved = {name: x for weights, *_ in ranks for name, x in weights.items()}
    last = "model.layers.2." if home == "ep" else "model.layers.1."
    assert len(_depths(saved)) == 2 * (4 + sum(name.startswith(last) for name in saved))
    for read in list(zip(*ranks, strict=True))[1:]:
        assert saved.keys() == {name for weights in read for name in weights}
        assert all(torch.equal(x, saved[name]) for weights in read for name, x in weights.items())
    stock = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert stock.keys() == saved.keys() - _depths(saved).keys()
    assert all(torch.equal(x, saved[name]) for name, x in stock.items())


def test_what_cannot_have_depths_is_refused() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (torch.nn.Linear(2, 2), 1, "takes a transformers model .* got Linear"),
        (tiny("qwen3"), 0, "depths=0; give a number from 1"),
        (tiny("qwen3"), True, "depths=True"),
        (add_mtp(tiny("qwen3")), 1, "has multi-token prediction of depth 1 already"),
        (tiny("qwen3").model, 1, "no output embedding over a base model"),
    ]
    for model, depths, message in refused:
        with pytest.raises(ModelError, match=message):
            add_mtp(model, depths)
    with pytest.raises(LossError, match="weight of an MtpLoss is -1; give a number from 0"):
        MtpLoss(weight=-1)


def _steps(rank: int) -> list[str]:
    messages = list[str]()
    with World(Layout(ranks=2)) as world:
        model, bare = prepare(add_mtp(tiny("qwen3")), world), prepare(tiny("qwen3"), world)
        plan: Any = plan_fixed(LENGTHS, world.home, cp=2)
        wrong: list[tuple[Any, Any]] = [(bare, MtpLoss()), (model, 0.3), (model, MtpLoss(rank + 0.1))]
        for which, mtp in (*wrong, (model, MtpLoss() if rank else None)):
            try:
                run_step(which, plan, texts(LENGTHS), world, mtp=mtp)
            except LongspanError as error:
                messages.append(f"{type(error).__name__}: {error}")
        with pytest.raises(ModelError, match="was prepared already; call add_mtp before prepare"):
            add_mtp(bare)
    return messages


def test_steps_refuse_what_is_no_loss_of_their_model() -> None:
    for bare, number, unequal, missing in run_ranks(_steps, 2):
        assert bare.startswith(ModelError.__name__) and "0 depths" in bare and "longspan.add_mtp(model" in bare
        assert number.startswith(LossError.__name__) and "mtp is 0.3; give MtpLoss(weight=0.3)" in number
        assert unequal.startswith(CommError.__name__) and "different losses of multi-token prediction" in unequal
        assert missing.startswith(CommError.__name__) and "mtp=" in missing


def _family(name: str, **changes: Any) -> PreTrainedModel:
    config_class, values = FAMILIES[name]
    return load_model(config=getattr(transformers, config_class)(**values | changes), sharded=True)


def test_models_whose_layers_take_something_else_are_refused_before_weights_are_drawn() -> None:
    refused: dict[str, PreTrainedModel] = {"embeddings of 24 values and layers of 32": _family("opt, norms after")}
    if "gemma3n_text" in CONFIG_MAPPING:
        small = shrink_configuration(CONFIG_MAPPING["gemma3n_text"]())
        refused[r"hidden states of shape \(4, 1, 2, \d+\) for two rows .* several streams"] = load_model(config=small)
    for message, model in refused.items():
        with pytest.raises(ModelError, match=message):
            add_mtp(model)
        assert not hasattr(model, "mtp")


def test_a_depth_copies_the_last_layer_with_keys_of_its_own_and_has_the_norms_that_the_model_has() -> None:
    depth = add_mtp(_family("gemma4")).mtp.layers[0]
    assert depth.mtp_block.self_attn.layer_idx == 1 and not depth.mtp_block.self_attn.is_kv_shared_layer
    assert add_mtp(_family("gemma4 without sharing")).mtp.copied.index == 3
    depth = add_mtp(_family("opt, norms after", word_embed_proj_dim=32)).mtp.layers[0]
    assert isinstance(depth.post_norm, torch.nn.Identity) and type(depth.enorm) is torch.nn.LayerNorm
    assert type(add_mtp(_family("opt")).mtp.layers[0].post_norm) is torch.nn.LayerNorm


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_drawn_depths_begin_as_a_new_model_does(sharded: bool) -> None:
    family, values = FAMILIES["gemma4 without sharing"]
    for config in (getattr(transformers, family)(**values), config_of("apertus")):
        model = load_model(config=config, sharded=sharded)
        for layer in model.model.layers:
            dict(layer.named_buffers()).get("layer_scalar", torch.zeros(1)).fill_(7.0)
        with World(Layout(ranks=1), backend="gloo") as world:
            weights = prepare(add_mtp(model), world).state_dict()
        constants = {"layer_scalar": 1.0, "alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
        found = {n: x for n, x in _depths(weights).items() if n.rpartition(".")[2] in constants}
        assert found and all(
            float(x) == pytest.approx(constants[n.rpartition(".")[2]], rel=1e-6) for n, x in found.items()
        )
