"""Small copies of configurations: of real models' values, and of every class of transformers' registry."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longspan.errors import ModelError
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration

LONGEST = 96  # tokens of the longest document of a proof
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False}

REAL: dict[str, dict[str, Any]] = {  # what their configurations say beside their class's defaults
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "experts_per_token": 4,
        "initial_context_length": 4096, "eos_token_id": 200002, "pad_token_id": 199999,
        "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096, **_YARN},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "max_position_embeddings": 163840,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
                         "beta_slow": 1, "original_max_position_embeddings": 4096},
    },
    "gemma-3-27b": {
        "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "head_dim": 128,
                        "num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 21504,
                        "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024, "sliding_window_pattern": 6},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896,
                          "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
                          "patch_size": 14},
    },
    "phi-4-mini": {
        "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 200064, "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                         "long_factor": [1.0 + i / 8 for i in range(48)]},
    },
}  # fmt: skip


def _config(name: str) -> PreTrainedConfig:
    values = dict(REAL[name])
    kind = values.pop("model_type")
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    return AutoConfig.for_model(kind, **values)


def _runs(config: PreTrainedConfig) -> torch.Tensor:
    """The loss of one document, of which every parameter of the text model gets a gradient."""
    model = make_tiny_model(config, torch.float32)
    ids = torch.arange(LONGEST)[None] % 61
    logits = model(input_ids=ids, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    loss.backward()
    assert torch.isfinite(loss)
    return loss.detach()


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_shrinks_in_kind(name: str) -> None:
    config = _config(name)
    small = shrink_configuration(config)
    assert type(small) is type(config)
    text, small_text = config.get_text_config(), small.get_text_config()
    assert small_text.hidden_size <= 64 and small_text.num_hidden_layers <= 6 and small_text.vocab_size == 61
    for key in ("num_attention_heads", "num_key_value_heads"):
        assert getattr(small_text, key) <= 4
    kinds = [(t.num_attention_heads == t.num_key_value_heads, t.num_key_value_heads == 1) for t in (small_text, text)]
    assert kinds[0] == kinds[1]
    assert (small_text.sliding_window or 0 if hasattr(text, "sliding_window") else 0) < LONGEST
    assert set(getattr(small_text, "layer_types", None) or ()) == set(getattr(text, "layer_types", None) or ())
    _runs(small)


def test_scalings_keep_their_type_and_begin_within_the_documents() -> None:
    for name, kind in (("gpt-oss-20b", "yarn"), ("deepseek-v3", "yarn"), ("phi-4-mini", "longrope")):
        small = shrink_configuration(_config(name))
        rope = small.rope_parameters
        start = rope.get("original_max_position_embeddings") or small.original_max_position_embeddings
        assert rope["rope_type"] == kind and start < LONGEST / 2 < small.max_position_embeddings


def test_a_padding_id_stays_one() -> None:
    sizes = [{}, {"pad_token_id": 7}, {"pad_token_id": 50256}]
    assert [shrink_configuration(CONFIG_MAPPING["gpt2"](**size)).pad_token_id for size in sizes] == [None, 7, 2]


def test_layers_keep_one_of_every_kind() -> None:
    llama4 = shrink_configuration(CONFIG_MAPPING["llama4_text"]())
    assert llama4.layer_types == ["chunked_attention", "full_attention"] and llama4.no_rope_layers == [1, 0]
    deepseek = shrink_configuration(_config("deepseek-v3"))
    assert deepseek.mlp_layer_types == ["dense", "sparse"] if hasattr(deepseek, "mlp_layer_types") else True
    gemma = CONFIG_MAPPING["gemma3n_text"]()
    small = shrink_configuration(gemma)
    assert small.num_kv_shared_layers == 2 and small.layer_types == ["sliding_attention", "full_attention"] * 3
    assert [bool(sparsity) for sparsity in small.activation_sparsity_pattern] == [True] * 2 + [False] * 4


def test_true_heads_are_those_of_the_model_in_every_layer() -> None:
    assert shrink_configuration(_config("gemma-3-27b"), true_heads=True).get_text_config().head_dim == 128
    deepseek = shrink_configuration(_config("deepseek-v3"), true_heads=True)
    assert (deepseek.qk_nope_head_dim, deepseek.qk_rope_head_dim, deepseek.v_head_dim) == (128, 64, 128)
    phi3 = shrink_configuration(CONFIG_MAPPING["phi3"](), true_heads=True)  # has no head_dim
    assert phi3.hidden_size // phi3.num_attention_heads == 96
    gemma4 = pytest.importorskip("transformers.models.gemma4").Gemma4TextConfig()
    model = make_tiny_model(shrink_configuration(gemma4, true_heads=True), torch.float32)
    assert [layer.self_attn.head_dim for layer in model.model.layers] == [256, 512]
    zamba2 = shrink_configuration(CONFIG_MAPPING["zamba2"](), true_heads=True)  # heads of Mamba 2 follow the width too
    assert (zamba2.attention_head_dim, zamba2.n_mamba_heads) == (160, 40)


def test_scales_of_scores_leave_no_softmax_of_one_key() -> None:
    granite = shrink_configuration(CONFIG_MAPPING["granite"](), true_heads=True)
    size = granite.hidden_size // granite.num_attention_heads
    assert granite.attention_multiplier == pytest.approx(1.5 / size**0.5)
    given = shrink_configuration(CONFIG_MAPPING["granite"](attention_multiplier=0.015625))
    assert given.attention_multiplier == 0.015625


def test_weights_are_always_the_same_and_no_parameter_is_constant() -> None:
    small = shrink_configuration(_config("deepseek-v3"))
    torch.manual_seed(1)
    first = make_tiny_model(small, torch.float64)
    torch.manual_seed(2)
    second = make_tiny_model(small, torch.float64)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.std() > 0.01, name
    bias = dict(first.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.std() > 0.01


def test_what_cannot_be_made_is_said() -> None:
    config = CONFIG_MAPPING["qwen3"](hidden_act="no-such-activation")
    with pytest.raises(ModelError, match=r"no small copy of Qwen3Config can be made: KeyError.*no-such-activation"):
        shrink_configuration(config)


KINDS = ("gpt2", "opt", "llama4", "gemma4_text", "minicpm3", "mamba2", "jamba", "deepseek_v4", "mllama", "bloom")


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_classes_of_every_kind(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    small = shrink_configuration(config)
    assert type(small) is type(config) and small.model_type == config.model_type
    assert _runs(small) > 0


def test_weights_do_not_depend_on_the_attention_that_a_part_lacks() -> None:
    """A tower of audio is not given "sdpa", which its class says once the other parts have drawn weights."""
    kind = pytest.importorskip("transformers.models.gemma4").Gemma4Config
    small = shrink_configuration(kind(vision_config={}, audio_config={}), images=True)
    first, second = (
        dict(make_tiny_model(small, torch.float32, attention=name, images=True).named_parameters())
        for name in ("sdpa", "eager")
    )
    assert first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())
