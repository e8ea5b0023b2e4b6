"""What a family of models is, beyond its configuration: one row a family, which every room reads.

A row counts for each `model_type` that its name matches ("qwen3*": all that begin so); later rows add to earlier ones.
First come families that share their one fact; no key has two rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

# Styles of tensor parallelism, by transformers' names and ours (model/tensor_parallel/split_modules.py)
COLWISE = "colwise"
ROWWISE = "rowwise"
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
EMBEDDING = "embedding_rowwise"
# Such a linear makes two things of equal width, such as a gate and what it weighs.
PACKED = "packed_colwise"
HEADS = "heads"  # a parameter with one number for each query head

_ATTENTION = {"q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "o_proj": ROWWISE}
_GATED = {"gate_proj": COLWISE, "up_proj": COLWISE, "down_proj": ROWWISE}
_UNGATED = {"up_proj": COLWISE, "down_proj": ROWWISE}
_W123 = {"w1": COLWISE, "w3": COLWISE, "w2": ROWWISE}
_HEAD_NORMS = {"q_norm": PARTIAL_GRADIENT, "k_norm": PARTIAL_GRADIENT}
_EMBEDDINGS = {"embed_tokens": EMBEDDING, "embeddings": EMBEDDING}
# Kimi and Bailing make keys and values of all heads from one latent row.
_LATENT_ATTENTION = {
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), PARTIAL_GRADIENT),
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "g_proj"), COLWISE),
    "o_proj": ROWWISE,
}
_LFM2_ATTENTION = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), COLWISE),
    **dict.fromkeys(("q_layernorm", "k_layernorm"), PARTIAL_GRADIENT),
    "out_proj": ROWWISE,
}


def _layer_plan(**modules: Mapping[str, str]) -> dict[str, str]:
    """A "__" in a module's name stands for a dot."""
    return {
        f"layers.*.{module.replace('__', '.')}.{name}": style
        for module, styles in modules.items()
        for name, style in styles.items()
    }


_XIELU = _layer_plan(mlp={"act_fn.alpha_p": PARTIAL_GRADIENT, "act_fn.alpha_n": PARTIAL_GRADIENT})
_LFM2 = _layer_plan(self_attn=_LFM2_ATTENTION, feed_forward=_W123)
# Layers share these modules; each layer has adapters of its own.
_ZAMBA2 = _layer_plan(
    shared_transformer__self_attn=_ATTENTION
    | {f"linear_{x}_adapter_list.*.0": PARTIAL_GRADIENT for x in "qkv"}
    | {f"linear_{x}_adapter_list.*.1": COLWISE for x in "qkv"},
    shared_transformer__feed_forward={
        "gate_up_proj": PACKED,
        "down_proj": ROWWISE,
        "gate_up_proj_adapter_list.*.0": PARTIAL_GRADIENT,
        "gate_up_proj_adapter_list.*.1": PACKED,
    },
)


_ROPE_BY_LAYER = {
    layer: {"rope_type": "default", "rope_theta": 1e4} for layer in ("full_attention", "sliding_attention")
}


_Values = Mapping[str, Any]
_Small = Mapping[
    str, Callable[[_Values], Any] | bool | int | list[str] | list[int] | dict[int, int] | dict[str, int]
]


