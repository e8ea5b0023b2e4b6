"""The tower and projector of a vision-language model as an encoder: a list of images to their rows, end to end.

The model's own `get_image_features` is called, once for all images of a call; parameters keep the model's names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import base_name, base_of, other_towers, shallow_module, text_of
from longspan.model.vision.image_arguments import encoding_order, image_arguments
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens


class ImageEncoder(nn.Module):
    """What an `Encoder(module=…)` of images calls: rows (n, D · (1 + deep layers)), parts of a row side by side.

    `base` is the model below the head without its text model, kept under the `name` that it has in the whole model; ""
    is the whole model, whose parts are then those of the encoder itself (Llama 4).
    """

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base_name = name
        if name:
            self.add_module(name, base)
        else:
            self.__dict__["_whole"] = base  # no module of this one, but its children are
            for part, child in base.named_children():
                self.add_module(part, child)
        vision = getattr(base.config, "vision_config", None)
        self.deep_layers = len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def base(self) -> Any:
        """The model below the head, without its text model."""
        return self.get_submodule(self.base_name) if self.base_name else self.__dict__["_whole"]

    def forward(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Raises DataError for images that do not fit each other, ModelError where the model gives no rows."""
        rows = rows_of_images(self.base, inputs)
        if len(rows) != 1 + self.deep_layers:
            raise ModelError(
                f"{type(self.base).__name__} gave {len(rows) - 1} parts for deeper layers, its configuration names "
                f"{self.deep_layers}"
            )
        return torch.cat(rows, -1)  # a copy: FSDP2 warns of views that a module returns


def rows_of_images(base: Any, inputs: Sequence[ImageInput]) -> list[Tensor]:
    """What a model's get_image_features makes of images: rows (n, D) end to end, and those for deeper layers."""
    twice = len(inputs) == 1 and _has_one_row(base, inputs[0])
    inputs = [*inputs, *inputs] if twice else inputs
    order = encoding_order(inputs)
    arguments = image_arguments(base, [inputs[i] for i in order], next(base.parameters()))
    out = base.get_image_features(**arguments, return_dict=True)
    rows = out.pooler_output
    if rows is None:  # Llama 4, whose forward pass projects what its tower made
        rows = base.multi_modal_projector(out.last_hidden_state)
    parts = (rows, *(getattr(out, "deepstack_features", None) or ()))
    joined = [_join_rows(part, order) for part in parts]
    return [part[: len(part) // 2] for part in joined] if twice else joined


def _has_one_row(base: Any, image: ImageInput) -> bool:
    """Whether an image is one row of a model with Pixtral's tower, which drops the dim of rows where there is but one
    in a call, and then fails (Mistral 3 and others in transformers 5.17 to 5.23)."""
    vision: Any = getattr(base.config, "vision_config", None)
    if image.size is None or getattr(vision, "model_type", "") != "pixtral":
        return False
    side = vision.patch_size * getattr(base.config, "spatial_merge_size", 1)
    return (image.size[0] // side) * (image.size[1] // side) == 1


def _join_rows(parts: Any, order: Sequence[int]) -> Tensor:
    """Rows (n, D) of all images, of one tensor or one for each image, which were encoded in this order."""
    if not isinstance(parts, Tensor):
        parts = torch.cat([*parts] if list(order) == sorted(order) else [parts[i] for i in np.argsort(order)])
    return parts.flatten(0, -2)


@dataclass(frozen=True)
class VisionParts:
    """The two modules of a vision-language model, and what its ids and positions contain of images.

    `deep_layers` decoder layers get a part of every image row added to what they return (DeepStack).
    """

    encoder: ImageEncoder
    language_model: PreTrainedModel
    tokens: ImageTokens

    @property
    def deep_layers(self) -> int:
        """How many parts a row has besides the one at the embedding."""
        return self.encoder.deep_layers


def split(model: PreTrainedModel) -> VisionParts:
    """The parts of a vision-language model; afterwards the model itself is the language model, without towers."""
    base, text, towers = base_of(model), text_of(model), other_towers(model)
    name_of_base = base_name(model)  # which without its towers may have another
    shell = shallow_module(base)
    for name, child in list(base.named_children()):
        if child in towers:
            del base._modules[name]
        elif any(module is text for module in child.modules()):
            del shell._modules[name]
    base._parameters.clear()  # they are of images too: what ends a line of patches, for one
    return VisionParts(ImageEncoder(shell, name_of_base), model, image_tokens(model.config))
