"""Layers of other forms, beside what transformers' classes have and compute: two attentions in each layer."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from longspan.layout import Layout
from longspan.model.layers import layers_of_all_stages
from longspan.plan import MemorySettings
from longspan.plan.memory.model_numbers import ModelNumbers, make_stages
from longspan.plan.shape.model_shape import ModelShape, model_flops

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
_LONGCAT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
_LONGCAT |= {"head_dim": 4, "v_head_dim": 12, "num_layers": 3, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24}
_LONGCAT |= {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3}
SMALL: dict[str, dict[str, Any]] = {"longcat_flash": _SIZES | _LONGCAT}
PUBLISHED = ("longcat_flash",)
ROWS = 24


def config_of(family: str, **values: Any) -> PreTrainedConfig:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    kind: Any = CONFIG_MAPPING[family]
    return kind(**values)


@pytest.mark.parametrize("family", PUBLISHED)
def test_parameters_of_published_models_are_those_of_each_layer(family: str) -> None:
    """By the class's defaults, which are a published model's: to the number, of each layer and of all."""
    config = config_of(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    home, settings = Layout(1), MemorySettings()
    numbers = ModelNumbers.from_configuration(config.to_dict(), home, settings)
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of_all_stages(model).values()]
    assert [layer.whole for layer in numbers.layers] == of_layers
    (stage,) = make_stages(numbers, home, settings)
    assert stage.all.whole == sum(p.numel() for p in model.parameters())
    assert stage.all.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


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
    flops = model_flops(shape, [ROWS]) + 12 * shape.query_width * shape.layers * unseen
    if family == "longcat_flash":  # whose rows visit identities as often as others in the mean alone
        expected = 3 * ROWS * 3 * 4 // 6
        flops += 6 * 3 * 64 * 24 * (visits["computed"] - expected)
    assert counted.get_total_flops() == flops
