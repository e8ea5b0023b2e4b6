"""Models with random weights, by name: tiny ones for first runs and tests, and published ones in their real sizes.

A preset is a transformers configuration, nothing else; `load_model` draws its weights.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import ModelError
from longspan.plain_text import nearest_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TINY = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Preset:
    """A transformers configuration class, by name, and the values that differ from its defaults."""

    config_class: str
    values: Mapping[str, Any]

    @property
    def embedding_rows(self) -> int:
        """How many rows the embedding of a published model has; 0 for a tiny one, which gets the tokenizer's ids."""
        return self.values.get("vocab_size", 0)

    @property
    def dtype(self) -> str:
        """The dtype of a published model's weights; of a tiny one float32."""
        return "bfloat16" if self.embedding_rows else "float32"

    @property
    def model_type(self) -> str:
        """The `model_type` of its configuration class, by the class's name, so that transformers is not imported.

        Qwen3MoeConfig is qwen3_moe; Granite's classes have no underscores.
        """
        name = self.config_class.removesuffix("Config")
        if name.startswith("Granite"):
            return name.lower()
        return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


def _qwen3_values(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        **more,
    }


def _window_layers(layers: int, period: int) -> list[str]:
    return ["sliding_attention" if n % period else "full_attention" for n in range(1, layers + 1)]


# Three layers of a linear-time mixer, then one of attention, as the published models have them.
_HYBRID = _TINY | {"num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 24, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_expand": 2}
_EXPERTS = {"moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2}
_SHARED = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 192,
    "shared_intermediate_size": 192,
}
# Latent attention to 64 keys of each row, which an indexer chooses; a dense layer, then one of experts.
_INDEXED = {name: value for name, value in _TINY.items() if name != "head_dim"} | {
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "index_topk": 64,
    "index_head_dim": 32,
    "index_n_heads": 8,
    "moe_intermediate_size": 192,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"],
}

_MOE = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_LLAMA_70B = _LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
_QWEN25_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
_QWEN25_32B = _QWEN25_7B | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "rms_norm_eps": 1e-5,
}
_INSTRUCT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}  # Qwen2.5
# Five layers of a window, then one of full attention, whose positions are stretched eight times.
_GEMMA3_12B: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 15360,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": _window_layers(48, 6),
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
    "tie_word_embeddings": True,
}
_GEMMA3_27B = _GEMMA3_12B | {
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "layer_types": _window_layers(62, 6),
    "intermediate_size": 21504,
    "query_pre_attn_scalar": 168,
}
# Layers alternate: a window of 128 rows, then full attention.
_GPT_OSS_20B: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "layer_types": _window_layers(24, 2),
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "tie_word_embeddings": False,
}
_GPT_OSS_120B = _GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": _window_layers(36, 2),
}
# Three layers of a gated delta net, then one of attention.
_QWEN35_9B = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 12288,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}

