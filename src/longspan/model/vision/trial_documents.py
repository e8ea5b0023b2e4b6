"""Documents with images for a small model, made from its configuration: ids and pixels at random, no processor.

Images are as `sample_image.py` makes them. They stand anywhere but side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.model.layers import base_of
from longspan.model.vision.image_arguments import image_arguments
from longspan.model.vision.image_encoder import rows_of_images
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens
from longspan.model.vision.sample_image import sample_image

_SIDES = ((2, 3), (1, 2), (3, 2))  # of images in merged patches; of tiles in quarters of a tile's side
_KINDS = ("token_type_ids", "mm_token_type_ids")  # 1 at images, as processors make them


@dataclass(frozen=True)
class TrialDocument:
    """One document: its ids (T,), its images, the rows that each of them makes, its positions where not plain.

    `at_images` (T,) says where placeholders are.
    """

    ids: np.ndarray
    images: tuple[ImageInput, ...]
    rows: tuple[int, ...]
    positions: np.ndarray | None
    at_images: np.ndarray


def trial_documents(model: PreTrainedModel, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[TrialDocument]:
    """Documents of these numbers of tokens of text and of images, for a whole small model.

    Raises ModelError, and whatever the model's own code raises, where it makes no rows of such images.
    """
    tokens, draw = image_tokens(model.config), np.random.default_rng(seed)
    words = np.array(ordinary_ids(model.config))
    pool = _images(base_of(model), tokens, max((images for _, images in sizes), default=0), draw)
    return [_document(tokens, draw.choice(words, text), pool[:images], draw) for text, images in sizes]


def ordinary_ids(config: PreTrainedConfig) -> list[int]:
    """The token ids without those that mean something to the model: padding, images and the like."""
    text = config.get_text_config()
    special = {
        value
        for part in (config, text)
        for key, value in vars(part).items()
        if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    return [token for token in range(text.vocab_size) if token not in special]


def stock_arguments(model: PreTrainedModel, document: TrialDocument) -> dict[str, Any]:
    """What the whole unchanged model takes for a document, as its processor would make it."""
    ids = torch.from_numpy(document.ids)[None]
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if document.images:
        arguments |= image_arguments(base_of(model), document.images, next(model.parameters()))
    known, at_images = signature(model.forward).parameters, torch.from_numpy(document.at_images)[None].long()
    return arguments | {name: at_images for name in _KINDS if name in known}


def _document(
    tokens: ImageTokens, words: np.ndarray, images: Sequence[tuple[ImageInput, int]], draw: np.random.Generator
) -> TrialDocument:
    places = np.sort(draw.choice(np.arange(1, len(words)), size=len(images), replace=False))
    ids = list[int]()
    for part, image in zip(np.split(words, places), (*images, None), strict=True):
        ids += [*part.tolist(), *([] if image is None else [tokens.placeholder] * image[1])]
    grids = np.array([image.grid for image, _ in images if image.grid is not None])
    positions = tokens.positions(np.array(ids), grids)
    inputs, rows = tuple(x for x, _ in images), tuple(n for _, n in images)
    return TrialDocument(np.array(ids), inputs, rows, positions, np.array(ids) == tokens.placeholder)


def _images(base: Any, tokens: ImageTokens, count: int, draw: np.random.Generator) -> list[tuple[ImageInput, int]]:
    """So many images, and how many rows the model's own code makes of each."""
    images = [sample_image(base, tokens.merge, side, draw) for side in (_SIDES * count)[:count]]
    with torch.no_grad():
        return [(image, len(rows_of_images(base, [image])[0])) for image in images]
