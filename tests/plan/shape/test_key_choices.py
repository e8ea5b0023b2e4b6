"""How rows come by their keys, beside what transformers' classes do: pairs, weights by layer, products of indexers."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from longspan.errors import PlanError
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.key_choices import KeyChoice, read_key_choice
from longspan.plan.shape.layers import attention_weights, layer_kinds, layer_parts, read_mixer_shape
from longspan.plan.shape.model_shape import ModelShape, model_flops

_DENSE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
_DENSE |= {"pad_token_id": None}
_DENSE |= {"intermediate_size": 24, "num_experts_per_tok": 2}
_INDEX: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16}
_LATENT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    **_INDEX,
}
_SHARED: dict[str, Any] = {"indexer_types": ["full", "shared", "shared", "full"]}
_POOLS: dict[str, Any] = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
_POOLS |= {"indexer_compress_ratio": 4, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16}
_POOLS |= {"shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_POOLS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "hc_lowrank": 8}
_BLOCKS: dict[str, Any] = {"num_key_value_heads": 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4}
_BLOCKS |= {"index_topk_blocks": 3, "head_dim": 16, "num_local_experts": 4, "dense_intermediate_size": 40}
_BLOCKS |= {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "shared_intermediate_size": 24}
_BLOCKS |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_ENTRIES: dict[str, Any] = {"head_dim": 32, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 20, "sliding_window": 6}
_ENTRIES |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "index_topk": 3}
_ENTRIES |= {"n_routed_experts": 4, "moe_intermediate_size": 24, **_INDEX}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": _DENSE | _LATENT | {"qk_rope_head_dim": 4, "index_topk": 6},
    "glm_moe_dsa": _DENSE | _LATENT | _SHARED | {"qk_rope_head_dim": 4, "index_topk": 6, "head_dim": 4},
    "glm5_next": _DENSE | _LATENT | {"index_topk": 8, "index_kpool": 4, "linear_num_heads": 4, "linear_head_dim": 16},
    "qwen4_exp_text": _DENSE | _POOLS,
    "minimax_m3_vl_text": _DENSE | _BLOCKS,
    "deepseek_v4": _DENSE | _ENTRIES,
}
ROWS = 41
# Of several streams of each row, of convolutions along rows and of norms, which are counted elsewhere.
_ELSEWHERE = ("_hc.", "hyper_connection", "conv1d", "layernorm.weight", "A_log", "dt_bias", ".norm.", "e_score")


def config_of(family: str) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    sizes = MODELS[family] | {"num_hidden_layers": 4}
    if family == "glm5_next":  # a language model alone has no class
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
        sizes = {"text_config": sizes, "vision_config": vision}
    kind: Any = CONFIG_MAPPING[family]
    return kind(**sizes)


def make_model(config: Any) -> Any:
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    model = auto.from_config(config)
    return getattr(model.model, "language_model", model.model)


def reader(config: Any) -> ConfigReader:
    return ConfigReader.read_language_model(config)


@pytest.mark.parametrize("family", MODELS)
def test_parameters_are_those_of_each_layer(family: str) -> None:
    """Matrices and indexers of every layer, to the number."""
    config = config_of(family)
    read = reader(config)
    with torch.device("meta"):
        model = make_model(config)
    for kind, layer in zip(layer_kinds(read), model.layers, strict=True):
        indexers = [m for m in layer.modules() if type(m).__name__.endswith("Indexer")]
        indexed = {id(x): x.numel() for m in indexers for x in m.parameters()}
        choice = read_key_choice(read, kind.attention)
        assert bool(indexed) == kind.chooses
        if kind.chooses:
            assert choice is not None and choice.linears + choice.vectors == sum(indexed.values())
        mixer = read_mixer_shape(read)
        parts = layer_parts(read, kind, mixer)
        counted = sum(part.all + part.unvisited for part in parts)
        matrices = sum(
            x.numel()
            for name, x in layer.named_parameters()
            if id(x) not in indexed and x.ndim > 1 and not any(word in name for word in (*_ELSEWHERE, "position_bias"))
        )
        assert counted == matrices + (mixer.channels * mixer.width if kind.mixes and mixer else 0)


def seen_by_rows(model: Any, layer: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pairs of a row and a key, or entry, that a class's attention has in one layer, of one key/value head."""
    attention = model.layers[layer].self_attn
    pairs = list[int]()

    def count(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        if module is attention:
            pairs.append(int((mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0).sum()))
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        return out, None

    name = type(attention).__module__
    monkeypatch.setattr(f"{name}.eager_attention_forward", count)
    with torch.no_grad():
        model(input_ids=torch.arange(ROWS)[None] % 61, use_cache=False)
    (number,) = pairs
    return number


@pytest.mark.parametrize("family", MODELS)
def test_pairs_are_those_of_the_class(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(family)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    config.get_text_config()._attn_implementation = "eager"
    model = make_model(config).eval()
    for parameter in model.parameters():  # zeros would tie all scores
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    read = reader(config)
    kinds = layer_kinds(read)
    for attention in {kind.attention for kind in kinds} - {"", "full_attention"}:
        layer = next(i for i, kind in enumerate(kinds) if kind.attention == attention)
        choice = read_key_choice(read, attention)
        assert choice is not None and choice.pairs(ROWS) == seen_by_rows(model, layer, monkeypatch), attention


@pytest.mark.parametrize("family", ["minimax_m3_vl_text", "deepseek_v32", "glm5_next", "deepseek_v4"])
def test_products_are_those_of_the_class(family: str) -> None:
    """Of an indexer: its linears, and scores of all rows and keys, of which half are seen. A class that adds its heads'
    scores by weights makes a product of that too."""
    config = config_of(family)
    config._attn_implementation = "eager"
    config.get_text_config()._attn_implementation = "eager"
    model = make_model(config).eval()
    name = next(n for n, m in model.named_modules() if type(m).__name__.endswith("Indexer"))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.arange(ROWS)[None] % 61, use_cache=False)
    flops = next(sum(of.values()) for module, of in counted.get_flop_counts().items() if module.endswith(name))
    rotary = [sum(of.values()) for m, of in counted.get_flop_counts().items() if name in m and m.endswith("rotary_emb")]
    read = reader(config)
    choice = read_key_choice(read, next(kind.attention for kind in layer_kinds(read) if kind.chooses))
    assert choice is not None
    units = ROWS // choice.scored
    weighted = 2 * ROWS * units * choice.heads * (family in ("deepseek_v32", "glm5_next"))
    assert flops - sum(rotary) - weighted == 2 * ROWS * (choice.linears + choice.heads * choice.size * units)


@given(
    st.sampled_from([("keys", 1), ("pools", 4), ("blocks", 4), ("entries", 4), ("entries", 8)]),
    st.integers(1, 5),
    st.integers(0, 60),
    st.integers(1, 9),
)
def test_pairs_are_sums_over_rows(kind: tuple[Any, int], most: int, length: int, window: int) -> None:
    form, m = kind
    choice = KeyChoice(form=form, most=most * (m < 8), stride=m, window=window * (form == "entries"), heads=1, scored=m)
    pairs = scored = 0
    for seen in range(1, length + 1):
        scored += seen // m
        if form == "entries":
            pairs += min(seen, window) + (seen // m if m == 8 else min(seen // m, most))
        elif form == "blocks":
            pairs += min((seen - 1) // m, most - 1) * m + (seen - 1) % m + 1
        else:
            pairs += min(seen // m, most) * m + seen % m
    assert (choice.pairs(length), choice.scored_pairs(length)) == (pairs, scored)
    assert form == "entries" or length <= choice.row_pairs or choice.is_made(length)


def test_a_choice_of_pairs_costs_flops_of_its_pairs() -> None:
    config = config_of("minimax_m3_vl_text")
    shape = ModelShape.of(config)
    choice = read_key_choice(reader(config), "minimax_m3_sparse")
    assert choice is not None
    rows = 6 * shape.weights + 2 * 2 * choice.linears
    pairs = 2 * (ROWS * (ROWS + 1) // 2) + 2 * choice.pairs(ROWS)
    scores = 2 * 2 * choice.heads * choice.size * (ROWS * (ROWS + 1) // 2)
    assert model_flops(shape, [ROWS]) == rows * ROWS + 12 * shape.query_width * pairs + scores


def test_names_of_published_files() -> None:
    """MiniMax-M3's and DeepSeek-V4's files name layers and sizes otherwise than transformers does."""
    table = {"sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 8}
    table |= {"sparse_block_size": 16, "sparse_topk_blocks": 5}
    m3: dict[str, Any] = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}
    m3 |= {"sparse_attention_config": table}
    read = reader(m3)
    assert [kind.attention for kind in layer_kinds(read)] == ["full_attention", *["minimax_m3_sparse"] * 2]
    assert [kind.feeds for kind in layer_kinds(read)] == ["dense", "experts", "experts"]
    choice = read_key_choice(read, "minimax_m3_sparse")
    assert choice is not None and (choice.heads, choice.size, choice.stride, choice.most) == (2, 8, 16, 5)
    v4: dict[str, Any] = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 128, 4]}
    kinds = [kind.attention for kind in layer_kinds(reader(v4))]
    assert kinds == ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
    entries = [read_key_choice(reader(v4), kind) for kind in kinds]
    assert [x and (x.stride, x.window, x.most) for x in entries] == [None, (128, 128, 0), (4, 128, 512)]
    weights = [attention_weights(reader(v4), kind).all for kind in kinds]
    assert [w - weights[0] for w in weights] == [0, 2 * 4096 * 512, 4 * 4096 * 512]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["indexed_attention"]}, "no kv_lora_rank, no index_topk, no index_n_heads"),
        ({"model_type": "dots3_note_text"}, "widths of their own"),
        ({"model_type": "mistral_large4_text"}, "keys and values that layers share"),
        ({"model_type": "hy_v4"}, "gates and sinks of attention's heads"),
        ({"model_type": "qwen4_exp_text", "ple_layer_ids": [1]}, "n-gram embeddings of layers"),
    ],
)
def test_what_cannot_be_priced_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 10}
    with pytest.raises(PlanError, match=message):
        ModelShape.of(sizes | {"vocab_size": 100} | changes)
