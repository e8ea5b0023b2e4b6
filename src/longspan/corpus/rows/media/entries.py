"""An entry of a row that gives an image or a video: paths, URLs of files, bytes, base64; frames with their times."""

import base64
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from longspan.corpus.images.image_file import ImageFile, VideoFile, shorten_path
from longspan.corpus.rows.values import RowError, short_repr, type_name
from longspan.errors import plural

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,11}://|file:", re.IGNORECASE)


def read_image_entry(entry: Any, folder: str, name: str) -> ImageFile:
    """Read the entry of an image, which errors call `name`; relative paths begin in `folder`. No file is opened.

    >>> read_image_entry("a.png", "/data", "images[0]").path
    '/data/a.png'

    Raises RowError for an entry that names or brings no image.
    """
    if isinstance(entry, dict):
        check_entry_keys(entry, ("bytes", "path"), name)
        if data := entry.get("bytes"):
            return ImageFile("", data if isinstance(data, bytes) else _decode_base64(data, f"{name}.bytes"))
        entry = entry.get("path")
    if isinstance(entry, bytes) and entry:
        return ImageFile("", entry)
    if not isinstance(entry, str) or not entry:
        kind = "an empty string" if entry == "" else type_name(entry)
        raise RowError(f'{name} is {kind}; give a path, or {{"bytes": …}} as parquet files have them')
    if entry[:5].lower() == "data:":
        header, _, text = entry.partition(",")
        if not text:
            raise RowError(
                f"{name} is {shorten_path(entry)!r}, which brings no bytes; give data:image/png;base64,…"
            )
        is_base64 = header.lower().endswith(";base64")
        return ImageFile("", _decode_base64(text, name) if is_base64 else unquote_to_bytes(text))
    path = Path(entry)
    if (scheme := _SCHEME.match(entry)) is not None:
        url_path = re.sub(r"^//(localhost)?(?=/)", "", entry[len("file:") :])
        if scheme.group().lower().rstrip("/") != "file:" or url_path.startswith("//"):
            raise RowError(
                f"{name} is {shorten_path(entry)!r}; nothing is downloaded: give the path of a file here, or file:///… "
                "with three slashes"
            )
        path = Path(unquote(url_path))
    with suppress(RuntimeError):  # "~name" without a user of this name is a name
        path = path.expanduser()
    return ImageFile(str(Path(folder, path).absolute()))


def check_entry_keys(entry: Mapping[str, Any], keys: Collection[str], name: str) -> None:
    """Raise RowError for a key of an entry or part, other than `keys`, that has a value."""
    if unknown := [key for key, value in entry.items() if key not in keys and value is not None and value != ""]:
        extra_keys = " and ".join(f'"{key}"' for key in unknown[:3])
        raise RowError(
            f"{name} has {extra_keys}, and {', '.join(keys)} alone are read of it; leave it out: sizes are set in the "
            "files of the model folder's processor"
        )


def _decode_base64(text: Any, name: str) -> bytes:
    if not isinstance(text, str):
        raise RowError(f"{name} is {type_name(text)}; give base64 in a string")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise RowError(f"{name} is no base64 ({error}): {text[:40]!r}") from error


FPS = 2.0  # frames a second where a row says nothing, as Qwen's own qwen-vl-utils has it for lists of frames
_RATES = ("fps", "sample_fps")
TIMES = (*_RATES, "timestamps")


def read_video_entry(entry: Any, folder: str, name: str, part: Mapping[str, Any] | None = None) -> VideoFile:
    """Read the entry of a video: a list of frames, or an object with `frames` and `fps` or `timestamps`.

    A `part` of a message may have these times next to its list. Raises RowError if it is no video.
    """
    times = {key: part[key] for key in TIMES if part and part.get(key) is not None}
    frames = entry
    if isinstance(entry, dict):
        check_entry_keys(entry, ("frames", *TIMES), name)
        if times:
            raise RowError(f"{name} has {', '.join(times)} beside an object of frames; give them in one place")
        frames = entry.get("frames")
        times = entry
    if not isinstance(frames, list):
        frames_text = short_repr(frames) if isinstance(frames, str) else type_name(frames)
        raise RowError(
            f"{name} is {frames_text}; files of videos are not read here: give its frames as a list of images, or as "
            '{"frames": […], "fps": 2}'
        )
    if not frames:
        raise RowError(f"{name} has no frames; leave it out")
    files = tuple(read_image_entry(frame, folder, f"{name}.frames[{i}]") for i, frame in enumerate(frames))
    return VideoFile(files, *_read_times(times, len(files), name))


def _read_times(entry: Mapping[str, Any], frames: int, name: str) -> tuple[tuple[float, ...], float]:
    """In seconds, with the mean from one frame to the next. Without a rate or timestamps there are FPS frames per
    second; a single frame with a timestamp lasts as long as one at FPS."""
    rate = next((entry[key] for key in _RATES if entry.get(key) is not None), None)
    times = entry.get("timestamps")
    if times is None:
        rate = FPS if rate is None else rate
        if not _is_number(rate) or not rate > 0:
            raise RowError(f"{name} has fps {short_repr(rate)}; give the frames a second as a number above 0")
        return tuple(i / rate for i in range(frames)), 1 / rate
    if rate is not None:
        raise RowError(f"{name} has fps and timestamps, which both say when frames stand; give one of them")
    if not isinstance(times, list) or not all(map(_is_number, times)) or len(times) != frames:
        times_text = plural(len(times), "number") if isinstance(times, list) else type_name(times)
        raise RowError(f"{name} has timestamps of {times_text} for {plural(frames, 'frame')}; give each its second")
    if any(b <= a for a, b in pairwise(times)) or times[0] < 0:
        raise RowError(f"{name} has timestamps that do not rise from 0 or later: {short_repr(times)}")
    interval = (times[-1] - times[0]) / (frames - 1) if frames > 1 else 1 / FPS
    return tuple(float(time) for time in times), interval


def _is_number(value: Any) -> bool:
    """Below 1e9, no boolean and not NaN (which is not itself)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e9
