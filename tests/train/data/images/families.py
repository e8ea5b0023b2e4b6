"""Small model folders of families whose processors make more of an image than pixels and a grid."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan.model.small.shrink import shrunken
from tests.train.data.images.folders import PARTS, TURNS, saved

TILE, PINPOINTS = {"height": 16, "width": 16}, [[16, 32], [32, 16], [32, 32]]
_IMAGE, _SOFT = {"image_token": "<image>"}, ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
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


FAMILIES: dict[str, Family] = {
    "mistral3": Family(
        ("pixtral.Pixtral", {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}}),
        "PixtralProcessor",
        {"patch_size": 4, "spatial_merge_size": 2},
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "llava_next": Family(
        ("llava_next.LlavaNext", _LLAVA_NEXT),
        "LlavaNextProcessor",
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1} | _IMAGE,
        "<image>",
        ("<image>",),
    ),
    "llava_onevision": Family(
        ("llava_onevision.LlavaOnevision", {"size": TILE, "image_grid_pinpoints": PINPOINTS}),
        "LlavaOnevisionProcessor",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"} | _IMAGE,
        "<image>",
        ("<image>", "<video>"),
    ),
    "internvl": Family(
        _GOT_OCR,
        "InternVLProcessor",
        {"image_seq_length": 4},
        "<IMG_CONTEXT>",
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        _INTERN | {"video_token": "<video>"},
    ),
    "idefics2": Family(
        ("idefics2.Idefics2", {"size": {"shortest_edge": 8, "longest_edge": 16}}),
        "Idefics2Processor",
        {"image_seq_len": 64},
        "<image>",
        _SOFT,
    ),
    "idefics3": Family(
        ("idefics3.Idefics3", _IDEFICS3),
        "Idefics3Processor",
        {"image_seq_len": 4},
        "<image>",
        (*_SOFT, "<global-img>"),
    ),
    "smolvlm": Family(
        ("smolvlm.SmolVLM", _IDEFICS3), "SmolVLMProcessor", {"image_seq_len": 4}, "<image>", (*_SOFT, "<global-img>")
    ),
    "video_llama_3": Family(
        ("video_llama_3.VideoLlama3", {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}),
        "VideoLlama3Processor",
        {},
        "<|image_pad|>",
        ("<|image_pad|>", "<|video_pad|>"),
    ),
    "aya_vision": Family(
        _GOT_OCR,
        "AyaVisionProcessor",
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2, "image_token": "<image>"},
        "<image>",
        ("<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
    ),
}


def family_folder(folder: Path, name: str) -> Path:
    """A folder with the tokenizer, the template and the processor of a family; skipped where there is none."""
    family = FAMILIES[name]
    if name == "smolvlm":
        pytest.importorskip("num2words")  # its processor cannot be made without
    image = pil_processor(*family.image)
    template = TURNS.replace("PARTS", PARTS).replace("IMAGE", family.mark)
    settings = {"processor_class": family.processor, **family.settings}
    saved(folder, image, ("<|im_start|>", *family.tokens), template, settings)
    file, names = folder / "tokenizer_config.json", dict(family.names)
    said = json.loads(file.read_text()) | names | {"pad_token": "<|im_end|>"}  # some processors pad a text alone
    file.write_text(json.dumps(said | ({"model_specific_special_tokens": names} if names else {})))
    return folder


def pil_processor(name: str, settings: Mapping[str, Any]) -> Any:
    """An image processor on Pillow, by its module and class."""
    module, kind = name.split(".")
    try:
        made = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {name}ImageProcessorPil")
    return getattr(made, f"{kind}ImageProcessorPil")(**settings)


def family_config(name: str, placeholder: int, vocabulary: int) -> PreTrainedConfig:
    """The small configuration of a family, with ids of its folder's tokenizer."""
    config: Any = shrunken(CONFIG_MAPPING[name](), images=True)
    config.get_text_config().vocab_size = vocabulary
    for key in ("image_token_id", "image_token_index"):
        if getattr(config, key, None) is not None:
            setattr(config, key, placeholder)
    return config
