"""Images in files or in rows, and videos as lists of frames: their sizes from headers, and their pixels.

They are turned upright by EXIF, with three channels, as transformers' `load_image` does. Only formats that are
nothing but pixels are read: Pillow gives some others to programs, as EPS to Ghostscript.
"""

import io
import re
import warnings
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.errors import DataError
from longspan.files import Stamp, file_stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image


Size = tuple[int, int]  # height, width
_ORIENTATION = 0x0112  # the EXIF tag
# These values exchange height and width.
_TURNED = (5, 6, 7, 8)
_TAIL = 64  # last bytes of a file, which contain the end mark of a complete one
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "GIF": b";"}
# An image has at most this many pixels, twice what Pillow warns of: 537 MB in three channels.
MAX_PIXELS = 178_956_970
# The file of an image has at most this many bytes.
MAX_IMAGE_BYTES = 1 << 29
# By Pillow's names; its reader of JPEG reads MPO too.
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "JPEG2000")
_SHOWN = 80  # characters of each end of a path in messages


class ImageFile(NamedTuple):
    """An image: the absolute `path` of a file or, if that is empty, the bytes in a row."""

    path: str
    data: bytes = b""

    def size(self) -> Size:
        """Return height and width of the upright image. Raises DataError if it is missing, no image, or cut off.

        Pixels are read only if the file does not end as a complete one does.
        """
        with self._open_image() as image:
            turned = _orientation(image) in _TURNED
            kind = image.format or ""
            size = (image.width, image.height) if turned else (image.height, image.width)
        if kind in _ENDS:
            with Path(self.path).open("rb") if self.path else io.BytesIO(self.data) as file:
                file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL))
                has_end = _ENDS[kind] in file.read()
            if not has_end:
                self.load()
        return size

    def load(self) -> "Image":
        """Read the upright image in three channels. Raises DataError if it is missing or broken."""
        from PIL import ImageOps

        with self._open_image() as image:
            upright = ImageOps.exif_transpose(image) if _orientation(image) else image
            return upright.convert("RGB")

    def stamp(self) -> Stamp:
        """Return size and time of change of a file; for bytes in a row their number and 0."""
        return file_stamp(self.path) if self.path else (len(self.data), 0)

    @contextmanager
    def _open_image(self) -> "Iterator[Image]":
        pil: Any = import_pillow()
        try:
            size = len(self.data)
            if self.path:
                stat = Path(self.path).stat()
                if not S_ISREG(stat.st_mode):  # a pipe may never end
                    raise DataError(f"{self._name} is no regular file; give the path of an image")
                size = stat.st_size
            if size > MAX_IMAGE_BYTES:
                raise DataError(
                    f"{self._name} has {size:,} bytes, and an image has at most {MAX_IMAGE_BYTES:,}; store it with "
                    "fewer pixels, and without what is not its pixels"
                )
            with pil.open(self.path or io.BytesIO(self.data), formats=_pillow_formats()) as image:
                if (pixels := image.width * image.height) > MAX_PIXELS:
                    raise self._pixels_error(pixels, MAX_PIXELS)
                yield image
        except FileNotFoundError as error:
            raise DataError(f"{self._name} does not exist") from error
        except DataError:
            raise
        except pil.DecompressionBombError as error:  # Pillow raises it at twice its limit
            pixels = re.search(r"\d+", str(error))
            raise self._pixels_error(int(pixels.group()) if pixels else 0, 2 * pil.MAX_IMAGE_PIXELS) from error
        except pil.UnidentifiedImageError as error:
            # The error's message is the path, or an address in memory.
            raise DataError(
                f"{self._name} is no image that Pillow can read: it is none of {', '.join(_pillow_formats())}"
            ) from error
        except Exception as error:  # decoders raise errors of any kind for broken files
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise DataError(f"{self._name} is no image that Pillow can read: {reason}") from error

    def _pixels_error(self, pixels: int, most: int) -> DataError:
        return DataError(
            f"{self._name} has {pixels:,} pixels, and at most {most:,} are read, as one with more fills the memory; "
            "store it with fewer: processors make a large image smaller"
        )

    @property
    def _name(self) -> str:
        return shorten_path(self.path) or f"an image of {len(self.data):,} bytes in the row"


def shorten_path(path: str) -> str:
    """Return a path for messages: both ends of a long one, and no character that steers a terminal."""
    path = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in path)
    if len(path) <= 2 * _SHOWN:
        return path
    return f"{path[:_SHOWN]}…{path[-_SHOWN:]} ({len(path):,} characters)"


def _orientation(image: Any) -> int:
    """0 without an orientation; data behind the pixels of a PNG is not read, as that decodes them."""
    if image.format == "PNG" and "exif" not in image.info:
        return 0
    return int(image.getexif().get(_ORIENTATION, 0))


@lru_cache(maxsize=1)
def _pillow_formats() -> tuple[str, ...]:
    pil: Any = import_pillow()
    pil.init()
    return tuple(name for name in FORMATS if name in pil.OPEN)


@lru_cache(maxsize=1)
def import_pillow() -> Any:
    """Import PIL.Image, without its warning of many pixels. Raises DataError, with the command that installs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images are read with Pillow, which is not installed: pip install 'longspan[images]'"
        ) from error
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


class VideoFile(NamedTuple):
    """A video: its frames in order, the time of each in seconds, and the mean seconds from one to the next."""

    frames: tuple[ImageFile, ...]
    times: tuple[float, ...]
    interval: float

    def size(self) -> Size:
        """Return height and width of every upright frame, from the headers. Raises DataError where they differ."""
        sizes = list[Size]()
        for number, frame in enumerate(self.frames):
            try:
                sizes.append(frame.size())
            except DataError as error:
                raise DataError(f"frames[{number}]: {error}") from error
        index = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
        if index is not None:
            (height, width), (first_height, first_width) = sizes[index], sizes[0]
            raise DataError(
                f"frames[{index}] is of {width} x {height} pixels, and frames[0] of {first_width} x {first_height}; "
                "frames of a video are of one size"
            )
        return sizes[0]
