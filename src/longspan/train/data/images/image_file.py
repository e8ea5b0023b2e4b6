"""An image where it lies: a file, or bytes in a row. Its header says its size; its pixels are read where asked for.

Images stand upright, as the EXIF orientation in their header says, in three channels: as transformers' `load_image` has
them (which also looks behind the pixels of a PNG).
"""

import io
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

Size = tuple[int, int]  # height, width
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that exchange height and width


class ImageFile(NamedTuple):
    """An image: the absolute `path` of a file, or, where that is empty, the bytes that a row holds."""

    path: str
    data: bytes = b""

    def size(self) -> Size:
        """Height and width of the upright image. Raises DataError for what is missing, or no image."""
        with self._open() as image:
            turned = _orientation(image) in _TURNED
            return (image.width, image.height) if turned else (image.height, image.width)

    def load(self) -> "Image":
        """The upright image in three channels. Raises DataError for what is missing, or broken."""
        from PIL import ImageOps

        with self._open() as image:
            upright = ImageOps.exif_transpose(image) if _orientation(image) else image
            return upright.convert("RGB")

    def stamp(self) -> tuple[int, int]:
        """Bytes and time of change (ns) of a file, by which a change is seen; of bytes in a row their number and 0."""
        if not self.path:
            return len(self.data), 0
        stat = Path(self.path).stat()
        return stat.st_size, stat.st_mtime_ns

    @contextmanager
    def _open(self) -> "Iterator[Image]":
        pil: Any = needed_pillow()
        try:
            with pil.open(self.path or io.BytesIO(self.data)) as image:
                yield image
        except FileNotFoundError as error:
            raise DataError(f"{self.path} does not exist") from error
        except DataError:
            raise
        except Exception as error:  # decoders raise errors of any kind for broken files
            raise DataError(f"{self._name} is no image that Pillow can read: {error}") from error

    @property
    def _name(self) -> str:
        return self.path or f"an image of {len(self.data):,} bytes in the row"


def _orientation(image: Any) -> int:
    """The EXIF orientation, 0 where there is none; of a PNG it is looked for before the pixels, which are not read."""
    if image.format == "PNG" and "exif" not in image.info:
        return 0
    return int(image.getexif().get(_ORIENTATION, 0))


def needed_pillow() -> Any:
    """The module PIL.Image. Raises DataError, with what installs it, where it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images are read with Pillow, which is not installed: pip install 'longspan[images]'"
        ) from error
    return Image
