"""The images and videos of a row: the entries that give them, and the places in its texts that name them.

An image is a path, a file: or data: URL, or bytes, also in base64; a video is a list of frames with their times. A
row has `images` (or one `image`) and `videos`, and names them in order: as parts {"type": "image"} of messages, which
may also contain them, or as `<image>` and `<video>` in texts. Nothing is downloaded, and audio is refused.
"""

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import numpy.typing as npt

from longspan.corpus.images.image_file import ImageFile, VideoFile, shorten_path
from longspan.corpus.images.processor import Grid, Processor, load_processor
from longspan.corpus.images.without_torchvision import VideoProcessor, processor_digest
from longspan.corpus.rows.sample import (
    MEDIA_KEYS,
    Row,
    RowError,
    Sample,
    check_strings,
    require_string,
    short_repr,
    type_name,
)
from longspan.corpus.rows.template import ChatTemplate
from longspan.corpus.tokenizer import TextTokenizer, pattern_of_any
from longspan.data.document import NO_TARGET
from longspan.data.images import SampleImage, join_paths, join_stamps
from longspan.errors import DataError, plural

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,11}://|file:", re.IGNORECASE)


def read_image_entry(entry: Any, folder: str, name: str) -> ImageFile:
    """Read the entry of an image, which errors call `name`; relative paths begin in `folder`.

    >>> read_image_entry("a.png", "/data", "images[0]").path
    '/data/a.png'
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
        header, comma, text = entry.partition(",")
        if not comma or not text:
            raise RowError(
                f"{name} is {shorten_path(entry)!r}, which brings no bytes; give data:image/png;base64,…"
            )
        is_base64 = header.lower().endswith(";base64")
        return ImageFile("", _decode_base64(text, name) if is_base64 else unquote_to_bytes(text))
    path = Path(_entry_path(entry, name))
    with suppress(RuntimeError):  # "~name" without a user of this name is a name
        path = path.expanduser()
    return ImageFile(str(Path(folder, path).absolute()))


def check_entry_keys(entry: Mapping[str, Any], keys: Collection[str], name: str) -> None:
    if unknown := [key for key, value in entry.items() if key not in keys and value is not None and value != ""]:
        extra_keys = " and ".join(f'"{key}"' for key in unknown[:3])
        raise RowError(
            f"{name} has {extra_keys}, and {', '.join(keys)} alone are read of it; leave it out: sizes are set in the "
            "files of the model folder's processor"
        )


def _entry_path(entry: str, name: str) -> str:
    scheme = _SCHEME.match(entry)
    if scheme is None:
        return entry
    path = re.sub(r"^//(localhost)?(?=/)", "", entry[len("file:") :])
    if scheme.group().lower().rstrip("/") != "file:" or path.startswith("//"):
        raise RowError(
            f"{name} is {shorten_path(entry)!r}; nothing is downloaded: give the path of a file here, or file:///… "
            "with three slashes"
        )
    return unquote(path)


def _decode_base64(text: Any, name: str) -> bytes:
    if not isinstance(text, str):
        raise RowError(f"{name} is {type_name(text)}; give base64 in a string")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise RowError(f"{name} is no base64 ({error}): {text[:40]!r}") from error


@dataclass(frozen=True)
class RowMedia:
    """The images and videos of a row."""

    images: Sequence[ImageFile] = ()
    videos: Sequence[VideoFile] = ()

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)


NOTHING_SHOWN = RowMedia()


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
    """Return the time of each frame of a video in seconds, and the mean seconds from one to the next.

    An entry gives its frames a second, or a timestamp for each frame, or neither, which is FPS frames a second. A
    single frame with a timestamp lasts as long as one at FPS.
    """
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


PARTS = {kind: {"type": kind} for kind in ("image", "video")}
NAMED = {kind: f"<{kind}>" for kind in MEDIA_KEYS}  # in a text of a row with a key of the kind
_TYPES = {kind: (kind, f"{kind}_url") for kind in NAMED}  # of parts
_MEDIA_KEYS = {  # keys of a part that contains its image or video
    "image": ("image_url", "image", "path", "url", "base64"),
    "video": ("video_url", "video", "frames", "path", "url"),
}
_TEXTS = ("text", "prompt", "completion")
_CONVERSATIONS = ("messages", "prompt", "completion")


def media_name_pattern(values: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern for the kinds (image, video, audio) that texts of a row name: those with a key and no part.

    A key without a value counts: a text that names something missing is then an error, not plain text.
    """
    with_key = [kind for kind, keys in MEDIA_KEYS.items() if any(key in values for key in keys)]
    part_types = [part.get("type") for key in _CONVERSATIONS for part in _message_parts(values.get(key))]
    by_name = (kind for kind in with_key if not any(part_type in _TYPES[kind] for part_type in part_types))
    return pattern_of_any([NAMED[kind] for kind in by_name])


