"""A checkpoint of someone else runs nothing: hostile metadata, tensors, schedules and random states are named."""

import builtins
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer

from longspan import Layout, World
from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.checkpoint.export import _read_adapter_tensors
from longspan.checkpoint.files import check_sizes, read_state
from longspan.checkpoint.metadata import metadata_text, read_metadata
from longspan.checkpoint.storage import DataPlanner, DataReader, read_values
from longspan.errors import CheckpointError
from longspan.hf.files import FilesPart
from longspan.testing import run_ranks

OLD = Path(__file__).parent / "old"  # of a Linear(5, 3) in float64 on two ranks, after a step; without metadata.json
WEIGHT = "model.weight"


class Hostile:
    """An object that makes a file when it is unpickled; with `by` through another function than open."""

    def __init__(self, trap: Path, by: str = "open") -> None:
        self.trap, self.by = str(trap), by

    def __reduce__(self) -> Any:
        program = f"open({self.trap!r}, 'w').close()"
        return {
            "open": (builtins.open, (self.trap, "w")),
            "system": (os.system, (f"touch {self.trap}",)),
            "exec": (exec, (program,)),
            "getattr": (getattr(os, "system"), (f"touch {self.trap}",)),  # noqa: B009
            "load": (torch.load, (self.trap,), None, None, None),
        }[self.by]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old checkpoint."""
    return Path(shutil.copytree(OLD / "step-000001", tmp_path / "checkpoints" / "step-000001"))


@pytest.fixture
def new(old: Path) -> Path:
    """The same checkpoint, as it is written now."""
    stored = FileSystemReader(old).read_metadata()
    (old / "metadata.json").write_text(metadata_text(stored.state_dict_metadata, stored.storage_data))
    return old


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(5, 3).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}{ending}": value.detach()
        for name, parameter in model.named_parameters()
        for ending, value in [("", parameter), *((f"|{k}", v) for k, v in optimizer.state[parameter].items())]
    }


def load_rank(rank: int, path: Path, hostile: list[Path]) -> list[str]:
    """Load the old checkpoint bit for bit, save and load it as it is written now; the errors of hostile ones."""
    errors: list[str] = []
    with World(Layout(1), backend="gloo", timeout=60) as world:
        model, optimizer = parts()
        state = load_checkpoint(path, model, optimizer, world)
        assert state == {"step": 1, "note": "of longspan before metadata.json"}
        expected = load_file(OLD / "expected.safetensors")
        for _ in range(2):
            found = contents(model, optimizer)
            assert found.keys() == expected.keys() and len(found) == 8
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            again = save_checkpoint(path.parent.parent / "again", model, optimizer, world, step=2)
            assert (again / "metadata.json").is_file()
            (again / ".metadata").write_bytes(b"not read")
            model, optimizer = parts()
            load_checkpoint(again, model, optimizer, world)
        for folder in hostile:
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(folder, *parts(), world)
            errors.append(str(caught.value))
    return errors


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the table of a checkpoint."""
    file = path / "metadata.json"
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))


