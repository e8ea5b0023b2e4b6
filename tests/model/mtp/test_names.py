"""Depths read, and written, under the names that models are published with."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Layout, World, add_mtp, load_model, prepare
from longspan.errors import ModelError
from longspan.model import preset_config
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.mtp import count_depths, publication_names, translate_name
from tests.model.stock import at_random, config_of, weights_of

NORMS = {
    "DeepSeek": ("model.layers.2.", ("enorm", "hnorm", "shared_head.norm", "eh_proj")),
    "Ling": ("model.layers.2.", ("enorm", "hnorm", "final_layernorm", "eh_proj")),
    "MiMo": ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")),
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


def _qwen2(layers: int) -> PreTrainedModel:
    """MiMo-7B is a Qwen2 with a depth."""
    config = config_of("qwen2")
    config.update({"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers})
    return at_random(config)


def _qwen3_next(layers: int) -> PreTrainedModel:
    config = preset_config("qwen3-next-tiny", vocab_size=64)
    types = ["linear_attention", *["full_attention"] * (layers - 1)]
    config.update({"num_hidden_layers": layers, "layer_types": types, "hidden_size": 32})
    return at_random(config)


def _ling(layers: int) -> PreTrainedModel:
    if "bailing_hybrid" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no bailing_hybrid")
    config: Any = shrink_configuration(CONFIG_MAPPING["bailing_hybrid"]())
    types = ["linear_attention", *["full_attention"] * (layers - 1)]
    config.update({"num_hidden_layers": layers, "layer_types": types, "vocab_size": 64})
    return at_random(config)


MODELS = {"DeepSeek": _deepseek, "Ling": _ling, "MiMo": _qwen2, "Qwen": _qwen3_next}


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
    order = (hidden, embedding) if family == "MiMo" else (embedding, hidden)  # as the models' own code has it
    wanted = F.linear(torch.cat(order, -1), own[f"{prefix}{names[-1]}.weight"].double())
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
    _published("MiMo", tmp_path / "MiMo")
    _qwen2(2).save_pretrained(tmp_path / "two")
    wanted = add_mtp(_qwen2(2), 1, weights=tmp_path / "MiMo").state_dict()
    with World(Layout(ranks=1), backend="gloo") as world:
        model = add_mtp(load_model(tmp_path / "two", dtype="float64", sharded=True), 1, weights=tmp_path / "MiMo")
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
    written = publication_names("nemotron_h", 3, 1, 2)
    assert written is not None and {written(name) for name in read if name.startswith("mtp.")} >= own.keys()
    assert (
        all(translate_name(written(name), 3, 2) == name for name in read)
        and publication_names("nemotron_h", 3, 2, 2) is None
    )


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
    written = publication_names(model_type, 4, depths)
    assert written is not None and not {*map(written, names)} & {*names}
    assert [translate_name(written(name), layers=4) for name in names] == names
    assert written("model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert publication_names("qwen3_next", 4, 2) is None and publication_names("llama", 4, 1) is None


def test_stock_transformers_reads_what_is_published(tmp_path: Path) -> None:
    _published("Qwen", tmp_path)
    config = _qwen3_next(2).config
    config.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(stock.model.layers) == 2
