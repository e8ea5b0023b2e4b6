"""Which images and videos a row has, and where its texts name them.

A row has `images`, a list of paths or of bytes, and `videos`, a list of lists of frames, and names them in order: as
parts {"type": "image"} and {"type": "video"} of messages, or as `<image>` and `<video>` in a text. Parts may also bring
what they show themselves.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.errors import counted
from longspan.train.data.images.image_file import ImageFile
from longspan.train.data.images.video_file import VideoFile
from longspan.train.data.rows.media.named_videos import video
from longspan.train.data.rows.media.row_media import RowMedia
from longspan.train.data.rows.sample import Row
from longspan.train.data.rows.values import RowError, kind_of_value

NAMED = {"image": "<image>", "video": "<video>"}  # in a text, where a row has any
PARTS = {kind: {"type": kind} for kind in NAMED}
_OWN = ("path", "url")  # keys of a part that brings what it shows itself, beside its type
_NAMES = {(i, v): re.compile("|".join(["<image>"] * i + ["<video>"] * v) or r"(?!)") for i in (0, 1) for v in (0, 1)}


def names(media: RowMedia) -> re.Pattern[str]:
    """What names images and videos in a text, of those kinds alone that a row has."""
    return _NAMES[bool(media.images), bool(media.videos)]


def kinds_named(text: str, names: re.Pattern[str]) -> list[str]:
    """What a text names, in its order: image, video."""
    return [found.strip("<>") for found in names.findall(text)]


def media_of(values: Mapping[str, Any], folder: str) -> RowMedia:
    """What a row has beside its texts, of a file in this folder. Raises RowError for what is none."""
    if values.get("video"):
        raise RowError('"video" is no key of a row; give "videos", a list of lists of frames')
    lists = {kind: _list(values.get(f"{kind}s"), kind) for kind in NAMED}
    images = [_image(entry, folder, f"images[{i}]") for i, entry in enumerate(lists["image"])]
    return RowMedia(images, [video(entry, folder, f"videos[{i}]", _image) for i, entry in enumerate(lists["video"])])


def _list(given: Any, kind: str) -> list[Any]:
    if given is not None and not isinstance(given, list):
        what = 'paths, or of {"bytes": …}' if kind == "image" else "lists of frames"
        raise RowError(f'"{kind}s" is {kind_of_value(given)}; give a list of {what}')
    return given or []


def media_of_row(row: Row) -> RowMedia:
    """All that a row shows, beside its texts or brought by parts of them, in their order."""
    return row_and_media(row)[1]


def row_and_media(row: Row) -> tuple[dict[str, Any], RowMedia]:
    """A row's values, in which images and videos are parts of messages without more, and these in their order."""
    media, own = media_of(row.values, row.folder), RowMedia([], [])
    changed = dict(row.values)
    for key in ("messages", "prompt", "completion"):
        if isinstance(row.values.get(key), list):
            changed[key], brought = with_parts(row.values[key], names(media), row.folder)
            own = RowMedia([*own.images, *brought.images], [*own.videos, *brought.videos])
    for key, beside, brought in (("images", media.images, own.images), ("videos", media.videos, own.videos)):
        if beside and brought:
            raise RowError(f'{len(brought)} parts bring {key}, and the row has "{key}" too; give them in one place')
    return changed, RowMedia(media.images or own.images, media.videos or own.videos)


def has_media(values: Mapping[str, Any]) -> bool:
    """Whether a row brings images, or videos, beside its texts."""
    return any(isinstance(values.get(key), list) and values[key] for key in ("images", "videos"))


def with_parts(messages: Any, names: re.Pattern[str], folder: str) -> tuple[Any, RowMedia]:
    """Messages in which each image and video is a part without more, and those that parts bring themselves.

    Where a text has one of the `names`, it is such a part.
    """
    images, videos = list[ImageFile](), list[VideoFile]()
    if not isinstance(messages, list):
        return messages, RowMedia(images, videos)
    changed = list[Any]()
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and names.search(content):
            content = [{"type": "text", "text": content}]
        if isinstance(content, list):
            parts = [made for k, part in enumerate(content) for made in _parts(part, names)]
            for k, part in enumerate(parts):
                name = f"messages[{i}].content[{k}]"
                parts[k] = _bare_video(part, videos, folder, name) or _bare(part, images, folder, name)
            message = {**message, "content": parts}
        changed.append(message)
    return changed, RowMedia(images, videos)


def kinds_of_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What messages name, in their order: image, video."""
    contents = (message.get("content") for message in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [kind for part in parts for kind in NAMED if part == PARTS[kind]]


def check_counts(named: Sequence[str], media: RowMedia, where: str) -> None:
    """Raise RowError where texts name another number of images, or of videos, than there are."""
    for kind, there in (("image", media.images), ("video", media.videos)):
        if named.count(kind) != len(there):
            raise RowError(
                f"{where} name {counted(named.count(kind), kind)}, and the row has {len(there)}; give one "
                f'{{"type": "{kind}"}}, or {NAMED[kind]} in a text, for each of "{kind}s", in their order'
            )


def _parts(part: Any, names: re.Pattern[str]) -> Iterator[Any]:
    """A part of a content, cut where its text names what is shown; a copy, so that keys without a value are gone."""
    text = part.get("text") if isinstance(part, dict) else None
    if not (isinstance(text, str) and names.search(text)):
        yield part
        return
    kinds = kinds_named(text, names)
    for i, piece in enumerate(names.split(text)):
        if i:
            yield dict(PARTS[kinds[i - 1]])
        if piece:
            yield {**part, "text": piece}


def _bare(part: Any, own: list[ImageFile], folder: str, name: str) -> Any:
    """A part of an image without the image, which is added to `own`; another part as it is."""
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return part
    given = [part[key] for key in ("image_url", "image", *_OWN) if part.get(key) is not None]
    if given:
        value = given[0].get("url") if isinstance(given[0], dict) and "url" in given[0] else given[0]
        own.append(_image(value, folder, name))
    return dict(PARTS["image"])


def _bare_video(part: Any, own: list[VideoFile], folder: str, name: str) -> Any:
    """A part of a video without the video, which is added to `own`; None for another part."""
    if not isinstance(part, dict) or part.get("type") not in ("video", "video_url"):
        return None
    given = [part[key] for key in ("video_url", "video", "frames", *_OWN) if part.get(key) is not None]
    if given:
        own.append(video(given[0], folder, name, _image, part))
    return dict(PARTS["video"])


def _image(entry: Any, folder: str, name: str) -> ImageFile:
    if isinstance(entry, dict):
        data, path = entry.get("bytes"), entry.get("path")
        entry = data if isinstance(data, bytes) else path
    if isinstance(entry, bytes):
        return ImageFile("", entry)
    if not isinstance(entry, str) or not entry:
        raise RowError(f'{name} is {kind_of_value(entry)}; give a path, or {{"bytes": …}} as parquet files have them')
    if "://" in entry[:12] or entry.startswith("data:"):
        raise RowError(f"{name} is {entry[:60]!r}; nothing is downloaded: give the path of a file here")
    return ImageFile(str(Path(folder, Path(entry).expanduser()).absolute()))
