"""A checkpoint of someone else runs nothing: hostile headers, schedules and random states are named."""

import builtins
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from transformers import Trainer

from longspan.checkpoint.checkpoint import read_optimizer_values
from longspan.checkpoint.export import _read_tensors, _stored_weights
from longspan.checkpoint.files import create_partial_folder, publish_checkpoint, read_checked_manifest, read_state
from longspan.checkpoint.storage import Chunk, read_metadata, shard_name, write_chunks
from longspan.errors import CheckpointError
from longspan.hf.files import FilesPart, load_without_code

WEIGHT = "model.weight"


class Hostile:
    """An object that makes a file when it is unpickled; with `by` "system" through a shell."""

    def __init__(self, trap: Path, by: str = "open") -> None:
        self.trap, self.by = str(trap), by

    def __reduce__(self) -> Any:
        return (builtins.open, (self.trap, "w")) if self.by == "open" else (os.system, (f"touch {self.trap}",))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path, rows = tmp_path / "step-000001", {0: 2, 2: 1}
    create_partial_folder(path.with_name("step-000001.partial"))
    digests = {}
    for rank, (first, count) in enumerate(rows.items()):
        chunk = Chunk(WEIGHT, torch.float64, (first, 0), (count, 5))
        file = path.with_name("step-000001.partial") / shard_name(rank)
        digests[file.name] = write_chunks(file, [chunk], lambda chunk: torch.full(chunk.sizes, 7.0, dtype=chunk.dtype))
    contents = {"state.json": {"step": 1}, "optimizer.json": {"numbers": {}, "settings": {}}}
    publish_checkpoint(path.with_name("step-000001.partial"), path, contents, [digests])
    return path


def change_header(file: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    change(header[WEIGHT], offsets)
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


HEADERS: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda entry, _: entry.update(dtype="load"), r"00001.* is damaged .*model.weight has the dtype 'load'"),
    (lambda entry, _: entry.update(shape=[2**60, 5]), r"model.weight of \[\d+, 5\] at .* has bytes 0 to 80"),
    (lambda entry, _: entry.update(shape=[-2, -5]), r"model.weight has a number that is no size"),
    (lambda entry, _: entry.update(data_offsets=[80, 160]), r"has bytes 80 to 160 of 80"),
    (lambda entry, _: entry.update(data_offsets=[0]), r"is damaged \(ValueError: not enough values"),
    (lambda _, offsets: offsets[WEIGHT].update(saved_offsets=[0]), r"of \[2, 5\] at \[0\] has"),
    (lambda _, offsets: offsets[WEIGHT].update(saved_offsets=["0", 0]), r"has a number that is no size"),
    (lambda _, offsets: offsets[WEIGHT].update(saved_offsets=[9, 0]), r"have 15 numbers of .* \[11, 5\] takes 55"),
    (lambda _, offsets: offsets.clear() or offsets.update(other=1), r"is damaged \(KeyError: 'model.weight'\)"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS, ids=[message for _, message in HEADERS])
def test_a_header_that_does_not_fit_its_file_is_named(
    stored: Path, change: Callable[[Any, Any], Any], message: str
) -> None:
    metadata = read_metadata(stored)
    weights = _read_tensors(stored, metadata, _stored_weights(metadata))
    assert torch.equal(weights["weight"], torch.full((3, 5), 7.0, dtype=torch.float64))
    change_header(stored / shard_name(0), change)
    with pytest.raises(CheckpointError, match=rf"step-000001: .*{message}.*; copy the checkpoint again"):
        read_metadata(stored)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"format": 1' + "0" * 10_000 + "}", "\udcff"])
def test_damaged_files_are_named(stored: Path, text: str) -> None:
    data = text.encode(errors="surrogateescape")
    for length in (len(data), 2**40):
        (stored / shard_name(1)).write_bytes(struct.pack("<Q", length) + data)
        with pytest.raises(CheckpointError, match=r"shard-00002-\S+ is damaged .*copy the checkpoint again"):
            read_metadata(stored)
    (stored / shard_name(1)).unlink()
    (stored / shard_name(1)).mkdir()
    with pytest.raises(CheckpointError, match=r"shard-00002-\S+ cannot be read \(Is a directory\)"):
        read_metadata(stored)
    for name, read in (("state.json", read_state), ("optimizer.json", read_optimizer_values)):
        (stored / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
            read(stored)


def test_a_part_that_is_missing_is_named(stored: Path) -> None:
    (stored / shard_name(0)).unlink()
    with pytest.raises(CheckpointError, match=r"have 5 numbers of model.weight, whose shape \[3, 5\] takes 15"):
        read_metadata(stored)


def test_a_manifest_names_files_of_its_folder_only(stored: Path) -> None:
    manifest = json.loads((stored / "manifest.json").read_text())
    manifest["files"]["../other"] = [1, "0"]
    (stored / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest.json names '../other', which is not a file of this folder"):
        read_checked_manifest(stored)


def load_random_states(folder: Path) -> None:
    part: Any = object.__new__(type("Part", (FilesPart, Trainer), {}))
    part.args = SimpleNamespace(world_size=1, process_index=0, parallel_mode=None)
    part._load_random_states(folder)


def test_hostile_files_of_a_trainer_run_nothing(tmp_path: Path) -> None:
    trap, file = tmp_path / "trap", tmp_path / "rng_state.pth"
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, file)
    expected = random.random(), numpy.random.rand(), torch.rand(1).item()
    load_random_states(tmp_path)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == expected
    reads: list[Callable[[], object]] = [lambda: load_without_code(file), lambda: load_random_states(tmp_path)]
    for value in (Hostile(trap), states | {"python": Hostile(trap)}, {"schedule": [Hostile(trap, "system")]}):
        torch.save(value, file)
        for read in reads:
            with pytest.raises(CheckpointError, match=r"(names (_?io.open|posix.system), which|holds something else)"):
                read()
    file.write_bytes(pickle.dumps(Hostile(trap)))  # as torch saved before its format was a zip
    for read in reads:
        with pytest.raises(CheckpointError, match=r"nothing of it was run|was not run"):
            read()
    torch.save(states | {"python": (1, 2, 3)}, file)
    with pytest.raises(CheckpointError, match=r"nothing of it was run"):
        load_random_states(tmp_path)
    assert not trap.exists()
