"""Depths that are added: their weights, the names that models are published with, what is saved and what is refused."""

import math
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Layout, World, plan_fixed, run_step
from longspan.checkpoint import load_checkpoint, save_checkpoint
from longspan.errors import CommError, LossError, ModelError
from longspan.model import add_mtp, load_model, prepare, preset_config, save_model
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.mtp.published_names import count_depths, find_published_naming, translate_published_name
from longspan.mtp import MtpLoss
from longspan.testing import run_ranks
from longspan.train import build_optimizer
from tests.model.mtp.dense import LENGTHS, adapted, with_depths
from tests.model.seams.families import FAMILIES
from tests.model.stock import at_random, config_of, prepare_untried, texts, tiny, weights_of


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
    for there, sharded in ((home, True), (Layout(ranks=2), False)):
        with World(there) as world:
            model = add_mtp(load_model(folder / "model", sharded=sharded), 2, weights=folder / "model")
            weights.append(weights_of(prepare_untried(model, world)))
    with World(there) as world:
        model = prepare_untried(made(), world)
        load_checkpoint(folder / "checkpoint" / "step-000001", model, build_optimizer(model, "adamw", lr=1e-2), world)
        weights.append(weights_of(model))
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
    peft_model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    refused: list[tuple[Any, Any, str]] = [
        (peft_model.get_base_model(), 1, "call add_mtp first"),
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


def _steps(rank: int) -> None:
    with World(Layout(ranks=2)) as world:
        model, bare = prepare(add_mtp(tiny("qwen3")), world), prepare(tiny("qwen3"), world)
        plan: Any = plan_fixed(LENGTHS, world.home, cp=2)
        wrong: list[tuple[Any, Any, type[Exception], str]] = [
            (bare, MtpLoss(), ModelError, r"0 depths.*longspan\.add_mtp\(model"),
            (model, 0.3, LossError, r"mtp is 0\.3; give MtpLoss\(weight=0\.3\)"),
            (model, MtpLoss(rank + 0.1), CommError, "different losses of multi-token prediction"),
            (model, MtpLoss() if rank else None, CommError, "mtp="),
        ]
        for which, mtp, kind, message in wrong:
            with pytest.raises(kind, match=message):
                run_step(which, plan, texts(LENGTHS), world, mtp=mtp)
        with pytest.raises(ModelError, match="was prepared already; call add_mtp before prepare"):
            add_mtp(bare)


def test_steps_refuse_what_is_no_loss_of_their_model() -> None:
    run_ranks(_steps, 2)


def _family(name: str, **changes: Any) -> PreTrainedModel:
    config_class, values = FAMILIES[name]
    return load_model(config=getattr(transformers, config_class)(**values | changes), sharded=True)


def test_models_whose_layers_take_something_else_are_refused_before_weights_are_drawn() -> None:
    refused: dict[str, PreTrainedModel] = {"embeddings of 24 values and layers of 32": _family("opt, norms after")}
    if "gemma3n_text" in CONFIG_MAPPING:
        small = shrink_configuration(CONFIG_MAPPING["gemma3n_text"]())
        refused[r"hidden states of shape \(4, 1, 2, \d+\) for two rows .* several streams"] = load_model(config=small)
    zamba2 = load_model(config=shrink_configuration(CONFIG_MAPPING["zamba2"]()))
    refused |= {f"{type(m).__name__} gives its last decoder layer, beside": m for m in (_family("gemma4"), zamba2)}
    for message, model in refused.items():
        with pytest.raises(ModelError, match=message):
            add_mtp(model)
        assert not hasattr(model, "mtp")


def test_a_depth_has_the_norms_that_the_model_has() -> None:
    depth = add_mtp(_family("opt, norms after", word_embed_proj_dim=32)).mtp.layers[0]
    assert isinstance(depth.post_norm, torch.nn.Identity) and type(depth.enorm) is torch.nn.LayerNorm
    assert type(add_mtp(_family("opt")).mtp.layers[0].post_norm) is torch.nn.LayerNorm


def test_drawn_depths_begin_as_a_new_model_does() -> None:
    family, values = FAMILIES["gemma4 without sharing"]
    for config in (getattr(transformers, family)(**values), config_of("apertus")):
        model = load_model(config=config, sharded=True)
        for layer in model.model.layers:
            dict(layer.named_buffers()).get("layer_scalar", torch.zeros(1)).fill_(7.0)
        with World(Layout(ranks=1), backend="gloo") as world:
            weights = prepare(add_mtp(model), world).state_dict()
        constants = {"layer_scalar": 1.0, "alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
        found = {n: x for n, x in _depths(weights).items() if n.rpartition(".")[2] in constants}
        assert found and all(
            float(x) == pytest.approx(constants[n.rpartition(".")[2]], rel=1e-6) for n, x in found.items()
        )


def _refused_adapters(rank: int) -> None:
    in_part = adapted(with_depths("llama", 2), modules_to_save=["mtp"])
    in_part.base_model.model.mtp.modules_to_save["default"].layers[1].eh_proj.requires_grad_(False)
    twice = adapted(with_depths("llama", 2))
    for name, parameter in twice.base_model.model.mtp.named_parameters():
        parameter.requires_grad_(".lora_" not in name or parameter.requires_grad)
    of_embedding = adapted(with_depths("llama", 2), target_modules=["q_proj", "embed_tokens"])
    with World(Layout(ranks=2, pp=2)) as world:
        for peft_model, message in (
            (of_embedding, "leave it out of target_modules, or use pp 1"),
            (in_part, "of its depths of multi-token prediction require gradients"),
            (twice, r"are trained whole and have adapters \(mtp\.layers\.0\.eh_proj, "),
        ):
            mtp = peft_model.base_model.model.mtp
            with pytest.raises(ModelError, match=message):
                prepare(peft_model, world)
            assert peft_model.base_model.model.mtp is mtp  # as it was


@pytest.mark.whole
def test_adapters_that_are_refused() -> None:
    run_ranks(_refused_adapters, 2, timeout=60)


NORMS = {
    "DeepSeek": ("model.layers.2.", ("enorm", "hnorm", "shared_head.norm", "eh_proj")),
    "Qwen": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")),
}
OURS = ("enorm", "hnorm", "post_norm", "eh_proj")
LAYERS = {family: NORMS[family][0] for family in NORMS} | {"Qwen": "mtp.layers.0."}


def _deepseek(layers: int) -> PreTrainedModel:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    config = config_of("deepseek-v3")
    config.update(experts | {"num_hidden_layers": layers})
    config.mlp_layer_types = ["dense"] + ["sparse"] * (layers - 1)
    return at_random(config)


def _qwen3_next(layers: int) -> PreTrainedModel:
    config = preset_config("qwen3-next-tiny", vocab_size=64)
    types = ["linear_attention", *["full_attention"] * (layers - 1)]
    config.update({"num_hidden_layers": layers, "layer_types": types, "hidden_size": 32})
    return at_random(config)


MODELS = {"DeepSeek": _deepseek, "Qwen": _qwen3_next}


def _published(family: str, folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A folder whose depth's layer is the last one of a deeper model: that model, and what else the depth has."""
    deeper, (prefix, names) = MODELS[family](3), NORMS[family]
    deeper.save_pretrained(folder)
    files = load_file(folder / "model.safetensors")
    size = deeper.config.hidden_size
    own: dict[str, Tensor] = {f"{prefix}{name}.weight": torch.full((size,), i + 2.0) for i, name in enumerate(names)}
    own[f"{prefix}{names[-1]}.weight"] = torch.randn(size, 2 * size)
    files = {name.replace("model.layers.2.", LAYERS[family]): x for name, x in files.items()}
    files["model.layers.2.embed_tokens.weight"] = torch.zeros(2)  # copies of the model's own, which are not read
    save_file(files | own, folder / "model.safetensors")
    return deeper, own


@pytest.mark.parametrize("family", MODELS)
def test_depths_are_read_under_the_names_that_they_are_published_with(family: str, tmp_path: Path) -> None:
    deeper, own = _published(family, tmp_path)
    assert count_depths(tmp_path, layers=2) == 1
    model = add_mtp(MODELS[family](2), 1, weights=tmp_path)
    read, (prefix, names) = model.state_dict(), NORMS[family]
    for name, x in deeper.model.layers[2].state_dict().items():
        assert torch.equal(read[f"mtp.layers.0.mtp_block.{name}"], x), name
    for ours, theirs in zip(OURS[:3], names, strict=False):
        assert torch.equal(read[f"mtp.layers.0.{ours}.weight"], own[f"{prefix}{theirs}.weight"].double())
    embedding, hidden = torch.randn(2, 5, deeper.config.hidden_size, dtype=torch.float64)
    wanted = F.linear(torch.cat((embedding, hidden), -1), own[f"{prefix}{names[-1]}.weight"].double())
    found = model.mtp.layers[0].eh_proj(torch.cat((embedding, hidden), -1))
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_folder_with_fewer_depths_or_other_shapes_is_refused(tmp_path: Path) -> None:
    _published("DeepSeek", tmp_path)
    with pytest.raises(ModelError, match=r"lacks \d+ of \d+ .*mtp\.layers\.1\..*or model\.layers\.2\..*fewer depths"):
        add_mtp(_deepseek(2), 2, weights=tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    save_file(files | {"model.layers.2.enorm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"mtp.layers.0.enorm.weight is \(3,\) in the files, \(32,\)"):
        add_mtp(_deepseek(2), 1, weights=tmp_path)


def test_depths_of_a_sharded_model_are_read_a_part_at_a_time(tmp_path: Path) -> None:
    _published("DeepSeek", tmp_path / "published")
    _deepseek(2).save_pretrained(tmp_path / "two")
    wanted = add_mtp(_deepseek(2), 1, weights=tmp_path / "published").state_dict()
    with World(Layout(ranks=1), backend="gloo") as world:
        model = add_mtp(load_model(tmp_path / "two", dtype="float64", sharded=True), 1, weights=tmp_path / "published")
        read = weights_of(prepare(model, world))
    assert all(torch.equal(x, wanted[name]) for name, x in read.items() if name.startswith("mtp."))


NEMOTRON = ["linear_attention", "moe", "full_attention"]


def _nemotron(types: list[str]) -> Any:
    config: Any = shrink_configuration(CONFIG_MAPPING["nemotron_h"](n_routed_experts=4))
    config.update({"layer_types": types, "vocab_size": 64})
    return at_random(config)


def test_a_depth_of_several_layers_is_read_as_it_is_published(tmp_path: Path) -> None:
    deeper = _nemotron([*NEMOTRON, "full_attention", "moe"])
    deeper.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    for layer in (0, 1):
        files = {re.sub(rf"^\w+\.layers\.{3 + layer}\.", f"mtp.layers.{layer}.", name): x for name, x in files.items()}
    size = deeper.config.hidden_size
    own = {f"mtp.layers.0.{name}.weight": torch.full((size,), i + 2.0) for i, name in enumerate(("enorm", "hnorm"))}
    own |= {"mtp.layers.1.final_layernorm.weight": torch.full((size,), 4.0)}
    own |= {"mtp.layers.0.eh_proj.weight": torch.randn(size, 2 * size)}
    save_file(files | own, tmp_path / "model.safetensors")
    assert count_depths(tmp_path, layers=3) == 1
    read = add_mtp(_nemotron(NEMOTRON), 1, weights=tmp_path).state_dict()
    for layer in (0, 1):
        for name, x in deeper.model.layers[3 + layer].state_dict().items():
            assert torch.equal(read[f"mtp.layers.0.mtp_block.{layer}.{name}"], x), name
    for name in ("enorm", "hnorm", "eh_proj"):
        assert torch.equal(read[f"mtp.layers.0.{name}.weight"], own[f"mtp.layers.0.{name}.weight"].double())
    assert (read["mtp.layers.0.post_norm.weight"] == 4).all()
    written = find_published_naming("nemotron_h", 3, 1, 2)
    assert written is not None and {written(name) for name in read if name.startswith("mtp.")} >= own.keys()
    assert all(translate_published_name(written(name), 3, 2) == name for name in read)
    assert find_published_naming("nemotron_h", 3, 2, 2) is None


def test_a_depth_has_the_layers_that_its_configuration_names() -> None:
    bare = _nemotron(["linear_attention", "full_attention", "mlp"])  # without experts
    blocks = add_mtp(bare, 2).mtp.layers[1].mtp_block
    assert [block.block_type for block in blocks] == ["full_attention", "mlp"]
    with pytest.raises(ModelError, match="of full_attention the model has none to copy, only of linear_attention, mlp"):
        add_mtp(_nemotron(["linear_attention", "mlp"]))


@pytest.mark.parametrize(("model_type", "depths"), [("deepseek_v3", 2), ("bailing_hybrid", 1), ("qwen3_next", 1)])
def test_published_names_are_those_that_are_read(model_type: str, depths: int) -> None:
    inside = ("enorm", "hnorm", "eh_proj", "post_norm", "mtp_block.mlp.up_proj", "mtp_block.self_attn.q_proj")
    names = [f"mtp.layers.{depth}.{name}.weight" for depth in range(depths) for name in inside]
    written = find_published_naming(model_type, 4, depths)
    assert written is not None and not {*map(written, names)} & {*names}
    assert [translate_published_name(written(name), layers=4) for name in names] == names
    assert written("model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert find_published_naming("qwen3_next", 4, 2) is None and find_published_naming("llama", 4, 1) is None