def kinds_named(text: str, name_pattern: re.Pattern[str]) -> list[str]:
    return [name.strip("<>") for name in name_pattern.findall(text)]


def read_media(values: Mapping[str, Any], folder: str) -> RowMedia:
    """Read the media under keys of a row; relative paths begin in `folder`."""
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


def row_and_media(row: Row) -> tuple[dict[str, Any], RowMedia]:
    """Return a row's values with images and videos as bare parts {"type": "image"} of messages, and its media in order.

    Raises RowError for malformed entries, and if texts name something that the row lacks.
    """
    by_key = read_media(row.values, row.folder)
    part_media = _PartMedia(row.folder)
    values = dict(row.values)
    pattern = media_name_pattern(row.values)
    for key in _CONVERSATIONS:
        if isinstance(row.values.get(key), list):
            values[key] = part_media.extract_media(row.values[key], key, pattern)
    media = RowMedia(by_key.images or part_media.images, by_key.videos or part_media.videos)
    for name in ("images", "videos"):
        if getattr(by_key, name) and (in_parts := getattr(part_media, name)):
            raise RowError(
                f'{len(in_parts)} parts bring {name}, and the row has "{name}" too; give them in one place'
            )
    if not media:  # with media the names in texts are counted where the row is encoded
        texts = [text for key in _TEXTS if isinstance(text := row.values.get(key), str)]
        check_media_counts([kind for text in texts for kind in kinds_named(text, pattern)], media, "its texts")
    return values, media


class _PartMedia:
    """Collects the images and videos in parts of a row's messages; relative paths begin in `folder`."""

    def __init__(self, folder: str) -> None:
        self.images, self.videos = list[ImageFile](), list[VideoFile]()
        self._folder = folder
        self._counts = Counter[str]()

    def extract_media(self, messages: Sequence[Any], key: str, name_pattern: re.Pattern[str]) -> list[Any]:
        new_messages = list[Any]()
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str) and name_pattern.search(content):
                content = [{"type": "text", "text": content}]
            if isinstance(content, list):
                parts = [cut for part in content for cut in _split_at_placeholders(part, name_pattern)]
                parts = [self._extract_from_part(part, f"{key}[{i}].content[{k}]") for k, part in enumerate(parts)]
                message = {**message, "content": parts}
            new_messages.append(message)
        return new_messages

    def _extract_from_part(self, part: Any, name: str) -> Any:
        """Return a bare part in place of one with media; a part that contains none names the row's next entry."""
        if not isinstance(part, dict):
            return part
        kind = next((kind for kind in PARTS if part.get("type") in _TYPES[kind]), None)
        if kind is None:
            keys = [(kind, key) for kind in PARTS for key in _TYPES[kind] if part.get(key) not in (None, "")]
            if keys:
                kind, key = keys[0]
                type_text = f"of type {part['type']!r}" if part.get("type") else "without a type"
                advice = f'give it as a part {{"type": "{kind}", …}} of its own'
                raise RowError(f'{name} is {type_text}, and has "{key}"; {advice}')
            return part
        # Beside its media a part may have the number of an image, or the times of a video's frames.
        keys = ("type", *_MEDIA_KEYS[kind], *(("index",) if kind == "image" else TIMES))
        check_entry_keys(part, keys, name)
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
        for key in media_keys:  # one at most
            self._add_media(kind, key, part, name)
        return dict(PARTS[kind])

    def _add_media(self, kind: str, key: str, part: Mapping[str, Any], name: str) -> None:
        value = part[key]
        if isinstance(value, dict) and "url" in value:  # OpenAI's form; its detail "auto" asks for nothing
            keys = ("url", "detail") if value.get("detail") == "auto" else ("url",)
            check_entry_keys(value, keys, f"{name}.{key}")
            value = value["url"]
        if kind == "video":
            self.videos.append(read_video_entry(value, self._folder, name, part))
        else:
            self.images.append(read_image_entry({"bytes": value} if key == "base64" else value, self._folder, name))


def kinds_of_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
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


def _split_at_placeholders(part: Any, name_pattern: re.Pattern[str]) -> Iterator[Any]:
    text = part.get("text") if isinstance(part, dict) else None
    if not (isinstance(text, str) and name_pattern.search(text)):
        yield part
        return
    kinds = kinds_named(text, name_pattern)
    for i, piece in enumerate(name_pattern.split(text)):
        if i:  # a name stands before every piece except the first
            yield {"type": kinds[i - 1]}
        if piece:
            yield {**part, "text": piece}