def _defaults_where_none(**values: Any) -> _Small:
    """Each default stands in place of a None in the copy's configuration."""
    # `key` is a parameter, as a lambda would look up `name` only when it is called, after the loop
    return {name: lambda small, key=name: values[key] if small.get(key) is None else small[key] for name in values}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a family; the defaults are those of a family without a row.

    >>> find_family("qwen3_next").gated_queries, find_family("llama") == Family()
    (True, True)

    Only what differs from most families is a fact here; everything else is read from the model's configuration.
    """

    head_norms: bool = False  # a norm of each query and key
    post_norms: bool = False  # a norm after attention and after the MLP too
    gated_queries: bool = False  # the query projection has a gate for each query
    gate_linear: str = ""  # that gate has a linear of its own, of this name
    norm_weights: bool = True  # False: norms of layers have none
    wide_latent_queries: bool = False  # latent queries of twice as many inputs, and a gate
    shared_blocks: bool = False  # layers are mixers, and some come after a block that they share
    mlp_width: str = ""  # the attribute of the MLP's width; null there: four times the hidden size
    mlp_gate: bool = True  # False: two products, without an `mlp_hidden_act` that would tell
    gated_shared_expert: bool = False  # the shared expert has a weight for each row
    own_expert_gate: bool = False  # experts with a gate of several steps, routed by scores alone
    wide_router: bool = False  # the router multiplies rows in float32
    experts_interface: bool = True  # experts have transformers' common interface
    mean_of_streams: bool = False  # the last layer's streams are added, without weights
    double_layers: bool = False  # a layer has two attentions and two MLPs, and experts beside the first of these
    rotary: bool = True  # False: attention of a hybrid without positions
    rotary_key: str = ""  # the attribute that switches them on (True or "rope"); without it they are off
    prefix_rows: bool = False  # rows at the start of a document see each other in both directions
    images: Literal["", "merged", "features", "pooled", "patches"] = ""  # how a priced tower makes an image's rows
    gated_tower: bool = False  # MLPs of the tower have three products
    square_patches: bool = False  # patches are (n, C, p, p)
    no_images: str = ""  # why images cannot be given, clearer than the differences that a trial finds
    # Published weights of multi-token prediction have such names.
    mtp_names: Literal["", "last layers", "qwen"] = ""
    mtp_norm: str = "shared_head.norm."  # the last norm of depths that are named as last layers
    unpriced: str = ""  # what its layers have that no configuration tells for plans and prices
    tensor_parallel: Mapping[str, str] | None = None  # styles that transformers 5.17 to 5.23 lacks
    # A small copy has these values; functions are of its other values.
    small: _Small = field(default_factory=dict[str, Any])


# Families that share one fact.
_SHARED_ROWS: tuple[Mapping[str, Family], ...] = (
    dict.fromkeys(
        (
            "arcee",
            "bert-generation",
            "biogpt",
            "gpt_neox",
            "jais2",
            "nanochat",
            "nemotron",
            "persimmon",
            "phi",
            "starcoder2",
        ),
        Family(mlp_gate=False),
    ),
    dict.fromkeys(
        (
            "apertus*",
            "dots1*",
            "exaone4",
            "exaone_moe",
            "flex_olmo",
            "flint",
            "hunyuan_v1*",
            "hy_v3",
            "laguna",
            "lara_mini",
            "lfm2*",
            "lfm3*",
            "mellum*",
            "minimax_m2",
            "minimax_m3*",
            "olmo2*",
            "olmo3*",
            "olmo_hybrid",
            "olmoe",
            "qwen3*",
        ),
        Family(head_norms=True),
    ),
    dict.fromkeys(
        (
            "axk*",
            "bailing_hybrid*",
            "deepseek_ocr2*",
            "deepseek_v[23]*",
            "dots[13]*",
            "exaone_moe*",
            "glm4_moe*",
            "glm4v_moe*",
            "glm_moe_dsa*",
            "hy_v4*",
            "kimi_linear*",
            "kolibri1*",
            "mimo_v2_flash*",
            "muse_spark*",
            "nemotron_h*",
            "sarvam_mla*",
            "solar_open*",
            "unlimited_ocr*",
        ),
        Family(wide_router=True),
    ),
    dict.fromkeys(("hy_v4", "hy_v4_vl_text"), Family(unpriced="gates and sinks of attention's heads")),
    dict.fromkeys(("gemma2*", "glm4", "glm4v", "glm4v_text"), Family(post_norms=True)),
    dict.fromkeys(("afmoe", "beam", "gemma3*", "gemma4*", "kolibri1"), Family(head_norms=True, post_norms=True)),
    dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), Family(mtp_names="last layers")),
    dict.fromkeys(("mellum", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), Family(mtp_names="qwen")),
)
_OWN_ROWS: dict[str, Family] = {
    "apertus": Family(mlp_gate=False, tensor_parallel=_XIELU),
    "apertus1p5_text": Family(tensor_parallel=_XIELU),
    "aria": Family(small={"projector_patch_to_query_dict": {16: 4}}),
    "axk1": Family(unpriced="a norm behind its experts"),
    "axk2": Family(wide_latent_queries=True),
    "bailing_hybrid": Family(
        mtp_names="last layers",
        mtp_norm="final_layernorm.",
        tensor_parallel=_layer_plan(self_attn=_LATENT_ATTENTION),
    ),
    **dict.fromkeys(
        ("bamba", "falcon_h1"),
        Family(tensor_parallel=_EMBEDDINGS | _layer_plan(self_attn=_ATTENTION, feed_forward=_GATED)),
    ),
    "cohere_compass_text": Family(
        small={"rope_parameters": lambda small: small["rope_parameters"] or _ROPE_BY_LAYER},
    ),
    "dbrx": Family(
        small={"attn_config": lambda small: small["attn_config"] | {"rope_theta": 1e4, "clip_qkv": 8.0}}
    ),
    "deepseek_v2": Family(small=_defaults_where_none(num_experts_per_tok=2)),
    # Documents of trials have entries of both kinds.
    "deepseek_v4": Family(
        small={"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
    ),
    "dots3_note*": Family(unpriced="layers with widths of their own (per_layer_config)"),
    "dory": Family(
        # Its dict counts attention and MLPs apart: four layers, the two in the middle run again.
        small={
            "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
            "num_hidden_layers": 8,
            "n_input_layers": 2,
            "n_recurrent_layers": 4,
            "n_output_layers": 2,
        }
    ),
    "dots1": Family(small=_defaults_where_none(n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2)),
    "gemma3": Family(images="pooled"),
    "glm4_moe": Family(mtp_names="last layers", tensor_parallel=_layer_plan(self_attn=_HEAD_NORMS)),
    "glm5_next*": Family(rotary=False, wide_router=True, mean_of_streams=True),
    "glm5_next_text": Family(small={"index_topk": 8, "index_kpool": 4, "qk_rope_head_dim": 0}),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), Family(mlp_width="n_inner", mlp_gate=False)),
    "gpt_oss": Family(own_expert_gate=True, tensor_parallel=_layer_plan(self_attn=_ATTENTION | {"sinks": HEADS})),
    "granitemoehybrid": Family(
        rotary_key="position_embedding_type",
        tensor_parallel=_layer_plan(
            self_attn=_ATTENTION, shared_mlp={"input_linear": PACKED, "output_linear": ROWWISE}
        ),
    ),
    "hrm_text": Family(
        gated_queries=True,
        gate_linear="gate_proj",
        norm_weights=False,
        # Two stacks of two layers, which run four and two times; the first pass of the low one has no gradients.
        small={"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 12},
    ),
    "kimi_k25": Family(
        square_patches=True, small={"projection_hidden_size": lambda small: small["vision_config"]["hidden_size"]}
    ),
    "kimi_linear": Family(rotary=False, tensor_parallel=_layer_plan(self_attn=_LATENT_ATTENTION)),
    "lfm2": Family(tensor_parallel=_EMBEDDINGS | _LFM2),
    "lfm2_moe": Family(tensor_parallel=_LFM2, small=_defaults_where_none(layer_types=["conv", "full_attention"])),
    "lfm3": Family(
        tensor_parallel=_EMBEDDINGS
        | _layer_plan(self_attn=_ATTENTION | _HEAD_NORMS | {"g_proj": COLWISE}, feed_forward=_W123)
    ),
    "llama4*": Family(experts_interface=False),
    "llama4_vision_model": Family(
        small={
            "intermediate_size": lambda small: int(small["hidden_size"] / small["pixel_shuffle_ratio"] ** 2),
            "vision_output_dim": lambda small: small["projector_output_dim"],
        }
    ),
    "llava": Family(images="features"),
    "longcat_flash": Family(double_layers=True, experts_interface=False, wide_router=True),
    "mamba2": Family(
        tensor_parallel=_EMBEDDINGS,
        small={"num_heads": lambda small: small["expand"] * small["hidden_size"] // small["head_dim"]},
    ),
    # Each key/value head has an index head of its own.
    "minimax_m3_vl_text": Family(
        small={
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": lambda small: small["num_key_value_heads"],
        }
    ),
    "mistral_large4*": Family(unpriced="keys and values that layers share"),
    "mllama": Family(no_images="its layers attend across to its images"),
    "nemotron_h": Family(
        rotary=False,
        tensor_parallel=_layer_plan(mixer=_ATTENTION | _UNGATED, mixer__shared_experts=_UNGATED),
    ),
    "opt": Family(mlp_width="ffn_dim", mlp_gate=False),
    "paddleocr_vl": Family(square_patches=True),
    "paligemma": Family(
        prefix_rows=True,
        images="patches",
        small={"projection_dim": lambda small: small["text_config"]["hidden_size"]},
    ),
    "qwen2_5_vl*": Family(images="merged", gated_tower=True),
    "qwen2_moe*": Family(gated_shared_expert=True),
    "qwen2_vl*": Family(images="merged"),
    "qwen3_5*": Family(gated_queries=True, images="merged"),
    "qwen3_5_moe*": Family(gated_shared_expert=True),
    "qwen3_next*": Family(gated_queries=True, gated_shared_expert=True),
    "qwen3_vl*": Family(images="merged"),
    "qwen3_vl_moe_text": Family(tensor_parallel=_layer_plan(self_attn=_HEAD_NORMS)),
    "qwen3_vl_text": Family(tensor_parallel=_layer_plan(self_attn=_ATTENTION | _HEAD_NORMS, mlp=_GATED)),
    "qwen4_exp*": Family(head_norms=True, gated_queries=True, gated_shared_expert=True),
    # 8 keys a row are two pools.
    "qwen4_exp_text": Family(
        small={
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": lambda small: [1] if small.get("ple_layer_ids") else [],
        }
    ),
    "reformer": Family(small={"axial_pos_embds": False, "lsh_attn_chunk_length": 1, "local_attn_chunk_length": 1}),
    "sarvam_moe": Family(head_norms=True, tensor_parallel=_layer_plan(self_attn=_HEAD_NORMS)),
    "xmod": Family(small={"default_language": lambda small: small["languages"][0]}),
    "zamba": Family(small={"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}),
    "zamba2": Family(
        shared_blocks=True,
        rotary_key="use_mem_rope",
        tensor_parallel=_EMBEDDINGS | _ZAMBA2,
        small={  # two layers of the same shared block
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
        },
    ),
}


def _join_rows(*tables: Mapping[str, Family]) -> dict[str, Family]:
    """Raise ValueError for a key of two tables, of whose rows a dict would keep the later one alone."""
    rows = dict[str, Family]()
    for table in tables:
        if repeated := rows.keys() & table.keys():
            raise ValueError(f"FAMILIES has two rows of {', '.join(sorted(repeated))}; make one row of both")
        rows |= table
    return rows


FAMILIES = _join_rows(*_SHARED_ROWS, _OWN_ROWS)
_DEFAULTS = Family()


@cache
def find_family(model_type: str | None) -> Family:
    """Return what the rows say of a `model_type` together; the defaults where none names it."""
    facts = dict[str, Any]()
    for pattern, row in FAMILIES.items():
        if fnmatchcase(model_type or "", pattern):
            facts |= {name: fact for name, fact in vars(row).items() if fact != getattr(_DEFAULTS, name)}
    return Family(**facts)


# The first version of transformers with language models of these types, where it is later than the oldest that
# longspan runs with.
_SINCE = {
    "5.24": ("apertus1p5*", "dory", "exaone", "hy_v4_vl*", "inkling2_loop*", "lara_mini", "sarvam_m*"),
    "5.23": ("dots3_note*", "granite_docling*", "inkling2*", "internlm3", "iquestcoder", "lfm3*"),
    "5.22": ("mistral_large4*",),
    "5.21": ("flint",),
    "5.20": ("bailing_hybrid", "beam", "kolibri1", "molmo2*", "muse_spark*", "unlimited_ocr*"),
    "5.18": ("nemotron_h_omni",),
}


def first_version(model_type: str) -> str:
    """Return the first version of transformers with a model type; "" if it is as old as the oldest, or unknown."""
    versions = (
        version for version, patterns in _SINCE.items() if any(fnmatchcase(model_type, name) for name in patterns)
    )
    return next(versions, "")
