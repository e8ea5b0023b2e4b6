"""An image where it lies: a file, or bytes in a row. Its header says its size; its pixels are read where asked for.

Images stand upright, as the EXIF orientation in their header says, in three channels: as transformers' `load_image` has
them (which also looks behind the pixels of a PNG).
"""

import io
import re
import warnings
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.data.images import Stamp, file_stamp
from longspan.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image


Size = tuple[int, int]  # height, width
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that exchange height and width
_TAIL = 64  # bytes in which a whole file says that it ends
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "GIF": b";"}
_SHOWN = 80  # characters of each end of a path in messages


class ImageFile(NamedTuple):
    """An image: the absolute `path` of a file, or, where that is empty, the bytes that a row holds."""

    path: str
    data: bytes = b""

    def size(self) -> Size:
        """Height and width of the upright image. Raises DataError for what is missing, no image, or cut off.

        Pixels are read only where the file does not end as a whole one does.
        """
        with self._open() as image:
            turned, kind = _orientation(image) in _TURNED, image.format or ""
            size = (image.width, image.height) if turned else (image.height, image.width)
        if not self._has_end(kind):
            self.load()
        return size

    def load(self) -> "Image":
        """The upright image in three channels. Raises DataError for what is missing, or broken."""
        from PIL import ImageOps

        with self._open() as image:
            upright = ImageOps.exif_transpose(image) if _orientation(image) else image
            return upright.convert("RGB")

    def stamp(self) -> Stamp:
        """Bytes and time of change (ns) of a file, by which a change is seen; of bytes in a row their number and 0."""
        if not self.path:
            return len(self.data), 0
        return file_stamp(self.path)

    def _has_end(self, kind: str) -> bool:
        """Whether the file ends as whole ones of its kind do; one of a kind that does not tell does."""
        if kind not in _ENDS:
            return True
        with Path(self.path).open("rb") if self.path else io.BytesIO(self.data) as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL))
            return _ENDS[kind] in file.read()

    @contextmanager
    def _open(self) -> "Iterator[Image]":
        pil: Any = needed_pillow()
        try:
            with pil.open(self.path or io.BytesIO(self.data)) as image:
                yield image
        except FileNotFoundError as error:
            raise DataError(f"{self._name} does not exist") from error
        except DataError:
            raise
        except pil.DecompressionBombError as error:
            pixels = re.search(r"\d+", str(error))
            raise DataError(
                f"{self._name} has {int(pixels.group()) if pixels else 0:,} pixels, and at most "
                f"{2 * pil.MAX_IMAGE_PIXELS:,} are read, as one with more fills the memory; store it with fewer: "
                "processors make a large image smaller"
            ) from error
        except pil.UnidentifiedImageError as error:  # its own words are the path, or an address in memory
            raise DataError(f"{self._name} is no image that Pillow can read: it knows no such format") from error
        except Exception as error:  # decoders raise errors of any kind for broken files
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise DataError(f"{self._name} is no image that Pillow can read: {reason}") from error

    @property
    def _name(self) -> str:
        return shown_path(self.path) or f"an image of {len(self.data):,} bytes in the row"


def shown_path(path: str) -> str:
    """A path as messages write it: of a long one both ends."""
    if len(path) <= 2 * _SHOWN:
        return path
    return f"{path[:_SHOWN]}…{path[-_SHOWN:]} ({len(path):,} characters)"


def _orientation(image: Any) -> int:
    """The EXIF orientation, 0 where there is none; of a PNG it is looked for before the pixels, which are not read."""
    if image.format == "PNG" and "exif" not in image.info:
        return 0
    return int(image.getexif().get(_ORIENTATION, 0))


@lru_cache(maxsize=1)
def needed_pillow() -> Any:
    """The module PIL.Image. Raises DataError, with what installs it, where it is missing.

    Pillow warns of images of more than half of the pixels that it reads, which leaves nothing to do: it is quiet here.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images are read with Pillow, which is not installed: pip install 'longspan[images]'"
        ) from error
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


class VideoFile(NamedTuple):
    """A video: its frames in order, the second at which each stands, and the seconds from one to the next."""

    frames: tuple[ImageFile, ...]
    times: tuple[float, ...]
    interval: float

    def size(self) -> Size:
        """Height and width of every upright frame, from their headers.

        Raises DataError, naming the frame, for one that is missing, no image, or of another size than the first.
        """
        sizes = [_size(frame, number) for number, frame in enumerate(self.frames)]
        other = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
        if other is not None:
            (height, width), (first_height, first_width) = sizes[other], sizes[0]
            raise DataError(
                f"frames[{other}] is of {width} x {height} pixels, and frames[0] of {first_width} x {first_height}; "
                "frames of a video are of one size"
            )
        return sizes[0]


def _size(frame: ImageFile, number: int) -> Size:
    try:
        return frame.size()
    except DataError as error:
        raise DataError(f"frames[{number}]: {error}") from error
