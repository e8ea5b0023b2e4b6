"""Blocks that layers have together: found, sharded together, and saved under every name that they have."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.comm import World, run_local
from longspan.layout import Layout
from longspan.model import prepare, save_model
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.layers import decoder_layers
from longspan.model.seams.attention_calls import number_layers
from longspan.model.sharding import fsdp_modules, shared_blocks
from longspan.testing import backend
from tests.model.stock import tiny


def _zamba2(hybrids: int, blocks: int) -> PreTrainedModel:
    """One layer of Mamba 2 and then hybrids, whose shared blocks take turns."""
    config = shrink_configuration(CONFIG_MAPPING["zamba2"]())
    config.num_hidden_layers, config.num_mem_blocks = hybrids + 1, blocks
    config.layers_block_type = ["linear_attention"] + ["hybrid"] * hybrids
    config.hybrid_layer_ids = list(range(1, hybrids + 1))
    return make_tiny_model(config, torch.float32)


def test_blocks_are_found_and_numbered() -> None:
    model = _zamba2(5, blocks=2)
    blocks = [layer.shared_transformer for layer in model.model.layers[1:]]
    found = shared_blocks(decoder_layers(model))
    assert [[blocks.index(module) for module in modules] for modules in found] == [[0, 2, 4], [1, 3]]
    number_layers(model)
    assert [block.self_attn.layer_idx for block in blocks] == [1, 2, 3, 4, 5]
    llama = tiny("llama")
    assert shared_blocks(decoder_layers(llama)) == []
    llama.model.layers[1].mlp = llama.model.layers[0].mlp  # one module, which FSDP2 would gather twice
    assert shared_blocks(decoder_layers(llama)) == []


def _save(rank: int, folder: str) -> int:
    with World(Layout(ranks=2), backend=backend()) as world:
        model = prepare(_zamba2(2, blocks=1), world)
        save_model(model, folder, world)
        states = {id(module._get_fsdp_state()) for module in fsdp_modules(model)}
        return len(states)


def test_what_is_saved_is_the_stock_model(tmp_path: Path) -> None:
    """Three layers, one block and the root."""
    assert run_local(_save, 2, (str(tmp_path),), timeout=60) == [5, 5]
    saved, stock = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), _zamba2(2, blocks=1).state_dict()
    assert saved.keys() == stock.keys() and all(torch.equal(saved[name], stock[name]) for name in stock)
