"""Documents with images for a small model, made from its configuration: ids and pixels at random, no processor.

Images are as `sample_image.py` makes them. They stand anywhere but side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.model.layers import base_of
from longspan.model.seams.prefix import has_prefix
from longspan.model.vision.image_arguments import image_arguments
from longspan.model.vision.image_encoder import rows_of_images
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens
from longspan.model.vision.sample_image import sample_image
from longspan.model.vision.video_tokens import Video, VideoTokens

_SIDES = ((2, 3), (1, 2), (3, 2))  # of images in merged patches; of tiles in quarters of a tile's side
TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")  # 1 at images, 2 at videos, as processors make them


@dataclass(frozen=True)
class TrialDocument:
    """One document: its ids (T,), its images, the rows that each of them makes, its positions where not plain.

    `at_images` (T,) says where placeholders are. Groups of frames of `videos` stand among the images; of their
    placeholders `at_videos` (T,) says where they are. `prefix`: how many rows see each other before the causal ones, in
    models that have a prefix.
    """

    ids: np.ndarray
    images: tuple[ImageInput, ...]
    rows: tuple[int, ...]
    positions: np.ndarray | None
    at_images: np.ndarray
    videos: tuple["TrialVideo", ...] = ()
    at_videos: np.ndarray | None = None
    prefix: int = 0

    @property
    def groups(self) -> set[int]:
        """Which of the images are groups of frames of videos."""
        return {video.first + k for video in self.videos for k in range(video.video.grid[0])}

    def kinds(self, model: PreTrainedModel, *, images: bool) -> Tensor:
        """What models are told of each row (1, T): with `images` 1 at these and 2 at videos; or 1 after a prefix."""
        if not images or has_prefix(model.config):
            return token_kinds(model, len(self.ids), self.prefix)
        kinds = self.at_images.astype(np.int64) + (0 if self.at_videos is None else self.at_videos)
        return torch.from_numpy(kinds)[None]


class TrialVideo(NamedTuple):
    """A video whose groups of frames are images of a document from number `first` on."""

    first: int
    video: Video


def token_kinds(model: PreTrainedModel, rows: int, prefix: int = 1) -> Tensor:
    """What models are told of the rows of a document of text (1, T): 0, and where a model has a prefix, 1 after it."""
    kinds = torch.arange(rows) >= (prefix if has_prefix(model.config) else rows)
    return kinds.long()[None]


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
    base, like, known = base_of(model), next(model.parameters()), signature(model.forward).parameters
    if images := [image for i, image in enumerate(document.images) if i not in document.groups]:
        arguments |= image_arguments(base, images, like)
    if document.videos:
        made = image_arguments(base, [document.images[i] for i in sorted(document.groups)], like)
        grids = torch.tensor([video.video.grid for video in document.videos])
        seconds = torch.tensor([video.video.seconds for video in document.videos], dtype=torch.float32)
        arguments |= {"pixel_values_videos": made["pixel_values"], "video_grid_thw": grids}
        arguments |= {"second_per_grid_ts": seconds} if "second_per_grid_ts" in known else {}
    return arguments | {name: document.kinds(model, images=True) for name in TOKEN_KINDS if name in known}


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
    at_images = np.array(ids) == tokens.placeholder
    prefix = 0
    if tokens.config is not None and has_prefix(tokens.config):
        prefix = min(len(ids), int(np.flatnonzero(at_images).max(initial=2)) + 2)
    return TrialDocument(np.array(ids), inputs, rows, positions, at_images, prefix=prefix)


def video_document(model: PreTrainedModel, text: int = 9, seed: int = 0) -> TrialDocument:
    """A document with two videos of several groups of frames around an image, for a whole small model.

    Raises ModelError for a model without videos by grids of patches, and whatever its own code raises.
    """
    videos, draw, base = VideoTokens.of(model.config), np.random.default_rng(seed), base_of(model)
    merge, words = videos.images.merge, draw.choice(np.array(ordinary_ids(model.config)), (3, text))
    ids, images, clips = words[0].tolist(), list[ImageInput](), list[TrialVideo]()
    for number, (groups, side) in enumerate([(3, (1, 2)), (1, (2, 2)), (2, (2, 1))]):
        placeholder = videos.images.placeholder if number == 1 else videos.placeholder
        if number != 1:
            grid = (groups, merge * side[0], merge * side[1])
            clips.append(TrialVideo(len(images), Video(grid, seconds=1.5 - number / 2)))
        for group in range(groups):
            images.append(sample_image(base, merge, side, draw))
            ids += [*words[1, :2].tolist()] * (videos.apart and group > 0) + [placeholder] * (side[0] * side[1])
        ids += words[2, : 2 + number].tolist()
    places, grid = np.array(ids), np.array([image.grid for image in images[3:4]])
    positions = videos.positions(places, grid, [clip.video for clip in clips])
    at_videos = places == videos.placeholder
    rows = tuple(videos.images.rows(image.grid) for image in images)
    at_images = at_videos | (places == videos.images.placeholder)
    return TrialDocument(places, tuple(images), rows, positions, at_images, tuple(clips), at_videos)


def _images(base: Any, tokens: ImageTokens, count: int, draw: np.random.Generator) -> list[tuple[ImageInput, int]]:
    """So many images, and how many rows the model's own code makes of each."""
    images = [sample_image(base, tokens.merge, side, draw) for side in (_SIDES * count)[:count]]
    with torch.no_grad():
        return [(image, len(rows_of_images(base, [image])[0])) for image in images]
