"""Documents of random ids with drawn images and videos, for trials and proofs of models that read them.

Images are of several sizes, and in the form that the class's own image function takes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.model.layers import base_model
from longspan.model.vision.image_encoder import encode_images
from longspan.model.vision.image_inputs import (
    IN_DOCUMENT,
    MASK,
    POSITIONS,
    ImageInput,
    image_arguments,
    image_feature_parameters,
)
from longspan.model.vision.image_tokens import GRIDS, SIZES, image_tokens
from longspan.model.vision.videos import Video, VideoTokens
from longspan.plan.shape.families import find_family

Side = tuple[int, int]
_MASK_OF_TILES = "tile_fine_mask"  # Granite Docling, whose mask is of tiles
_SHAPES = "spatial_shapes"
_MERGES = "image_merge_sizes"
_PLACED_ROWS = 8  # images of up to so many rows are padded to as many
_FINER_PIXELS = "high_res_pixel_values"


def draw_image(base: Any, merge: int, side: Side, generator: np.random.Generator) -> ImageInput:
    """Draw an image in the form that a model takes, which its class's image function shows.

    `side` is height and width: in merged patches (of `merge` patches a side), in halves of a tile's side where the
    model cuts images, or in tiles.
    """
    parameters = image_feature_parameters(base)
    vision = base.config.vision_config
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    patch, image_side = (_first_side(getattr(vision, name, None)) for name in ("patch_size", "image_size"))
    if GRIDS in parameters:
        return _draw_patches(base, merge, side, channels * patch**2, generator)
    if POSITIONS in parameters:
        return _draw_placed_patches(vision, side, channels * patch**2, generator)
    if _SHAPES in parameters:
        return _draw_padded_tiles(base, side, channels * patch**2, generator)
    tile = (channels, image_side, image_side)
    if grids := getattr(base.config, "image_grid_pinpoints", None):
        size = (image_side * side[0] // 2, image_side * side[1] // 2)
        count_tiles: Any = getattr(sys.modules[type(base).__module__], "image_size_to_num_patches")  # noqa: B009
        tiles = count_tiles(image_size=size, grid_pinpoints=grids, patch_size=image_side)
        if IN_DOCUMENT not in parameters:
            return ImageInput(_draw_pixels((tiles, *tile), generator), size=size)
        # Such a model cuts an image only if its document has no other: a first side of 3 says that there are three.
        images = 1 if side[0] < 3 else 3
        pixels = _draw_pixels((tiles if images == 1 else 1, *tile), generator)
        return ImageInput(pixels, size=size, fields={IN_DOCUMENT: torch.tensor([images])})
    if SIZES in parameters and getattr(base.config, "spatial_merge_size", None):  # merges patches, without a grid
        height, width = (patch * base.config.spatial_merge_size * n for n in side)
        return ImageInput(_draw_pixels((1, channels, height, width), generator), size=(height, width))
    return _draw_tiles(base, side, tile, generator)


def _draw_padded_tiles(base: Any, side: Side, width: int, generator: np.random.Generator) -> ImageInput:
    """Patches (n, P, `width`), a mask (n, P), 0 at padding, shapes (n, 2); the last tile's mask hides patches."""
    height, row_width = side
    factor = getattr(base.config, "downsample_factor", 1)
    full_side = 3 * factor
    shapes = torch.tensor([(full_side, full_side)] * (height - 1) + [(factor * height, factor * row_width)])
    mask = torch.arange(full_side**2) < shapes.prod(1)[:, None]
    pixels = _draw_pixels((height, full_side**2, width), generator) * mask[..., None]
    return ImageInput(pixels, fields={_SHAPES: shapes, MASK: mask.int()})


