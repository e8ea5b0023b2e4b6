"""Images as a model's processor makes them, and as arguments of the model's own `get_image_features`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MODEL_MAPPING, PreTrainedConfig

from longspan.errors import DataError, ModelError, plural

PIXELS = "pixel_values"
GRIDS = "image_grid_thw"
SIZES = "image_sizes"
# One tensor holds the mask of images of several sizes, or of patches.
MASK = "pixel_attention_mask"
POSITIONS = "image_position_ids"  # Gemma 4: the place (x, y) of each patch of an image, −1 of padding
IN_DOCUMENT = "batch_num_images"  # LLaVA-OneVision: how many images a document has; a single one is cut into tiles
_HINTS = {SIZES: "size=(height, width)", GRIDS: "grid=(t, h, w)"}  # fields of ImageInput, by argument
Grid = tuple[int, int, int]  # patches (t, h, w)


@dataclass(frozen=True)
class ImageInput:
    """One image as the model folder's own image processor makes it: what `read(index)` gives and an encoder takes.

    `pixels` are (patches, C · t · p²) with a `grid` (t, h, w) of patches (Qwen), or without one (n, 3, H, W), n being
    the tiles of the image (LLaVA: 1). `size` is the image's own height and width in models that ask for `image_sizes`
    (Mistral 3: of its pixels; LLaVA-NeXT: before it was cut into tiles). `fields` are further arguments of the model's
    `get_image_features` by name, as its processor makes them of only this image: a `pixel_attention_mask` (n, H, W) of
    tiles (Idefics), or `spatial_shapes` (n, 2) (LFM2-VL).
    """

    pixels: Tensor
    grid: Grid | None = None
    size: tuple[int, int] | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def image_feature_parameters(model: Any) -> Mapping[str, Parameter]:
    """Return the parameters of `get_image_features` of a model or class by name; ModelError for one without it."""
    if not (parameters := method_parameters(model, "get_image_features")):
        raise ModelError(f"{_class_name(model)} has no get_image_features, which makes rows of images")
    return parameters


def method_parameters(model: Any, method: str) -> Mapping[str, Parameter]:
    """Return the parameters of a method of a model, a class or None, by name; none where it has no such method."""
    function = getattr(model, method, None)
    parameters = {} if function is None else signature(function).parameters
    return {name: p for name, p in parameters.items() if name != "self" and p.kind != Parameter.VAR_KEYWORD}


def _class_name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)


def headless_model_class(config: PreTrainedConfig | None) -> Any:
    """Return the class of the model below the head; None if transformers has none."""
    mapping: Any = MODEL_MAPPING
    return mapping.get(type(config), None)


def check_image_arguments(model: Any, names: Collection[str]) -> None:
    """Raise DataError unless a model, or class, takes these arguments for its images and asks for no others."""
    parameters = image_feature_parameters(model)
    if unknown := [name for name in names if name not in parameters]:
        raise DataError(
            f"images have {', '.join(unknown)}, and get_image_features of {_class_name(model)} takes "
            f"{', '.join(parameters)} alone; use the processor of the model's own folder"
        )
    required = [name for name, p in parameters.items() if p.default is Parameter.empty and name not in names]
    if required:
        hints = [_HINTS.get(name, f'fields={{"{name}": …}}') for name in required]
        raise DataError(
            f"{_class_name(model)} makes rows of an image by {', '.join(required)}, which its images lack; give "
            f"ImageInput(pixels, {', '.join(hints)}), as the image processor of the model's folder makes them"
        )


def check_image_arguments_of_config(config: PreTrainedConfig, names: Collection[str]) -> None:
    """Raise DataError unless models of this configuration take these arguments for their images."""
    if (model := headless_model_class(config)) is not None:
        check_image_arguments(model, names)


def image_arguments(model: Any, inputs: Sequence[ImageInput], like: Tensor) -> dict[str, Any]:
    """Make the arguments of a model's `get_image_features`, and of its forward pass, for images, in the type of `like`.

    Inputs are joined along the first dim, padded with zeros if there are sizes or a mask that tell what is padding.
    Idefics gets all as one document. DataError for images that do not fit each other, or the model.
    """
    names = dict.fromkeys(name for image in inputs for name in image.fields)
    fields = {name: [image.fields[name] for image in inputs if name in image.fields] for name in names}
    arguments: dict[str, Any] = {}
    if any(image.grid is not None for image in inputs):
        arguments[GRIDS] = torch.tensor([image.grid for image in inputs], device=like.device)
    if any(image.size is not None for image in inputs):
        arguments[SIZES] = torch.tensor([image.size for image in inputs], device=like.device)
    check_image_arguments(model, [PIXELS, *arguments, *fields])
    pads = SIZES in arguments or MASK in fields
    for name, parts in ({PIXELS: [image.pixels for image in inputs]} | fields).items():
        if len(parts) != len(inputs):
            raise DataError(f"{len(parts)} of {plural(len(inputs), 'image')} have {name}; give it of each")
        dtypes = [like.dtype if x.is_floating_point() else x.dtype for x in parts]
        parts = [x.to(like.device, dtype, non_blocking=True) for x, dtype in zip(parts, dtypes, strict=True)]
        arguments[name] = _join_images(name, parts, pads=pads)
    # Idefics: (documents, tiles, 3, H, W)
    if MASK in image_feature_parameters(model) and arguments[PIXELS].ndim == 4:
        arguments |= {name: arguments[name][None] for name in (PIXELS, MASK) if name in arguments}
    return arguments


def encoding_order(inputs: Sequence[ImageInput]) -> list[int]:
    """Return the order of images in one call: those alone in their document first, as LLaVA-OneVision needs it."""
    counts = [int(image.fields.get(IN_DOCUMENT, 1)) for image in inputs]  # an only image is cut into tiles
    return sorted(range(len(inputs)), key=lambda i: counts[i] != 1)


def _join_images(name: str, parts: Sequence[Tensor], *, pads: bool) -> Tensor:
    if name == IN_DOCUMENT:
        # `parts` has for each image how many its document has. Images alone are documents; all others form one of at
        # least two, since a single one would be cut into tiles.
        single_images = sum(int(count) == 1 for count in parts)
        further_images = len(parts) - single_images
        counts = [1] * single_images
        if further_images:
            counts.append(max(2, further_images))
        return torch.tensor(counts)
    # The padding is zeros behind, as processors pad images of a call.
    if pads and len({x.ndim for x in parts}) == 1:
        largest_sides = [max(sides) for sides in zip(*(x.shape[1:] for x in parts), strict=True)]
        padding = [[to - side for side, to in zip(x.shape[1:], largest_sides, strict=True)] for x in parts]
        parts = [
            F.pad(x, [n for count in sides[::-1] for n in (0, count)])
            for x, sides in zip(parts, padding, strict=True)
        ]
    shapes = {tuple(x.shape[1:]) for x in parts}
    if len(shapes) > 1:
        argument = "pixels" if name == PIXELS else name
        raise DataError(
            f"{plural(len(parts), 'image')} have {argument} of {len(shapes)} shapes ({sorted(shapes)[:3]} after the "
            "first dim); an image processor makes one"
        )
    return torch.cat([*parts])
