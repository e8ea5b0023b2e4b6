"""Sizes, weights, FLOPs and cost of a model, from its configuration alone, and as torch counts them."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from longspan.errors import PlanError
from longspan.model import load_model, preset_config
from longspan.model.add_depths import add_mtp
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.kinds import find_mixers
from longspan.model.seams.mixers import ROWS_ALONE, set_mixer_ops
from longspan.plan import Cost
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.families import Family, _join_rows
from longspan.plan.shape.layers import MixerShape, layer_types
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape, has_mixers, model_flops, peak_tflops, read_experts
from tests.plan.cases import flops_cost

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 10, "vocab_size": 100}
_ATTENTION = 8 * (8 + 2 * 8) + 8 * 8  # no head_dim, no key/value heads: 2 heads of 8 / 2, all alike


def test_the_default_cost_is_qwen3_8b_at_400_tflops() -> None:
    values = flops_cost(QWEN3_8B, tflops=400).to_json()
    constants = {name: value for name, value in Cost().to_json().items() if name != "source"}
    assert len(constants) == 20
    for name, value in constants.items():
        assert values[name] == pytest.approx(value, rel=1e-3), name


def test_attention_at_another_rate() -> None:
    windows = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}
    plain, faster = (flops_cost(SMALL | windows, tflops=100, attention_tflops=rate) for rate in (None, 200.0))
    assert faster.attention_seconds == plain.attention_seconds / 2
    linear = 6 * ModelShape.of(SMALL).weights / 100e12
    assert faster.linear_seconds == pytest.approx((plain.linear_seconds + linear) / 2) != plain.linear_seconds


def test_a_second_row_of_a_family_is_refused() -> None:
    with pytest.raises(ValueError, match="FAMILIES has two rows of qwen3; make one row of both"):
        _join_rows({"qwen3": Family(), "llama": Family()}, {"qwen3*": Family(), "qwen3": Family(head_norms=True)})


FAMILIES = {  # with the width of their MLPs
    "gpt2": {"n_inner": None},
    "gpt2, a width": {"n_inner": 100},
    "gpt_bigcode": {},
    "nemotron": {"intermediate_size": 100, "num_key_value_heads": 4},
    "opt": {"ffn_dim": 100, "word_embed_proj_dim": 64},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "intermediate_size": 100,
        "first_k_dense_replace": 1,
    },
    **{family: {"intermediate_size": 100} for family in ("biogpt", "gpt_neox", "phi", "starcoder2", "llama")},
}
ALIKE = {"gpt_bigcode", "biogpt", "gpt_neox", "phi"}  # in their rows: gpt2 and starcoder2 stand for them daily


def rarely(cases: Iterable[str], alike: set[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.whole if case in alike else ()) for case in cases]


@pytest.mark.parametrize("case", rarely(FAMILIES, ALIKE))
def test_weights_are_those_of_the_family(case: str, tmp_path: Path) -> None:
    family = case.partition(",")[0]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
    config: Any = CONFIG_MAPPING[family](**sizes, max_position_embeddings=8, **FAMILIES[case])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1)
    config.save_pretrained(tmp_path)
    shape = ModelShape.of(config)
    assert shape.stored_weights == pytest.approx(matrices, rel=0.01) and ModelShape.of(tmp_path) == shape


@pytest.mark.parametrize("place", ["object", "file", "folder", "text_config", "text_config object"])
def test_wherever_the_configuration_is_kept(place: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    config: Any = {
        "object": SimpleNamespace(**QWEN3_8B),
        "file": tmp_path / "config.json",
        "folder": str(tmp_path),
        "text_config": {"text_config": QWEN3_8B, "hidden_size": 1},
        "text_config object": SimpleNamespace(text_config=SimpleNamespace(**QWEN3_8B)),
    }[place]
    assert flops_cost(config, tflops=100) == flops_cost(QWEN3_8B, tflops=100)


ONE, TWO = {"num_experts_per_tok": 1, "moe_intermediate_size": 3}, {"num_experts_per_tok": 2}
LLAMA4 = {"num_experts_per_tok": 1, "num_local_experts": 4, "moe_layers": [1], "intermediate_size_mlp": 20}


@pytest.mark.parametrize(
    ("changes", "weights", "query", "key"),
    [
        ({}, 2 * (_ATTENTION + 3 * 8 * 10) + 800, 8, 8),
        ({"head_dim": 16, "num_key_value_heads": 1}, 2 * (8 * (32 + 2 * 16) + 32 * 8 + 240) + 800, 32, 16),
        # two experts of 5 for a token, and a router over 4
        (TWO | {"moe_intermediate_size": 5, "num_experts": 4}, 2 * (_ATTENTION + 240 + 32) + 800, 8, 8),
        # experts as wide as intermediate_size, as Mixtral has them
        (TWO | {"num_local_experts": 4}, 2 * (_ATTENTION + 480 + 32) + 800, 8, 8),
        # the first layer dense, in three spellings
        *(
            (ONE | dense, 2 * _ATTENTION + 240 + 72 + 800, 8, 8)
            for dense in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"first_k_dense_replace": 1})
        ),
        # experts for everybody beside those that are chosen
        (ONE | {"n_shared_experts": 2}, 2 * (_ATTENTION + 216) + 800, 8, 8),
        (ONE | {"shared_expert_intermediate_size": 4}, 2 * (_ATTENTION + 168) + 800, 8, 8),
        # Llama 4: the listed layers have experts, one shared, as wide as intermediate_size; others are wider
        (LLAMA4, 2 * _ATTENTION + 3 * 8 * 20 + (3 * 8 * 20 + 32) + 800, 8, 8),
    ],
)
def test_sizes(changes: dict[str, Any], weights: int, query: int, key: int) -> None:
    shape = ModelShape.of(SMALL | changes)
    assert (shape.weights, shape.query_width, shape.key_width, shape.layers) == (weights, query, key, 2)


CHOOSING = {"layer_types": ["indexed_attention"] * 2, "indexer_types": ["full", "shared"], "kv_lora_rank": 6}
CHOOSING |= {"qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5, "index_topk": 16, "index_n_heads": 3}
CHOOSING |= {"index_head_dim": 7}


def test_chosen_keys_cost_tokens_the_same_and_their_choice_all_pairs() -> None:
    shape, price = ModelShape.of(SMALL | CHOOSING), flops_cost(SMALL | CHOOSING, tflops=1e-12)
    ((choice, layers, indexers),) = shape.choosing
    assert (layers, indexers, choice.row_pairs, choice.heads * choice.size) == (2, 1, 16, 3 * 7)  # one chooses for both
    assert (choice.width, shape.key_width, shape.kv_heads) == (2 * 8, 5, 1)  # latents of 6 + 4 and 6 numbers
    assert price.attention_seconds == 3 * 21 and price.choice_share == 1
    assert price.ring_bytes == (2 * 3 * 2 * 5 + 7) * 2
    linear = 6 * shape.weights + 2 * shape.forward_weights
    assert price.linear_seconds == linear + 3 * 2 * 14 * 16 * 16
    chosen, pairs = 16 * 17 // 2 + 14 * 16, 30 * 31 // 2
    flops = linear * 30 + 2 * 12 * shape.query_width * chosen + 2 * 21 * pairs
    assert model_flops(shape, [30]) == flops


@pytest.mark.parametrize(
    ("changes", "attention", "linear"),  # of 2 layers: those that see all, and rows that a token sees in the others
    [
        ({"sliding_window": 16}, 0, 2 * 16),
        ({"sliding_window": 16, "use_sliding_window": False}, 2, 0),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 1, 16),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, 2, 0),
        ({"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}, 1, 16 / 2),
    ],
)
def test_windows_cost_tokens_the_same_and_chunks_half(changes: dict[str, Any], attention: int, linear: float) -> None:
    plain, changed = flops_cost(SMALL, tflops=1e-12), flops_cost(SMALL | changes, tflops=1e-12)
    assert changed.attention_seconds == 7 * 8 * attention
    assert changed.linear_seconds - plain.linear_seconds == 14 * 8 * linear


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "dict has no hidden_size, no num_hidden_layers, no num_attention_heads, no vocab_size, no inter"),
        (SimpleNamespace(**(SMALL | {"vocab_size": None})), "SimpleNamespace has no vocab_size; the cost"),
        ({"text_config": {}}, "text_config of dict has no hidden_size"),
        (SMALL | {"intermediate_size": None}, "no intermediate_size or moe_intermediate_size"),
        (SMALL | {"num_attention_heads": "two"}, "num_attention_heads of dict is 'two'; it must be a count"),
        (SMALL | {"num_attention_heads": -2}, "is -2; it must be a count"),
        (SMALL | {"kv_lora_rank": 512}, "latent attention, which no configuration prices; leave --model out"),
        (SMALL | {"mamba_d_state": 128}, "state-space layers"),
        (SMALL | {"layer_types": ["full_attention", "linear_attention"]}, "layers of type 'linear_attention'"),
        ("no/such/config.json", "cannot read a model's configuration from no/such/config.json: No such file"),
    ],
)
def test_refused(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        flops_cost(config, tflops=100)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PlanError, match=r"not JSON|not an object"):
            flops_cost(tmp_path, tflops=100)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_under_every_name(name: str) -> None:
    counts: dict[str, Any] = {name: 8, "num_experts_per_tok": 2}
    assert read_experts({"text_config": SimpleNamespace(**counts)}) == read_experts(counts) == (8, name, 2, True)
    assert read_experts({"num_experts_per_tok": 2, name: None}) == (0, "", 0, True)


DENSE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE |= {"intermediate_size": 128, "vocab_size": 512}


def pairs(length: int, window: int | None = None) -> int:
    return sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)


@pytest.mark.parametrize("lengths", [[], [1], [40, 24], [7] * 5])
def test_six_for_each_weight_and_token_and_causal_attention(lengths: list[int]) -> None:
    shape = ModelShape.of(DENSE)
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 64 * 512  # the output head once, no embedding
    attention = 2 * sum(12 * 64 * pairs(n) for n in lengths)
    assert model_flops(shape, lengths) == 6 * weights * sum(lengths) + attention


@pytest.mark.parametrize("width", [1, 8, 24, 100])
def test_layers_of_windows_and_chunks_count_what_their_rows_see(width: int) -> None:
    lengths = [40, 24, 3]
    windows = {"sliding_window": width, "layer_types": ["full_attention", "sliding_attention"]}
    chunks = {"attention_chunk_size": width, "layer_types": ["chunked_attention", "full_attention"]}
    in_chunks = sum(row % width + 1 for n in lengths for row in range(n))
    for values, seen in ((windows, sum(pairs(n, width) for n in lengths)), (chunks, in_chunks)):
        shape = ModelShape.of(DENSE | values)
        attention = 12 * 64 * (sum(pairs(n) for n in lengths) + seen)
        assert model_flops(shape, lengths) == 6 * shape.weights * sum(lengths) + attention


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA H200 NVL", "bfloat16", 835.0),
        ("NVIDIA H100 80GB HBM3", "float16", 989.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tensorfloat32", 156.0),
        ("NVIDIA H200", "float64", None),
        ("NVIDIA GH200 480GB", "bfloat16", 989.0),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA RTX A6000", "bfloat16", 154.8),
        ("RTX-A6000", "bfloat16", 154.8),
        ("NVIDIA TITAN V", "bfloat16", None),
    ],
)
def test_peaks_by_name_and_type(device: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(device, dtype) == peak


# ---- state-space layers


ROWS = 16
MAMBA2 = ("bamba", "mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "zamba2+adapters")
HYBRIDS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), "gated delta net"),
    "kimi_linear": "Kimi delta attention",
    **dict.fromkeys(MAMBA2, "Mamba 2"),
    "lfm2_moe": "short convolution",
    **dict.fromkeys(("lfm2", "qwen2_moe", "granitemoeshared"), ""),  # the small copy of lfm2 has attention alone
}
# Another family of the same kind stands for these daily.
ALIKE_HYBRIDS = {"qwen3_5_text", "qwen3_5_moe_text", "mamba2", "granitemoehybrid", "zamba2", "granitemoeshared"}


def products(model: Any) -> tuple[int, int]:
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    for mixer in find_mixers(model).values():
        set_mixer_ops(mixer, lambda batch, rows: ROWS_ALONE)  # the scan is counted by hand
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


@pytest.mark.parametrize("family", rarely(HYBRIDS, ALIKE_HYBRIDS))
def test_weights_are_those_that_multiply_a_row(family: str) -> None:
    config = small(family)
    model, shape = make_tiny_model(config, torch.float32), ModelShape.of(config)
    mixers = len(find_mixers(model))
    of_weights, of_attention = products(model)
    assert 2 * (shape.weights - convolutions(model)) == of_weights
    assert 4 * ROWS**2 * shape.query_width * shape.layers == of_attention
    assert (shape.mixer_layers, shape.mixer.kind if shape.mixer else "") == (mixers, HYBRIDS[family])
    assert shape.decoder_layers == config.num_hidden_layers and has_mixers(config) == bool(mixers)
    assert ModelShape.of(config.to_dict()) == shape  # as a config.json says it


def by_rows(mixer: MixerShape) -> int:
    heads, key, value = mixer.heads, mixer.key_size, mixer.value_size
    state, k, q, v = (torch.zeros(heads, *shape) for shape in ((key, value), (1, key), (1, key), (1, value)))
    with FlopCounterMode(display=False) as counted:
        new = v - torch.bmm(k, state) if mixer.delta else v
        torch.bmm(q, state + torch.bmm(k.mT, new))
    return counted.get_total_flops() if heads else 0


LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "hidden_size": 64}
LFM2 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 61}


def presets() -> dict[str, PreTrainedConfig]:
    names = ("qwen3-next-tiny", "bamba-tiny", "granite-hybrid-tiny")
    tiny = {name: preset_config(name, vocab_size=61) for name in names}
    return tiny | {"lfm2": CONFIG_MAPPING["lfm2"](**LFM2, bos_token_id=1, eos_token_id=2, pad_token_id=0)}


@pytest.mark.parametrize("name", rarely(presets(), {"granite-hybrid-tiny"}))  # daily bamba-tiny stands for it
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
    deeper = ModelShape.of(model.config, mtp_layers=2)
    assert deeper.weights - plain.weights == added
    assert (deeper.layers, deeper.decoder_layers) == (plain.layers + 2, plain.decoder_layers + 2)
    of_layer = plain.recomputed_weights // plain.decoder_layers
    assert deeper.recomputed_weights == plain.recomputed_weights + 2 * of_layer
    deep, flat = (flops_cost(model.config, tflops=1.0, depths=depths).ring_bytes for depths in (2, 0))
    assert deep > flat


def test_a_depth_of_several_layers_costs_them_all() -> None:
    config: Any = shrink_configuration(CONFIG_MAPPING["nemotron_h"](n_routed_experts=4))
    plain, deeper = ModelShape.of(config), ModelShape.of(config, mtp_layers=1)
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
    assert layer_types(ConfigReader.read_language_model(values)) == types


NO_PRICE = "has .*layers of .*, which no configuration prices; leave --model out"
REFUSED = {"zamba": "state-space layers of zamba, Mamba 1", "jamba": "of jamba", "mamba": "of mamba"}
REFUSED |= {"minimax": "layers of type", "falcon_mamba": NO_PRICE, "recurrent_gemma": NO_PRICE}


def test_a_count_of_several_names_is_the_first_that_is_not_zero() -> None:
    read = ConfigReader({"n_groups": 0, "mamba_n_groups": None, "groups": 5}, "a dict")
    assert read.require_count("mamba_n_groups", "n_groups", "groups") == 5
    with pytest.raises(PlanError, match="a dict has no mamba_n_groups or n_groups"):
        read.require_count("mamba_n_groups", "n_groups")


def test_what_has_no_price_is_named() -> None:
    for family, message in REFUSED.items():
        with pytest.raises(PlanError, match=message):
            ModelShape.of(CONFIG_MAPPING[family]())
    sizes = "has no linear_num_key_heads, no linear_key_head_dim, no linear_value_head_dim"
    with pytest.raises(PlanError, match=sizes):
        ModelShape.of({"hidden_size": 8, "linear_num_value_heads": 2, "vocab_size": 9, "num_hidden_layers": 2})
