"""Small model folders of families whose processors make more of an image than pixels and a grid."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan.doctor.which_model import default_configuration
from longspan.model.exactness.small_copies import shrink_configuration
from tests.corpus.images.folders import PARTS, TURNS, saved
from tests.versions import transformers_before

TILE, PINPOINTS = {"height": 16, "width": 16}, [[16, 32], [32, 16], [32, 32]]
_IMAGE, _SOFT = {"image_token": "<image>"}, "<fake_token_around_image> <image> <end_of_utterance> <global-img>"
_PATCHES: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_PATCHES |= {"size": {"shortest_edge": 64, "longest_edge": 4096}}
_FRAMES = {"cosmos3_edge": {"temporal_patch_size": 1}}
_PIXTRAL = ("pixtral.Pixtral", {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}})
_GOT_OCR = ("got_ocr2.GotOcr2", {"size": TILE, "crop_to_patches": True, "max_patches": 4})
_INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_IDEFICS3 = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_LLAVA_NEXT: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": TILE, "image_grid_pinpoints": PINPOINTS}


class Family(NamedTuple):
    """A class of transformers: its image processor (module, class) and processor, with settings; its tokens.

    `names` are attributes of the tokenizer that say what some tokens are.
    """

    image: tuple[str, Mapping[str, Any]]
    processor: str
    settings: Mapping[str, Any]
    mark: str
    tokens: tuple[str, ...] = ()
    names: Mapping[str, str] = {}


def _family(
    image: tuple[str, Mapping[str, Any]], processor: str, tokens: str, names: Mapping[str, str] = {}, **settings: Any
) -> Family:
    """A family whose first token is the mark of an image."""
    words = tuple(tokens.split())
    return Family(image, f"{processor}Processor", settings, words[0], words, names)


_COHERE = {"image_token": "<image>", "boi_token": "<b>", "eoi_token": "<e>", "img_line_break_token": "<l>"}
_LIGHT = {"image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<end>"}
_ADDED: dict[str, Any] = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"} | _IMAGE
_LFM2 = {"tile_size": 16, "encoder_patch_size": 4, "min_image_tokens": 1, "max_image_tokens": 4, "max_tiles": 4}
_TILED: dict[str, Any] = {"size": TILE, "crop_to_patches": True, "max_patches": 4}
_ONEVISION = ("llava_onevision.LlavaOnevision", {"size": TILE, "image_grid_pinpoints": PINPOINTS})
_VIDEO_LLAMA = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}
_CLIP = ("clip.CLIP", {"size": {"shortest_edge": 16}, "crop_size": TILE})
_AYA = "<image> <|IMG_PATCH|> <|START_OF_IMG|> <|END_OF_IMG|> TILE TILE_GLOBAL"
_OVIS = "<image> <IMG_START> <IMG_ATOM> <IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END>"
_HYBRID = ("deepseek_vl_hybrid.DeepseekVLHybrid", {"size": TILE, "high_res_size": TILE})
_DOCLING = ("granite_docling.GraniteDocling", {"size": TILE, "max_patches": 4})
_GEMMA4 = ("gemma4.Gemma4", {"patch_size": 4, "max_soft_tokens": 70})
_GEMMA4_TOKENS = {f"{kind}_token": f"<{kind}>" for kind in ("image", "boi", "eoi", "audio", "boa", "eoa")}
FAMILIES: dict[str, Family] = {
    "mistral3": _family(_PIXTRAL, "Pixtral", "[IMG] [IMG_BREAK] [IMG_END]", patch_size=4, spatial_merge_size=2),
    "llava_next": _family(("llava_next.LlavaNext", _LLAVA_NEXT), "LlavaNext", "<image>", patch_size=4, **_ADDED),
    "llava_onevision": _family(
        _ONEVISION,
        "LlavaOnevision",
        "<image> <video>",
        **{"num_image_tokens": 16, "vision_feature_select_strategy": "full"} | _IMAGE,
    ),
    "internvl": _family(
        _GOT_OCR,
        "InternVL",
        "<IMG_CONTEXT> <img> </img> <video>",
        _INTERN | {"video_token": "<video>"},
        image_seq_length=4,
    ),
    "idefics3": _family(("idefics3.Idefics3", _IDEFICS3), "Idefics3", _SOFT, image_seq_len=4)._replace(mark="<image>"),
    "smolvlm": _family(("smolvlm.SmolVLM", _IDEFICS3), "SmolVLM", _SOFT, image_seq_len=4)._replace(mark="<image>"),
    "video_llama_3": _family(("video_llama_3.VideoLlama3", _VIDEO_LLAMA), "VideoLlama3", "<|image_pad|> <|video_pad|>"),
    "aya_vision": _family(
        _GOT_OCR, "AyaVision", _AYA, patch_size=4, img_size=16, downsample_factor=2, image_token="<image>"
    ),
    "cohere2_vision": _family(
        ("cohere2_vision.Cohere2Vision", _TILED | {"patch_size": 2}), "Cohere2Vision", "<image> <b> <e> <l>", _COHERE
    ),
    "deepseek_vl": _family(
        ("deepseek_vl.DeepseekVL", {"size": TILE}), "DeepseekVL", "<image>", _IMAGE, num_image_tokens=16
    ),
    "deepseek_vl_hybrid": _family(_HYBRID, "DeepseekVLHybrid", "<image>", _IMAGE, num_image_tokens=16),
    "gemma4": _family(_GEMMA4, "Gemma4", " ".join(_GEMMA4_TOKENS.values()), _GEMMA4_TOKENS),
    "gemma4_unified": _family(
        ("gemma4_unified.Gemma4Unified", _GEMMA4[1]),
        "Gemma4Unified",
        " ".join(_GEMMA4_TOKENS.values()),
        _GEMMA4_TOKENS,
    ),
    "granite_docling": _family(_DOCLING, "GraniteDocling", _SOFT, image_seq_len=1)._replace(mark="<image>"),
    "lfm2_vl": _family(("lfm2_vl.Lfm2Vl", _LFM2), "Lfm2Vl", "<image> <|image_start|> <|image_end|> <|img_thumbnail|>"),
    "lighton_ocr": _family(_PIXTRAL, "LightOnOcr", "<image> <break> <end>", _LIGHT, patch_size=4, spatial_merge_size=2),
    "llava_next_video": _family(
        ("llava_next.LlavaNext", _LLAVA_NEXT), "LlavaNextVideo", "<image> <video>", patch_size=4, **_ADDED
    ),
    "ovis2": _family(("ovis2.Ovis2", _TILED), "Ovis2", _OVIS, image_seq_length=16),
    "qianfan_ocr": _family(
        _GOT_OCR,
        "QianfanOCR",
        "<image> <IMG_CONTEXT> <img> </img>",
        _INTERN,
        image_seq_length=4,
        image_placeholder_token="<image>",
    ),
    "vipllava": _family(_CLIP, "Llava", "<image>", patch_size=4, **_ADDED),
    **{
        name: Family((image, _PATCHES | _FRAMES.get(name, {})), processor, {}, f"<s>{mark}<e>", (mark, "<s>", "<e>"))
        for name, image, processor, mark in (
            ("cohere_compass", "cohere_compass.CohereCompass", "CohereCompassProcessor", "<|IMAGE_PAD|>"),
            ("cosmos3_edge", "cosmos3_edge.Cosmos3Edge", "Cosmos3EdgeProcessor", "<|image_pad|>"),
            ("exaone4_5", "qwen2_vl.Qwen2VL", "Exaone4_5_Processor", "<|image_pad|>"),
            ("glm4v", "glm4v.Glm4v", "Glm4vProcessor", "<|image|>"),
            ("glm46v", "glm46v.Glm46V", "Glm46VProcessor", "<|image|>"),
            ("hyperclovax_vision_v2", "qwen2_vl.Qwen2VL", "HyperCLOVAXVisionV2Processor", "<|image_pad|>"),
            ("lfm3_vl", "qwen2_vl.Qwen2VL", "Lfm3VlProcessor", "<|image_pad|>"),
            ("qwen3_vl", "qwen2_vl.Qwen2VL", "Qwen3VLProcessor", "<|image_pad|>"),
        )
    },
}
# They lack in transformers 5.17 processors, a small copy, a run of the stock model, or a mask without jumps of time.
LATER = ("hyperclovax_vision_v2", "lfm3_vl", "cohere_compass", "vipllava", "cosmos3_edge")


def family_folder(folder: Path, name: str) -> Path:
    family = FAMILIES[name]
    if name in LATER and transformers_before("5.23"):
        pytest.skip(f"transformers {transformers.__version__} cannot run {name} itself")
    if name == "smolvlm":
        pytest.importorskip("num2words")  # its processor cannot be made without
    kind, settings_of_image = family.image
    image = image_processor(kind)(**settings_of_image)
    template = TURNS.replace("PARTS", PARTS).replace("IMAGE", family.mark)
    settings = {"processor_class": family.processor, **family.settings}
    saved(folder, image, ("<|im_start|>", *family.tokens), template, settings)
    file, names = folder / "tokenizer_config.json", dict(family.names)
    said = json.loads(file.read_text()) | names | {"pad_token": "<|im_end|>"}  # some processors pad a text alone
    file.write_text(json.dumps(said | ({"model_specific_special_tokens": names} if names else {})))
    return folder


def image_processor(name: str) -> Any:
    module, kind = name.split(".")
    if "torchvision" in getattr(getattr(transformers, f"{kind}ImageProcessorPil", None), "_backends", ()):
        pytest.importorskip("torchvision", reason=f"{kind}ImageProcessorPil of this transformers asks for it")
    try:
        made = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    except ModuleNotFoundError:
        pytest.importorskip("torchvision", reason=f"transformers has no {kind}ImageProcessorPil")
        made = import_module(f"transformers.models.{module}.image_processing_{module}")
    return getattr(made, f"{kind}ImageProcessorPil", None) or getattr(made, f"{kind}ImageProcessor")


def family_config(name: str, placeholder: int, vocabulary: int) -> PreTrainedConfig:
    config: Any = shrink_configuration(default_configuration(CONFIG_MAPPING[name]), images=True)
    text = config.get_text_config()
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(text, key):
            setattr(text, key, vocabulary)
    for key in ("image_token_id", "image_token_index"):
        if getattr(config, key, None) is not None:
            setattr(config, key, placeholder)
    return config
