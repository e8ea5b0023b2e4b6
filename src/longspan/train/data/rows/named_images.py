"""Which images a row has, and where its texts name them.

A row has `images`, a list of paths or of bytes, and names them in order: as parts {"type": "image"} of messages, or as
`<image>` in a text. Parts may also bring their images themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.errors import counted
from longspan.train.data.images.image_file import ImageFile
from longspan.train.data.rows.sample import Row
from longspan.train.data.rows.values import RowError, kind_of_value, shown

NAMED = "<image>"  # in a text, where a row has images
PART = {"type": "image"}
_OWN = ("image", "path", "url")  # keys of a part that brings its image itself
_VIDEO = ("videos", "video")


def images_of(values: Mapping[str, Any], folder: str) -> list[ImageFile]:
    """The images that a row has beside its texts, of a file in this folder. Raises RowError for what is none."""
    for key in _VIDEO:
        if values.get(key):
            raise RowError(
                f"{key!r} holds {_shown(values[key])}: transformers processes videos with torchvision alone, and they "
                "are not read here; give their frames as images, each with its place in the text"
            )
    given = values.get("images")
    if given is None:
        return []
    if not isinstance(given, list):
        raise RowError(f'"images" is {kind_of_value(given)}; give a list of paths, or of {{"bytes": …}}')
    return [_image(entry, folder, f"images[{i}]") for i, entry in enumerate(given)]


def images_of_row(row: Row) -> list[ImageFile]:
    """All images of a row, beside its texts or brought by parts of them, in their order."""
    return row_and_images(row)[1]


def row_and_images(row: Row) -> tuple[dict[str, Any], list[ImageFile]]:
    """A row's values, in which images are parts of messages without more, and the images in their order."""
    images, own = images_of(row.values, row.folder), list[ImageFile]()
    changed = dict(row.values)
    for key in ("messages", "prompt", "completion"):
        if isinstance(row.values.get(key), list):
            changed[key], brought = with_parts(row.values[key], bool(images), row.folder)
            own += brought
    if images and own:
        raise RowError(f'{len(own)} parts bring images, and the row has "images" too; give them in one place')
    return changed, images or own


def has_images(values: Mapping[str, Any]) -> bool:
    """Whether a row brings images, or videos, beside its texts."""
    return any(isinstance(values.get(key), list) and values[key] for key in ("images", *_VIDEO))


def with_parts(messages: Any, given: bool, folder: str) -> tuple[Any, list[ImageFile]]:
    """Messages in which each image is a part without more, and the images that parts bring themselves.

    Where the row has images (`given`), `<image>` in a text is one of them.
    """
    if not isinstance(messages, list):
        return messages, []
    changed, own = list[Any](), list[ImageFile]()
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and given and NAMED in content:
            content = [{"type": "text", "text": content}]
        if isinstance(content, list):
            parts = [made for k, part in enumerate(content) for made in _parts(part, given)]
            for k, part in enumerate(parts):
                parts[k] = _bare(part, own, folder, f"messages[{i}].content[{k}]")
            message = {**message, "content": parts}
        changed.append(message)
    return changed, own


def count_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many images messages name."""
    contents = (message.get("content") for message in messages)
    return sum(part == PART for content in contents if isinstance(content, list) for part in content)


def check_count(named: int, images: Sequence[ImageFile], where: str) -> None:
    """Raise RowError where texts name another number of images than there are."""
    if named != len(images):
        raise RowError(
            f"{where} name {counted(named, 'image')}, and the row has {len(images)}; give one "
            f'{{"type": "image"}}, or {NAMED} in a text, for each of "images", in their order'
        )


def _parts(part: Any, given: bool) -> Iterator[Any]:
    """A part of a content, cut where its text names images; a copy, so that keys without a value are gone."""
    text = part.get("text") if isinstance(part, dict) else None
    if not (given and isinstance(text, str) and NAMED in text):
        yield part
        return
    for i, piece in enumerate(text.split(NAMED)):
        if i:
            yield dict(PART)
        if piece:
            yield {**part, "text": piece}


def _bare(part: Any, own: list[ImageFile], folder: str, name: str) -> Any:
    """A part of an image without the image, which is added to `own`; another part as it is."""
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return part
    given = [part[key] for key in ("image_url", *_OWN) if part.get(key) is not None]
    if given:
        value = given[0].get("url") if isinstance(given[0], dict) and "url" in given[0] else given[0]
        own.append(_image(value, folder, name))
    return dict(PART)


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


def _shown(value: Any) -> str:
    return counted(len(value), "video") if isinstance(value, list) else shown(value)
