"""Images of someone else's corpus are pixels: what runs a program, never ends or fills the memory is a named error."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.corpus.images.image_file import FORMATS, MAX_IMAGE_BYTES, ImageFile
from longspan.errors import DataError

Image: Any = pytest.importorskip("PIL.Image")
PNG = b"\x89PNG\r\n\x1a\n"


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A .png of one grey row, whatever its header says."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b"\0" * (width % 10_000 + 1)))
    return b"".join([PNG, header, *chunks, pixels, png_chunk(b"IEND", b"")])


def image_as(kind: str) -> bytes:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    extra = {"MPO": {"append_images": [picture], "save_all": True}}.get(kind, {})
    picture.save(buffer, format=kind, **extra)
    return buffer.getvalue()


def read_whole(data: bytes) -> tuple[int, int]:
    file = ImageFile("", data)
    size = file.size()
    assert (size[1], size[0]) == file.load().size
    return size


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(/tmp/trap) (w) file closefile\n%%EOF\n"
GIF_FRAME = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0"
HUGE_TIFF = b"II*\0\x08\0\0\0\2\0" + struct.pack("<HHIIHHII", 256, 4, 1, 60_000, 257, 4, 1, 60_000) + b"\0" * 4
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a program for Ghostscript": (EPS, r"is no image that Pillow can read: it is none of PNG, JPEG"),
    "texts that grow a thousand times": (
        png(4, 1, png_chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 10_000_000))),
        "is no image that Pillow can read",
    ),
    "more pixels than are read": (png(20_000, 9_000), "has 180,000,000 pixels, and at most 178,956,970 are read"),
    "a side of 2^31": (png(2**31 - 1, 1), "2,147,483,647 pixels|is no image that Pillow can read"),
    "TIFF of many pixels": (HUGE_TIFF, "3,600,000,000 pixels|is no image that"),
    "no bytes of a format": (b"<svg onload=alert(1)>", "it is none of PNG"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as some programs set it
    data, message = HOSTILE[name]
    with pytest.raises(DataError, match=f"an image of [0-9,]+ bytes in the row (has|is).*({message})|{message}"):
        read_whole(data)


def test_only_the_first_frame_of_many_is_read() -> None:
    data = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff" + GIF_FRAME * 300_000 + b";"
    assert read_whole(data) == (1, 1)


def test_files_that_are_none_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with (tmp_path / "large.png").open("wb") as file:
        file.write(png(4, 1))
        file.truncate(MAX_IMAGE_BYTES + 1)  # a hole, which takes no room
    (tmp_path / "link.png").symlink_to("/dev/zero")
    for name, message in (("pipe.png", "no regular file"), ("link.png", "no regular"), ("large.png", "536,870,913")):
        with pytest.raises(DataError, match=message):
            ImageFile(str(tmp_path / name)).size()
    with pytest.raises(DataError, match="no regular file"):
        ImageFile(str(tmp_path)).load()
    with pytest.raises(DataError, match=r"a\\x1b\[2J.png does not exist"):
        ImageFile(str(tmp_path / "a\x1b[2J.png")).load()


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_images_are_named(kind: str) -> None:
    Image.init()
    if kind not in {*Image.SAVE, *Image.SAVE_ALL} or kind not in {*Image.OPEN, "MPO"}:  # a JPEG's reader reads it
        pytest.skip(f"Pillow does not write {kind} here")
    whole, random = image_as(kind), np.random.default_rng(1)
    assert read_whole(whole) == (24, 32)
    cut = [whole[: int(stop)] for stop in random.integers(0, len(whole), 20)]
    changed = [bytearray(whole) for _ in range(60)]
    for data in changed:
        for place in random.integers(0, min(len(data), 400), 3):
            data[place] = random.integers(0, 256)
    refused = 0
    for data in [*cut, *map(bytes, changed)]:
        try:
            read_whole(data)
        except DataError:
            refused += 1
    assert refused >= 10
