"""An image at random for a model, from its configuration and the arguments of its `get_image_features`; no processor.

Images are of several sizes, or of one and two tiles, as the class takes them, with masks and shapes where it has them.
"""

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.model.vision.image_arguments import GRIDS, IN_DOCUMENT, MASK, SIZES, image_parameters
from longspan.model.vision.image_tokens import ImageInput

Side = tuple[int, int]
_FINE = "tile_fine_mask"  # Granite Docling, whose mask is of tiles
_SQUARE = ("kimi_k25", "paddleocr_vl")  # families whose patches are (n, C, p, p)
_SHAPES, _MERGES, _FINER = "spatial_shapes", "image_merge_sizes", "high_res_pixel_values"


def sample_image(base: Any, merge: int, side: Side, draw: np.random.Generator) -> ImageInput:
    """An image of a model below its head: of so many merged patches a side, or quarters of a tile's side.

    `merge` are the merged patches a side of models with grids.
    """
    parameters, vision = image_parameters(base), base.config.vision_config
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    patch, whole = _int(getattr(vision, "patch_size", None)), _int(getattr(vision, "image_size", None))
    if GRIDS in parameters:
        return _patches(base, merge, side, channels * patch**2, draw)
    if _SHAPES in parameters:
        return _packed_tiles(base, side, channels * patch**2, draw)
    if getattr(base.config, "image_grid_pinpoints", None):
        return _cut(base, side, (channels, whole, whole), draw)
    if _is_merged(base):
        height, width = (patch * base.config.spatial_merge_size * n for n in side)
        return ImageInput(_pixels((1, channels, height, width), draw), size=(height, width))
    return _tiles(base, side, (channels, whole, whole), draw)


def probe_image(base: Any, merge: int, rows: int) -> ImageInput:
    """An image of a model below its head: of so many rows where they follow from its size, else of one or two tiles."""
    of_any_size = GRIDS in image_parameters(base) or _is_merged(base)
    side = math.isqrt(rows) if of_any_size else 2
    return sample_image(base, merge, (side, side), np.random.default_rng(0))


def _is_merged(base: Any) -> bool:
    """Whether images of any size have rows of merged patches, without a grid (Mistral 3)."""
    return SIZES in image_parameters(base) and bool(getattr(base.config, "spatial_merge_size", None))


def _patches(base: Any, merge: int, side: Side, width: int, draw: np.random.Generator) -> ImageInput:
    """Patches (n, C · t · p²), or (n, C, p, p), and their grid; where asked for, how many a side make a row."""
    fields, frames = dict[str, Tensor](), getattr(base.config.vision_config, "temporal_patch_size", None) or 1
    if _MERGES in image_parameters(base):
        merge = side[1] % 2 + 1
        fields[_MERGES] = torch.tensor([merge])
    patch, of_patch = _int(base.config.vision_config.patch_size), (frames * width,)
    if base.config.model_type in _SQUARE:
        of_patch = (width // patch**2, patch, patch)
    shape = (merge**2 * side[0] * side[1], *of_patch)
    return ImageInput(_pixels(shape, draw), (1, merge * side[0], merge * side[1]), fields=fields)


def _packed_tiles(base: Any, side: Side, width: int, draw: np.random.Generator) -> ImageInput:
    """Tiles of patches (n, most, C · p²), of which the last is smaller, with a mask (n, most) and shapes (n, 2)."""
    factor, tiles = getattr(base.config, "downsample_factor", 1), side[0]
    shapes = torch.tensor([(3 * factor, 3 * factor)] * (tiles - 1) + [(factor * side[0], factor * side[1])])
    mask = torch.arange(9 * factor**2) < shapes.prod(1)[:, None]
    pixels = _pixels((tiles, 9 * factor**2, width), draw) * mask[..., None]
    return ImageInput(pixels, fields={_SHAPES: shapes, MASK: mask.int()})


def _cut(base: Any, side: Side, tile: tuple[int, int, int], draw: np.random.Generator) -> ImageInput:
    """Tiles of an image of some size, or, in models that ask for it, of one among others in its document."""
    size = (tile[1] * side[0] // 2, tile[2] * side[1] // 2)
    count: Any = getattr(sys.modules[type(base).__module__], "image_size_to_num_patches")  # noqa: B009
    tiles = count(image_size=size, grid_pinpoints=base.config.image_grid_pinpoints, patch_size=tile[1])
    if IN_DOCUMENT not in image_parameters(base):
        return ImageInput(_pixels((tiles, *tile), draw), size=size)
    among = 1 if side[0] < 3 else 3
    pixels = _pixels((tiles if among == 1 else 1, *tile), draw)
    return ImageInput(pixels, size=size, fields={IN_DOCUMENT: torch.tensor([among])})


def _tiles(base: Any, side: Side, tile: tuple[int, int, int], draw: np.random.Generator) -> ImageInput:
    """Tiles of one size; the last is padded at its right where masks say so. Some models see them finer too."""
    parameters, vision, tiles = image_parameters(base), base.config.vision_config, min(side)
    pixels, fields = _pixels((tiles, *tile), draw), dict[str, Tensor]()
    if MASK in parameters and _FINE not in parameters:
        fields[MASK] = torch.ones(tiles, *tile[1:], dtype=torch.int64)
        fields[MASK][-1, :, tile[2] - _int(vision.patch_size) * (side[1] % 2) :] = 0
        pixels = pixels * fields[MASK][:, None]
    if _FINE in parameters:
        fields[MASK] = torch.ones(tiles, dtype=torch.bool)
    if _FINER in parameters:
        finer = _int(base.config.high_res_vision_config.image_size)
        fields[_FINER] = _pixels((tiles, tile[0], finer, finer), draw)
    return ImageInput(pixels, fields=fields)


def _int(value: Any) -> int:
    """A side that may be given for both dims."""
    return int(value[0] if isinstance(value, list | tuple) else value or 0)


def _pixels(shape: tuple[int, ...], draw: np.random.Generator) -> Tensor:
    return torch.from_numpy(draw.normal(size=shape))
