"""The processor of a model's folder: placeholders and grid of an image of a size, and an image's pixels.

It is transformers' own with the image processor of its PIL backend, so that torchvision is not needed and pixels are
equal on every machine. It is loaded in `stock_processor.py`; videos are in `video_processor.py`.
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

from longspan.corpus.images.image_file import Size, import_pillow
from longspan.corpus.images.stock_processor import load_stock_processor
from longspan.corpus.images.video_processor import VideoProcessor
from longspan.errors import DataError
from longspan.model.vision.image_inputs import GRIDS, IN_DOCUMENT, PIXELS, SIZES, Grid, ImageInput
from longspan.model.weights.hf_folder import folder_error_text

# Fields of a processor's output that are not about images.
_TEXT_OUTPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
_TEXT_OUTPUTS |= {"num_soft_tokens_per_image"}  # how many placeholders Gemma 4 writes
_SIDES = (8, 16, 32, 64, 256, 1024, 4096)
# Sizes that show whether all images take the same placeholders.
_PROBES = tuple((a, b) for a in _SIDES for b in _SIDES if max(a, b) <= 8 * min(a, b))
# A blank image has this size.
_SMALL = (64, 64)


@lru_cache(maxsize=8)
def load_processor(folder: Path) -> "Processor":
    """Load the processor of a folder, once a process. Raises DataError if its files name none that can be loaded."""
    import_pillow()
    try:
        return Processor(load_stock_processor(folder), folder)
    except DataError:
        raise
    except Exception as error:  # json, transformers and huggingface_hub each raise their own
        raise DataError(
            f"the image processor in {folder} cannot be loaded by transformers without torchvision: "
            f"{folder_error_text(error, 'give a folder whose processor is one of transformers')}"
        ) from error


@dataclass(frozen=True, eq=False)
class Processor:
    """A `folder`'s processor; `stock` is transformers' object.

    >>> processor = load_processor(Path("Qwen2.5-VL-7B"))
    >>> processor.patch_grid((20, 33)), processor.image_text((20, 33))[:13]
    ((1, 2, 2), '<|image_pad|>')
    """

    stock: Any
    folder: Path = Path()
    _texts: dict[Any, str] = field(default_factory=dict[Any, str], repr=False)
    _grids: dict[Size, Grid] = field(default_factory=dict[Size, Grid], repr=False)

    @property
    def token(self) -> str:
        """The text of an image before it is processed."""
        return str(getattr(self.stock, "image_placeholder_token", self.stock.image_token))

    @cached_property
    def placeholder(self) -> int:
        """The token id whose places take the rows of images; it need not be the id of `token`.

        It is the id that tokenizer or processor names, if the processor writes it; else the id that it writes most
        often.
        """
        ids = (getattr(component, "image_token_id", None) for component in (self.stock.tokenizer, self.stock))
        known_id = next((int(i) for i in ids if i is not None), None)
        written: list[int] = self.stock.tokenizer(self.image_text(_SMALL), add_special_tokens=False)["input_ids"]
        if known_id is not None and known_id in written:
            return known_id
        return Counter(written).most_common(1)[0][0]

    @property
    def name(self) -> str:
        """The class of its image processor, for messages."""
        return type(self.stock.image_processor).__name__

    @cached_property
    def videos(self) -> VideoProcessor:
        """The processor of videos. Raises DataError for a class that is not supported."""
        return VideoProcessor.from_folder(self.folder, self.stock)

    @property
    def has_grids(self) -> bool:
        """Whether it cuts images into patches, whose grid the model takes."""
        return GRIDS in self.stock.image_processor.model_input_names

    def patch_grid(self, size: Size) -> Grid | None:
        """Return the grid of patches (t, h, w) of an image of this size, without its pixels; None if it has no grid.

        Raises DataError for a size that the processor refuses.
        """
        if not self.has_grids:
            return None
        if size not in self._grids:
            self._grids[size] = _call_processor(self.name, size, lambda: self._find_grid(size))
        return self._grids[size]

    def image_text(self, size: Size, among: int = 1) -> str:
        """Return the text of an image of this size for the tokenizer: placeholders, and the tokens around them.

        `among` is how many images its document has; some processors decide by it whether to cut the image into tiles.
        """
        grid = self.patch_grid(size)
        several = self._depends_on_image_count and among > 1
        # The text depends on the grid alone or, without one, on these; it is found once for each.
        key = grid or (several, None if self.has_fixed_placeholders else size)
        if key not in self._texts:
            self._texts[key] = _call_processor(self.name, size, lambda: self._find_text(size, grid, several))
        return self._texts[key]

    def process_image(self, picture: Any, among: int = 1) -> ImageInput:
        """Process a PIL image into the model's inputs; `among` as in `image_text`. Raises DataError if it fails."""
        several = self._depends_on_image_count and among > 1
        size = (picture.height, picture.width)
        return _call_processor(self.name, size, lambda: read_model_inputs(self._process_image(picture, several)))

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The names of the model's inputs for an image, found by processing a blank one."""
        image = self.process_image(_blank_picture(_SMALL))
        present = {PIXELS: True, GRIDS: image.grid is not None, SIZES: image.size is not None}
        return tuple(name for name, is_present in present.items() if is_present) + tuple(image.fields)

    @cached_property
    def _depends_on_image_count(self) -> bool:
        return IN_DOCUMENT in self.stock.image_processor.model_input_names

    @cached_property
    def has_fixed_placeholders(self) -> bool:
        """Whether images of every size take the same placeholders."""
        try:
            counts = self.stock._get_num_multimodal_tokens(image_sizes=list(_PROBES))
        except Exception:
            # Some processors lack this method, or have one that does not run.
            return False
        return len({*zip(counts["num_image_tokens"], counts["num_image_patches"], strict=True)}) == 1

    def _find_grid(self, size: Size) -> Grid:
        """`smart_resize` makes sides multiples of a merged patch. Where the processor has none, does not resize, or
        counts another number of patches, a blank image is processed."""
        with suppress(Exception):  # processors without what is read here, or whose resizing has other arguments
            processor: Any = self.stock.image_processor
            resize: Callable[..., Size] | None = getattr(
                sys.modules[type(processor).__module__], "smart_resize", None
            )
            if resize is not None and processor.do_resize:
                bounds = {
                    "min_pixels": processor.size["shortest_edge"],
                    "max_pixels": processor.size["longest_edge"],
                }
                height, width = resize(*size, factor=processor.patch_size * processor.merge_size, **bounds)
                grid = (1, height // processor.patch_size, width // processor.patch_size)
                if grid[1] * grid[2] == processor.get_number_of_image_patches(*size, {}):
                    return grid
        grids = self._process_image(_blank_picture(size))[GRIDS][0]
        return int(grids[0]), int(grids[1]), int(grids[2])

    def _find_text(self, size: Size, grid: Grid | None, several: bool) -> str:
        """With `several` another image stands behind the blank one; without a grid a blank image is processed."""
        if grid is not None:
            with suppress(Exception):  # processors that need more than the grid
                return str(self.stock.replace_image_token({GRIDS: np.array([grid])}, 0))
        inputs = self._process_image(_blank_picture(size), several)
        if "text_replacement_offsets" not in inputs:
            raise DataError(
                f"{type(self.stock).__name__} does not say what it writes for an image by itself, so its placeholders "
                "are not known; train the model in a loop of your own (docs/vision-models.md)"
            )
        return str(inputs["text_replacement_offsets"][0][0]["replacement"])

    def _process_image(self, image: Any, several: bool = False) -> Any:
        images = [image, _blank_picture(_SMALL)] if several else [image]
        settings = {"return_tensors": "pt", "padding": False, "return_text_replacement_offsets": True}
        return self.stock(images=[images], text=[self.token * len(images)], **settings)


def _call_processor(name: str, size: Size, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # a processor's code may raise anything
        height, width = size
        raise DataError(f"{name} refuses an image of {width} x {height} pixels: {error}") from error


def _blank_picture(size: Size) -> Any:
    return import_pillow().new("RGB", (size[1], size[0]))


def read_model_inputs(outputs: Mapping[str, Any]) -> ImageInput:
    """Return the first image of a processor's output for a text and its images.

    Pixels are (n, 3, H, W), for n tiles. Where a processor returns (1, n, 3, H, W), the leading dim is removed, from
    pixels and from other fields whose first two dims are (1, n).
    """
    tensors = {name: _as_tensor(name, value) for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
    pixels = tensors.pop(PIXELS)
    leading_dims = pixels.shape[:2] if pixels.ndim == 5 else None
    grid = tensors.pop(GRIDS, None)
    size = tensors.pop(SIZES, None)
    return ImageInput(
        pixels if leading_dims is None else pixels[0],
        None if grid is None else tuple(grid[0].tolist()),  # type: ignore[arg-type]
        None if size is None else tuple(size.reshape(-1, 2)[0].tolist()),  # type: ignore[arg-type]
        {name: x[0] if leading_dims and x.shape[:2] == leading_dims else x for name, x in tensors.items()},
    )


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is no tensor, and a model from images and text takes tensors: {error}") from error
