"""What a row gives as an image: a path, a file: or data: URL, or bytes, in base64 too. Nothing is downloaded.

Whether it is an image, and whether its file is there, is seen where it is opened.
"""

import base64
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from longspan.corpus.images.image_file import ImageFile, shown_path
from longspan.corpus.rows.values import RowError, kind_of_value

_LONGEST_PATH = 4096  # characters, which no system takes more of
_BASE64 = re.compile(r"(?:iVBORw0|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/\s]{64,}={0,2}\s*")  # of PNG, JPEG, GIF and WebP
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,11}://|file:", re.IGNORECASE)


def image_of(entry: Any, folder: str, name: str) -> ImageFile:
    """The image that an entry called `name` stands for, of a file in this folder. Raises RowError for what is none.

    >>> image_of("a.png", "/data", "images[0]").path
    '/data/a.png'
    """
    if isinstance(entry, dict):
        check_keys(entry, ("bytes", "path"), name)
        if data := entry.get("bytes"):
            return ImageFile("", data if isinstance(data, bytes) else _decoded(data, f"{name}.bytes"))
        entry = entry.get("path")
    if isinstance(entry, bytes) and entry:
        return ImageFile("", entry)
    if not isinstance(entry, str) or not entry:
        kind = "an empty string" if entry == "" else kind_of_value(entry)
        raise RowError(f'{name} is {kind}; give a path, or {{"bytes": …}} as parquet files have them')
    if entry[:5].lower() == "data:":
        return ImageFile("", _data_of_url(entry, name))
    path = Path(_path(entry, name))
    with suppress(RuntimeError):  # "~name" without a user of this name is a name
        path = path.expanduser()
    return ImageFile(str(Path(folder, path).absolute()))


def check_keys(entry: Mapping[str, Any], known: Collection[str], name: str) -> None:
    """Raise RowError where an entry has a key, with a value, that nothing here reads."""
    unknown = [key for key, value in entry.items() if key not in known and value is not None and value != ""]
    if unknown:
        listed = " and ".join(f'"{key}"' for key in unknown[:3])
        raise RowError(
            f"{name} has {listed}, and {', '.join(known)} alone are read of it; leave it out: sizes are set in the "
            "files of the model folder's processor"
        )


def _path(entry: str, name: str) -> str:
    """The path that an entry is, or that its file: URL has."""
    scheme = _SCHEME.match(entry)
    if scheme is None:
        if _BASE64.fullmatch(entry):
            raise RowError(
                f"{name} looks like an image as base64, of {len(entry):,} characters; write it as "
                '"data:image/png;base64,…", or as {"bytes": "…"}'
            )
        if len(entry) > _LONGEST_PATH:
            raise RowError(
                f"{name} has {len(entry):,} characters, and a path at most {_LONGEST_PATH:,}: {entry[:60]!r}"
            )
        return entry
    if scheme.group().lower().rstrip("/") != "file:":
        raise RowError(f"{name} is {shown_path(entry)!r}; nothing is downloaded: give the path of a file here")
    path = entry[len("file:") :]
    if path.startswith("//"):
        host, slash, path = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise RowError(
                f"{name} is {shown_path(entry)!r}, a file of the host {host!r}; nothing is downloaded: a file here is "
                "file:///…, with three slashes, or a path"
            )
        path = slash + path
    return unquote(path)


def _data_of_url(url: str, name: str) -> bytes:
    """The bytes that a data: URL brings."""
    header, comma, text = url.partition(",")
    if not comma or not text:
        raise RowError(f"{name} is {shown_path(url)!r}, which brings no bytes; give data:image/png;base64,…")
    return _decoded(text, name) if header.lower().endswith(";base64") else unquote_to_bytes(text)


def _decoded(text: Any, name: str) -> bytes:
    if not isinstance(text, str):
        raise RowError(f"{name} is {kind_of_value(text)}; give base64 in a string")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise RowError(f"{name} is no base64 ({error}): {text[:40]!r}") from error
