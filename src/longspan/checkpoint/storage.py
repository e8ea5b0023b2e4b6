"""The tensors of a checkpoint: a safetensors file from each rank, as torch's distributed checkpoint lays them out.

torch's HuggingFaceStorageWriter (2.11 to 2.14) makes the whole file of a rank in memory first, and holds Python's lock
meanwhile, so that nothing trains. Its reader takes paths of the disk alone. Here a tensor at a time is written, hashed
and read. torch's reader reads these files, and torch's files are read here.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.futures import Future

from longspan.checkpoint.files import Digest
from longspan.errors import CheckpointError, plural
from longspan.files import name_file_in_errors, os_error_text, parse_json

SUFFIX = ".safetensors"
# safetensors files have these names of dtypes.
DTYPES = {
    **{f"F{8 * dtype.itemsize}": dtype for dtype in (torch.float64, torch.float32, torch.float16)},
    **{f"I{8 * dtype.itemsize}": dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)},
    **{f"U{8 * dtype.itemsize}": dtype for dtype in (torch.uint64, torch.uint32, torch.uint16, torch.uint8)},
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes, as in safetensors itself
_OFFSETS = "DCP_SHARDING_INFO"  # torch's name
_OFFSET = "saved_offsets"  # torch's name
_AGAIN = "copy the checkpoint again from where it was saved, or use another one"


class Chunk(NamedTuple):
    """A part of a tensor that lies in one file: `offsets` is where it begins in the whole tensor."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


class StoredChunk(NamedTuple):
    """A chunk and the place of its numbers: the file's name, and the first byte in it."""

    chunk: Chunk
    file: str
    first: int


def shard_name(rank: int) -> str:
    """torch's name of a rank's file, which counts from 1."""
    return f"shard-{rank + 1:05}-model-00001-of-00001{SUFFIX}"


