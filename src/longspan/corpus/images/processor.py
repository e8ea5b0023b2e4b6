"""The processor of a model's folder: what its text has for an image of a size, and an image's pixels.

It is transformers' own (the folder's files name its class), with the image processor of its PIL backend, so that
torchvision is not needed and pixels are the same on every machine. Its part for video, which transformers has with
torchvision alone, is in `video_processor.py`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.corpus.images.image_file import Size, needed_pillow
from longspan.corpus.images.without_torchvision import VideoProcessor, load_stock
from longspan.errors import DataError
from longspan.model.hf_folder import why_refused
from longspan.model.vision.image_arguments import GRIDS, IN_DOCUMENT, PIXELS, SIZES
from longspan.model.vision.image_tokens import Grid, ImageInput

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}


def made_image(made: Mapping[str, Any]) -> ImageInput:
    """The first image of what a processor made of a text and its images.

    Tiles that stand under a dim of documents, or of images, lie under none here: pixels are (n, 3, H, W). Raises
    DataError for a field that is no tensor.
    """
    tensors = {name: _tensor(name, value) for name, value in made.items() if name not in _OF_TEXT}
    pixels = tensors.pop(PIXELS)
    nested = pixels.shape[:2] if pixels.ndim == 5 else None
    grid, size = tensors.pop(GRIDS, None), tensors.pop(SIZES, None)
    return ImageInput(
        pixels if nested is None else pixels[0],
        None if grid is None else tuple(grid[0].tolist()),  # type: ignore[arg-type]
        None if size is None else tuple(size.reshape(-1, 2)[0].tolist()),  # type: ignore[arg-type]
        {name: x[0] if nested is not None and x.shape[:2] == nested else x for name, x in tensors.items()},
    )


def names_of(image: ImageInput) -> list[str]:
    """The arguments of a model that an image has."""
    known = {PIXELS: True, GRIDS: image.grid is not None, SIZES: image.size is not None}
    return [name for name, there in known.items() if there] + list(image.fields)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is no tensor, and a model from images and text takes tensors: {error}") from error


_SIDES = (8, 16, 32, 64, 256, 1024, 4096)
_PROBES = tuple((a, b) for a in _SIDES for b in _SIDES if max(a, b) <= 8 * min(a, b))  # do all images take the same?
_SMALL = (64, 64)  # of a blank image


@lru_cache(maxsize=8)
def load_processor(folder: Path) -> "Processor":
    """The processor of a folder, once a process. Raises DataError where its files name none that can be loaded here."""
    needed_pillow()
    try:
        return Processor(load_stock(folder), folder)
    except DataError:
        raise
    except Exception as error:  # json, transformers and huggingface_hub each raise their own
        raise DataError(
            f"the image processor in {folder} cannot be loaded by transformers without torchvision: "
            f"{why_refused(error, 'give a folder whose processor is one of transformers')}"
        ) from error


@dataclass(frozen=True, eq=False)
class Processor:
    """A `folder`'s processor, `stock`, in transformers' words.

    >>> processor = load_processor(Path("Qwen2.5-VL-7B"))
    >>> processor.grid((20, 33)), processor.text((20, 33))[:13]
    ((1, 2, 2), '<|image_pad|>')
    """

    stock: Any
    folder: Path = Path()
    _texts: dict[Any, str] = field(default_factory=dict[Any, str], repr=False)
    _grids: dict[Size, Grid] = field(default_factory=dict[Size, Grid], repr=False)

    @property
    def token(self) -> str:
        """What stands in a text for an image before it is processed."""
        return str(getattr(self.stock, "image_placeholder_token", self.stock.image_token))

    @cached_property
    def placeholder(self) -> int:
        """The token id at whose places rows of images stand, which need not be that of `token`."""
        ids = (getattr(said, "image_token_id", None) for said in (self.stock.tokenizer, self.stock))
        known = next((int(i) for i in ids if i is not None), None)
        written: list[int] = self.stock.tokenizer(self.text(_SMALL), add_special_tokens=False)["input_ids"]
        return known if known is not None and known in written else Counter(written).most_common(1)[0][0]

    @property
    def name(self) -> str:
        """The class of the image processor."""
        return type(self.stock.image_processor).__name__

    @cached_property
    def videos(self) -> VideoProcessor:
        """What videos become. Raises DataError where the folder's video processor is not known here."""
        return VideoProcessor.of(self.folder, self.stock)

    @property
    def has_grids(self) -> bool:
        """Whether images are cut into a grid of patches that depends on their size."""
        return GRIDS in self.stock.image_processor.model_input_names

    def grid(self, size: Size) -> Grid | None:
        """The grid of patches (t, h, w) of an image of this size, from the size alone; None where there are none.

        Raises DataError for a size that the processor refuses.
        """
        if not self.has_grids:
            return None
        if size not in self._grids:
            self._grids[size] = _naming(self.name, size, lambda: self._grid(size))
        return self._grids[size]

    def text(self, size: Size, among: int = 1) -> str:
        """What an image of this size is in the text that is tokenized: placeholders, and what stands around them.

        `among` are the images of its document, by which some processors decide whether to cut it into tiles.
        """
        grid, several = self.grid(size), self._sees_others and among > 1
        key = grid or (several, None if self.all_alike else size)
        if key not in self._texts:
            self._texts[key] = _naming(self.name, size, lambda: self._text(size, grid, several))
        return self._texts[key]

    def image(self, picture: Any, among: int = 1) -> ImageInput:
        """What the model takes for a PIL image, processed alone. Raises DataError where that fails."""
        several = self._sees_others and among > 1
        size = (picture.height, picture.width)
        return _naming(self.name, size, lambda: made_image(self._processed(picture, several)))

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of all that the model is given for an image. Raises DataError where images cannot be processed."""
        return tuple(names_of(self.image(_blank(_SMALL))))

    @cached_property
    def _sees_others(self) -> bool:
        """Whether an image is processed otherwise where its document has several."""
        return IN_DOCUMENT in self.stock.image_processor.model_input_names

    @cached_property
    def all_alike(self) -> bool:
        """Whether images of every size take the same placeholders."""
        try:
            made = self.stock._get_num_multimodal_tokens(image_sizes=list(_PROBES))
        except Exception:  # some processors have none, or one that does not run
            return False
        return len({*zip(made["num_image_tokens"], made["num_image_patches"], strict=True)}) == 1

    def _grid(self, size: Size) -> Grid:
        with suppress(Exception):  # processors whose resizing has other arguments
            if (grid := self._resized_grid(size)) is not None:
                return grid
        made = self._processed(_blank(size))[GRIDS][0]
        return int(made[0]), int(made[1]), int(made[2])

    def _resized_grid(self, size: Size) -> Grid | None:
        """The grid by the processor's own arithmetic; None where its parts do not agree."""
        processor: Any = self.stock.image_processor
        resize: Callable[..., Size] | None = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
        if resize is None or not processor.do_resize:
            return None
        bounds = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        height, width = resize(*size, factor=processor.patch_size * processor.merge_size, **bounds)
        grid = (1, height // processor.patch_size, width // processor.patch_size)
        return grid if grid[1] * grid[2] == processor.get_number_of_image_patches(*size, {}) else None

    def _text(self, size: Size, grid: Grid | None, several: bool) -> str:
        if grid is not None:
            with suppress(Exception):  # processors that need more than the grid
                return str(self.stock.replace_image_token({GRIDS: np.array([grid])}, 0))
        made = self._processed(_blank(size), several)
        if "text_replacement_offsets" not in made:
            raise DataError(
                f"{type(self.stock).__name__} does not say what it writes for an image by itself, so its placeholders "
                "are not known; train the model in a loop of your own (docs/vision-models.md)"
            )
        return str(made["text_replacement_offsets"][0][0]["replacement"])

    def _processed(self, image: Any, several: bool = False) -> Any:
        """What the stock processor makes of a document of this image alone, or of it and a blank one."""
        images = [image, _blank(_SMALL)] if several else [image]
        settings = {"return_tensors": "pt", "padding": False, "return_text_replacement_offsets": True}
        return self.stock(images=[images], text=[self.token * len(images)], **settings)


def _naming(name: str, size: Size, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # whatever a processor's own code raises
        height, width = size
        raise DataError(f"{name} refuses an image of {width} x {height} pixels: {error}") from error


def _blank(size: Size) -> Any:
    return needed_pillow().new("RGB", (size[1], size[0]))