def _draw_patches(base: Any, merge: int, side: Side, width: int, generator: np.random.Generator) -> ImageInput:
    """Patches (n, C · t · p²) or (n, C, p, p); `width` is C · p². `image_merge_sizes` has 1 for even widths, else 2."""
    fields = dict[str, Tensor]()
    frames = getattr(base.config.vision_config, "temporal_patch_size", None) or 1
    if _MERGES in image_feature_parameters(base):
        merge = side[1] % 2 + 1
        fields[_MERGES] = torch.tensor([merge])
    patch = _first_side(base.config.vision_config.patch_size)
    patch_shape = (frames * width,)
    if find_family(base.config.model_type).square_patches:
        patch_shape = (width // patch**2, patch, patch)
    pixels = _draw_pixels((merge**2 * side[0] * side[1], *patch_shape), generator)
    return ImageInput(pixels, (1, merge * side[0], merge * side[1]), fields=fields)


def _draw_placed_patches(vision: Any, side: Side, width: int, generator: np.random.Generator) -> ImageInput:
    """Patches (1, n, C · p²) with their places (1, n, 2) as (x, y), and padding behind, whose places are −1, up to the
    same n for every side.

    A row pools k x k patches; a tower without blocks gets these as one patch (`model_patch_size`) of k² times the
    width.
    """
    pooled = int(vision.pooling_kernel_size)
    if hasattr(vision, "model_patch_size"):
        width *= pooled**2
        pooled = 1
    height, row_width = (pooled * n for n in side)
    padding = _PLACED_ROWS * pooled**2 - height * row_width
    y, x = np.divmod(np.arange(height * row_width), row_width)
    places = np.concatenate([np.stack([x, y], axis=1), np.full((padding, 2), -1)])
    pixels = _draw_pixels((1, len(places), width), generator) * torch.from_numpy(places[:, :1] >= 0)
    return ImageInput(pixels, fields={POSITIONS: torch.from_numpy(places)[None]})


def _draw_tiles(base: Any, side: Side, tile: tuple[int, int, int], generator: np.random.Generator) -> ImageInput:
    """Tiles are (C, height, width). A mask of pixels hides a patch at the right of the last tile of an odd width."""
    parameters = image_feature_parameters(base)
    tiles = min(side)
    pixels = _draw_pixels((tiles, *tile), generator)
    fields = dict[str, Tensor]()
    if _MASK_OF_TILES in parameters:
        fields[MASK] = torch.ones(tiles, dtype=torch.bool)
    elif MASK in parameters:
        padding = _first_side(base.config.vision_config.patch_size) * (side[1] % 2)
        fields[MASK] = torch.ones(tiles, *tile[1:], dtype=torch.int64)
        fields[MASK][-1, :, tile[2] - padding :] = 0
        pixels = pixels * fields[MASK][:, None]
    if _FINER_PIXELS in parameters:
        finer = _first_side(base.config.high_res_vision_config.image_size)
        fields[_FINER_PIXELS] = _draw_pixels((tiles, tile[0], finer, finer), generator)
    return ImageInput(pixels, fields=fields)


def _first_side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value or 0)


def _draw_pixels(shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.normal(size=shape))


# `draw_image` takes these sides of images.
_SIDES = ((2, 3), (1, 2), (3, 2))
TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")  # 1 at images, 2 at videos, as processors make them


