"""The images and videos of a row, in order, and the places in its texts and messages that name them.

An image is a path, a file: or data: URL, or bytes, also in base64; a video is a list of frames with their times. A
row has `images` (or one `image`) and `videos`, and names them in order: as parts {"type": "image"} of messages, which
may also contain them, or as `<image>` and `<video>` in texts. Nothing is downloaded, and audio is refused.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.corpus.images.image_file import ImageFile, VideoFile
from longspan.corpus.rows.kinds import MEDIA_KEYS
from longspan.corpus.rows.media.entries import TIMES, check_entry_keys, read_image_entry, read_video_entry
from longspan.corpus.rows.sample import Row
from longspan.corpus.rows.values import RowError, type_name
from longspan.corpus.tokenizer import any_name_pattern
from longspan.errors import plural


@dataclass(frozen=True)
class RowMedia:
    """The images and videos of a row."""

    images: Sequence[ImageFile] = ()
    videos: Sequence[VideoFile] = ()

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)


NOTHING_SHOWN = RowMedia()


PARTS = {kind: {"type": kind} for kind in ("image", "video")}
# A text of a row with a key of the kind names its media so.
NAMED = {kind: f"<{kind}>" for kind in MEDIA_KEYS}
# Parts have these types.
_TYPES = {kind: (kind, f"{kind}_url") for kind in NAMED}
_MEDIA_KEYS = {  # keys of a part that contains its image or video
    "image": ("image_url", "image", "path", "url", "base64"),
    "video": ("video_url", "video", "frames", "path", "url"),
}
_TEXTS = ("text", "prompt", "completion")
_CONVERSATIONS = ("messages", "prompt", "completion")


def media_name_pattern(values: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern of the names, such as <image>, that texts of a row may contain.

    These are names of kinds (image, video, audio) of which the row has a key, and no part of its messages. A key
    without a value counts: a text that names something missing is then an error, not plain text.
    """
    with_key = [kind for kind, keys in MEDIA_KEYS.items() if any(key in values for key in keys)]
    part_types = [part.get("type") for key in _CONVERSATIONS for part in _message_parts(values.get(key))]
    by_name = (kind for kind in with_key if not any(part_type in _TYPES[kind] for part_type in part_types))
    return any_name_pattern([NAMED[kind] for kind in by_name])


def kinds_in_text(text: str, name_pattern: re.Pattern[str]) -> list[str]:
    """List the kinds (image, video, audio) that a text names, in order."""
    return [name.strip("<>") for name in name_pattern.findall(text)]


def read_media(values: Mapping[str, Any], folder: str) -> RowMedia:
    """Read the media under keys of a row; relative paths begin in `folder`.

    Raises RowError for keys that are not read, and for entries that are no image or video.
    """
    if values.get("video"):
        raise RowError('"video" is no key of a row; give "videos", a list of lists of frames')
    if audio := next((key for key in MEDIA_KEYS["audio"] if values.get(key)), None):
        raise RowError(f'it has "{audio}", and audio is not read here; leave the row out')
    images = [
        read_image_entry(entry, folder, f"images[{i}]") for i, entry in enumerate(_media_entries(values, "image"))
    ]
    videos = [
        read_video_entry(entry, folder, f"videos[{i}]") for i, entry in enumerate(_media_entries(values, "video"))
    ]
    if (image := values.get("image")) is None:
        return RowMedia(images, videos)
    if isinstance(image, list):
        raise RowError('"image" is a list; give one image, or the list as "images"')
    if images:
        raise RowError('it has "image" and "images"; give them in one list')
    return RowMedia([read_image_entry(image, folder, '"image"')], videos)


def _media_entries(values: Mapping[str, Any], kind: str) -> list[Any]:
    entries = values.get(f"{kind}s")
    if entries is not None and not isinstance(entries, list):
        entry = 'paths, or of {"bytes": …}' if kind == "image" else "lists of frames"
        raise RowError(f'"{kind}s" is {type_name(entries)}; give a list of {entry}')
    return entries or []


def extract_row_media(row: Row) -> tuple[dict[str, Any], RowMedia]:
    """Return a row's values with images and videos as bare parts {"type": "image"} of messages, and its media in order.

    Raises RowError for malformed entries, and if texts name something that the row lacks.
    """
    by_key = read_media(row.values, row.folder)
    part_media = _PartMedia(row.folder)
    values = dict(row.values)
    pattern = media_name_pattern(row.values)
    for key in _CONVERSATIONS:
        messages = row.values.get(key)
        if not isinstance(messages, list):
            continue
        values[key] = list[Any]()
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str) and pattern.search(content):
                content = [{"type": "text", "text": content}]
            if isinstance(content, list):
                pieces = [piece for part in content for piece in _split_at_names(part, pattern)]
                parts = [
                    part_media.extract_part(piece, f"{key}[{i}].content[{k}]") for k, piece in enumerate(pieces)
                ]
                message = {**message, "content": parts}
            values[key].append(message)
    media = RowMedia(by_key.images or part_media.images, by_key.videos or part_media.videos)
    for name in ("images", "videos"):
        if getattr(by_key, name) and (in_parts := getattr(part_media, name)):
            raise RowError(
                f'{len(in_parts)} parts bring {name}, and the row has "{name}" too; give them in one place'
            )
    # With media the names in texts are counted where the row is encoded.
    if not media:
        texts = [text for key in _TEXTS if isinstance(text := row.values.get(key), str)]
        check_media_counts([kind for text in texts for kind in kinds_in_text(text, pattern)], media, "its texts")
    return values, media


