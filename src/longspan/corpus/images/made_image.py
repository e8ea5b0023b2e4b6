"""What a stock processor makes of one image, as an encoder takes it: everything that it would hand to the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longspan.errors import DataError
from longspan.model.vision.image_arguments import GRIDS, PIXELS, SIZES
from longspan.model.vision.image_tokens import ImageInput

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}


def made_image(made: Mapping[str, Any]) -> ImageInput:
    """The first image of what a processor made of a text and its images.

    Tiles that stand under a dim of documents, or of images, lie under none here: pixels are (n, 3, H, W). Raises
    DataError for a field that is no tensor.
    """
    tensors = {name: _tensor(name, value) for name, value in made.items() if name not in _OF_TEXT}
    pixels = tensors.pop(PIXELS)
    nested = pixels.shape[:2] if pixels.ndim == 5 else None
    grid, size = tensors.pop(GRIDS, None), tensors.pop(SIZES, None)
    return ImageInput(
        pixels if nested is None else pixels[0],
        None if grid is None else tuple(grid[0].tolist()),  # type: ignore[arg-type]
        None if size is None else tuple(size.reshape(-1, 2)[0].tolist()),  # type: ignore[arg-type]
        {name: x[0] if nested is not None and x.shape[:2] == nested else x for name, x in tensors.items()},
    )


def names_of(image: ImageInput) -> list[str]:
    """The arguments of a model that an image has."""
    known = {PIXELS: True, GRIDS: image.grid is not None, SIZES: image.size is not None}
    return [name for name, there in known.items() if there] + list(image.fields)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is no tensor, and a model from images and text takes tensors: {error}") from error
