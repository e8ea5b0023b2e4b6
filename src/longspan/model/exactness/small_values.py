"""The values of a configuration at widths of tens: sizes, one layer of every kind, and images of a few patches.

Widths keep whole ratios to the hidden size, head counts their kind, rotary scalings their type; attributes that no rule
knows stay.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longspan.model.seams.rope import rope_types

WINDOW = 5
CHUNK = 7
_SMALL_HEADS = 4
_SMALL_HEAD_SIZE = 16
SMALL_VOCABULARY = 61
SCALED_FROM = 16
POSITIONS = 512
_HIDDEN = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
    "swa_num_attention_heads",
    "num_query_groups",
    "linear_num_heads",
    "num_attention_heads_per_layer",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_HEAD_SIZES = (
    "head_dim",
    "swa_head_dim",
    "kv_channels",
    "d_head",
    "dim_head",
    "attention_head_size",
    "d_kv",
    "global_head_dim",
)
_LATENT_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PICKED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
EXPERT_GROUPS = ("n_group", "num_expert_group")
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "local_attention",
    "window_size",
    "keep_window_size",
    "local_attention_window_len",
)
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "context_length",
    "max_source_positions",
    "model_max_length",
)
_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
_DROPOUT = re.compile(r"drop|_pdrop$|^dropout")
_NETWORK = re.compile(
    r"(intermediate|ffn|ff|feed_forward|inner).*(size|dim|mlp)$|^(n_inner|d_inner|dff|dim_ff)$|ffn_dim$"
)
_TOKEN = re.compile(r"_token_(id|index)$|^(mask|unk)_index$")
# What these count has no kinds: state sizes, ranks, chunks of kernels, tables of hashed ids.
_FIXED = {
    **dict.fromkeys(_HEADS, _SMALL_HEADS), **dict.fromkeys(_WINDOWS, WINDOW),
    **dict.fromkeys(_VOCABULARIES, SMALL_VOCABULARY),
    "topk_group": 1, "original_max_position_embeddings": SCALED_FROM,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "o_lora_rank": 16, "qk_head_dim": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6,
    "index_block_size": 4, "index_topk_blocks": 2, "attention_chunk_size": CHUNK, "floor_scale": 8,
    "log_scaling_n_floor": 8, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_head_dim": 16, "mamba_d_state": 8, "state_size": 8, "ssm_state_size": 8,
    "mamba_dt_rank": 4, "time_step_rank": 4, "chunk_size": 8, "mamba_chunk_size": 8, "router_hidden_size": 16,
    "d_rel": 4, "rel_extent": 64, "hc_lowrank": 8, "ngram_vocab_size_base": 64, "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 4, "zero_expert_num": 2, "moe_latent_size": 16, "dim_model_base": 16,
    "encoder_hash_byte_group_vocab": 64, "position_bias_max_distance": 64, "position_bias_num_buckets": 32,
    "num_buckets": 8, "relative_max_distance": 16, "adapter_rank": 8, "gated_norm_rank": 4, "block_multiple_of": 8,
    "ffn_round_up_to_multiple_of": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_headdim": 16,
    "lang_id": 0, "shape_vocab_size": 16, "pronunciation_vocab_size": 16, "shape_embed_dim": 8,
    "pronunciation_embed_dim": 8, "patch_size": 4, "image_size": 16, "n_groups": 2, "mamba_ngroups": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What may be chosen of a small copy; with `true_heads`, heads are as large as those of the configuration."""

    true_heads: bool = False
    experts: int = 4
    pad: int | None = None
    grouped: bool = True  # False: as many key heads as queries
    narrow: bool = True  # the hidden size may differ from the heads' widths together, where it did


