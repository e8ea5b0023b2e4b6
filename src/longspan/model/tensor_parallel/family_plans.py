"""The tensor-parallel plans of models: transformers' own, and what we add for families that it covers in part or not.

A plan maps names of modules or parameters to styles (how each is split); `*` stands for a layer's number. What lies
inside a mixer (a state-space layer or another one in place of attention) is left out: its heads are split as a whole
(`mixers.py`).
"""

from collections.abc import Mapping

from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import text_name
from longspan.model.mtp.depths import PREFIX

COLWISE, ROWWISE = "colwise", "rowwise"
QKV = "qkv"  # of one linear that makes queries, keys and values, in an encoder
GATHERED = ("colwise_gather_output", "colwise_rep")
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
EMBEDDING = "embedding_rowwise"
SPLIT_INPUT = "rowwise_split_input"  # of a linear whose input is whole on every rank
PACKED = "packed_colwise"  # of a linear that makes two things of equal width, such as a gate and what it weighs
HEADS = "heads"  # ours: a parameter with one number for each query head
MIXER = "mixer"  # ours: a state-space layer, whose heads or channels are split

_ATTENTION = {"q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "o_proj": ROWWISE}
_GATED = {"gate_proj": COLWISE, "up_proj": COLWISE, "down_proj": ROWWISE}
_LFM2_NORMS = {"q_layernorm": PARTIAL_GRADIENT, "k_layernorm": PARTIAL_GRADIENT}
_LFM2_ATTENTION = {"q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "out_proj": ROWWISE} | _LFM2_NORMS
_LFM3_ATTENTION = _ATTENTION | {"q_norm": PARTIAL_GRADIENT, "k_norm": PARTIAL_GRADIENT, "g_proj": COLWISE}
_LATENT_ATTENTION = {  # of Kimi and Bailing: keys and values of all heads from one latent row
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), PARTIAL_GRADIENT),
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "g_proj"), COLWISE),
    "o_proj": ROWWISE,
}


def _layer_plan(**modules: Mapping[str, str]) -> dict[str, str]:
    """Return the plan of modules inside every layer; "__" stands for a dot, which no keyword may have."""
    return {
        f"layers.*.{module.replace('__', '.')}.{name}": style
        for module, styles in modules.items()
        for name, style in styles.items()
    }


_HEAD_NORMS = {"q_norm": PARTIAL_GRADIENT, "k_norm": PARTIAL_GRADIENT}
_EMBEDDINGS = {"embed_tokens": EMBEDDING, "embeddings": EMBEDDING}
_W123 = {"w1": COLWISE, "w3": COLWISE, "w2": ROWWISE}
_LFM2 = _layer_plan(self_attn=_LFM2_ATTENTION, feed_forward=_W123)
_ZAMBA2 = _layer_plan(  # what layers share; each layer has adapters of its own
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
_OURS: dict[str, dict[str, str]] = {  # what transformers 5.17 to 5.23 lacks
    "bailing_hybrid": _layer_plan(self_attn=_LATENT_ATTENTION),
    "bamba": _EMBEDDINGS | _layer_plan(self_attn=_ATTENTION, feed_forward=_GATED),
    "falcon_h1": _EMBEDDINGS | _layer_plan(self_attn=_ATTENTION, feed_forward=_GATED),
    "gpt_oss": _layer_plan(self_attn=_ATTENTION | {"sinks": HEADS}),
    "granitemoehybrid": _layer_plan(
        self_attn=_ATTENTION, shared_mlp={"input_linear": PACKED, "output_linear": ROWWISE}
    ),
    "kimi_linear": _layer_plan(self_attn=_LATENT_ATTENTION),
    "lfm2": _EMBEDDINGS | _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": _EMBEDDINGS | _layer_plan(self_attn=_LFM3_ATTENTION, feed_forward=_W123),
    "mamba2": _EMBEDDINGS,
    "nemotron_h": _layer_plan(
        mixer=_ATTENTION | {"up_proj": COLWISE, "down_proj": ROWWISE},
        mixer__shared_experts={"up_proj": COLWISE, "down_proj": ROWWISE},
    ),
    "qwen3_vl_moe_text": _layer_plan(self_attn=_HEAD_NORMS),
    "qwen3_vl_text": _layer_plan(self_attn=_ATTENTION | _HEAD_NORMS, mlp=_GATED),
    "zamba2": _EMBEDDINGS | _ZAMBA2,
}
_HEAD = {"lm_head": GATHERED[0]}


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of every module and parameter that has one, by its name in the model, with `*` for layers.

    The plan in a configuration names modules of the base model, without its prefix; its styles replace ours. The plan
    of the class (`_tp_plan`) names modules of the whole model, so the head too. Layers that predict further tokens
    (multi-token prediction) are split as decoder layers. Raises ModelError for a model without a plan.
    """
    config = model.config.get_text_config()
    theirs, ours = getattr(config, "base_model_tp_plan", None), _OURS.get(config.model_type)
    if not theirs and ours is None:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan of its configuration); use tp 1"
        )
    base = {**(ours or {}), **(theirs or {})}
    prefix = text_name(model)
    inside_layers = {inside: style for name, style in base.items() if (inside := name.partition(".*.")[2])}
    return (  # of two styles of a name the later one counts
        {f"{prefix}.{name}": style for name, style in base.items()}
        | {f"{PREFIX}.layers.*.mtp_block.{inside}": style for inside, style in inside_layers.items()}
        # a block of several layers numbers them
        | {f"{PREFIX}.layers.*.mtp_block.*.{inside}": style for inside, style in inside_layers.items()}
        | ({} if ours is None else _HEAD)  # a family that transformers does not cover may not name its head
        | dict(getattr(type(model), "_tp_plan", None) or {})
    )
