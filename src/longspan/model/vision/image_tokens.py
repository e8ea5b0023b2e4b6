"""Images in the token ids and positions of a vision-language model: how many rows they have, and where.

tokens = image_tokens(AutoConfig.from_pretrained(folder))
positions = tokens.positions(ids, grids)            # (3, T), by the model's own `get_rope_index`; None if plain
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from longspan.errors import DataError, ModelError, plural
from longspan.layout import Integers
from longspan.model.vision.image_inputs import (
    GRIDS,
    POSITIONS,
    SIZES,
    Grid,
    headless_model_class,
    method_parameters,
)

# In mm_token_type_ids text is 0 and videos are 2.
IMAGE = 1


def compute_rope_positions(
    model_class: Any, config: PreTrainedConfig | None, ids: Integers, kinds: Integers, **media: Tensor
) -> Integers:
    """Compute positions (3, T) of a document by the model's own `get_rope_index`.

    `model_class` is that below the head; `kinds` (T,) are of text, images and videos; `media` are arguments such as
    grids.
    """
    bare = model_class.__new__(model_class)  # the method reads the configuration and nothing else of the model
    object.__setattr__(bare, "config", config)
    arguments = {"mm_token_type_ids": torch.from_numpy(kinds)[None].int(), **media}
    result: Any = bare.get_rope_index(torch.from_numpy(ids)[None], **arguments)  # positions (3, 1, T), and offsets
    return result[0][:, 0].numpy()


def mark_placeholders(ids: Integers, placeholder: int, rows: Sequence[int], media: str) -> Integers:
    """Mark tokens (T,) that are this placeholder by 1, others by 0.

    DataError if its runs do not have the lengths `rows`.
    """
    marks = (ids == placeholder).astype(np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks, [0]])))  # start, end, start, end … of runs
    runs = (edges[1::2] - edges[::2]).tolist()
    if runs != list(rows):
        raise DataError(
            f"the document has {plural(len(runs), 'run')} of placeholders (token id {placeholder}) of {runs[:8]} "
            f"tokens, its {media} make {list(rows)[:8]} rows; positions are counted by run: put the placeholders of "
            "each between tokens of text, as the model's processor does"
        )
    return marks


_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")


@dataclass(frozen=True)
class ImageTokens:
    """Images in the ids and positions of a vision-language model; only integers, from its configuration.

    `placeholder` is the token id that rows of images replace (image_token_id). `merge`² patches, `merge` a side, become
    one row: a grid (t, h, w) of patches makes t · h · w / merge² rows. Models without grids make `fixed_rows` for every
    image. `unknown` is the reason why the configuration does not determine the rows: then the processor's placeholders
    count them.
    """

    placeholder: int
    merge: int = 1
    fixed_rows: int | None = None
    config: PreTrainedConfig | None = field(default=None, repr=False, compare=False)
    unknown: str = field(default="", compare=False)

    @property
    def has_grids(self) -> bool:
        """Whether the rows of an image depend on its grid of patches."""
        return self.fixed_rows is None and not self.unknown

    def rows(self, grid: Grid | None) -> int:
        """Return the rows, and placeholders, of one image.

        DataError if the configuration does not determine them, and for a grid that cannot be merged.
        """
        if self.fixed_rows is not None:
            return self.fixed_rows
        if self.unknown:
            raise DataError(
                f"how many rows an image has is not said by {type(self.config).__name__} ({self.unknown}); in a loop "
                "of your own count the placeholders that its processor makes (longspan train does not do so)"
            )
        if (
            grid is None
            or len(grid) != 3
            or any(side < 1 for side in grid)
            or any(s % self.merge for s in grid[1:])
        ):
            raise DataError(
                f"an image has the grid of patches {grid}; give (t, h, w), h and w multiples of {self.merge} "
                "(spatial_merge_size), as the model folder's own image processor makes them"
            )
        return int(np.prod(grid)) // self.merge**2

    def positions(self, ids: npt.NDArray[Any], grids: npt.NDArray[Any]) -> npt.NDArray[np.int64] | None:
        """Compute the positions (3, T) of a whole document, ids (T,) and grids (images, 3); None if they are plain.

        DataError if a grid cannot be merged, or if runs of placeholders are not those of the grids, as where two images
        have no text between them.
        """
        model = headless_model_class(self.config)
        if model is None or not hasattr(model, "get_rope_index") or not len(grids):
            return None
        ids = np.asarray(ids, dtype=np.int64)
        grids = np.asarray(grids, dtype=np.int64)
        kinds = self.kinds(ids, grids)
        return compute_rope_positions(model, self.config, ids, kinds, image_grid_thw=torch.from_numpy(grids))

    def kinds(self, ids: npt.NDArray[np.int64], grids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the kind of each token (T,): text 0, image 1.

        DataError if runs of placeholders do not fit the grids.
        """
        rows = [self.rows(tuple(grid)) for grid in grids.tolist()]
        return IMAGE * mark_placeholders(ids, self.placeholder, rows, plural(len(rows), "image"))


def image_tokens(config: PreTrainedConfig) -> ImageTokens:
    """Read what a model of this configuration takes for images. Raises ModelError for one that has no images.

    >>> image_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((1, 4, 6))  # doctest: +SKIP
    6
    """
    placeholder = getattr(config, "image_token_id", None)
    placeholder = getattr(config, "image_token_index", None) if placeholder is None else placeholder
    vision = getattr(config, "vision_config", None)
    if not isinstance(placeholder, int) or vision is None:
        raise ModelError(
            f"{type(config).__name__} has no image_token_id and vision_config, so it says nothing of images; use the "
            "configuration of a model from images and text to text"
        )
    merges = [getattr(some_config, name, None) for some_config in (vision, config) for name in _MERGES]
    merge = next((value for value in merges if value is not None), None)
    parameters = method_parameters(headless_model_class(config), "get_image_features")
    if GRIDS in parameters and merge is not None:
        return ImageTokens(placeholder, merge[0] if isinstance(merge, list | tuple) else merge, config=config)
    if SIZES in parameters and parameters[SIZES].default is Parameter.empty:
        return ImageTokens(placeholder, config=config, unknown="they depend on its size")
    if POSITIONS in parameters:
        return ImageTokens(placeholder, config=config, unknown="they depend on which of its patches are padding")
    try:
        return ImageTokens(placeholder, fixed_rows=_count_fixed_rows(config, vision), config=config)
    except ModelError as error:
        return ImageTokens(placeholder, config=config, unknown=str(error))


def _count_fixed_rows(config: PreTrainedConfig, vision: PreTrainedConfig) -> int:
    size: Any = getattr(vision, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    name = type(config).__name__
    if not isinstance(height, int) or not isinstance(width, int):
        raise ModelError(f"{name}: its vision_config has no image_size, so rows of an image are not known")
    try:
        with torch.device("meta"), torch.no_grad():
            model: Any = AutoModel.from_config(config, trust_remote_code=False)
            model.to(torch.float32)
            pixels = torch.zeros(1, getattr(vision, "num_channels", 3), height, width).to(next(model.parameters()))
            return len(model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output[0])
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(
            f"{name}: get_image_features of one image of {height} x {width} pixels raised {type(error).__name__}: "
            f"{error}; so its rows are not known"
        ) from error