class _SmallAttributes:
    """The small value of each attribute of one configuration.

    The small hidden size is heads · head size, or three quarters of it where the model's differs too (`narrow`).
    """

    def __init__(self, values: Mapping[str, Any], sizes: Sizes):
        """Find the sizes to which others keep their ratios: hidden size, heads, head size, experts; None where there
        are none.
        """
        self.values = values
        self.sizes = sizes
        self.hidden, self.heads, self.head_dim, self.experts = (
            next((x for name in names if type(x := values.get(name)) is int and x), None)
            for names in (_HIDDEN, _HEADS, _HEAD_SIZES, _EXPERTS)
        )
        self.small_head_size = _SMALL_HEAD_SIZE
        differs = False
        if self.hidden and self.heads:
            head_dim = self.head_dim or self.hidden // self.heads
            differs = self.head_dim is not None and self.heads * head_dim != self.hidden
            self.small_head_size = head_dim if sizes.true_heads else _SMALL_HEAD_SIZE
        full = _SMALL_HEADS * self.small_head_size
        latent = values.get("kv_lora_rank") is not None  # latent attention, whose heads have sizes of their own
        self.small_hidden = full * 3 // 4 if differs and sizes.narrow and not latent else full

    def shrink_value(self, name: str, value: Any) -> Any:
        """Return the small value of an attribute: itself if no rule knows it.

        Token ids beyond the small vocabulary become 2, so that a token is still set. Dropout is off, as trials compare
        passes.
        """
        if isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            has_sizes_of_layers = name in _HEADS or name in _KV_HEADS or _NETWORK.search(name)
            return [self.shrink_value(name, entry) for entry in value] if has_sizes_of_layers else value
        if name == "pad_token_id" and value is None:
            return self.sizes.pad
        if _TOKEN.search(name):
            fits = isinstance(value, int) and value < SMALL_VOCABULARY
            return value if fits or not value else 2  # None or an empty list: no such token
        if value is None:
            # The class would derive these two from other sizes, whose ratios may differ in the copy.
            if name in _HEAD_SIZES and self.hidden and self.heads:
                return self.small_head_size
            return _SMALL_HEADS if name in _KV_HEADS else None
        if isinstance(value, float) and _DROPOUT.search(name):
            return 0.0
        # Granite's scale of scores: by its default, 1, scores are so large that a softmax takes one key alone
        if isinstance(value, float) and name == "attention_multiplier":
            return min(value, 1.5 / math.sqrt(self.small_head_size))
        if isinstance(value, bool) or not isinstance(value, int) or value == 0:
            return value
        return self._small_integer(name, value)

    def _small_integer(self, name: str, value: int) -> int:
        true_heads = self.sizes.true_heads
        if true_heads and name in _LATENT_SIZES:
            return value
        if name in _FIXED:
            return _FIXED[name]
        if name in _LENGTHS:
            # dynamic scaling begins beyond these positions, within trials
            dynamic = "dynamic" in rope_types(self.values.get("rope_parameters"))
            return SCALED_FROM if dynamic else POSITIONS
        if name in (*_EXPERTS, *PICKED, *EXPERT_GROUPS):
            return min(value, self.sizes.experts if name in _EXPERTS else 2)
        # The small copy has one key head, or as many as query heads, where the configuration says so, else half as
        # many.
        if name in _KV_HEADS:
            # layers with a sliding window (swa_…) may have their own number of query heads
            queries = self.values.get("swa_num_attention_heads") if name.startswith("swa") else self.heads
            full = 1 if value == 1 else _SMALL_HEADS
            if value in (1, queries) or not self.sizes.grouped:
                return full
            return _SMALL_HEADS // 2
        if name in _HEAD_SIZES:
            if value == self.values.get("qk_rope_head_dim"):
                return value if true_heads else _FIXED["qk_rope_head_dim"]
            return self.small_head_size * max(1, value // self.head_dim if self.head_dim else 1)
        return self._derive_width(name, value)

    def _derive_width(self, name: str, value: int) -> int:
        small = self.small_hidden
        hidden = self.hidden
        expand = self.values.get("mamba_expand") or self.values.get("expand") or 2
        derived = {
            # Mamba's heads have 16 features (`_FIXED`)
            **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), expand * small // 16),
            "mamba_d_ssm": expand * small,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2 * max(1, value // (self.values.get("linear_num_key_heads") or value)),
            "query_pre_attn_scalar": self.small_head_size,
            "rotary_dim": self.small_head_size // 2,
            "attention_head_dim": 2 * small // _SMALL_HEADS,
        }
        if name in derived:
            return derived[name]
        if "shared" in name or "moe" in name or "expert" in name:
            return 32 if _NETWORK.search(name) else value
        if hidden and value == hidden:
            return small
        if _NETWORK.search(name):
            if self.experts and "moe_intermediate_size" not in self.values:
                return 32
            return small * 3 // 2
        # A number up to 64 counts something else, such as the pixels of a patch.
        if not (hidden and value > 64 and re.search(r"(size|dim|width|channels)$", name)):
            return value
        if value % hidden == 0:
            return small * (value // hidden)
        return max(8, small // (hidden // value)) if hidden % value == 0 else small * 3 // 4


def small_values(values: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return every attribute at its small size; nested values of single layers too, by the same rules.

    >>> small_values({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, Sizes())
    {'hidden_size': 64, 'num_attention_heads': 4, 'num_key_value_heads': 2}
    """
    rules = _SmallAttributes(values, sizes)
    small = {name: rules.shrink_value(name, value) for name, value in values.items()}
    if isinstance(layers := values.get("per_layer_config"), Mapping):
        small["per_layer_config"] = {
            layer: {name: rules.shrink_value(name, value) for name, value in entry.items()}
            for layer, entry in layers.items()
        }
    if isinstance(rope := values.get("rope_parameters"), Mapping):
        small["rope_parameters"] = _small_rope(rope, small, rules.small_head_size)
    return small


def _count_rotary_pairs(rope: Mapping[str, Any], small: Mapping[str, Any], head_size: int) -> int:
    share = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
    return int((small.get("qk_rope_head_dim") or small.get("head_dim") or head_size) * share) // 2


def _small_rope(rope: Mapping[str, Any], small: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Scaling begins at a length that trials exceed; M-RoPE keeps the share of frames, the others get equal shares."""
    out = dict(rope)
    pairs = _count_rotary_pairs(rope, small, head_size)
    for name, value in rope.items():
        if isinstance(value, Mapping):
            out[name] = _small_rope(value, small, head_size)
        elif name == "original_max_position_embeddings" and isinstance(value, int):
            out[name] = SCALED_FROM
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            out[name] = [value[len(value) * i // pairs] for i in range(pairs)]  # evenly spaced
        elif name == "mrope_section" and isinstance(value, list):
            # pairs of height and of width; frames get the others, at least one
            others = (pairs - max(1, pairs * value[0] // sum(value))) // (len(value) - 1)
            out[name] = [pairs - others * (len(value) - 1), *[others] * (len(value) - 1)]
    return out


# ---- layers

# Kinds of layers are told apart by lists with an entry for each layer (its attention, its mixture or dense network, its
# rope), by lists of layer indices, by counts of first or last layers, and by periods. One layer of every kind is
# chosen, in order.

LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_layers_per_stack",
    "depth",
)
_INDICES = (
    "mlp_only_layers",
    "moe_layers",
    "full_attn_idxs",
    "cross_attention_layers",
    "attn_layer_indices",
    "hybrid_layer_ids",
    "local_layer_ids",
    "ple_layer_ids",
)
_FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
_PERIODS = {
    "decoder_sparse_step": None,
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "moe_layer_interval": None,
}
_MOST = 6  # kinds of layers that each get a layer; of more kinds, layers that show each property


class LayerChoice(NamedTuple):
    """The layers, `of` so many, that a small copy has; `layer_value` gives the values of a configuration for them."""

    of: int
    layers: tuple[int, ...]

    def layer_value(self, name: str, value: Any) -> Any:
        """Return the value of one attribute for the chosen layers; layers 0, 3 and 7 of 8, say, become 0, 1 and 2."""
        if name in LAYER_COUNTS and value == self.of:
            return len(self.layers)
        if name in _INDICES and isinstance(value, list | tuple):
            return [index for index, layer in enumerate(self.layers) if layer in value]
        if name in _FIRST and isinstance(value, int):
            return sum(layer < value for layer in self.layers)
        if name == "num_kv_shared_layers" and isinstance(value, int):
            return sum(layer >= self.of - value for layer in self.layers)
        if name == "moe_layer_end_index" and isinstance(value, int):
            return len(self.layers) - 1
        if name == "per_layer_config" and isinstance(value, Mapping):
            return {
                index: value[key] for index, layer in enumerate(self.layers) for key in value if int(key) == layer
            }
        # The value is each layer's own number.
        if isinstance(value, list) and value == [*range(self.of)]:
            return [*range(len(self.layers))]
        if isinstance(value, list | tuple) and len(value) == self.of and self.of > 1:
            return [value[layer] for layer in self.layers]
        return value


def choose_layers(values: Mapping[str, Any], least: int = 2) -> LayerChoice:
    """Choose the layers of a small copy: the first of every kind, then others from the first on, up to `least`.

    A kind is what a configuration's values become for a layer alone. Of more than six kinds, those are left out that
    show no value which an earlier kind does not. Where layers alternate by a period and these are fewer than four, the
    copy has layers 0 to 3 instead: its periods are two, so that four layers show each kind twice.
    """
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), 0)
    kinds = list[frozenset[str]]()
    for layer in range(count):
        choice = LayerChoice(count, (layer,))
        kinds.append(frozenset(f"{name}={choice.layer_value(name, value)}" for name, value in values.items()))
    layers = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    if len(layers) > _MOST:
        layers = _layers_with_new_values(layers, kinds)
    further_layers = [layer for layer in range(count) if layer not in layers]
    layers += further_layers[: max(0, least - len(layers))]
    if small_periods(values) and len(layers) < 4:
        return LayerChoice(count, tuple(range(min(4, count))))
    return LayerChoice(count, tuple(sorted(layers)))


def _layers_with_new_values(layers: Sequence[int], kinds: Sequence[frozenset[str]]) -> list[int]:
    chosen = list[int]()
    shown = set[str]()
    for layer in layers:
        if not kinds[layer] <= shown:
            chosen.append(layer)
        shown |= kinds[layer]
    return chosen


def small_periods(values: Mapping[str, Any]) -> dict[str, int]:
    """Return periods of layers above one as periods of two, with offsets of 0 or 1, by name."""
    small: dict[str, int] = {}
    for name, offset in _PERIODS.items():
        if isinstance(values.get(name), int) and values[name] > 1:
            small[name] = 2
            if offset is not None:
                small[offset] = min(1, values[offset])
    return small


# ---- images

# Images are of 16 x 16 pixels or a few times that, patches of 4 x 4; ids of placeholders are in the small vocabulary
# and differ from each other. Everything else of a tower is made small as above.

PATCH = 4
SIDE = 16
_TOKENS = ("_token_id", "_token_index", "_patch_id")
_TOKENS_OF_TEXT = ("bos_", "eos_", "pad_", "decoder_", "sep_", "cls_", "mask_", "unk_")
_TEXT_WIDTHS = ("out_hidden_size", "text_hidden_size", "text_config_hidden_size")  # names of the text model's width
_TOWER: Mapping[str, Any] = {
    "num_position_embeddings": (SIDE // PATCH) ** 2, "num_patches": (SIDE // PATCH) ** 2,
    "position_embedding_size": 64, "posemb_grid_size": 4, "pos_emb_height": 8, "pos_emb_width": 8,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "global_attn_indexes": [1],
    "insert_layer_id": 0, "max_num_patches": 64, "num_image_tokens": 16, "max_image_size": 64, "min_image_size": 16,
    "mm_posemb_size": 32, "mm_embed_dim": 48, "output_proj_dims": 48,
}  # fmt: skip
_TOP: Mapping[str, Any] = {
    "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
    "mm_tokens_per_image": 4, "image_seq_length": 16, "num_query_tokens": 4, "insert_layer_id": 0,
    "vision_soft_tokens_per_image": 4, "projector_hidden_size": 48,
}  # fmt: skip
_TEXTS = ("text_config", "language_config", "llm_config")
_LAYERS = ("depth", "num_hidden_layers", "n_layers")


def small_image_values(values: dict[str, Any], base: type | None) -> dict[str, Any]:
    """Fit tower, M-RoPE's sections and placeholders to the text model of a configuration that `small_values` shrank.

    A `base` class with `get_rope_index` has M-RoPE. Placeholders get the largest ids of the vocabulary, those of images
    first, as there may be fewer ids than names; 0 to 2 stay those of texts.
    """
    vision = values.get("vision_config")
    if not isinstance(vision, dict):
        return values
    text = next((values[name] for name in _TEXTS if values.get(name)), values)
    result = {**values, **{name: value for name, value in _TOP.items() if values.get(name) is not None}}
    width = text.get("hidden_size") if isinstance(text, Mapping) else None
    result["vision_config"] = _small_tower(vision, width)
    if isinstance(second_tower := values.get("high_res_vision_config"), dict):
        result["high_res_vision_config"] = second_tower | {"global_attn_indexes": _TOWER["global_attn_indexes"]}
    if hasattr(base, "get_rope_index"):
        result |= {name: _add_mrope_sections(result[name]) for name in _TEXTS if isinstance(result.get(name), dict)}
    if isinstance(layers := values.get("vision_feature_layer"), list | tuple):
        result["vision_feature_layer"] = [-1, -2][: len(layers)]  # a small tower has them, counted from its end
    tokens = [name for name, value in values.items() if name.endswith(_TOKENS) and isinstance(value, int)]
    placeholders = [name for name in tokens if not name.startswith(_TOKENS_OF_TEXT)]
    placeholders.sort(key=lambda name: (not name.startswith("image_token"), name))
    return result | dict(zip(placeholders, range(SMALL_VOCABULARY - 1, 2, -1), strict=False))


def _small_tower(vision: dict[str, Any], width: int | None) -> dict[str, Any]:
    """`width` is that of the text model; None: unknown."""
    tower = {**vision, **{name: value for name, value in _TOWER.items() if vision.get(name) is not None}}
    tower |= {name: width for name in _TEXT_WIDTHS if name in vision and width}
    for name, side in (("image_size", SIDE), ("patch_size", PATCH)):
        if isinstance(vision.get(name), list | tuple):
            tower[name] = [side] * 2
    if vision.get("deepstack_visual_indexes") is not None or vision.get("fullatt_block_indexes") is not None:
        # three layers, so that some are not named by index
        tower |= {name: 3 for name in _LAYERS if name in vision}
    # Qwen2-VL's names of width and outputs
    if isinstance(vision.get("embed_dim"), int) and "hidden_size" in vision:
        tower |= {"embed_dim": 64, "hidden_size": width}
    # The window counts pixels where patches are merged, else patches.
    if vision.get("window_size"):
        tower["window_size"] = 2 * PATCH * vision["spatial_merge_size"] if vision.get("spatial_merge_size") else 2
    return tower


def _add_mrope_sections(text: dict[str, Any]) -> dict[str, Any]:
    """The class's own default is for a large head; `small_values` scales sections that a configuration sets."""
    rope = text.get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" in rope or any(isinstance(v, dict) for v in rope.values()):
        return text
    pairs = _count_rotary_pairs(rope, text, _SMALL_HEAD_SIZE)
    return text | {"rope_parameters": rope | {"mrope_section": [pairs - pairs // 4 * 2, pairs // 4, pairs // 4]}}
