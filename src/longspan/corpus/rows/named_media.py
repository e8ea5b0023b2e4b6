"""Which images and videos a row has, and where its texts name them.

A row has `images`, a list of paths or of bytes (or `image`, one), and `videos`, a list of lists of frames, and names
them in order: as parts {"type": "image"} and {"type": "video"} of messages, or, where no part does, as `<image>` and
`<video>` in texts. Parts may also bring what they show themselves. Audio is not read: where a row has a key for it,
`<audio>` is refused as a name of something that is not there.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from longspan.corpus.images.image_file import ImageFile, VideoFile
from longspan.corpus.rows.row_media import TIMES, RowMedia, check_entry_keys, image_of, video_of
from longspan.corpus.rows.sample import Row, RowError, kind_of_value, strings
from longspan.errors import counted

PARTS = {kind: {"type": kind} for kind in ("image", "video")}
NAMED = {kind: f"<{kind}>" for kind in (*PARTS, "audio")}  # in a text, where a row has the keys of its kind
_KEYS = {kind: (f"{kind}s", kind) for kind in NAMED}
_TYPES = {kind: (kind, f"{kind}_url") for kind in NAMED}  # of parts
_BRING = {  # keys of a part that brings what it shows itself
    "image": ("image_url", "image", "path", "url", "base64"),
    "video": ("video_url", "video", "frames", "path", "url"),
}
_TEXTS = ("text", "prompt", "completion")
_CONVERSATIONS = ("messages", "prompt", "completion")


def kinds_by_name(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds (image, video, audio) that texts of a row name: those that it has a key for, and no part is of.

    A key without a value is one too: a text that names what is not there is then an error, and not a text.
    """
    there = [kind for kind, keys in _KEYS.items() if any(key in values for key in keys)]
    types = [part.get("type") for key in _CONVERSATIONS for part in _parts_of(values.get(key))] if there else []
    return tuple(kind for kind in there if not any(type in _TYPES[kind] for type in types))


def names(kinds: Collection[str]) -> re.Pattern[str]:
    """What names these kinds in a text."""
    return _pattern(tuple(kinds))


@lru_cache(maxsize=8)
def _pattern(kinds: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(NAMED[kind] for kind in kinds) or r"(?!)")


def kinds_named(text: str, names: re.Pattern[str]) -> list[str]:
    """What a text names, in its order: image, video."""
    return [name.strip("<>") for name in names.findall(text)]


def names_read_as_text(values: Mapping[str, Any]) -> Counter[str]:
    """In how many texts of a row each of `<image>`, `<video>` and `<audio>` stands for nothing that is shown."""
    bare = [NAMED[kind] for kind in NAMED if kind not in kinds_by_name(values)]
    texts = [text for key in ("messages", *_TEXTS) for _, text in strings(values.get(key), key)]
    return Counter(name for text in texts for name in bare if name in text)


def has_media_keys(values: Mapping[str, Any]) -> bool:
    """Whether a row has a key of images, videos or audio, with a value or without."""
    return any(key in values for keys in _KEYS.values() for key in keys)


def media_beside(values: Mapping[str, Any], *, lists: bool) -> str | None:
    """What a row brings beside its texts, in lists alone if asked: images, videos or audios; None: nothing."""
    there = ((keys[0], values.get(key)) for keys in _KEYS.values() for key in keys)
    return next((media for media, value in there if value and (isinstance(value, list) or not lists)), None)


def media_of(values: Mapping[str, Any], folder: str) -> RowMedia:
    """What a row has beside its texts, of a file in this folder. Raises RowError for what is none."""
    if values.get("video"):
        raise RowError('"video" is no key of a row; give "videos", a list of lists of frames')
    if audio := next((key for key in _KEYS["audio"] if values.get(key)), None):
        raise RowError(f'it has "{audio}", and audio is not read here; leave the row out')
    images = [image_of(entry, folder, f"images[{i}]") for i, entry in enumerate(_list(values, "image"))]
    videos = [video_of(entry, folder, f"videos[{i}]") for i, entry in enumerate(_list(values, "video"))]
    if (image := values.get("image")) is None:
        return RowMedia(images, videos)
    if isinstance(image, list):
        raise RowError('"image" is a list; give one image, or the list as "images"')
    if images:
        raise RowError('it has "image" and "images"; give them in one list')
    return RowMedia([image_of(image, folder, '"image"')], videos)


def _list(values: Mapping[str, Any], kind: str) -> list[Any]:
    entries = values.get(f"{kind}s")
    if entries is not None and not isinstance(entries, list):
        what = 'paths, or of {"bytes": …}' if kind == "image" else "lists of frames"
        raise RowError(f'"{kind}s" is {kind_of_value(entries)}; give a list of {what}')
    return entries or []


def media_of_row(row: Row) -> RowMedia:
    """All that a row shows, beside its texts or brought by parts of them, in their order."""
    return row_and_media(row)[1]