PRESETS: dict[str, Preset] = {
    "llama-tiny": Preset("LlamaConfig", _TINY),
    "qwen3-tiny": Preset("Qwen3Config", _TINY),
    # Its layers are enough for pipelines of up to four stages.
    "qwen3-deep-tiny": Preset("Qwen3Config", _TINY | {"num_hidden_layers": 4}),
    "qwen3-moe-tiny": Preset("Qwen3MoeConfig", _TINY | _EXPERTS),
    # Its layers alternate: a window of 128 rows, then full attention; every head has a sink.
    "gpt-oss-tiny": Preset(
        "GptOssConfig",
        _TINY
        | {"intermediate_size": 192, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
    "qwen3-next-tiny": Preset(
        "Qwen3NextConfig", _HYBRID | _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 192}
    ),
    "bamba-tiny": Preset("BambaConfig", _HYBRID | _MAMBA2 | {"attn_layer_indices": [3]}),
    "granite-hybrid-tiny": Preset(
        "GraniteMoeHybridConfig",
        _HYBRID | _MAMBA2 | _SHARED | {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    "deepseek-v32-tiny": Preset("DeepseekV32Config", _INDEXED),
    "qwen3-0.6b": Preset("Qwen3Config", _qwen3_values(1024, 28, 16, 8, 3072, tie_word_embeddings=True)),
    "qwen3-4b": Preset("Qwen3Config", _qwen3_values(2560, 36, 32, 8, 9728, tie_word_embeddings=True)),
    "qwen3-8b": Preset("Qwen3Config", _qwen3_values(4096, 36, 32, 8, 12288)),
    "qwen3-32b": Preset("Qwen3Config", _qwen3_values(5120, 64, 64, 8, 25600)),
    "qwen3-30b-a3b": Preset("Qwen3MoeConfig", _qwen3_values(2048, 48, 32, 4, 6144, **_MOE)),
    "llama-3.1-8b": Preset("LlamaConfig", _LLAMA_8B),
    "llama-3.3-70b-instruct": Preset("LlamaConfig", _LLAMA_70B),
    "qwen2.5-7b": Preset("Qwen2Config", _QWEN25_7B),
    "qwen2.5-7b-instruct": Preset("Qwen2Config", _QWEN25_7B | _INSTRUCT),
    "qwen2.5-32b": Preset("Qwen2Config", _QWEN25_32B),
    "qwen2.5-32b-instruct": Preset("Qwen2Config", _QWEN25_32B | _INSTRUCT),
    # The presets of these two families are the language model alone, without the tower for images.
    "gemma-3-12b": Preset("Gemma3TextConfig", _GEMMA3_12B),
    "gemma-3-27b": Preset("Gemma3TextConfig", _GEMMA3_27B),
    "qwen3.5-9b": Preset("Qwen3_5TextConfig", _QWEN35_9B),
    "gpt-oss-20b": Preset("GptOssConfig", _GPT_OSS_20B),
    "gpt-oss-120b": Preset("GptOssConfig", _GPT_OSS_120B),
}


def find_published_preset(name: str) -> str:
    """Find the preset of a published model, as Qwen/Qwen3-8B; "" for other names, and for what is on this machine.

    An instruction-tuned model has the sizes of its base model, unless it is a preset of its own.
    """
    if Path(name).exists():
        return ""
    published = Path(name).name.lower().removeprefix("meta-")
    base = re.sub("-(instruct|it|pt)$", "", published)
    return next((p for p in (published, base) if p in PRESETS and PRESETS[p].embedding_rows), "")


def preset_config(name: str, *, vocab_size: int | None = None) -> "PreTrainedConfig":
    """Make the configuration of a preset for a vocabulary of `vocab_size` ids; published models have their own.

    >>> preset_config("qwen3-tiny", vocab_size=2048).hidden_size
    192

    Raises ModelError for an unknown name, with the nearest one, and for a vocabulary of less than one id.
    """
    import transformers

    if name not in PRESETS:
        nearest = nearest_name(name, PRESETS)
        hint = f", did you mean {nearest!r}?" if nearest else ""
        raise ModelError(f"unknown model preset {name!r}{hint}; presets: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    values = deepcopy(dict(preset.values))  # transformers writes into a configuration's tables
    # The embedding has as many rows as the tokenizer has ids.
    if not preset.embedding_rows:
        if vocab_size is None:
            raise ModelError(f"preset {name} needs vocab_size, the number of ids of the tokenizer")
        if isinstance(vocab_size, bool) or int(vocab_size) != vocab_size or vocab_size < 1:
            raise ModelError(f"vocab_size is {vocab_size!r}; preset {name} needs an integer of at least 1")
        values["vocab_size"] = int(vocab_size)
    # The tokenizer decides which ids are special; the default ids of a family may lie outside a small vocabulary.
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return getattr(transformers, preset.config_class)(**values, **special)