class _PartMedia:
    """Collects the images and videos in parts of a row's messages; relative paths begin in `folder`."""

    def __init__(self, folder: str) -> None:
        self.images = list[ImageFile]()
        self.videos = list[VideoFile]()
        self._folder = folder
        # These are the parts so far, by kind.
        self._counts = Counter[str]()

    def extract_part(self, part: Any, name: str) -> Any:
        """Return a bare part in place of one of an image or a video, and any other part as it is.

        The image or video that the part brings is added to `images` or `videos`. A part that brings none names the next
        entry of the row's own list. Parts of each kind are counted. Raises RowError, which calls the part `name`, for
        keys that its type has not, several media, and an image out of order.
        """
        if not isinstance(part, dict):
            return part
        kind = next((kind for kind in PARTS if part.get("type") in _TYPES[kind]), None)
        if kind is None:
            media = [(kind, key) for kind in PARTS for key in _TYPES[kind] if part.get(key) not in (None, "")]
            # Parts of another type have this key.
            if media:
                kind, key = media[0]
                type_text = f"of type {part['type']!r}" if part.get("type") else "without a type"
                advice = f'give it as a part {{"type": "{kind}", …}} of its own'
                raise RowError(f'{name} is {type_text}, and has "{key}"; {advice}')
            return part
        # Beside its media a part may have the number of an image, or the times of a video's frames.
        allowed_keys = ("type", *_MEDIA_KEYS[kind], *(("index",) if kind == "image" else TIMES))
        check_entry_keys(part, allowed_keys, name)
        index = part.get("index")
        number = self._counts[kind]
        if index is not None and index != number:
            raise RowError(
                f"{name} has index {index!r}, and is image {number} of the row, from 0; images are named in their "
                "order: sort them, and leave the index out"
            )
        self._counts[kind] += 1
        media_keys = [key for key in _MEDIA_KEYS[kind] if part.get(key) not in (None, "")]
        if len(media_keys) > 1:
            raise RowError(f"{name} brings {' and '.join(media_keys)}; give one of them")
        # There is one key at most.
        for key in media_keys:
            value = part[key]
            if isinstance(value, dict) and "url" in value:  # OpenAI's form; its detail "auto" asks for nothing
                url_keys = ("url", "detail") if value.get("detail") == "auto" else ("url",)
                check_entry_keys(value, url_keys, f"{name}.{key}")
                value = value["url"]
            if kind == "video":
                self.videos.append(read_video_entry(value, self._folder, name, part))
            else:
                entry = {"bytes": value} if key == "base64" else value
                self.images.append(read_image_entry(entry, self._folder, name))
        return dict(PARTS[kind])


def kinds_of_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the kinds (image, video) of the bare parts of messages, in order."""
    return [kind for part in _message_parts(messages) for kind in PARTS if part == PARTS[kind]]


def check_media_counts(named_kinds: Sequence[str], media: RowMedia, where: str) -> None:
    """Raise RowError if texts name another number of images, videos or audio than there are."""
    for kind, media_count in (("image", len(media.images)), ("video", len(media.videos)), ("audio", 0)):
        if (count := named_kinds.count(kind)) == media_count:
            continue
        if kind == "audio":
            raise RowError(f"{where} name audio {count} times, which is not read here; leave the row out")
        advice = f'; a row without the key "{kind}s" has {NAMED[kind]} as text' if not media_count else ""
        raise RowError(
            f"{where} name {plural(count, kind)}, and the row has {media_count}; give one "
            f'{{"type": "{kind}"}}, or {NAMED[kind]} in a text, for each of "{kind}s", in their order{advice}'
        )


def _message_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def _split_at_names(part: Any, name_pattern: re.Pattern[str]) -> Iterator[Any]:
    text = part.get("text") if isinstance(part, dict) else None
    if not (isinstance(text, str) and name_pattern.search(text)):
        yield part
        return
    kinds = kinds_in_text(text, name_pattern)
    for i, piece in enumerate(name_pattern.split(text)):
        if i:  # a name stands before every piece except the first
            yield {"type": kinds[i - 1]}
        if piece:
            yield {**part, "text": piece}
