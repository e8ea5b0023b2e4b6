"""The data and the model folder of `make vlm`: handwritten digits as images, several in a conversation.

    python examples/vlm/data.py runs/vlm-data

Images are scikit-learn's digits (8 x 8, 1,797 of them, written by 43 people), 16 x 16 in PNG files. 1,500 are trained
on, each as it is and three times turned and moved a little; the others are held out. A conversation shows one to four
and asks which they are. `shuffled.jsonl` are the held-out conversations with images of others. The model folder has
the configuration of a small Qwen2.5-VL, its image processor, and a tokenizer of bytes; `longspan train` draws the
weights.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SIDE, VERSIONS, TRAINED = 16, 4, 1500  # pixels; files of each trained image; images that are trained on
CONVERSATIONS, HELD_OUT = 8_000, 200
HIDDEN = 64
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def main(folder: Path) -> None:
    """Write data/ and model/ into a folder."""
    digits, generator = load_digits(), np.random.default_rng(0)
    order = generator.permutation(len(digits.target))
    pixels, targets = digits.images[order], digits.target[order]
    (folder / "data" / "images").mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(pixels):
        for version in range(VERSIONS if i < TRAINED else 1):
            drawn(image, generator if version else None).save(folder / "data" / name_of(i, version))
    trained, others = np.arange(TRAINED), np.arange(TRAINED, len(targets))
    write(folder / "data" / "train.jsonl", conversations(trained, targets, CONVERSATIONS, generator))
    held_out = list(conversations(others, targets, HELD_OUT, generator))
    write(folder / "data" / "held-out.jsonl", held_out)
    write(folder / "data" / "shuffled.jsonl", shuffled(held_out, generator))
    write_model(folder / "model")
    print(f"wrote {CONVERSATIONS:,} conversations to train on and {HELD_OUT} that are held out to {folder}")


def drawn(image: np.ndarray, generator: np.random.Generator | None) -> Image.Image:
    """A digit in the size of the files, turned and moved a little by a generator."""
    made = Image.fromarray((image * 255 / 16).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if generator is None:
        return made
    angle, move = generator.uniform(-12, 12), tuple(generator.integers(-2, 3, 2).tolist())
    return made.rotate(angle, Image.Resampling.BICUBIC, translate=move)


def name_of(image: int, version: int) -> str:
    """The file of one version of an image."""
    return f"images/{image:04d}-{version}.png"


def conversations(
    images: np.ndarray, targets: np.ndarray, count: int, generator: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Conversations over one to four of these images."""
    for _ in range(count):
        shown = generator.choice(images, generator.integers(1, 5))
        versions = generator.integers(0, VERSIONS if images[0] == 0 else 1, len(shown))
        answer = "the digits are " + " ".join(str(targets[i]) for i in shown)
        question = [*({"type": "image"} for _ in shown), {"type": "text", "text": "which digits?"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": messages, "images": [name_of(i, v) for i, v in zip(shown, versions, strict=True)]}


def shuffled(rows: list[dict[str, Any]], generator: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The same conversations, each with as many images as before, drawn from all of them."""
    images = generator.permutation([name for row in rows for name in row["images"]]).tolist()
    for row in rows:
        yield {**row, "images": [images.pop() for _ in row["images"]]}


def write(file: Path, rows: Any) -> None:
    """Write rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path) -> None:
    """Write a folder of a small Qwen2.5-VL without weights: configuration, processor, tokenizer, chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token="<|im_end|>", additional_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    configuration(tokenizer).save_pretrained(folder)


def configuration(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Three decoder layers and two of the encoder, both 64 wide; four rows for an image."""
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    text = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 3}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": len(tokenizer)}
    text |= {"rope_parameters": rope, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [0, 1], "out_hidden_size": HIDDEN}
    return Qwen2_5_VLConfig(
        text_config=text | {"max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.1},
        vision_config=vision | {"initializer_range": 0.1},
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
