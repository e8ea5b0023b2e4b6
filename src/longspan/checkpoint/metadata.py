"""What a checkpoint holds and where, read as data: nothing that stands in a checkpoint's folder can run code.

`metadata.json` names every tensor with its dtype, its shape and its chunks, and of each chunk the file and the bytes in
it. It is written next to `.metadata`, a pickle, which other tools read and longspan does not. The table is checked
against the files of the folder. The tensors themselves are read in `storage.py`.
"""

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from longspan.errors import CheckpointError, plural

METADATA = "metadata.json"
FORMAT = 1  # of metadata.json
_AGAIN = "copy the checkpoint again from where it was saved, or use another one"
Table = dict[str, Any]


def metadata_text(entries: Mapping[str, Any], places: Mapping[Any, Any]) -> str:
    """Return the text of `metadata.json`, from what torch's writer knows of a checkpoint when all files are written.

    `entries` are tensors and other values by name (`Metadata.state_dict_metadata`); `places` says by name and offset in
    which file each chunk lies (`Metadata.storage_data`).
    """
    table = _plain_table(entries, places)
    dump = partial(json.dumps, separators=(",", ":"))  # entry by entry: one call for all would hold Python's lock
    parts = (
        f'"{key}":{{{",".join(f"{dump(name)}:{dump(value)}" for name, value in table.pop(key).items())}}}'
        for key in ("tensors", "values")
    )
    tensors, values = parts  # which takes both out of the table
    return f"{dump(table)[:-1]},{tensors},{values}}}"  # :-1: without the brace that closes it


def read_metadata(path: Path) -> Metadata:
    """Read what a checkpoint holds and where, as torch's distributed checkpoint takes it.

    Nothing of the folder is run. Raises CheckpointError for files that are missing or damaged.
    """
    file = path / METADATA
    try:
        return _as_metadata(json.loads(file.read_text(encoding="utf-8")), path)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} {error}") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} cannot be read ({error.strerror}); {_AGAIN}") from error
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(
            f"checkpoint {path}: {file.name} is damaged ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error


def _plain_table(entries: Mapping[str, Any], places: Mapping[Any, Any]) -> Table:
    """Return names, shapes and places as plain values, from torch's classes.

    The table is that which `_as_metadata` reads. A value is at offset None of its name, a chunk at its own offset.
    Raises CheckpointError for files that another program compressed or encrypted.
    """
    place_of = {(index.fqn, _as_tuple(getattr(index, "offset", None))): place for index, place in places.items()}
    files = {name: number for number, name in enumerate(sorted({place.relative_path for place in places.values()}))}
    if any(getattr(place, "transform_descriptors", None) for place in places.values()):
        raise CheckpointError(f"has files that another program compressed or encrypted, which are not read; {_AGAIN}")

    def location(name: str, offset: Any) -> list[int]:
        place = place_of[name, offset]
        return [files[place.relative_path], place.offset, place.length]

    tensors: Table = {}
    values: Table = {}
    for name, entry in sorted(entries.items()):
        if not hasattr(entry, "chunks"):
            values[name] = location(name, None)
            continue
        chunks = [
            [list(chunk.offsets), list(chunk.sizes), *location(name, _as_tuple(chunk.offsets))]
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return {"format": FORMAT, "files": list(files), "tensors": tensors, "values": values}


def _as_tuple(offset: Any) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


def _as_metadata(table: Any, path: Path) -> Metadata:
    """Return the table of a checkpoint's metadata file as torch's classes.

    A value of `values`, an object as bytes, has a place in a file: [number of the file, first byte, bytes]. A tensor of
    `tensors` is cut into chunks: [offsets in the tensor, sizes, and the three numbers of a place]. Raises
    CheckpointError for another format, for numbers, names and files that are not as they must be, for a chunk outside
    of its tensor or its file, and where the chunks of a tensor together have more or fewer numbers than its shape.
    """
    if table["format"] != FORMAT:
        raise CheckpointError(
            f"has format {table['format']!r}, and this version of longspan reads format {FORMAT}; use a newer one"
        )
    files = [(_read_file_name(name), _file_size(path, name)) for name in table["files"]]
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}

    def place(name: str, location: list[Any], least: int) -> _StorageInfo:
        """Return in which file a chunk lies and where. Raises CheckpointError if it cannot hold `least` bytes there."""
        number, first, length = map(_read_whole_number, location)
        file, size = files[number]
        if length < least or first + length > size:
            raise CheckpointError(
                f"says that {name} takes bytes {first} to {first + length} of {file}, which has {size}, and a chunk of "
                f"its shape takes at least {least}; {_AGAIN}"
            )
        return _StorageInfo(file, first, length)

    for name, location in table["values"].items():
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = place(name, location, 0)
    for name, tensor in table["tensors"].items():
        dtype, shape = _read_dtype(tensor["dtype"], name), [_read_whole_number(size) for size in tensor["shape"]]
        chunks: list[ChunkStorageMetadata] = []
        elements = 0
        for offsets, sizes, *location in tensor["chunks"]:
            if not _lies_inside(shape, offsets, sizes):
                raise CheckpointError(f"has a chunk of {name} at {offsets} of {sizes}, outside of {shape}; {_AGAIN}")
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            elements += prod(sizes)
            chunks.append(chunk)
            places[MetadataIndex(name, chunk.offsets)] = place(name, location, prod(sizes) * dtype.itemsize)
        if elements != prod(shape):
            raise CheckpointError(
                f"has {plural(elements, 'number')} in the chunks of {name}, whose shape {shape} takes {prod(shape)}; "
                f"{_AGAIN}"
            )
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
    return Metadata(entries, storage_data=places)


def _lies_inside(shape: list[int], offsets: list[Any], sizes: list[Any]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        _read_whole_number(first) + _read_whole_number(size) <= whole
        for first, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _read_whole_number(number: Any) -> int:
    """Return a count, size or offset that is an integer of at least 0. Raises CheckpointError for anything else.

    The caller of this module's functions puts the name of the file before the message.
    """
    if type(number) is not int or not 0 <= number < 2**63:
        raise CheckpointError(f"has {number!r:.40} where a whole number of at least 0 belongs; {_AGAIN}")
    return number


def _read_dtype(name: Any, tensor: str) -> torch.dtype:
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"has {name!r:.40} as the dtype of {tensor}, which torch has not; use a newer torch")
    return dtype


def _read_file_name(name: Any) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise CheckpointError(f"names {name!r:.80}, which is not a file of this folder and is not read; {_AGAIN}")
    return name


def _file_size(path: Path, name: str) -> int:
    if not (path / name).is_file():
        raise CheckpointError(f"names {name}, which is missing; {_AGAIN}")
    return (path / name).stat().st_size
