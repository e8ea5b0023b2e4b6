"""Checkpoints of format 1, which longspan 0.2 wrote, rewritten once in today's; goes with the next version.

python -m longspan.checkpoint.format_1 runs/mine/checkpoints

Each `step-000100` under the folder is compared with its hashes, and written anew beside it, a tensor at a time and in
one process; the old one stays as `step-000100.format-1`. Nothing in the files is run.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.checkpoint.checkpoint import OptimizerValues
from longspan.checkpoint.files import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    check_file_hashes,
    check_file_sizes,
    complete_checkpoints,
    create_partial_folder,
    partial_path,
    publish_checkpoint,
    read_checkpoint_json,
    remove_folder,
    step_of,
)
from longspan.checkpoint.storage import Chunk, shard_name, unreadable_data_text, write_chunks
from longspan.errors import CheckpointError, LongspanError


def convert_checkpoint(path: Path) -> Path:
    """Rewrite a checkpoint of format 1 in its place; returns where the old one is now.

    >>> convert_checkpoint(Path("runs/mine/checkpoints/step-000100"))
    PosixPath('runs/mine/checkpoints/step-000100.format-1')

    Raises CheckpointError for a damaged one.
    """
    check_file_hashes(path, check_file_sizes(path, version=1))
    table = _read_table(path)
    partial = partial_path(path)
    old = path.with_name(f"{path.name}.format-1")
    create_partial_folder(partial)
    try:
        digests = {}
        for number, name in enumerate(table["files"]):
            places = {chunk: place for chunk, file, *place in _chunks(table) if file == number}
            if places:
                digests[shard_name(number)] = write_chunks(
                    partial / shard_name(number), places, _make_chunk_reader(path / name, places)
                )
        optimizer = {}  # entries by name, as an optimizer has them: of settings only the names count
        for name, (number, *place) in table["values"].items():
            setting = name.startswith("optimizer.param_groups.")
            value = None if setting else _load_pickled_bytes(path / table["files"][number], *place)
            optimizer[name.removeprefix("optimizer.")] = value
        optimizer |= {
            name.removeprefix("optimizer."): ... for name in table["tensors"] if name.startswith("optimizer.")
        }
        contents = {
            STATE: read_checkpoint_json(path / STATE),
            OPTIMIZER: OptimizerValues.from_entries(optimizer)._asdict(),
        }
        path.rename(old)
        publish_checkpoint(partial, path, contents, [digests])
    except (KeyError, TypeError, ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be rewritten: {type(error).__name__}: {error}") from error
    finally:
        remove_folder(partial)
    return old


def _read_table(path: Path) -> dict[str, Any]:
    """Chunks are [offsets, sizes, number of the file, first byte, bytes], and values have the last three."""
    table = read_checkpoint_json(path / "metadata.json")
    names = table.get("files", [])
    if table.get("format") != 1 or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"checkpoint {path}: metadata.json is damaged; copy the checkpoint again")
    return table


def _chunks(table: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (Chunk(name, getattr(torch, tensor["dtype"]), tuple(offsets), tuple(sizes)), *place)
        for name, tensor in table["tensors"].items()
        for offsets, sizes, *place in tensor["chunks"]
    ]


def _make_chunk_reader(file: Path, places: dict[Chunk, list[int]]) -> Callable[[Chunk], Tensor]:
    def read(chunk: Chunk) -> Tensor:
        tensor = _load_pickled_bytes(file, *places[chunk])
        if not isinstance(tensor, Tensor) or tensor.shape != chunk.sizes or tensor.dtype != chunk.dtype:
            raise CheckpointError(f"{file} has something else than {chunk} there; copy the checkpoint again")
        return tensor

    return read


def _load_pickled_bytes(file: Path, first: int, length: int) -> Any:
    with file.open("rb") as stream:
        stream.seek(first)
        data = io.BytesIO(stream.read(length))
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(unreadable_data_text(file, error)) from error


def main(words: list[str]) -> int:
    if len(words) != 1:
        print(f"usage: python -m longspan.checkpoint.format_1 FOLDER, {len(words)} words given", file=sys.stderr)
        return 2
    root = Path(words[0])
    try:
        paths = [root] if step_of(root) >= 0 else complete_checkpoints(root, print)
        old_paths = [path for path in paths if read_checkpoint_json(path / MANIFEST).get("format") == 1]
        for path in old_paths:
            print(f"{path} is rewritten; the old one is {convert_checkpoint(path)}, to be removed when you like")
    except LongspanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(old_paths)} of {len(paths)} checkpoints in {root} were of format 1")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
