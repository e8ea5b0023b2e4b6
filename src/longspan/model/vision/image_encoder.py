"""The tower and projector of a vision-language model as an encoder: a list of images to their rows, end to end.

The model's own `get_image_features` is called, once for all images of a call; parameters keep the model's names.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import DataError, ModelError, counted
from longspan.model.vision.image_tokens import ImageInput


class ImageEncoder(nn.Module):
    """What an `Encoder(module=…)` of images calls: rows (n, D · (1 + deep layers)), parts of a row side by side.

    `base` is the model below the head without its text model, kept under the `name` that it has in the whole model.
    """

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, base)
        self.base_name = name
        vision = getattr(base.config, "vision_config", None)
        self.deep_layers = len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def base(self) -> Any:
        """The model below the head, without its text model."""
        return self.get_submodule(self.base_name)

    def forward(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Raises DataError for images that do not fit each other, ModelError where the model gives no rows."""
        weight = next(self.base.parameters())
        pixels = [image.pixels.to(weight.device, weight.dtype, non_blocking=True) for image in inputs]
        shapes = {tuple(x.shape[1:]) for x in pixels}
        if len(shapes) > 1:
            raise DataError(
                f"{counted(len(inputs), 'image')} have pixels of {len(shapes)} shapes ({sorted(shapes)[:3]} after the "
                "first dim); an image processor makes one"
            )
        out = self.base.get_image_features(pixel_values=torch.cat(pixels), **self._grids(inputs, weight.device))
        deeper = getattr(out, "deepstack_features", None) or ()
        rows = [_joined(part) for part in (out.pooler_output, *deeper)]
        if len(rows) != 1 + self.deep_layers:
            raise ModelError(
                f"{type(self.base).__name__} gave {len(deeper)} parts for deeper layers, its configuration names "
                f"{self.deep_layers}"
            )
        return torch.cat(rows, -1) if deeper else rows[0]

    def _grids(self, inputs: Sequence[ImageInput], device: torch.device) -> dict[str, Any]:
        if all(image.grid is None for image in inputs):
            return {"return_dict": True}
        return {"image_grid_thw": torch.tensor([image.grid for image in inputs], device=device), "return_dict": True}


def _joined(parts: Any) -> Tensor:
    """Rows (n, D) of all images, of one tensor or one for each image."""
    rows = torch.cat([*parts]) if not isinstance(parts, Tensor) else parts
    return rows.flatten(0, -2)