# Part of the digest of placeholders: it changes with the rules by which texts name images.
_RULES = "images are named by parts, else by texts of rows with a key for them"
_WORDS = ("Zq0before", "Zq1behind")


class Shown(NamedTuple):
    """An image or a video in a text: its name for messages, its file or frames, and what the processor makes of it.

    `text` is what the processor writes for it, `grid` the grid of its patches (None: it is not cut into a grid).
    """

    name: str
    file: ImageFile | VideoFile
    text: str
    grid: Grid | None


class Expanded(NamedTuple):
    """A text with placeholders for its media, these in their order, and spans (start, stop) of characters."""

    text: str
    shown: tuple[Shown, ...]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RowImages:
    """Makes placeholders of the images of rows, with the processor in the tokenizer's folder and its chat template.

    Every method raises RowError if something is wrong with a row.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None

    @property
    def processor(self) -> Processor:
        assert self.tokenizer.folder is not None
        return load_processor(self.tokenizer.folder.absolute())

    @property
    def digest(self) -> tuple[str, ...]:
        assert self.tokenizer.folder is not None
        return _RULES, processor_digest(self.tokenizer.folder), *([self.template.plain] if self.template else ())

    @cached_property
    def marks(self) -> dict[str, str]:
        """What is written into a text in place of `<image>` and of `<video>`, by kind, before it is expanded."""
        return {
            kind: self._template_mark(kind, token) for kind, token in self._processor_tokens(videos=True).items()
        }

    def _template_mark(self, kind: str, token: str) -> str:
        """Return what the chat template writes for a part of this kind: all that stands between words around the part.

        The processor's `token` alone if there is no template, or if the template does not write the token exactly once.
        """
        if self.template is None:
            return token
        part_before, part_after = ({"type": "text", "text": word} for word in _WORDS)
        try:
            content = [part_before, PARTS[kind], part_after]
            text = self.template.render([{"role": "user", "content": content}], None).text
        except RowError:
            return token
        between = text.split(_WORDS[0])[-1].split(_WORDS[1])[0]
        return between if between.count(token) == 1 else token

    def _processor_tokens(self, *, videos: bool) -> dict[str, str]:
        tokens = {"image": self.processor.token}
        if videos:
            with suppress(DataError):
                tokens["video"] = self.processor.videos.token
        return tokens

    def expand_placeholders(self, text: str, media: RowMedia, spans: Sequence[tuple[int, int]] = ()) -> Expanded:
        """Replace placeholders in a text, one for each file in order, by what the processor writes for these.

        `spans` of the text, in characters, move by as many as the placeholders before them grow.
        """
        tokens = self._processor_tokens(videos=bool(media.videos))
        if media.videos:
            _ = self._videos  # raises RowError if videos cannot be processed
        pattern = re.compile("|".join(re.escape(token) for token in tokens.values()))
        placeholders = pattern.findall(text)
        pieces = pattern.split(text)
        kinds = [kind for token in placeholders for kind in tokens if tokens[kind] == token]
        for kind, files in (("image", media.images), ("video", media.videos)):
            if kinds.count(kind) != len(files):
                raise RowError(
                    f"its chat template writes {plural(kinds.count(kind), 'placeholder')} {tokens[kind]} for "
                    f"{plural(len(files), kind)}; mend the template of {self.tokenizer.folder}"
                )
        files = {"image": enumerate(media.images), "video": enumerate(media.videos)}
        shown = tuple(self._make_shown(kind, next(files[kind]), len(media.images)) for kind in kinds)
        sizes = [len(token) for token in placeholders]
        # Where each placeholder begins in the text, and by how much those before it have grown.
        starts = np.cumsum([len(piece) for piece in pieces[:-1]]) + np.cumsum(sizes) - sizes
        grown_before = np.cumsum([0, *(len(medium.text) - size for medium, size in zip(shown, sizes, strict=True))])
        moved_spans = tuple(
            (int(a + grown_before[(starts < a).sum()]), int(b + grown_before[(starts < b).sum()])) for a, b in spans
        )
        shown_texts = (*(medium.text for medium in shown), "")  # no placeholder follows the last piece
        expanded_text = "".join(piece + shown_text for piece, shown_text in zip(pieces, shown_texts, strict=True))
        return Expanded(expanded_text, shown, moved_spans)

    def add_images(self, sample: Sample, expanded: Expanded) -> Sample:
        """Return a sample of an expanded text with its images; placeholders are no targets."""
        placed = list[SampleImage]()
        labels = sample.ids if sample.labels is None else sample.labels
        for kind in ("image", "video"):
            shown = [medium for medium in expanded.shown if isinstance(medium.file, VideoFile) == (kind == "video")]
            if kind == "image" or shown:  # a folder may lack a processor of videos, which only videos need
                placeholder = self.processor.placeholder if kind == "image" else self._videos.placeholder
                placed += self._place_images(sample.ids, kind, placeholder, shown)
                labels = np.where(sample.ids == placeholder, NO_TARGET, labels)
        return sample._replace(labels=labels, images=tuple(sorted(placed)))

    def text_sample(self, values: Mapping[str, Any], media: RowMedia) -> Sample:
        """Encode a text that names images and videos, with the tokens that the tokenizer puts around texts."""
        text = require_string(values.get("text"), "text")
        pattern = media_name_pattern(values)
        special = pattern_of_any(self.tokenizer.special_names)
        check_media_counts(kinds_named(text, pattern), media, "its text")
        if media.videos:
            _ = self._videos  # raises RowError if videos cannot be processed
        # What stands between names of media is tokenized with the placeholders, so it must name no special token.
        for i, piece in enumerate(pattern.split(text)):
            check_strings(piece, f"its text (piece {i + 1})", special)
        expanded = self.expand_placeholders(
            pattern.sub(lambda match: self.marks[match[0].strip("<>")], text), media
        )
        ids = self.tokenizer.set_parsing(True).engine.encode(expanded.text, add_special_tokens=False).ids
        return self.add_images(Sample(self.tokenizer.surround(ids)), expanded)

    @property
    def _videos(self) -> VideoProcessor:
        try:
            return self.processor.videos
        except DataError as error:
            raise RowError(str(error)) from error

    def _place_images(
        self, ids: npt.NDArray[np.int64], kind: str, placeholder: int, shown: Sequence[Shown]
    ) -> Iterator[SampleImage]:
        """Yield images, or groups of frames, with the places of their placeholders in a text's ids (n,)."""
        places = np.flatnonzero(ids == placeholder)
        engine = self.tokenizer.set_parsing(True).engine
        counts = [engine.encode(m.text, add_special_tokens=False).ids.count(placeholder) for m in shown]
        if len(places) != sum(counts) or not all(counts):
            raise RowError(
                f"{plural(len(places), 'placeholder')} (token id {placeholder}) for "
                f"{plural(len(shown), kind)} of {sum(counts)} rows ({counts[:8]}); the processor and the "
                f"tokenizer of {self.tokenizer.folder} must agree, and its texts hold none of their own"
            )
        parts = np.split(places, np.cumsum(counts)[:-1]) if counts else []
        for number, (medium_places, medium) in enumerate(zip(parts, shown, strict=True)):
            if isinstance(medium.file, VideoFile):
                yield from self._frame_groups(number, medium_places, medium.file, medium.grid or (0, 0, 0))
            else:
                at = int(medium_places[0]), int(medium_places[-1]) + 1, len(medium_places)
                stamp = medium.file.stamp()
                grid = medium.grid or (0, 0, 0)
                yield SampleImage(*at, grid, number, medium.file.path, *stamp, among=len(shown))

    def _frame_groups(
        self, number: int, places: npt.NDArray[np.int64], video: VideoFile, grid: Grid
    ) -> Iterator[SampleImage]:
        """Each group has an equal share of a video's placeholders, at these places (n,)."""
        size, (groups, height, width) = self._videos.frames_per_group, grid  # frames of a group, then patches
        if len(places) % groups:
            raise RowError(
                f"videos[{number}] has {plural(len(places), 'placeholder')} for {groups} groups of frames; the "
                f"processor of {self.tokenizer.folder} must write as many for each"
            )
        for group, group_places in enumerate(np.split(places, groups)):
            frames = video.frames[group * size : (group + 1) * size]
            at = int(group_places[0]), int(group_places[-1]) + 1, len(group_places), (1, height, width), number
            path = join_paths([frame.path for frame in frames])
            stamp = join_stamps(frame.stamp() for frame in frames)
            yield SampleImage(*at, path, *stamp, frame=group * size, seconds=video.interval * size)

    def _make_shown(self, kind: str, numbered: tuple[int, ImageFile | VideoFile], images: int) -> Shown:
        number, file = numbered
        name = f"{kind}s[{number}]"
        try:
            if isinstance(file, VideoFile):
                grid = self._videos.patch_grid(len(file.frames), file.size())
                return Shown(name, file, self._videos.video_text(grid, file.times), grid)
            size = file.size()
            return Shown(name, file, self.processor.image_text(size, images), self.processor.patch_grid(size))
        except DataError as error:
            raise RowError(f"{name}: {error}") from error
