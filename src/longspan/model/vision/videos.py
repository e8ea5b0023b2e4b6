"""Videos in the token ids and positions of a vision-language model.

Each group of frames of a video (a temporal patch) is an item, with a grid (1, h, w) of patches. Towers of models with
such videos attend only inside a group, so that the groups of one video may be encoded by several ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspan.errors import DataError, ModelError, plural
from longspan.model.vision.image_inputs import GRIDS, Grid, ImageInput, headless_model_class, method_parameters
from longspan.model.vision.image_tokens import ImageTokens, compute_rope_positions, image_tokens, mark_placeholders

# In mm_token_type_ids text is 0 and images are 1.
VIDEO = 2

_PIXELS = "pixel_values_videos"
_GRIDS = "video_grid_thw"
_SECONDS = "second_per_grid_ts"


class Video(NamedTuple):
    """A video by its `grid` (t, h, w) of patches: t groups of frames, `seconds` from one group to the next.

    Only Qwen2.5-VL computes positions from `seconds`; Qwen3-VL writes the times of groups as text between them.
    """

    grid: Grid
    seconds: float = 1.0


@dataclass(frozen=True)
class VideoTokens:
    """Videos in the ids and positions of a vision-language model; only integers, from its configuration.

    `placeholder` is the token id that rows of videos replace (video_token_id). If `apart`, the model expects text
    between the groups of frames of a video; otherwise the rows of a video are one run.
    """

    images: ImageTokens
    placeholder: int
    apart: bool

    @classmethod
    def from_configuration(cls, config: PreTrainedConfig) -> "VideoTokens":
        """Read what a configuration takes for videos; ModelError where it takes none by grids, or lacks the id."""
        images = image_tokens(config)
        model = headless_model_class(config)
        placeholder = getattr(config, "video_token_id", None)
        takes_features = {_PIXELS, _GRIDS} <= method_parameters(model, "get_video_features").keys()
        takes_grids = {_GRIDS, "mm_token_type_ids"} <= method_parameters(model, "get_rope_index").keys()
        if not isinstance(placeholder, int) or not takes_features or not takes_grids:
            raise ModelError(
                f"{type(config).__name__} is not of a model that takes videos by a video_token_id, {_PIXELS} and "
                f"{_GRIDS}; give frames as images"
            )
        if placeholder >= (known_ids := config.get_text_config().vocab_size):
            raise ModelError(
                f"placeholders of videos are token id {placeholder}, and {type(config).__name__} has {known_ids} ids "
                "(vocab_size); set video_token_id in config.json to an id of the vocabulary, as the tokenizer has it"
            )
        return cls(images, placeholder, _expects_text_between_groups(config, placeholder, images.merge))

    def rows(self, grid: Grid) -> list[int]:
        """Return the rows of each group of frames of a video.

        Raises DataError for a grid that the model does not merge.

        >>> video_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((3, 4, 6))  # doctest: +SKIP
        [6, 6, 6]
        """
        groups, height, width = grid
        return [self.images.rows((1, height, width))] * groups

    def inputs(self, pixels: Tensor, grid: Grid) -> list[ImageInput]:
        """Cut pixel_values_videos (t · h · w, C · frames · p²) into an input for each group of frames.

        DataError if unequal.
        """
        groups, height, width = grid
        if len(pixels) != groups * height * width:
            raise DataError(
                f"a video has {len(pixels)} patches and the grid {grid}, which is of {groups * height * width}; give "
                f"the rows of {_PIXELS} of this video alone"
            )
        return [ImageInput(group_pixels, (1, height, width)) for group_pixels in pixels.chunk(groups)]

    def positions(
        self, ids: npt.NDArray[Any], grids: npt.NDArray[Any], videos: Sequence[Video]
    ) -> npt.NDArray[np.int64] | None:
        """Compute the positions (3, T) of a document: ids (T,), grids (images, 3) of its images, and its videos.

        None if they are plain. DataError if runs of placeholders are not those of the images and videos.
        """
        if not videos:
            return self.images.positions(ids, grids)
        ids = np.asarray(ids, dtype=np.int64)
        grids = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
        rows = [counts if self.apart else [sum(counts)] for counts in (self.rows(video.grid) for video in videos)]
        runs = [n for counts in rows for n in counts]
        video_marks = mark_placeholders(ids, self.placeholder, runs, plural(len(videos), "video"))
        config = self.images.config
        model = headless_model_class(config)
        media = {_GRIDS: torch.tensor([video.grid for video in videos])}
        if len(grids):
            media[GRIDS] = torch.from_numpy(grids)
        # Processors give seconds in float32.
        if _SECONDS in method_parameters(model, "get_rope_index"):
            media[_SECONDS] = torch.tensor([video.seconds for video in videos], dtype=torch.float32)
        return compute_rope_positions(
            model, config, ids, self.images.kinds(ids, grids) + VIDEO * video_marks, **media
        )


def _expects_text_between_groups(config: PreTrainedConfig, placeholder: int, side: int) -> bool:
    """The model's own `get_rope_index` is tried with a video of two groups of two rows, of `side`² patches each,
    whose placeholders are one run."""
    grids = {_GRIDS: torch.tensor([[2, side, 2 * side]])}
    model = headless_model_class(config)
    try:
        compute_rope_positions(model, config, np.array([placeholder] * 4), np.array([VIDEO] * 4), **grids)
    except RuntimeError:
        # The model made positions of the first group only, which do not fill four tokens.
        return True
    return False
