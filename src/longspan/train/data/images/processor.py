"""The processor of a model's folder: what its text has for an image of a size, and an image's pixels.

It is transformers' own (the folder's files name its class), with the image processor of its PIL backend, so that
torchvision is not needed and pixels are the same on every machine. Its part for video is left out: transformers has
that with torchvision alone.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from longspan.errors import DataError
from longspan.train.data.images.image_file import Size, needed_pillow

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
Grid = tuple[int, int, int]
_PROBES = ((64, 64), (64, 512), (512, 64), (768, 1024))  # sizes by which it is seen whether all images take the same


def has_processor(folder: Path | None) -> bool:
    """Whether a folder holds an image processor."""
    return folder is not None and any((folder / name).is_file() for name in FILES[:2])


@lru_cache(maxsize=8)
def load_processor(folder: Path) -> "Processor":
    """The processor of a folder, once a process. Raises DataError where its files name none that can be loaded here."""
    needed_pillow()
    try:
        return Processor(_loaded(folder))
    except DataError:
        raise
    except Exception as error:  # json, transformers and huggingface_hub each raise their own
        raise DataError(
            f"the image processor in {folder} cannot be loaded by transformers without torchvision: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, eq=False)
class Processor:
    """A folder's processor, `stock`, in transformers' words.

    >>> processor = load_processor(Path("Qwen2.5-VL-7B"))
    >>> processor.grid((20, 33)), processor.text((20, 33))[:13]
    ((1, 2, 2), '<|image_pad|>')
    """

    stock: Any
    _texts: dict[Any, str] = field(default_factory=dict[Any, str], repr=False)
    _grids: dict[Size, Grid] = field(default_factory=dict[Size, Grid], repr=False)

    @property
    def token(self) -> str:
        """What stands in a text for an image before it is processed."""
        return str(self.stock.image_token)

    @property
    def placeholder(self) -> int:
        """The token id at whose places rows of images stand, which need not be that of `token`."""
        of_tokenizer = getattr(self.stock.tokenizer, "image_token_id", None)
        return int(self.stock.image_token_id if of_tokenizer is None else of_tokenizer)

    @property
    def name(self) -> str:
        """The class of the image processor."""
        return type(self.stock.image_processor).__name__

    @property
    def has_grids(self) -> bool:
        """Whether images are cut into a grid of patches that depends on their size."""
        return "image_grid_thw" in self.stock.image_processor.model_input_names

    def grid(self, size: Size) -> Grid | None:
        """The grid of patches (t, h, w) of an image of this size, from the size alone; None where there are none.

        Raises DataError for a size that the processor refuses.
        """
        if not self.has_grids:
            return None
        if size not in self._grids:
            self._grids[size] = _naming(self.name, size, lambda: self._grid(size))
        return self._grids[size]

    def text(self, size: Size) -> str:
        """What an image of this size is in the text that is tokenized: placeholders, and what stands around them."""
        grid = self.grid(size)
        key = grid or (None if self._all_alike else size)
        if key not in self._texts:
            self._texts[key] = _naming(self.name, size, lambda: self._text(size, grid))
        return self._texts[key]

    def pixels(self, image: Any) -> tuple[Any, Grid | None]:
        """The pixels of a PIL image as the model takes them, and its grid. Raises DataError where that fails."""
        made = _naming(self.name, (image.height, image.width), lambda: self._processed(image))
        grid = tuple(int(side) for side in made["image_grid_thw"][0]) if self.has_grids else None
        return made["pixel_values"], grid  # type: ignore[return-value]

    @cached_property
    def _all_alike(self) -> bool:
        """Whether images of every size take the same placeholders."""
        made = self.stock._get_num_multimodal_tokens(image_sizes=list(_PROBES))
        return len({*zip(made["num_image_tokens"], made["num_image_patches"], strict=True)}) == 1

    def _grid(self, size: Size) -> Grid:
        processor: Any = self.stock.image_processor
        patches = processor.get_number_of_image_patches(*size, {})
        resize: Callable[..., Size] | None = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
        if resize is not None and processor.do_resize:
            bounds = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
            height, width = resize(*size, factor=processor.patch_size * processor.merge_size, **bounds)
            grid = (1, height // processor.patch_size, width // processor.patch_size)
            if grid[1] * grid[2] == patches:
                return grid
        made = self._processed(_blank(size))["image_grid_thw"][0]
        return int(made[0]), int(made[1]), int(made[2])

    def _text(self, size: Size, grid: Grid | None) -> str:
        made = {"image_grid_thw": np.array([grid])} if grid else self._processed(_blank(size))
        return str(self.stock.replace_image_token(made, 0))

    def _processed(self, image: Any) -> Any:
        return self.stock.image_processor([image], return_tensors="pt")


def _naming(name: str, size: Size, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # whatever a processor's own code raises
        height, width = size
        raise DataError(f"{name} refuses an image of {width} x {height} pixels: {error}") from error


def _blank(size: Size) -> Any:
    return needed_pillow().new("RGB", (size[1], size[0]))


def _loaded(folder: Path) -> Any:
    """The stock processor without what it has beside images and text."""
    import transformers
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17's own name wants torchvision

    stock = getattr(transformers, _class_name(folder))

    def parts(cls: Any, path: Any, *_: Any, **__: Any) -> list[Any]:
        made = {
            "tokenizer": lambda: AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False),
            "image_processor": lambda: AutoImageProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, backend="pil"
            ),
        }
        return [made[name]() if name in made else None for name in cls.get_attributes()]

    unchecked = {"_get_arguments_from_pretrained": classmethod(parts), "check_argument_for_proper_class": _no_check}
    made = type(stock.__name__, (stock,), unchecked).from_pretrained(folder, local_files_only=True)
    for needed in ("image_processor", "image_token", "image_token_id"):
        if getattr(made, needed, None) is None:
            raise DataError(f"{stock.__name__}, the processor in {folder}, has no {needed}; images need one that has")
    return made


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
    said = [_json(folder / name) for name in FILES[:2]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
