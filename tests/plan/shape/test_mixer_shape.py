"""Weights and FLOPs of models with state-space layers: from the configuration, and as torch counts them."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.errors import PlanError
from longspan.model import load_model, preset_config
from longspan.model.add_depths import add_mtp
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.seams.mixers import ROWS_ALONE, find_mixers, set_mixer_ops
from longspan.plan import Cost
from longspan.plan.shape.layers import ConfigReader, MixerShape, layer_types
from longspan.plan.shape.model_shape import ModelShape, has_mixers, model_flops

ROWS = 16
FAMILIES = {
    "qwen3_next": "gated delta net",
    "qwen3_5_text": "gated delta net",
    "qwen3_5_moe_text": "gated delta net",
    "olmo_hybrid": "gated delta net",
    "kimi_linear": "Kimi delta attention",
    "bamba": "Mamba 2",
    "mamba2": "Mamba 2",
    "granitemoehybrid": "Mamba 2",
    "nemotron_h": "Mamba 2",
    "falcon_h1": "Mamba 2",
    "zamba2": "Mamba 2",
    "zamba2+adapters": "Mamba 2",
    "lfm2_moe": "short convolution",
    "lfm2": "",  # its small copy has attention alone
    "qwen2_moe": "",
    "granitemoeshared": "",
}


def products(model: Any) -> tuple[int, int]:
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    for mixer in find_mixers(model).values():
        set_mixer_ops(mixer, lambda shard, batch, rows: ROWS_ALONE)  # the scan is counted by hand
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.arange(ROWS)[None] % 10, use_cache=False)
    found = counted.get_flop_counts()
    batched = sum(n for name, n in found["Global"].items() if "bmm" in str(name))
    rotary = {name for name, module in model.named_modules() if type(module).__name__.endswith("RotaryEmbedding")}
    of_angles = sum(sum(of.values()) for module, of in found.items() if module.partition(".")[2] in rotary)
    return (counted.get_total_flops() - batched) // ROWS, batched - of_angles  # angles: a product in transformers 5.17


def convolutions(model: nn.Module) -> int:
    return sum(x.numel() for mixer in find_mixers(model).values() for x in mixer.parameters() if x.ndim == 3)


@cache
def small(family: str) -> PreTrainedConfig:
    family, _, adapters = family.partition("+")
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return shrink_configuration(CONFIG_MAPPING[family](**{"use_shared_attention_adapter": True} if adapters else {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_multiply_a_row(family: str) -> None:
    config = small(family)
    model, shape = make_tiny_model(config, torch.float32), ModelShape.of(config)
    mixers = len(find_mixers(model))
    of_weights, of_attention = products(model)
    assert 2 * (shape.weights - convolutions(model)) == of_weights
    assert 4 * ROWS**2 * shape.query_width * shape.layers == of_attention
    assert (shape.mixer_layers, shape.mixer.kind if shape.mixer else "") == (mixers, FAMILIES[family])
    assert shape.decoder_layers == config.num_hidden_layers and has_mixers(config) == bool(mixers)
    assert ModelShape.of(config.to_dict()) == shape  # as a config.json says it


def by_rows(mixer: MixerShape) -> int:
    heads, key, value = mixer.heads, mixer.key_size, mixer.value_size
    if not heads:
        return 0
    state, k, q, v = (torch.zeros(heads, *shape) for shape in ((key, value), (1, key), (1, key), (1, value)))

    with FlopCounterMode(display=False) as counted:
        new = v - torch.bmm(k, state) if mixer.delta else v
        torch.bmm(q, state + torch.bmm(k.mT, new))
    return counted.get_total_flops()


LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "hidden_size": 64}
LFM2 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 61}


def presets() -> dict[str, PreTrainedConfig]:
    names = ("qwen3-next-tiny", "bamba-tiny", "granite-hybrid-tiny")
    tiny = {name: preset_config(name, vocab_size=61) for name in names}
    return tiny | {"lfm2": CONFIG_MAPPING["lfm2"](**LFM2, bos_token_id=1, eos_token_id=2, pad_token_id=0)}


@pytest.mark.parametrize("name", presets())
def test_a_step_s_flops_are_those_of_projections_attention_and_the_recurrence(name: str) -> None:
    config = presets()[name]
    model, shape, lengths = make_tiny_model(config, torch.float32), ModelShape.of(config), (40, 24, 1)
    of_weights, _ = products(model)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert shape.mixer and shape.mixer_layers == 3 and shape.layers == 1
    forward = (of_weights + 2 * convolutions(model) + 3 * by_rows(shape.mixer)) * sum(lengths)
    forward += 4 * shape.query_width * pairs
    assert model_flops(shape, lengths) == 3 * forward


def test_a_depth_costs_a_layer_a_projection_and_a_head() -> None:
    model = load_model(preset="qwen3-tiny", vocab_size=64)
    plain = ModelShape.of(model.config)
    add_mtp(model, depths=2)
    hidden = model.config.hidden_size
    added = sum(p.numel() for p in model.mtp.parameters() if p.ndim == 2) + 2 * hidden * 64
    deeper = ModelShape.of(model.config, depths=2)
    assert deeper.weights - plain.weights == added
    assert (deeper.layers, deeper.decoder_layers) == (plain.layers + 2, plain.decoder_layers + 2)
    of_layer = plain.recomputed_weights // plain.decoder_layers
    assert deeper.recomputed_weights == plain.recomputed_weights + 2 * of_layer
    deep, flat = (Cost.for_model(model.config, tflops=1.0, depths=depths).ring_bytes for depths in (2, 0))
    assert deep > flat


def test_a_depth_of_several_layers_costs_them_all() -> None:
    config: Any = shrink_configuration(CONFIG_MAPPING["nemotron_h"](n_routed_experts=4))
    plain, deeper = ModelShape.of(config), ModelShape.of(config, depths=1)
    assert (deeper.layers, deeper.decoder_layers) == (plain.layers + 1, plain.decoder_layers + 2)
    model: Any = add_mtp(make_tiny_model(config, torch.float32))
    sizes = {name: p.numel() for name, p in model.mtp.named_parameters()}
    visited = config.num_experts_per_tok / 4
    added = sum(size * (visited if ".experts." in name else 1) for name, size in sizes.items() if "norm" not in name)
    assert deeper.weights - plain.weights == added + config.hidden_size * config.vocab_size


def test_what_a_layer_of_attention_alone_computes_again() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 48}
    values = CONFIG_MAPPING["nemotron_h"](**sizes).to_dict()
    types = [["mlp", *["attention"] * count] for count in (1, 2)]
    shapes = [ModelShape.of(values | {"layer_types": kinds, "num_hidden_layers": len(kinds)}) for kinds in types]
    weights, recomputed = (getattr(shapes[1], x) - getattr(shapes[0], x) for x in ("weights", "recomputed_weights"))
    assert weights == 48 * 16 * (2 * 4 + 2 * 2) and recomputed == weights - 48 * 16 * 4


QWEN: dict[str, Any] = {"linear_num_value_heads": 4, "num_hidden_layers": 4}
M, A = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("values", "types"),
    [
        ({"layer_types": ["mamba", "attention"]}, [M, A]),
        ({"layers_block_type": [M, "moe", A, "mlp"]}, [M, "moe", A, "mlp"]),
        ({"hybrid_override_pattern": "M-E*"}, [M, "mlp", "moe", A]),
        ({"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8}, [M, A, M]),
        ({"num_hidden_layers": 2, "mamba_n_heads": 8}, [M, M]),
        ({"num_hidden_layers": 3, "full_attn_idxs": [2], "conv_L_cache": 3}, ["conv", "conv", A]),
        (QWEN, [M, M, M, A]),
        (QWEN | {"full_attention_interval": 2}, [M, A, M, A]),
        ({"num_hidden_layers": 2, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1]}}, [M, A]),
        ({"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_ssm": 64}, ["hybrid"] * 2),
        ({"num_hidden_layers": 2, "state_size": 8, "num_heads": 4}, [M, M]),
        ({"num_hidden_layers": 2}, []),
    ],
)
def test_types_of_layers_in_every_spelling(values: dict[str, Any], types: list[str]) -> None:
    assert layer_types(ConfigReader.of(values)) == types


NO_PRICE = "has .*layers of .*, which no configuration prices; leave --model out"
REFUSED = {
    "zamba": "state-space layers of zamba, Mamba 1",
    "jamba": "of jamba",
    "mamba": "of mamba",
    "minimax": "layers of type",
    **dict.fromkeys(("falcon_mamba", "recurrent_gemma"), NO_PRICE),
}


def test_what_has_no_price_is_named() -> None:
    for family, message in REFUSED.items():
        with pytest.raises(PlanError, match=message):
            ModelShape.of(CONFIG_MAPPING[family]())
    sizes = "has no linear_num_key_heads, no linear_key_head_dim, no linear_value_head_dim"
    with pytest.raises(PlanError, match=sizes):
        ModelShape.of({"hidden_size": 8, "linear_num_value_heads": 2, "vocab_size": 9, "num_hidden_layers": 2})