def put(path: Path, name: str, value: Any) -> None:
    """Put a pickled value in place of what a checkpoint has under a name, in a file of its own."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (path / "x.distcp").write_bytes(buffer.getvalue())
    table = json.loads((path / "metadata.json").read_text())
    table["files"].append("x.distcp")
    place = [table["files"].index("x.distcp"), 0, len(buffer.getvalue())]
    if name in table["tensors"]:
        for chunk in table["tensors"][name]["chunks"]:
            chunk[2:] = place
    else:
        table["values"][name] = place
    (path / "metadata.json").write_text(json.dumps(table))


def test_an_old_checkpoint_loads_bit_for_bit_and_hostile_ones_run_nothing(new: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    tensors, value, pickled, as_value = (Path(shutil.copytree(new, tmp_path / f"h{i}" / new.name)) for i in range(4))
    put(tensors, WEIGHT, Hostile(trap))
    put(value, WEIGHT.replace("model", "optimizer.state") + ".step", Hostile(trap))
    change_json(value, lambda table: table["tensors"].pop("optimizer.state.weight.step"))
    put(value, "optimizer.state.weight.step", Hostile(trap))
    (pickled / "metadata.json").unlink()
    (pickled / ".metadata").write_bytes(pickle.dumps(Hostile(trap, "system")))
    change_json(as_value, lambda table: table["tensors"].pop(WEIGHT))
    put(as_value, WEIGHT, Hostile(trap))
    errors = run_ranks(load_rank, 1, new, [tensors, value, pickled, as_value])[0]
    assert not trap.exists()
    assert "x.distcp names io.open, which is neither a tensor nor a plain value" in errors[0]
    assert "optimizer.state.weight.step is no tensor in the checkpoint" in errors[1]
    assert f"checkpoint {pickled}: metadata.json cannot be read (No such file or directory)" in errors[2]
    assert f"{WEIGHT} is no tensor in the checkpoint, and one of [3, 5] here" in errors[3]


TABLES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda t: t["files"].__setitem__(0, "../x.distcp"), r"names '../x.distcp', which is not a file of this folder"),
    (lambda t: t["files"].__setitem__(0, "/etc/passwd"), r"names '/etc/passwd', which is not a file of this folder"),
    (lambda t: t["files"].__setitem__(0, ".."), r"names '..', which is not a file"),
    (lambda t: t["files"].__setitem__(0, "no.distcp"), r"names no.distcp, which is missing"),
    (lambda t: t["tensors"][WEIGHT].update(dtype="load"), r"has 'load' as the dtype of model.weight"),
    (lambda t: t["tensors"][WEIGHT].update(shape=[2**60, 5]), r"whose shape \[\d+, 5\] takes 576\d+"),
    (lambda t: t["tensors"][WEIGHT]["chunks"].pop(), r"has 10 numbers in the chunks of model.weight, .* takes 15"),
    (lambda t: t["tensors"][WEIGHT]["chunks"][0].__setitem__(1, [9, 5]), r"a chunk of model.weight at .* outside of"),
    (lambda t: t["tensors"][WEIGHT]["chunks"][0].__setitem__(3, 10**9), r"takes bytes 1000000000 to .* which has \d+"),
    (lambda t: t["tensors"][WEIGHT]["chunks"][0].__setitem__(4, 8), r"a chunk of its shape takes at least 80"),
    (lambda t: t["tensors"][WEIGHT]["chunks"][0].__setitem__(2, -1), r"has -1 where a whole number of at least 0"),
    (lambda t: t.update(format=2), r"has format 2, and this version of longspan reads format 1"),
    (lambda t: t.pop("tensors"), r"is damaged \(KeyError: 'tensors'\)"),
]


@pytest.mark.parametrize(("change", "message"), TABLES, ids=[message for _, message in TABLES])
def test_a_table_that_does_not_fit_its_files_is_named(new: Path, change: Callable[[Any], Any], message: str) -> None:
    change_json(new, change)
    with pytest.raises(CheckpointError, match=rf"step-000001: metadata.json .*{message}"):
        read_metadata(new)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"format": 1' + "0" * 10_000 + "}", "\udcff"])
def test_a_damaged_table_is_named(new: Path, text: str) -> None:
    (new / "metadata.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"metadata.json is damaged .*copy the checkpoint again"):
        read_metadata(new)
    (new / "state.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"state.json is damaged"):
        read_state(new)


def test_an_export_of_hostile_tensors_runs_nothing(new: Path, tmp_path: Path) -> None:
    assert torch.equal(_read_adapter_tensors(new)["weight"], load_file(OLD / "expected.safetensors")["weight"])
    put(new, WEIGHT, Hostile(tmp_path / "trap"))
    with pytest.raises(CheckpointError, match=r"x.distcp names io.open, which is neither a tensor nor a plain value"):
        _read_adapter_tensors(new)
    assert not (tmp_path / "trap").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_that_are_no_tensors_are_plain(new: Path, tmp_path: Path) -> None:
    for count, message in ((7, None), (Hostile(tmp_path / "trap"), r"io\.open|nothing of it was run|was not run")):
        put(new, "values.count", count)
        state, reader = {"values": {"count": 0}}, DataReader(new, read_metadata(new))
        if message is None:
            dcp.load(state, storage_reader=reader, planner=DataPlanner(), no_dist=True)
            assert state["values"]["count"] == 7
        else:
            with pytest.raises(CheckpointException, match=message):
                dcp.load(state, storage_reader=reader, planner=DataPlanner(), no_dist=True)
    assert not (tmp_path / "trap").exists()


def test_a_configuration_is_read_without_importing_what_it_names(tmp_path: Path) -> None:
    """Only training and evaluation use what config.toml names."""
    (tmp_path / "hostile_part.py").write_text("raise SystemExit('imported')")
    (tmp_path / "config.toml").write_text(
        "[train]\noptimizer = 'hostile_part.Sgd'\neval_metrics = ['hostile_part.metric']\n"
        "[context]\nplanner = 'hostile_part.plan'\n[run]\nloggers = ['hostile_part.Log']\n"
    )
    program = "from longspan.config.file import load_config; load_config('config.toml')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_manifest_names_files_of_its_folder_only(old: Path) -> None:
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["files"]["../other"] = [1, "0"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest.json names '../other', which is not a file of this folder"):
        check_sizes(old)


def load_random_states(folder: Path) -> None:
    """As a trainer of one process does."""
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
    for value in (Hostile(trap), states | {"python": Hostile(trap)}, {"schedule": [Hostile(trap, "system")]}):
        torch.save(value, file)
        for read in (lambda: read_values(file), lambda: load_random_states(tmp_path)):
            with pytest.raises(CheckpointError, match=r"(names (io.open|posix.system), which|holds something else)"):
                read()
    file.write_bytes(pickle.dumps(Hostile(trap)))  # as torch saved before its format was a zip
    for read in (lambda: read_values(file), lambda: load_random_states(tmp_path)):
        with pytest.raises(CheckpointError, match=r"nothing of it was run|was not run"):
            read()
    torch.save(states | {"python": (1, 2, 3)}, file)
    with pytest.raises(CheckpointError, match=r"nothing of it was run"):
        load_random_states(tmp_path)
    assert not trap.exists()
