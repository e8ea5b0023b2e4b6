"""Transformers' own processor of a model's folder: the files that say which it is, loaded without torchvision."""

import copy
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from longspan.corpus.images.image_file import Size
from longspan.errors import DataError
from longspan.model.hf_folder import OF_FOLDER

Grid = tuple[int, int, int]
NESTED, OWN_FILE, LEGACY = "processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"
_CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_ALL: dict[str, Any] = {"temporal_patch_size": 2, "merge_size": 2, "do_resize": True, "do_rescale": True}
_ALL |= {"do_normalize": True, "rescale_factor": 1 / 255, "resample": 3, "cap_pixels_per_frame": False}
_QWEN2, _QWEN3 = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
_DEFAULTS: dict[str, dict[str, Any]] = {  # of the classes, in transformers 5.17 to 5.23
    _QWEN2: {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "max_video_tokens": 128000}
    | {"patch_size": 14}
    | _CLIP,
    _QWEN3: {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "max_video_tokens": 768}
    | {"patch_size": 16}
    | _HALF,
}
_OF_PROCESSORS = {"Qwen2VLProcessor": _QWEN2, "Qwen2_5_VLProcessor": _QWEN2, "Qwen3VLProcessor": _QWEN3}
_RESIZE = {
    _QWEN2: "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    _QWEN3: "transformers.models.qwen3_vl.video_processing_qwen3_vl",
}