def row_and_media(row: Row) -> tuple[dict[str, Any], RowMedia]:
    """A row's values, in which images and videos are parts of messages without more, and these in their order.

    Raises RowError for what is none, and where a row shows nothing that its plain texts name.
    """
    beside, of_parts = media_of(row.values, row.folder), _PartMedia(row.folder)
    changed, named = dict(row.values), names(kinds_by_name(row.values))
    for key in _CONVERSATIONS:
        if isinstance(row.values.get(key), list):
            changed[key] = of_parts.without(row.values[key], key, named)
    media = RowMedia(beside.images or of_parts.images, beside.videos or of_parts.videos)
    for kind, here, there in (
        ("image", beside.images, of_parts.images),
        ("video", beside.videos, of_parts.videos),
    ):
        if here and there:
            raise RowError(f'{len(there)} parts bring {kind}s, and the row has "{kind}s" too; give them in one place')
    if not media:
        texts = [text for key in _TEXTS if isinstance(text := row.values.get(key), str)]
        check_counts([kind for text in texts for kind in kinds_named(text, named)], media, "its texts")
    return changed, media


class _PartMedia:
    """The images and videos that parts of messages bring themselves, of a row of a file in this folder."""

    def __init__(self, folder: str) -> None:
        self.images, self.videos = list[ImageFile](), list[VideoFile]()
        self._folder, self._counts = folder, Counter[str]()

    def without(self, messages: Sequence[Any], key: str, names: re.Pattern[str]) -> list[Any]:
        """Messages in which what is shown is a part without more, also where a text has one of the `names`."""
        changed = list[Any]()
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str) and names.search(content):
                content = [{"type": "text", "text": content}]
            if isinstance(content, list):
                parts = [cut for part in content for cut in _cut(part, names)]
                parts = [self._bare(part, f"{key}[{i}].content[{k}]") for k, part in enumerate(parts)]
                message = {**message, "content": parts}
            changed.append(message)
        return changed

    def _bare(self, part: Any, name: str) -> Any:
        """A part of an image or a video without these, which are kept here; another part as it is."""
        if not isinstance(part, dict):
            return part
        kind = next((kind for kind in PARTS if part.get("type") in _TYPES[kind]), None)
        if kind is None:
            _check_shows_nothing(part, name)
            return part
        known = ("type", *_BRING[kind], *(("index",) if kind == "image" else TIMES))
        check_entry_keys(part, known, name)
        self._check_index(part.get("index"), kind, name)
        there = [key for key in _BRING[kind] if part.get(key) not in (None, "")]
        if len(there) > 1:
            raise RowError(f"{name} brings {' and '.join(there)}; give one of them")
        for key in there:
            self._add(kind, key, part, name)
        return dict(PARTS[kind])

    def _add(self, kind: str, key: str, part: Mapping[str, Any], name: str) -> None:
        value = part[key]
        if isinstance(value, dict) and "url" in value:
            check_entry_keys(
                {**value, "detail": None} if value.get("detail") == "auto" else value, ("url",), f"{name}.{key}"
            )
            value = value["url"]
        if kind == "video":
            self.videos.append(video_of(value, self._folder, name, part))
        else:
            self.images.append(image_of({"bytes": value} if key == "base64" else value, self._folder, name))

    def _check_index(self, index: Any, kind: str, name: str) -> None:
        """Raise RowError for a part that asks for another image than the next."""
        if index is not None and index != self._counts[kind]:
            raise RowError(
                f"{name} has index {index!r}, and is image {self._counts[kind]} of the row, from 0; images are named "
                "in their order: sort them, and leave the index out"
            )
        self._counts[kind] += 1


def kinds_of_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What messages name, in their order: image, video."""
    return [kind for part in _parts_of(messages) for kind in PARTS if part == PARTS[kind]]


def check_counts(named: Sequence[str], media: RowMedia, where: str) -> None:
    """Raise RowError where texts name another number of images, of videos or of audio than there are."""
    for kind, there in (("image", len(media.images)), ("video", len(media.videos)), ("audio", 0)):
        if (count := named.count(kind)) == there:
            continue
        if kind == "audio":
            raise RowError(f"{where} name audio {count} times, which is not read here; leave the row out")
        advice = f'; a row without the key "{kind}s" has {NAMED[kind]} as text' if not there else ""
        raise RowError(
            f"{where} name {counted(count, kind)}, and the row has {there}; give one "
            f'{{"type": "{kind}"}}, or {NAMED[kind]} in a text, for each of "{kind}s", in their order{advice}'
        )


def _parts_of(messages: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of contents of messages, where they are such."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()


def _cut(part: Any, names: re.Pattern[str]) -> Iterator[Any]:
    """A part of a content, cut where its text names what is shown."""
    text = part.get("text") if isinstance(part, dict) else None
    if not (isinstance(text, str) and names.search(text)):
        yield part
        return
    kinds = kinds_named(text, names)
    for i, piece in enumerate(names.split(text)):
        if i:
            yield {"type": kinds[i - 1]}
        if piece:
            yield {**part, "text": piece}


def _check_shows_nothing(part: Mapping[str, Any], name: str) -> None:
    """Raise RowError for a part of a text, or of no type, that has an image or a video too."""
    keys = [(kind, key) for kind in PARTS for key in _TYPES[kind] if part.get(key) not in (None, "")]
    for kind, key in keys[:1]:
        of_type = f"of type {part['type']!r}" if part.get("type") else "without a type"
        raise RowError(f'{name} is {of_type}, and has "{key}"; give it as a part {{"type": "{kind}", …}} of its own')
