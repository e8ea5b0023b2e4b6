"""What `vision_step.py` runs: a model of Qwen3-VL-8B's shape with random weights, and documents with images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from longspan import ItemDocuments
from longspan.bridge import items_at_placeholders
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens

TEXT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TEXT |= {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144}
VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
SMALL_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL_TEXT |= {"initializer_range": 0.2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 4096}
SMALL_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
SMALL_VISION |= {"initializer_range": 0.2}
SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

# By name: how many images a document has, drawn between two numbers.
CASES = {"4": (4, 4), "16": (16, 16), "64": (64, 64), "4 to 64": (4, 64)}


@dataclass(frozen=True)
class Sizes:
    """How large everything is. `sides` are those of images, in rows of the language model, `text` tokens between."""

    layers: int = 8
    depth: int = 27
    rows_of_slot: int = 16384
    micro_batches: int = 2
    max_image_rows: int = 8192
    small: bool = False
    text: tuple[int, int] = (32, 512)
    sides: tuple[int, ...] = field(default=(16, 16, 24, 32))

    @classmethod
    def tiny(cls) -> "Sizes":
        """What a CPU does in seconds."""
        return cls(2, 3, 64, 2, 48, True, (1, 3), (1, 1, 1, 2))

    def configuration(self) -> Qwen3VLConfig:
        """The model: Qwen3-VL-8B's widths, and so many layers of each of its two modules."""
        text, vision = (SMALL_TEXT, SMALL_VISION) if self.small else (TEXT, VISION)
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1] if self.small else [24, 20, 20]}
        deep = (
            [round((i + 1) * self.depth / 27 * 8) for i in range(3)] if self.depth >= 25 else [*range(self.depth)][:2]
        )
        vision = vision | {
            "depth": self.depth,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": deep,
        }
        vision |= {"patch_size": 2 if self.small else 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
        ids = {name: text["vocab_size"] - 1 - i for i, name in enumerate(SPECIAL)}
        return Qwen3VLConfig(
            text_config=text | {"num_hidden_layers": self.layers, "rope_parameters": rope},
            vision_config=vision,
            tie_word_embeddings=False,
            **ids,
        )


@dataclass(frozen=True)
class VisionDocuments:
    """Documents with images, as integers: `images[d]` are the sides of images of document d, `text[d]` its tokens."""

    images: tuple[tuple[int, ...], ...]
    text: tuple[tuple[int, ...], ...]

    @classmethod
    def drawn(cls, case: str, sizes: Sizes, slots: int) -> "VisionDocuments":
        """As many as fill the micro-batches of so many slots, the same on every rank."""
        draw, left = np.random.default_rng(0), sizes.rows_of_slot * sizes.micro_batches * slots
        few, most = CASES[case]
        images, text = list[tuple[int, ...]](), list[tuple[int, ...]]()
        while True:
            count = int(draw.integers(few, most + 1))
            sides = tuple(draw.choice(sizes.sides, size=count).tolist())
            words = tuple(draw.integers(*sizes.text, size=count + 1).tolist())
            tokens = sum(side**2 for side in sides) + sum(words)
            if images and tokens > left:
                return cls(tuple(images), tuple(text))
            images, text, left = [*images, sides], [*text, words], left - tokens

    @cached_property
    def rows(self) -> list[int]:
        """The rows of every image."""
        return [side**2 for sides in self.images for side in sides]

    def as_items(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> "Made":
        """The same as a step takes them; pixels are random and lie on the device already."""
        return Made(self, sizes, device, dtype)


class Made(ItemDocuments):
    """Token ids and images, whose M-RoPE positions are computed once."""

    def __init__(self, documents: VisionDocuments, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        config: Any = sizes.configuration()
        self._tokens, self._documents = image_tokens(config), documents
        draw, top = np.random.default_rng(1), config.text_config.vocab_size - 8
        ids = [_ids(self._tokens, *each, draw, top) for each in zip(documents.images, documents.text, strict=True)]
        rows = [[side**2 for side in sides] for sides in documents.images]
        items = items_at_placeholders(ids, self._tokens.placeholder, rows)
        vision = config.vision_config
        self._pixels = _pixels(4 * max(documents.rows), 6 * vision.patch_size**2, device, dtype)
        self._sides = [side for sides in documents.images for side in sides]
        self._known: dict[int, Any] = {}
        super().__init__(ids, items, self._image, self._positions_of)

    def _image(self, item: int) -> ImageInput:
        side = self._sides[item]
        return ImageInput(self._pixels[: 4 * side**2] * (1 + item % 7 / 8), (1, 2 * side, 2 * side))

    def _positions_of(self, document: int) -> Any:
        if document not in self._known:
            grids = np.array([(1, 2 * side, 2 * side) for side in self._documents.images[document]])
            self._known[document] = self._tokens.positions(self.tokens[document], grids)
        return self._known[document]


def _ids(tokens: ImageTokens, sides: Sequence[int], text: Sequence[int], draw: Any, top: int) -> np.ndarray:
    parts = [draw.integers(1, top, size=text[0])]
    for side, words in zip(sides, text[1:], strict=True):
        parts += [np.full(side**2, tokens.placeholder), draw.integers(1, top, size=words)]
    return np.concatenate(parts)


def _pixels(patches: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    made = torch.randn(patches, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return made.to(device, dtype)
