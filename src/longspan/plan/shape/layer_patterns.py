"""The types of layers by the rules of transformers' classes, where a configuration does not list them. A family without
a rule here is one whose layers all attend to all rows, whatever window its config.json names, or all mix them.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache

from longspan.plan.shape.config_reader import ConfigReader

Rule = Callable[[ConfigReader, int], str]
"""Returns the type of a layer, by its number from 0."""

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def _last_of(every: int, attribute: str = "", last: str = _FULL, others: str = _SLIDING) -> Rule:
    """In each group of `every` layers, or as many as the attribute says, the last one is of type `last`."""

    def rule(read: ConfigReader, layer: int) -> str:
        group = (read.count(attribute) if attribute else 0) or every
        return others if (layer + 1) % group else last

    return rule


def _first_of(every: int, attribute: str = "") -> Rule:
    """In each group of layers the first one attends to all rows."""

    def rule(read: ConfigReader, layer: int) -> str:
        group = (read.count(attribute) if attribute else 0) or every
        return _SLIDING if layer % group else _FULL

    return rule


def _repeated(*types: str) -> Rule:
    return lambda read, layer: types[layer % len(types)]


def _only_with_window(pattern: Rule) -> Rule:
    return lambda read, layer: pattern(read, layer) if read.count("sliding_window") else _FULL


def _has_window(read: ConfigReader) -> bool:
    return read.value("use_sliding_window") is not False and bool(read.count("sliding_window"))


def _all_in_window(read: ConfigReader, layer: int) -> str:
    return _SLIDING if _has_window(read) else _FULL


def _from_max_window_layers(read: ConfigReader, layer: int) -> str:
    return _SLIDING if _has_window(read) and layer >= read.count("max_window_layers") else _FULL


def _qwen2_moe(read: ConfigReader, layer: int) -> str:
    windowed = _has_window(read) and layer < read.count("max_window_layers") and layer % 2 == 0
    return _SLIDING if windowed else _FULL


def _smollm3(read: ConfigReader, layer: int) -> str:
    listed = read.value("no_rope_layers")
    rotary = listed[layer] if listed else (layer + 1) % (read.count("no_rope_layer_interval") or 4)
    return _SLIDING if _has_window(read) and not rotary else _FULL


def _from_last(every: int) -> Rule:
    """Counted from the last layer, the first one of each group of layers attends to all rows."""

    def rule(read: ConfigReader, layer: int) -> str:
        return _SLIDING if (read.count("num_hidden_layers") - 1 - layer) % every else _FULL

    return rule


def _last_is_full(pattern: Rule) -> Rule:
    def rule(read: ConfigReader, layer: int) -> str:
        return _FULL if layer == read.count("num_hidden_layers") - 1 else pattern(read, layer)

    return rule


def _flint(read: ConfigReader, layer: int) -> str:
    return _FULL if layer < 2 or layer % 4 == 1 else _SLIDING


def _cohere2_moe(read: ConfigReader, layer: int) -> str:
    dense = read.count("first_k_dense_replace")
    if layer < dense:
        return _last_of(1, "prefix_dense_sliding_window_pattern")(read, layer)
    return _last_of(4, "sliding_window_pattern")(read, layer - dense)


def _dots3_note(read: ConfigReader, layer: int) -> str:
    full = _FULL if read.value("use_dsa") is False else "indexed_attention"
    return full if read.value("use_sliding_window") is False or layer < 2 or layer % 4 == 1 else _SLIDING


def _deepseek_v4(read: ConfigReader, layer: int) -> str:
    return "compressed_sparse_attention" if layer >= 2 and layer % 2 else "heavily_compressed_attention"


def _lfm3(read: ConfigReader, layer: int) -> str:
    if layer % 4 == 2:
        return _FULL
    return _SLIDING if layer % 4 == 0 and layer else "conv"


def _llama4(read: ConfigReader, layer: int) -> str:
    if not read.count("attention_chunk_size"):
        return _FULL
    if rotary := read.value("no_rope_layers"):  # 1 for a layer with positions, which attends inside chunks
        return "chunked_attention" if rotary[layer] else _FULL
    return _last_of(4, "no_rope_layer_interval", others="chunked_attention")(read, layer)


def _recurrent_gemma(read: ConfigReader, layer: int) -> str:
    types = read.value("block_types", "_block_types") or ("recurrent", "recurrent", "attention")
    return _SLIDING if types[layer % len(types)] == "attention" else "linear_attention"


def _zamba2(read: ConfigReader, layer: int) -> str:
    return "hybrid" if layer in (read.value("hybrid_layer_ids") or ()) else "linear_attention"


def _mimo(read: ConfigReader, layer: int) -> str:
    return _SLIDING if layer and (layer + 1) % 6 else _FULL


_WINDOW_IN_ALL = (
    "blt_patcher",
    "doge",
    "ministral*",
    "mistral",
    "mixtral",
    "moshi",
    "phi3",
    "phi4_multimodal",
    "phimoe",
)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys((*_WINDOW_IN_ALL, "qwen3_moe", "starcoder2"), _all_in_window),
    "afmoe": _last_of(4, "global_attn_every_n_layers"),
    "axk2": _repeated("indexed_attention"),
    "bailing_hybrid": _last_of(6, "layer_group_size", others="linear_attention"),
    "beam": _last_is_full(_last_of(6)),
    "cohere2": _last_of(4, "sliding_window_pattern"),
    "cohere2_moe": _cohere2_moe,
    "cohere_compass_text": _repeated(_FULL),
    "cwm": _first_of(4),
    "deepseek_ocr2_encoder": _from_max_window_layers,
    "deepseek_v32": _repeated("indexed_attention"),
    "deepseek_v4": _deepseek_v4,
    "dory": _last_of(4),
    "dots1": _from_max_window_layers,
    "dots3_note*": _dots3_note,
    "exaone4": _only_with_window(_last_of(4, "sliding_window_pattern")),
    "exaone_moe": _only_with_window(_last_of(4, "sliding_window_pattern")),
    "flint": _last_is_full(_flint),
    "gemma2": _last_of(2),
    "diffusion_gemma*": _last_is_full(_last_of(6)),
    "embedding_gemma2*": _last_is_full(_last_of(6, "sliding_window_pattern")),
    **dict.fromkeys(("gemma3", "gemma3_text"), _last_of(6, "sliding_window_pattern")),
    "gemma3n*": _last_of(5),
    "gemma4*": _last_is_full(_last_of(6)),
    "glm5_next*": _last_of(4, last="indexed_attention", others="linear_attention"),
    "glm_moe_dsa": _repeated("indexed_attention"),
    "gpt_oss": _last_of(2),
    "granite_swa": _first_of(4),
    "granitemoe_swa": _first_of(4),
    "hy_v4*": _repeated("indexed_attention"),
    "inkling*_text": _last_of(6, last="hybrid", others="hybrid_sliding"),
    "kimi_linear": lambda read, layer: _FULL if layer and layer % 4 == 0 else "linear_attention",
    "kolibri1": _last_of(5),
    "laguna": _repeated(_FULL),
    "lara_mini": _repeated("linear_attention", _SLIDING, "linear_attention", _FULL, _SLIDING),
    "lfm3": _lfm3,
    "llama4*": _llama4,
    "mellum": _repeated(_FULL),
    "mimo_v2_flash": _mimo,
    "mistral_large4*": _repeated("indexed_attention"),
    "minimax": _repeated("linear_attention", _FULL),
    "*modernbert*": _first_of(3, "global_attn_every_n_layers"),
    "muse_*": _from_last(4),
    "olmo3": _last_of(4),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_vl*", "qwen2_5_vl*", "qwen2_5_omni*"), _from_max_window_layers),
    "qwen2_moe": _qwen2_moe,
    "qwen4_exp*": _last_of(4, "full_attention_interval", "indexed_attention", "linear_attention"),
    "recurrent_gemma": _recurrent_gemma,
    "smollm3": _smollm3,
    "t5gemma2*": _last_of(6, "sliding_window_pattern"),
    "unlimited_ocr*": lambda read, layer: "reference_sliding_attention" if _has_window(read) else _FULL,
    "vaultgemma": _last_of(2),
    "zamba2": _zamba2,
    "zaya": _repeated("hybrid"),
}


@cache
def find_rule(model_type: str) -> Rule | None:
    """Return the rule of a family's layers; None if all are of one type."""
    return next((rule for pattern, rule in RULES.items() if fnmatchcase(model_type, pattern)), None)


def full_is_indexed(model_type: str) -> bool:
    """Return whether a family's class takes "full_attention" in a list of types for rows that choose their keys."""
    return model_type.startswith(("qwen4_exp", "glm5_next"))
