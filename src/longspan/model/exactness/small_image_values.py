"""Small values for what a configuration says of images: sizes of a tower that fit each other and the text model.

Images are of 16 x 16 pixels or a few times that, patches of 4 x 4; ids of placeholders are in the small vocabulary and
differ from each other. Everything else of a tower is as `small_values.py` makes it.
"""

from collections.abc import Mapping
from typing import Any

from longspan.model.exactness.small_values import Sizes

PATCH, SIDE = 4, 16
_TOKENS = ("_token_id", "_token_index", "_patch_id")
_OF_TEXT = ("out_hidden_size", "text_hidden_size", "text_config_hidden_size")  # names of the text model's width
_TOWER: Mapping[str, Any] = {
    "num_position_embeddings": (SIDE // PATCH) ** 2, "num_patches": (SIDE // PATCH) ** 2,
    "position_embedding_size": 32, "posemb_grid_size": 4, "pos_emb_height": 8, "pos_emb_width": 8,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "global_attn_indexes": [1],
    "insert_layer_id": 0, "max_num_patches": 64, "num_image_tokens": 16, "max_image_size": 64, "min_image_size": 16,
}  # fmt: skip
_TOP: Mapping[str, Any] = {
    "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
    "mm_tokens_per_image": 4, "image_seq_length": 16, "num_query_tokens": 4, "insert_layer_id": 0,
    "vision_soft_tokens_per_image": 4, "projector_hidden_size": 48,
}  # fmt: skip
_TEXTS = ("text_config", "language_config", "llm_config")
_LAYERS = ("depth", "num_hidden_layers", "n_layers")


def least_layers(config: Any) -> int:
    """Return how many decoder layers the text model of a small copy needs: two, or four under DeepStack.

    DeepStack adds rows of images after each of the first two layers, and a trial with two pipeline stages needs two
    layers in each.
    """
    return 4 if getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) else 2


def small_image_values(values: dict[str, Any], sizes: Sizes, base: type | None) -> dict[str, Any]:
    """Make the small values of a model with images fit each other, as its parts were made small separately.

    `base` is its class below the head; one with `get_rope_index` has positions in three parts (M-RoPE). Ids of
    placeholders become the largest of the vocabulary. Values of a model without images are returned as they are.
    """
    vision, width = values.get("vision_config"), _text_width(values)
    if not isinstance(vision, dict):
        return values
    result = {**values, **{name: value for name, value in _TOP.items() if values.get(name) is not None}}
    result["vision_config"] = _small_tower(vision, width)
    if isinstance(second_tower := values.get("high_res_vision_config"), dict):
        result["high_res_vision_config"] = second_tower | {"global_attn_indexes": _TOWER["global_attn_indexes"]}
    if hasattr(base, "get_rope_index"):
        result |= {name: _set_sections(result[name], sizes) for name in _TEXTS if isinstance(result.get(name), dict)}
    if isinstance(layers := values.get("vision_feature_layer"), list | tuple):
        result["vision_feature_layer"] = [-1, -2][: len(layers)]  # a small tower has them, counted from its end
    return result | dict(zip(_placeholder_names(values), range(sizes.vocabulary - 1, 2, -1), strict=False))


def _small_tower(vision: dict[str, Any], width: int | None) -> dict[str, Any]:
    """Return the small values of a tower, whose outputs have the `width` of the text model.

    Sizes and patches that are lists have two sides. Towers whose layers are named by index (DeepStack, full attention)
    have three layers, so that some are named and some are not. In Qwen2-VL `embed_dim` is the tower's width and
    `hidden_size` that of its outputs. Windows are two merged patches wide.
    """
    result = {**vision, **{name: value for name, value in _TOWER.items() if vision.get(name) is not None}}
    result |= {name: width for name in _OF_TEXT if name in vision and width}
    for name in ("image_size", "patch_size"):
        if isinstance(vision.get(name), list | tuple):
            result[name] = [SIDE if name == "image_size" else PATCH] * 2
    if vision.get("deepstack_visual_indexes") is not None or vision.get("fullatt_block_indexes") is not None:
        result |= {name: 3 for name in _LAYERS if name in vision}
    if "embed_dim" in vision and isinstance(vision["embed_dim"], int) and "hidden_size" in vision:  # Qwen2-VL
        result |= {"embed_dim": 64, "hidden_size": width}
    if vision.get("window_size"):  # of pixels where patches are merged, else of patches
        result["window_size"] = 2 * PATCH * vision["spatial_merge_size"] if vision.get("spatial_merge_size") else 2
    return result


def _set_sections(text: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Set how many rotary pairs of the small head count frames, rows and columns, where the configuration does not.

    The class's own default is for a large head. Rows and columns get a quarter of the pairs each, and frames what is
    left. Configurations that set sections (`small_values` scales these) or have several kinds of rotary embeddings
    stay.
    """
    rope = text.get("rope_parameters")
    has_kinds = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
    if not isinstance(rope, dict) or has_kinds or "mrope_section" in rope:
        return text
    rotated_share = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    pairs = int((text.get("head_dim") or sizes.head_size) * rotated_share) // 2
    return text | {"rope_parameters": rope | {"mrope_section": [pairs - pairs // 4 * 2, pairs // 4, pairs // 4]}}


def _text_width(values: Mapping[str, Any]) -> int | None:
    """Return the hidden size of the text model, whose configuration may be inside that of the whole model."""
    text = next((values[name] for name in _TEXTS if values.get(name)), values)
    return text.get("hidden_size") if isinstance(text, Mapping) else None


def _placeholder_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of special tokens of images, videos and audio, not of text, the image's own first."""
    names = [name for name, value in values.items() if name.endswith(_TOKENS) and isinstance(value, int)]
    text_prefixes = ("bos_", "eos_", "pad_", "decoder_", "sep_", "cls_", "mask_", "unk_")
    names = [name for name in names if not name.startswith(text_prefixes)]
    return sorted(names, key=lambda name: (not name.startswith("image_token"), name))
