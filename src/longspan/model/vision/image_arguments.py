"""Images as the arguments of a model's own `get_image_features`, and of its whole forward pass.

Which there are says the signature of `get_image_features`: pixels alone, pixels and grids of patches, or pixels and the
sizes of images. Models that take others are refused by name.
"""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.errors import DataError, ModelError, counted
from longspan.model.vision.image_tokens import ImageInput

GRIDS, SIZES = "image_grid_thw", "image_sizes"
_TILES_OF_DOCUMENTS = "pixel_attention_mask"  # Idefics: pixels are (documents, tiles, 3, H, W), and padding is masked
_KNOWN = ("self", "pixel_values", GRIDS, SIZES)


def image_parameters(model: Any) -> Mapping[str, Parameter]:
    """The arguments of a model's, or class's, `get_image_features`. Raises ModelError where it has none."""
    features = getattr(model, "get_image_features", None)
    if features is None:
        kind = model if isinstance(model, type) else type(model)
        raise ModelError(f"{kind.__name__} has no get_image_features, which makes rows of images")
    return signature(features).parameters


def unknown_arguments(model: Any) -> list[str]:
    """The arguments that rows of images need, and that an ImageInput does not have."""
    named = [p for n, p in image_parameters(model).items() if n not in _KNOWN and p.kind != Parameter.VAR_KEYWORD]
    return [p.name for p in named if p.default is Parameter.empty]


def image_arguments(model: Any, inputs: Sequence[ImageInput], like: Tensor) -> dict[str, Any]:
    """What a model's `get_image_features`, and its forward pass, take for these images, in the type of `like`.

    Raises DataError for images that do not fit each other or lack what the model asks for.
    """
    parameters = image_parameters(model)
    pixels = [image.pixels.to(like.device, like.dtype, non_blocking=True) for image in inputs]
    arguments: dict[str, Any] = {}
    if any(image.grid is not None for image in inputs):
        arguments[GRIDS] = torch.tensor([image.grid for image in inputs], device=like.device)
    if any(image.size is not None for image in inputs):
        pixels = _padded(pixels)
        arguments[SIZES] = torch.tensor([image.size for image in inputs], device=like.device)
    elif SIZES in parameters and parameters[SIZES].default is Parameter.empty:
        raise DataError(
            f"{type(model).__name__} makes rows of an image by its size; give ImageInput(pixels, "
            "size=(height, width)), the image_sizes of its image processor"
        )
    shapes = {tuple(x.shape[1:]) for x in pixels}
    if len(shapes) > 1:
        raise DataError(
            f"{counted(len(inputs), 'image')} have pixels of {len(shapes)} shapes ({sorted(shapes)[:3]} after the "
            "first dim); an image processor makes one"
        )
    joined = torch.cat(pixels)
    arguments["pixel_values"] = joined[None] if _TILES_OF_DOCUMENTS in parameters else joined
    return arguments


def _padded(pixels: Sequence[Tensor]) -> list[Tensor]:
    """Pixels (n, 3, H, W) with zeros below and to the right, as image processors pad those of one call."""
    height, width = (max(x.shape[dim] for x in pixels) for dim in (-2, -1))
    return [F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2])) for x in pixels]
