"""Images as the arguments of a model's own `get_image_features`, and of its whole forward pass.

The signature of `get_image_features` lists them: pixels, and grids of patches, sizes of images, masks of
pixels, or whatever else the model's processor makes of an image. What a model does not take is refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from longspan.errors import DataError, ModelError, plural
from longspan.model.vision.image_tokens import ImageInput, model_class

PIXELS, GRIDS, SIZES = "pixel_values", "image_grid_thw", "image_sizes"
MASK = "pixel_attention_mask"  # of images of several sizes, or of patches, that one tensor holds
IN_DOCUMENT = "batch_num_images"  # LLaVA-OneVision: how many images a document has; a single one is cut into tiles


def image_signature(model: Any) -> Mapping[str, Parameter]:
    """Return the signature of `get_image_features` of a model or class, as its parameters by name.

    Raises ModelError for one without this function.
    """
    features = getattr(model, "get_image_features", None)
    if features is None:
        kind = model if isinstance(model, type) else type(model)
        raise ModelError(f"{kind.__name__} has no get_image_features, which makes rows of images")
    parameters = signature(features).parameters.items()
    return {name: p for name, p in parameters if name != "self" and p.kind != Parameter.VAR_KEYWORD}


def check_fields(model: Any, names: Collection[str]) -> None:
    """Raise DataError unless a model, or class, takes these arguments for its images and asks for no others."""
    parameters, kind = image_signature(model), model if isinstance(model, type) else type(model)
    if unknown := [name for name in names if name not in parameters]:
        raise DataError(
            f"images have {', '.join(unknown)}, and get_image_features of {kind.__name__} takes "
            f"{', '.join(parameters)} alone; use the processor of the model's own folder"
        )
    required = [name for name, p in parameters.items() if p.default is Parameter.empty and name not in names]
    if required:
        hints = [_HINTS.get(name, f'fields={{"{name}": …}}') for name in required]
        raise DataError(
            f"{kind.__name__} makes rows of an image by {', '.join(required)}, which its images lack; give "
            f"ImageInput(pixels, {', '.join(hints)}), as the image processor of the model's folder makes them"
        )


def check_images(config: PreTrainedConfig, names: Collection[str]) -> None:
    """Raise DataError unless models of this configuration take these arguments for their images."""
    if (model := model_class(config)) is not None:
        check_fields(model, names)


_HINTS = {SIZES: "size=(height, width)", GRIDS: "grid=(t, h, w)"}


def image_arguments(model: Any, inputs: Sequence[ImageInput], like: Tensor) -> dict[str, Any]:
    """Make the arguments of a model's `get_image_features`, and of its forward pass, for images, in the type of `like`.

    Inputs of all images are joined along the first dim. Images of several sizes are padded with zeros to the largest,
    if sizes or a mask tell the model what is padding. A model that takes images by documents (Idefics) gets all of them
    as one document. Raises DataError for images that do not fit each other, lack an argument that the model asks for,
    or have one that it does not take.
    """
    names = dict.fromkeys(name for image in inputs for name in image.fields)
    fields = {name: [image.fields[name] for image in inputs if name in image.fields] for name in names}
    arguments: dict[str, Any] = {}
    if any(image.grid is not None for image in inputs):
        arguments[GRIDS] = torch.tensor([image.grid for image in inputs], device=like.device)
    if any(image.size is not None for image in inputs):
        arguments[SIZES] = torch.tensor([image.size for image in inputs], device=like.device)
    check_fields(model, [PIXELS, *arguments, *fields])
    pads = SIZES in arguments or MASK in fields
    for name, parts in ({PIXELS: [image.pixels for image in inputs]} | fields).items():
        if len(parts) != len(inputs):
            raise DataError(f"{len(parts)} of {plural(len(inputs), 'image')} have {name}; give it of each")
        dtypes = [like.dtype if x.is_floating_point() else x.dtype for x in parts]
        parts = [x.to(like.device, dtype, non_blocking=True) for x, dtype in zip(parts, dtypes, strict=True)]
        arguments[name] = _join_images(name, parts, pads=pads)
    if MASK in image_signature(model) and arguments[PIXELS].ndim == 4:  # Idefics: (documents, tiles, 3, H, W)
        arguments |= {name: arguments[name][None] for name in (PIXELS, MASK) if name in arguments}
    return arguments


def encoding_order(inputs: Sequence[ImageInput]) -> list[int]:
    """Return the order of images in one call: images that are alone in their document first, others behind.

    LLaVA-OneVision needs it: it is told the documents of a call by their counts of images (`_image_counts`).
    """
    counts = [int(image.fields.get(IN_DOCUMENT, 1)) for image in inputs]  # an only image is cut into tiles
    return sorted(range(len(inputs)), key=lambda i: counts[i] != 1)


def _join_images(name: str, parts: Sequence[Tensor], *, pads: bool) -> Tensor:
    """Numbers of images in documents become numbers of those of the call. Raises DataError if the shapes differ."""
    if name == IN_DOCUMENT:
        return _image_counts(parts)
    if pads:
        parts = _pad_to_largest(parts)
    shapes = {tuple(x.shape[1:]) for x in parts}
    if len(shapes) > 1:
        argument = "pixels" if name == PIXELS else name
        raise DataError(
            f"{plural(len(parts), 'image')} have {argument} of {len(shapes)} shapes ({sorted(shapes)[:3]} after the "
            "first dim); an image processor makes one"
        )
    return torch.cat([*parts])


def _image_counts(counts: Sequence[Tensor]) -> Tensor:
    """Each image that is alone is a document. All others form one document of at least two images: the model only asks
    whether there is more than one, and would cut a single image into tiles.
    """
    single_images = sum(int(count) == 1 for count in counts)
    other_images = len(counts) - single_images
    return torch.tensor([1] * single_images + [max(2, other_images)] * (other_images > 0))


def _pad_to_largest(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad tensors (n, …) to one shape after the first dim, with zeros behind, as processors pad images of a call.

    Tensors with different numbers of dims are returned as they are; they are refused when they are joined.
    """
    if len({x.ndim for x in parts}) > 1:
        return list(parts)
    largest_sides = [max(sides) for sides in zip(*(x.shape[1:] for x in parts), strict=True)]
    missing = [[to - side for side, to in zip(x.shape[1:], largest_sides, strict=True)] for x in parts]
    return [F.pad(x, [n for count in sides[::-1] for n in (0, count)]) for x, sides in zip(parts, missing, strict=True)]