@dataclass(frozen=True, eq=False)
class VideoProcessor:
    """What videos become: `kind` is the stock class, `said` its settings, `stock` the folder's processor of all.

    >>> videos = VideoProcessor.of(Path("Qwen3-VL-8B"), processor.stock)
    >>> videos.grid(frames=8, size=(480, 640))
    (4, 20, 26)
    """

    kind: str
    said: dict[str, Any]
    stock: Any
    _texts: dict[Any, str] = field(default_factory=dict[Any, str], repr=False)

    @classmethod
    def of(cls, folder: Path, stock: Any) -> "VideoProcessor":
        """That of a folder whose processor is `stock`. Raises DataError for one that is not known here."""
        said = _settings(folder)
        names = [name for name in (said.get("video_processor_type"), _OF_PROCESSORS.get(_class(stock))) if name]
        kind = names[0].removesuffix("Fast") if names else ""
        if kind not in _DEFAULTS or getattr(stock, "video_token_id", None) is None:
            raise DataError(
                f"videos are processed here as {' and '.join(_DEFAULTS)} do, and {folder} has a "
                f"{kind or _class(stock)}; give frames as images, each with its place in the text"
            )
        known = _DEFAULTS[kind] | _ALL
        said = known | {key: value for key, value in said.items() if value is not None}
        edges = {"shortest_edge": said.get("min_pixels"), "longest_edge": said.get("max_pixels")}
        bounds = {edge: value for edge, value in edges.items() if value and kind == _QWEN2}
        said["size"] = known["size"] | dict(said["size"]) | bounds
        whole = copy.copy(stock)
        sizes = ("merge_size", "temporal_patch_size", "patch_size")
        whole.video_processor = SimpleNamespace(**{name: said[name] for name in sizes})
        return cls(kind, said, whole)

    @property
    def token(self) -> str:
        """What stands in a text for a video before it is processed."""
        return str(self.stock.video_token)

    @property
    def placeholder(self) -> int:
        """The token id at whose places rows of videos stand."""
        return int(self.stock.video_token_id)

    @property
    def group(self) -> int:
        """How many frames become one patch of time."""
        return int(self.said["temporal_patch_size"])

    def grid(self, frames: int, size: Size) -> Grid:
        """The grid of patches (t, h, w) of so many frames of this height and width.

        Raises DataError for a size that the class refuses.
        """
        patch, factor = self.said["patch_size"], self.said["patch_size"] * self.said["merge_size"]
        height, width = size
        if self.said["do_resize"]:
            try:
                height, width = self._resized(frames, size, factor)
            except Exception as error:  # whatever its own code raises
                raise DataError(f"{self.kind} refuses {frames} frames of {width} x {height} pixels: {error}") from error
        if height % factor or width % factor:
            raise DataError(
                f"{self.kind} without do_resize takes frames of multiples of {factor} pixels a side, and these are of "
                f"{width} x {height}"
            )
        return -(-frames // self.group), height // patch, width // patch

    def text(self, grid: Grid, times: Sequence[float]) -> str:
        """What a video is in the text that is tokenized: its placeholders, and the times of groups where they stand."""
        from transformers.video_utils import VideoMetadata

        key = (grid, tuple(times))
        if key not in self._texts:
            metadata = VideoMetadata(total_num_frames=len(times), fps=1.0, frames_indices=list(times))  # type: ignore[arg-type]
            made = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
            self._texts[key] = str(self.stock.replace_video_token(made, 0))
        return self._texts[key]

    def pixels(self, frames: Sequence[Any], grid: Grid) -> Tensor:
        """The pixels (h · w, C · frames · p²) of a group of PIL images; the last is repeated where some are lacking."""
        patches = [self._patches(frame, grid) for frame in frames]
        patches += patches[-1:] * (self.group - len(patches))
        return torch.stack(patches, 2).flatten(1)

    def _patches(self, frame: Any, grid: Grid) -> Tensor:
        """The patches (h · w, C, p²) of one frame."""
        patch = int(self.said["patch_size"])
        if self.said["do_resize"]:
            frame = frame.resize((grid[2] * patch, grid[1] * patch), resample=self.said["resample"])
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "patch_size", "merge_size")
        asked = {name: self.said[name] for name in names}
        made = self.stock.image_processor([frame], do_resize=False, temporal_patch_size=1, return_tensors="pt", **asked)
        pixels: Tensor = made["pixel_values"]
        return pixels.view(len(pixels), -1, patch**2)

    def _resized(self, frames: int, size: Size, factor: int) -> Size:
        """The height and width of frames, by the class's own formula and bounds."""
        resize: Any = import_module(_RESIZE[self.kind]).smart_resize
        least, most = self.said["size"]["shortest_edge"], self.said["size"]["longest_edge"]
        capped, tokens = self.said["cap_pixels_per_frame"], self.said["max_video_tokens"]
        if self.kind == _QWEN2:
            if capped:
                share = int(tokens * factor**2 * 0.9) * self.group // frames
                most = max(min(most, share), int(least * 1.05))
            return resize(*size, factor=factor, min_pixels=least, max_pixels=most)
        if capped:
            most = max(min(tokens * factor**2, most // frames), int(least * 1.05)) * frames
        asked = {"temporal_factor": self.group, "factor": factor, "min_pixels": least, "max_pixels": most}
        return resize(frames, *size, **asked)


def _class(stock: Any) -> str:
    """The stock class of a processor that was loaded without its parts for video."""
    return type(stock).__name__


def _settings(folder: Path) -> dict[str, Any]:
    """What a folder's files say of its video processor, where transformers looks for it."""
    nested = _json_of(folder / NESTED).get("video_processor")
    return nested or _json_of(folder / OWN_FILE) or _json_of(folder / LEGACY)


def _json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def has_processor(folder: Path | None) -> bool:
    """Whether a folder holds an image processor."""
    return folder is not None and any((folder / name).is_file() for name in FILES[:2])


def load_stock(folder: Path) -> Any:
    """The stock processor without what it has beside images and text."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17's own name wants torchvision

    stock = _stock_class(_class_name(folder))

    def parts(cls: Any, path: Any, *_: Any, **__: Any) -> list[Any]:
        made = {
            "tokenizer": lambda: AutoTokenizer.from_pretrained(path, **OF_FOLDER),
            "image_processor": lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **OF_FOLDER),
        }
        return [made[name]() if name in made else None for name in cls.get_attributes()]

    unchecked = {"_get_arguments_from_pretrained": classmethod(parts), "check_argument_for_proper_class": _no_check}
    made = type(stock.__name__, (stock,), unchecked).from_pretrained(folder, **OF_FOLDER)
    for needed in ("image_processor", "image_token"):
        if getattr(made, needed, None) is None:
            raise DataError(f"{stock.__name__}, the processor in {folder}, has no {needed}; images need one that has")
    return made


def _stock_class(name: str) -> Any:
    """The processor's class; of one whose file asks for torchvision, by its image processor on Pillow in its place."""
    import transformers

    stock = getattr(transformers, name)
    if "torchvision" not in getattr(stock, "_backends", ()):
        return stock
    package, _, file = stock.__module__.rpartition(".")
    asked = f"{package}.image_{file}"
    sys.modules[asked] = import_module(asked.replace("image_processing_", "image_processing_pil_"))
    try:
        return getattr(import_module(stock.__module__), name)
    finally:
        del sys.modules[asked]


def _no_check(*_: Any) -> None:
    """Stock processors check the classes of their parts; video, which is left out, has none."""


def _class_name(folder: Path) -> str:
    """The class that the folder's files name, or that transformers has for its kind of model."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings = [_json(folder / name) for name in (*FILES[1::-1], "tokenizer_config.json")]
    named = next((made["processor_class"] for made in settings if made.get("processor_class")), None)
    named = named or PROCESSOR_MAPPING_NAMES.get(_json(folder / "config.json").get("model_type", ""))
    if named is None:
        raise DataError(
            f"neither {FILES[1]} nor {FILES[0]} in {folder} names a processor_class, and there is no config.json of a "
            "model that transformers has one for; save the model's processor there"
        )
    return re.sub(r"Fast$", "", str(named))


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def digest_of(folder: Path) -> str:
    """SHA-256 of what the files of a folder's processor say, however they are written; nothing is loaded."""
    said = [_json(folder / name) for name in FILES]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
