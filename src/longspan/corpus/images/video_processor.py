"""Makes placeholders and pixels of videos, as the video processors of Qwen2-VL and Qwen3-VL do with torchvision.

They are written again: settings of the folder with the class's defaults, sizes by its `smart_resize`, frames resized
by Pillow. transformers' own take the place of this file once they load without torchvision; compare corpora with videos
before, as torchvision does not resize frames exactly as Pillow does.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from longspan.corpus.images.image_file import Size
from longspan.corpus.images.stock_processor import LEGACY, NESTED, read_settings
from longspan.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Grid = tuple[int, int, int]
OWN_FILE = "video_preprocessor_config.json"
_CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_ALL: dict[str, Any] = {"temporal_patch_size": 2, "merge_size": 2, "do_resize": True, "do_rescale": True}
_ALL |= {"do_normalize": True, "rescale_factor": 1 / 255, "resample": 3, "cap_pixels_per_frame": False}
_QWEN2 = "Qwen2VLVideoProcessor"
_QWEN3 = "Qwen3VLVideoProcessor"
# The classes of transformers 5.17 to 5.23 have these defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _QWEN2: {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "max_video_tokens": 128000}
    | {"patch_size": 14}
    | _CLIP,
    _QWEN3: {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "max_video_tokens": 768}
    | {"patch_size": 16}
    | _HALF,
}
_VIDEO_TYPES = {"Qwen2VLProcessor": _QWEN2, "Qwen2_5_VLProcessor": _QWEN2, "Qwen3VLProcessor": _QWEN3}
_RESIZE = {
    _QWEN2: "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    _QWEN3: "transformers.models.qwen3_vl.video_processing_qwen3_vl",
}


@dataclass(frozen=True, eq=False)
class VideoProcessor:
    """Makes placeholders and pixels of videos as the stock class `kind` does; `stock` is the folder's processor.

    >>> videos = VideoProcessor.from_folder(Path("Qwen3-VL-8B"), processor.stock)
    >>> videos.patch_grid(frames=8, size=(480, 640))
    (4, 20, 26)
    """

    kind: str
    settings: dict[str, Any]
    stock: Any
    _texts: dict[Any, str] = field(default_factory=dict[Any, str], repr=False)

    @classmethod
    def from_folder(cls, folder: Path, stock: Any) -> "VideoProcessor":
        """Make the video processor of a folder whose processor is `stock`. Raises DataError for other classes.

        Its class is the one that the folder names, or else transformers' for the class of `stock`; settings that the
        folder lacks are its defaults. Qwen2-VL may write bounds of a frame's pixels as min_pixels and max_pixels.
        """
        nested = read_settings(folder / NESTED).get("video_processor")
        stock_name = type(stock).__name__
        folder_settings = nested or read_settings(folder / OWN_FILE) or read_settings(folder / LEGACY)
        kind = (folder_settings.get("video_processor_type") or _VIDEO_TYPES.get(stock_name, "")).removesuffix(
            "Fast"
        )
        if kind not in _DEFAULTS or getattr(stock, "video_token_id", None) is None:
            raise DataError(
                f"videos are processed here as {' and '.join(_DEFAULTS)} do, and {folder} has a "
                f"{kind or stock_name}; give frames as images, each with its place in the text"
            )
        defaults = _DEFAULTS[kind] | _ALL
        settings = defaults | {key: value for key, value in folder_settings.items() if value is not None}
        edges = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
        bounds = {edge: value for edge, value in edges.items() if value and kind == _QWEN2}
        settings["size"] = defaults["size"] | dict(settings["size"]) | bounds
        # The processor reads the sizes of its own video processor, which is not loaded.
        stock_with_sizes = copy.copy(stock)
        sizes = ("merge_size", "temporal_patch_size", "patch_size")
        stock_with_sizes.video_processor = SimpleNamespace(**{name: settings[name] for name in sizes})
        return cls(kind, settings, stock_with_sizes)

    @property
    def token(self) -> str:
        """The text of a video before it is processed."""
        return str(self.stock.video_token)

    @property
    def placeholder(self) -> int:
        """The token id whose places take the rows of videos."""
        return int(self.stock.video_token_id)

    @property
    def frames_per_group(self) -> int:
        """How many frames become one patch of time."""
        return int(self.settings["temporal_patch_size"])

    def patch_grid(self, frames: int, size: Size) -> Grid:
        """Return the grid of patches (t, h, w) of `frames` frames of this height and width.

        Raises DataError for a size that the class refuses.
        """
        patch = self.settings["patch_size"]
        factor = self.settings["patch_size"] * self.settings["merge_size"]
        height, width = size
        if self.settings["do_resize"]:
            try:
                height, width = self._sides_of_frames(frames, size, factor)
            except Exception as error:  # the class's code may raise anything
                raise DataError(
                    f"{self.kind} refuses {frames} frames of {width} x {height} pixels: {error}"
                ) from error
        if height % factor or width % factor:
            raise DataError(
                f"{self.kind} without do_resize takes frames of multiples of {factor} pixels a side, and these are of "
                f"{width} x {height}"
            )
        return -(-frames // self.frames_per_group), height // patch, width // patch

    def video_text(self, grid: Grid, times: Sequence[float]) -> str:
        """Return the text of a video for the tokenizer: its placeholders and the times of its groups."""
        import torch
        from transformers.video_utils import VideoMetadata

        key = (grid, tuple(times))
        # At one frame per second the index of a frame is its time in seconds.
        if key not in self._texts:
            metadata = VideoMetadata(total_num_frames=len(times), fps=1.0, frames_indices=list(times))  # type: ignore[arg-type]
            fields = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
            self._texts[key] = str(self.stock.replace_video_token(fields, 0))
        return self._texts[key]

    def group_patches(self, frames: Sequence[Any], grid: Grid) -> "Tensor":
        """Return patches (h · w, C · frames · p²) of a group of PIL images; a short group repeats its last image."""
        import torch

        patches = [self._frame_patches(frame, grid) for frame in frames]
        patches += patches[-1:] * (self.frames_per_group - len(patches))
        return torch.stack(patches, 2).flatten(1)

    def _frame_patches(self, frame: Any, grid: Grid) -> "Tensor":
        """(h · w, C, p²), resized to the grid of p × p pixels."""
        patch = int(self.settings["patch_size"])
        if self.settings["do_resize"]:
            frame = frame.resize((grid[2] * patch, grid[1] * patch), resample=self.settings["resample"])
        names = (
            "do_rescale",
            "rescale_factor",
            "do_normalize",
            "image_mean",
            "image_std",
            "patch_size",
            "merge_size",
        )
        settings = {name: self.settings[name] for name in names} | {"do_resize": False, "temporal_patch_size": 1}
        pixels: Tensor = self.stock.image_processor([frame], return_tensors="pt", **settings)["pixel_values"]
        return pixels.view(len(pixels), -1, patch**2)

    def _sides_of_frames(self, frames: int, size: Size, factor: int) -> Size:
        """The sides are multiples of `factor`. The setting "size" bounds the pixels of each frame in Qwen2-VL's class,
        and of all frames together in Qwen3-VL's. With "cap_pixels_per_frame" the setting "max_video_tokens" is a bound
        too: in Qwen2-VL's class of the video, of which each frame gets an equal share, in Qwen3-VL's of each frame. 0.9
        and 1.05 are the classes' numbers."""
        resize: Any = import_module(_RESIZE[self.kind]).smart_resize
        fewest_pixels = self.settings["size"]["shortest_edge"]
        most_pixels = self.settings["size"]["longest_edge"]
        capped = self.settings["cap_pixels_per_frame"]
        tokens = self.settings["max_video_tokens"]
        if self.kind == _QWEN2:
            if capped:
                share = int(tokens * factor**2 * 0.9) * self.frames_per_group // frames
                most_pixels = max(min(most_pixels, share), int(fewest_pixels * 1.05))
            return resize(*size, factor=factor, min_pixels=fewest_pixels, max_pixels=most_pixels)
        if capped:
            most_pixels = max(min(tokens * factor**2, most_pixels // frames), int(fewest_pixels * 1.05)) * frames
        bounds = {"factor": factor, "min_pixels": fewest_pixels, "max_pixels": most_pixels}
        return resize(frames, *size, temporal_factor=self.frames_per_group, **bounds)