def write_chunks(path: Path, chunks: Iterable[Chunk], read: Callable[[Chunk], Tensor]) -> Digest:
    """Write a safetensors file, a tensor at a time, and return its bytes and hash once the disk has it.

    `read(chunk)` returns the tensor of a chunk when it is written. Raises CheckpointError, with the file's name, for
    two chunks of one tensor, and for what the disk refuses.
    """
    ordered = sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)  # so that every tensor is aligned
    header = dict[str, Any]()
    end = 0
    for chunk in ordered:
        entry = {"dtype": _DTYPE_NAMES[chunk.dtype], "shape": chunk.sizes, "data_offsets": (end, end + chunk.bytes)}
        header[chunk.name] = entry
        end += chunk.bytes
    if len(header) < len(ordered):
        raise CheckpointError(f"{path}: a rank holds two parts of one tensor, and a file has one place for each")
    offsets = json.dumps({chunk.name: {_OFFSET: chunk.offsets} for chunk in ordered})
    # torch's writer has the same metadata.
    metadata = {_OFFSETS: offsets, "DCP_VERSION": "1.0", "format": "pt"}
    encoded = json.dumps({"__metadata__": metadata} | header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the tensors begin at a multiple of 8 bytes
    sha256 = hashlib.sha256()
    size = 0
    try:
        with name_file_in_errors(path), path.open("wb") as file:
            tensors = (read(chunk).detach().cpu().contiguous().reshape(-1) for chunk in ordered)
            parts = (tensor.view(torch.uint8).numpy().data for tensor in tensors)
            for data in chain([len(encoded).to_bytes(8, "little") + encoded], parts):
                file.write(data)
                sha256.update(data)
                size += len(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(os_error_text(error)) from error
    return size, sha256.hexdigest()


def read_metadata(path: Path) -> Metadata:
    """Read which tensors a checkpoint holds and where, from the headers of its files, as torch's loading takes it.

    Raises CheckpointError for files that are missing or damaged, and for tensors with parts that are not there.
    """
    try:
        files = sorted((file for file in path.iterdir() if file.name.endswith(SUFFIX)), key=lambda file: file.name)
        with ThreadPoolExecutor(max_workers=8) as pool:
            headers = list(pool.map(_read_stored_chunks, files))
    except OSError as error:
        file_name = Path(error.filename or "its folder").name
        raise CheckpointError(
            f"checkpoint {path}: {file_name} cannot be read ({error.strerror}); {_AGAIN}"
        ) from error
    entries = dict[str, TensorStorageMetadata]()
    places = dict[MetadataIndex, StoredChunk]()
    for place in chain.from_iterable(headers):
        name, dtype, offsets, sizes = place.chunk
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        entry = entries.setdefault(name, TensorStorageMetadata(TensorProperties(dtype), chunk.sizes, []))
        # the whole tensor reaches as far as the chunk that ends last
        entry.size = torch.Size(max(s, first + n) for s, first, n in zip(entry.size, offsets, sizes, strict=False))
        entry.chunks.append(chunk)
        places[MetadataIndex(name, chunk.offsets)] = place
    for name, entry in entries.items():
        if (numbers := sum(prod(chunk.sizes) for chunk in entry.chunks)) != prod(entry.size):
            raise CheckpointError(
                f"checkpoint {path}: its files have {plural(numbers, 'number')} of {name}, whose shape "
                f"{list(entry.size)} takes {prod(entry.size)}; {_AGAIN}"
            )
    return Metadata(dict(entries), storage_data=places)


class SafetensorsWriter(HuggingFaceStorageWriter):
    """Writes this rank's file, in the context `waiting`, into a folder; `digests` has its hash by its name."""

    def __init__(self, path: Path, waiting: AbstractContextManager[None] | None = None) -> None:
        super().__init__(str(path), save_distributed=True)
        self.path = path
        self.digests: dict[str, Digest] = {}
        self._waiting = waiting or nullcontext()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is; torch's looks for another checkpoint in the folder."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the file of this rank, as torch calls it, and set `digests`."""
        items = {item.index.fqn: item for item in plan.items}
        resolve = cast(Any, planner.resolve_data)
        chunks = list[Chunk]()
        for name, data in ((item.index.fqn, item.tensor_data) for item in plan.items):
            assert data is not None, name  # refused before (checkpoint.py)
            chunks.append(Chunk(name, data.properties.dtype, tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        with self._waiting:
            if chunks:
                file_name = shard_name(plan.storage_data["shard_index"] - 1)
                self.digests[file_name] = write_chunks(
                    self.path / file_name, chunks, lambda chunk: resolve(items[chunk.name])
                )
        future = Future[Any]()
        future.set_result([])  # nothing is written of all ranks' results
        return future


class SafetensorsReader(FileSystemReader):
    """Reads tensors of a checkpoint, in the context `waiting`, as `metadata` (of `read_metadata`) describes them."""

    def __init__(self, path: Path, metadata: Metadata, waiting: AbstractContextManager[None] | None = None) -> None:
        super().__init__(path)
        self.path = path
        self._metadata = metadata
        self._waiting = waiting or nullcontext()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's tensors into those of the planner, as torch calls it; an OSError has the file's name."""
        items_of = dict[str, list[ReadItem]]()
        for item in plan.items:
            items_of.setdefault(self.storage_data[item.storage_index].file, []).append(item)
        with self._waiting:
            for name, items in items_of.items():
                with name_file_in_errors(self.path / name), (self.path / name).open("rb") as file:
                    for item in items:
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(_read_part(file, self.storage_data[item.storage_index], item))
                        planner.commit_tensor(item, target)
        future = Future[None]()
        future.set_result(None)
        return future


def _read_part(file: Any, place: StoredChunk, item: ReadItem) -> Tensor:
    """Only the item's rows (first dim) are read, whole, and then cut in the other dims."""
    _, dtype, _, sizes = place.chunk
    lengths = list(item.lengths)
    rows, first = (lengths[0], item.storage_offsets[0]) if sizes else (1, 0)  # a number is one row
    row_bytes = prod(sizes[1:]) * dtype.itemsize
    data = torch.empty(rows * row_bytes, dtype=torch.uint8)
    file.seek(place.first + first * row_bytes)
    if data.numel() and file.readinto(data.numpy()) != data.numel():
        raise CheckpointError(f"{place.file} ends within {place.chunk.name}; {_AGAIN}")
    part = data.view(dtype).reshape(rows, *sizes[1:]) if sizes else data.view(dtype).reshape(())
    for dim in range(1, len(sizes)):
        part = part.narrow(dim, item.storage_offsets[dim], lengths[dim])
    return part


def _read_stored_chunks(file: Path) -> list[StoredChunk]:
    """Places are in the order of the file's header."""
    try:
        with name_file_in_errors(file), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            data_bytes = file.stat().st_size - 8 - length
            if length > _MOST_HEADER or data_bytes < 0:
                raise ValueError(f"a header of {length} bytes in a file of {file.stat().st_size}")
            header = parse_json(stream.read(length))
        metadata = header.pop("__metadata__", {})
        offsets = parse_json(metadata[_OFFSETS]) if _OFFSETS in metadata else {}
        chunks = list[StoredChunk]()
        for name, entry in header.items():
            sizes = entry["shape"]
            first, end = entry["data_offsets"]
            begins = offsets[name][_OFFSET] if offsets else [0] * len(sizes)
            if not all(type(n) is int and 0 <= n < 2**63 for n in (*sizes, *begins, first, end)):
                raise ValueError(f"{name} has a number that is no size: {entry!s:.80} at {begins!s:.40}")
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the dtype {entry['dtype']!r:.40}")
            chunk = Chunk(name, DTYPES[entry["dtype"]], tuple(begins), tuple(sizes))
            if len(begins) != len(sizes) or end - first != chunk.bytes or end > data_bytes:
                raise ValueError(f"{name} of {sizes} at {begins} has bytes {first} to {end} of {data_bytes}")
            chunks.append(StoredChunk(chunk, file.name, 8 + length + first))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a damaged header raises any of these
        raise CheckpointError(
            f"checkpoint {file.parent}: {file.name} is damaged ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error
    return chunks


def first_failure_text(error: BaseException) -> str:
    """Return the text of the failure on the first rank that failed; torch's own text has the tracebacks of all ranks.

    An error that is of no rank in particular has its own text.
    """
    failures = error.failures if isinstance(error, CheckpointException) else {}
    if not failures:
        return str(error)
    rank, (failure, _) = next(iter(failures.items()))  # _: the traceback
    return f"{failure} (on rank {rank})"