@dataclass(frozen=True)
class TrialDocument:
    """One document: ids (T,), images with their `rows`, and positions (None: plain).

    `at_images` (T,) says which tokens are placeholders; groups of frames of `videos` stand among the images
    (`at_videos`). `prefix` rows see each other before the causal ones.
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
        """Return the indices of the images that are groups of frames of videos."""
        return {video.first + k for video in self.videos for k in range(video.video.grid[0])}

    def kinds(self, model: PreTrainedModel, *, images: bool) -> Tensor:
        """Return the kinds of tokens (1, T) that the model gets.

        With `images` they are 1 at images and 2 at videos; without, or in a model with a prefix, as `token_kinds` says.
        """
        if not images or find_family(model.config.model_type).prefix_rows:
            return token_kinds(model, len(self.ids), self.prefix)
        # placeholders of videos are in both masks, so that their sum is 2
        kinds = self.at_images.astype(np.int64) + (0 if self.at_videos is None else self.at_videos)
        return torch.from_numpy(kinds)[None]


class TrialVideo(NamedTuple):
    """A video whose groups of frames are images of a document from number `first` on."""

    first: int
    video: Video


def token_kinds(model: PreTrainedModel, rows: int, prefix: int = 1) -> Tensor:
    """Return the kinds (1, T) that a model gets for the tokens of a text: 0, and 1 after a prefix if it has one."""
    kinds = torch.arange(rows) >= (prefix if find_family(model.config.model_type).prefix_rows else rows)
    return kinds.long()[None]


def make_trial_documents(model: PreTrainedModel, sizes: Sequence[tuple[int, int]]) -> list[TrialDocument]:
    """Make documents for a whole small model: `sizes` has the tokens of text and the images of each.

    All take their images from one list, from its first on, and have them at random places of the text.
    """
    tokens = image_tokens(model.config)
    generator = np.random.default_rng(0)
    words = np.array(ordinary_ids(model.config))
    base = base_model(model)
    most = max((images for _, images in sizes), default=0)
    images = [draw_image(base, tokens.merge, side, generator) for side in (_SIDES * most)[:most]]
    with torch.no_grad():
        # The pool holds each image with its number of rows.
        pool = [(image, len(encode_images(base, [image])[0])) for image in images]
    documents = list[TrialDocument]()
    for text, count in sizes:
        document_words = generator.choice(words, text)
        places = np.sort(generator.choice(np.arange(1, text), size=count, replace=False))
        ids = list[int]()
        for words_between, image in zip(np.split(document_words, places), (*pool[:count], None), strict=True):
            ids += [*words_between.tolist(), *([] if image is None else [tokens.placeholder] * image[1])]
        grids = np.array([image.grid for image, _ in pool[:count] if image.grid is not None])
        at_images = np.array(ids) == tokens.placeholder
        prefix = 0
        # a prefix ends with the token after the last image, so that it holds text too
        if tokens.config is not None and find_family(tokens.config.model_type).prefix_rows:
            prefix = min(len(ids), int(np.flatnonzero(at_images).max(initial=2)) + 2)
        inputs = tuple(image for image, _ in pool[:count])
        rows = tuple(n for _, n in pool[:count])
        positions = tokens.positions(np.array(ids), grids)
        documents.append(TrialDocument(np.array(ids), inputs, rows, positions, at_images, prefix=prefix))
    return documents


def ordinary_ids(config: PreTrainedConfig) -> list[int]:
    """List the token ids without those that mean something to the model: padding, images and the like."""
    text = config.get_text_config()
    values = [*vars(config).items(), *vars(text).items()]
    special = {v for k, v in values if k.endswith(("token_id", "token_index")) and isinstance(v, int)}
    return [token for token in range(text.vocab_size) if token not in special]


def make_stock_arguments(model: PreTrainedModel, document: TrialDocument) -> dict[str, Any]:
    """Make the arguments that the whole unchanged model takes for a document, as its processor would."""
    ids = torch.from_numpy(document.ids)[None]
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    base = base_model(model)
    like = next(model.parameters())
    parameters = signature(model.forward).parameters
    if images := [image for i, image in enumerate(document.images) if i not in document.groups]:
        arguments |= image_arguments(base, images, like)
    if document.videos:
        image_fields = image_arguments(base, [document.images[i] for i in sorted(document.groups)], like)
        grids = torch.tensor([video.video.grid for video in document.videos])
        seconds = torch.tensor([video.video.seconds for video in document.videos], dtype=torch.float32)
        arguments |= {"pixel_values_videos": image_fields["pixel_values"], "video_grid_thw": grids}
        arguments |= {"second_per_grid_ts": seconds} if "second_per_grid_ts" in parameters else {}
    return arguments | {name: document.kinds(model, images=True) for name in TOKEN_KINDS if name in parameters}


def make_video_document(model: PreTrainedModel) -> TrialDocument:
    """Make a document of a video, an image and a second video, with words around each, for a whole small model.

    Each group of frames is an image; the videos have three groups and two, of different shapes, so that exchanged items
    would be seen. ModelError for a model without videos by grids.
    """
    videos = VideoTokens.from_configuration(model.config)
    generator = np.random.default_rng(0)
    base = base_model(model)
    merge = videos.images.merge
    # nine words each to stand before everything, between groups of frames, and after items: not all are used
    words = generator.choice(np.array(ordinary_ids(model.config)), (3, 9))
    ids = words[0].tolist()
    images = list[ImageInput]()
    clips = list[TrialVideo]()
    for number, (groups, side) in enumerate([(3, (1, 2)), (1, (2, 2)), (2, (2, 1))]):  # a video, an image, a video
        placeholder = videos.images.placeholder if number == 1 else videos.placeholder
        if number != 1:
            grid = (groups, merge * side[0], merge * side[1])
            clips.append(TrialVideo(len(images), Video(grid, seconds=1.5 - number / 2)))  # 1.5 and 0.5
        for group in range(groups):
            images.append(draw_image(base, merge, side, generator))
            words_between = words[1, :2].tolist() if videos.apart and group > 0 else []
            ids += [*words_between, *[placeholder] * (side[0] * side[1])]
        # Each item has another number of words after it.
        ids += words[2, : 2 + number].tolist()
    all_ids = np.array(ids)
    image_grids = np.array([images[3].grid])  # the one image, after the first video's 3 groups
    positions = videos.positions(all_ids, image_grids, [clip.video for clip in clips])
    at_videos = all_ids == videos.placeholder
    rows = tuple(videos.images.rows(image.grid) for image in images)
    at_images = at_videos | (all_ids == videos.images.placeholder)
    return TrialDocument(all_ids, tuple(images), rows, positions, at_images, tuple(clips), at_videos)
