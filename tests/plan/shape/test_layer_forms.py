"""Layers of other forms, beside what transformers' classes have and compute: two attentions in each layer, several
streams of each row, and stacks of layers that run several times."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from longspan.layout import Layout
from longspan.model.layers import layers_of_all_stages
from longspan.plan import MemorySettings
from longspan.plan.memory.model_numbers import ModelNumbers, make_stages
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.plan.shape.streams import read_streams

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
_LONGCAT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
_LONGCAT |= {"head_dim": 4, "v_head_dim": 12, "num_layers": 3, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24}
_LONGCAT |= {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3}
# Of five runs of the low stack two are without gradients.
_HRM: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 40, "head_dim": 16, "prefix_lm": False}
_HRM |= {"H_cycles": 2, "L_cycles": 3, "L_bp_cycles": [2]}
SMALL: dict[str, dict[str, Any]] = {"hrm_text": _SIZES | _HRM, "longcat_flash": _SIZES | _LONGCAT}
_STREAMS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2}
_V4: dict[str, Any] = {"head_dim": 16, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4}
_V4 |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "mlp_layer_types": ["moe"] * 2}
_QWEN4: dict[str, Any] = {"hc_lowrank": 8, "num_experts": 4, "shared_expert_intermediate_size": 24}
_QWEN4 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_QWEN4 |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention"] * 2}
STREAMS = {
    "deepseek_v4": _SIZES | _STREAMS | _V4 | {"pad_token_id": None},
    "qwen4_exp_text": _SIZES | _STREAMS | _QWEN4,
}
# The classes' defaults are DeepSeek-V4-Flash, GLM-5.3-Flash, HRM-Text-1B and LongCat-Flash; of Qwen3.8-Flash-Next what
# they leave out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "glm5_next": {},
    "hrm_text": {},
    "longcat_flash": {},
    "qwen4_exp_text": {
        "num_hidden_layers": 48,
        "num_attention_heads": 24,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
CONNECTIONS = ("HyperConnection", "GatedResidual", "HyperHead")
ROWS = 24


def config_of(family: str, **values: Any) -> PreTrainedConfig:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    kind: Any = CONFIG_MAPPING[family]
    return kind(**values)


@pytest.mark.parametrize("family", PUBLISHED)
def test_parameters_of_published_models_are_those_of_each_layer(family: str) -> None:
    """To the number, of each layer and of all."""
    config = config_of(family, **PUBLISHED[family])
    with torch.device("meta"):
        alone = type(config) in AutoModelForCausalLM._model_mapping
        model: Any = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_config(config)
    home, settings = Layout(1), MemorySettings()
    numbers = ModelNumbers.from_configuration(config.to_dict(), home, settings)
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of_all_stages(model).values()]
    assert [layer.whole for layer in numbers.layers] == of_layers
    (stage,) = make_stages(numbers, home, settings)
    of_text = [p for name, p in model.named_parameters() if ".visual." not in name]
    assert stage.all.whole == sum(p.numel() for p in of_text)
    assert stage.all.trained == sum(p.numel() for p in of_text if p.requires_grad)


def count_visits(model: nn.Module) -> dict[str, int]:
    """Count the rows that visit an expert with weights."""
    visits = dict.fromkeys(["computed"], 0)

    def count(router: Any, _: Any, output: Any) -> None:
        visits["computed"] += int((output[2] < router.num_experts).sum())

    for module in model.modules():
        if type(module).__name__ == "LongcatFlashTopkRouter":
            module.register_forward_hook(count)
    return visits


@pytest.mark.parametrize("family", SMALL)
def test_a_step_has_the_products_of_its_class(family: str) -> None:
    """Eager attention computes all pairs, of which half are seen."""
    config = config_of(family, **SMALL[family], attn_implementation="eager")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    visits = count_visits(model)
    shape = ModelShape.of(config.to_dict())
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(ROWS)[None], use_cache=False).logits.sum().backward()
    unseen = ROWS**2 - ROWS * (ROWS + 1) // 2
    flops = model_flops(shape, [ROWS]) + 4 * shape.query_width * (3 * shape.layers + shape.forward_layers) * unseen
    if family == "longcat_flash":  # whose rows visit identities as often as others in the mean alone
        expected = 3 * ROWS * 3 * 4 // 6
        flops += 6 * 3 * 64 * 24 * (visits["computed"] - expected)
    assert counted.get_total_flops() == flops


@pytest.mark.parametrize("family", STREAMS)
def test_connections_have_the_products_of_their_class(family: str) -> None:
    config = config_of(family, **STREAMS[family], attn_implementation="eager")
    model: Any = AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.arange(ROWS)[None], use_cache=False)
    by_module = {name: sum(of.values()) for name, of in counted.get_flop_counts().items()}
    connections = [name for name, m in model.named_modules() if type(m).__name__.endswith(CONNECTIONS)]
    inside = sum(flops for name, flops in by_module.items() if name.partition(".")[2] in connections)
    layer = "DeepseekV4ForCausalLM.model.layers.0" if family == "deepseek_v4" else "Qwen4ExpForCausalLM.model.layers.0"
    depth = layer.count(".") + 1
    parts = sum(flops for name, flops in by_module.items() if name.startswith(f"{layer}.") and name.count(".") == depth)
    streams = read_streams(ConfigReader.read_language_model(config))
    assert streams is not None
    assert inside == 2 * ROWS * (2 * 2 * streams.products + streams.end_products)
    assert by_module[layer] - parts == 2 * ROWS * 2 * streams.mixed
    shape = ModelShape.of(config.to_dict())
    single = ModelShape.of({**config.to_dict(), "hc_mult": 1, "hc_count": 1})
    assert shape.weights - single.weights == 2 * 2 * (streams.products + streams.mixed) + streams.end_products
    assert shape.stored_weights - single.stored_weights == 2 * 2 * streams.products + streams.end_products
    assert single.recomputed_weights < shape.recomputed_weights <= shape.weights - shape.hidden * 61
