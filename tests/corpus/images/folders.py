"""Small model folders with the processors of Qwen2.5-VL, LLaVA and Gemma 3, and a data set of small images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
PARTS = (
    "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO{% else %}"
    "{{ c.text }}{% endif %}{% endfor %}"
)
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}PARTS"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_TEMPLATE = TURNS.replace("PARTS", PARTS)
for _kind in ("image", "video"):
    _QWEN_TEMPLATE = _QWEN_TEMPLATE.replace(_kind.upper(), f"<|vision_start|><|{_kind}_pad|><|vision_end|>")


def qwen_folder(folder: Path, **sizes: Any) -> Path:
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 4096}} | sizes
    image = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **sizes)
    return saved(folder, image, QWEN_TOKENS, _QWEN_TEMPLATE, {"processor_class": "Qwen2_5_VLProcessor"})


def qwen3_folder(folder: Path) -> Path:
    size = {"shortest_edge": 64, "longest_edge": 4096}
    image = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 4, "size": size}
    settings = {"processor_class": "Qwen3VLProcessor", "video_processor": videos}
    return saved(folder, image, QWEN_TOKENS, _QWEN_TEMPLATE, settings)


def llava_folder(folder: Path) -> Path:
    image = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    settings = {"processor_class": "LlavaProcessor", "patch_size": 4, "num_additional_image_tokens": 1}
    template = TURNS.replace("PARTS", PARTS).replace("IMAGE", "<image>")
    kind = {"vision_feature_select_strategy": "default", "image_token": "<image>"}
    return saved(folder, image, ("<|im_start|>", "<image>"), template, settings | kind)


def gemma3_folder(folder: Path) -> Path:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    image = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    settings = {"processor_class": "Gemma3Processor", "image_seq_length": 9}
    template = TURNS.replace("PARTS", PARTS).replace("IMAGE", GEMMA_TOKENS["boi_token"])
    saved(folder, image, ("<|im_start|>", *GEMMA_TOKENS.values()), template, settings)
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text()) | GEMMA_TOKENS | {"model_specific_special_tokens": GEMMA_TOKENS}
    file.write_text(json.dumps(said))
    return folder


def write_images(folder: Path, sizes: list[tuple[int, int]], seed: int = 0) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    generator, names = np.random.default_rng(seed), []
    for number, (height, width) in enumerate(sizes):
        pixels = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names.append(f"{number}.png")
    return names


def with_broken_pixels(data: bytes) -> bytes:
    at = data.index(b"IDAT") + 4
    return data[:at] + bytes(40) + data[at + 40 :]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def saved(folder: Path, image: Any, tokens: tuple[str, ...], template: str, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token="<|im_end|>", additional_special_tokens=list(tokens)
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    image.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder
