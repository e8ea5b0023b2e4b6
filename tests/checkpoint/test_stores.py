"""Checkpoints in stores of fsspec: written, complete by their manifest, found, pruned, resumed from."""

import json
import tempfile
from pathlib import Path

import fsspec
import pytest

from longspan import Layout, World
from longspan.checkpoint.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from longspan.checkpoint.export import export_checkpoint
from longspan.checkpoint.files import (
    StorePath,
    as_root,
    checkpoints_root,
    complete_checkpoints,
    read_state,
    remove_unfinished_saves,
    step_of,
)
from longspan.checkpoint.saver import CheckpointSaver
from longspan.checkpoint.storage import shard_name
from longspan.cli.main import main
from longspan.errors import CheckpointError
from longspan.run.loggers import read_metrics
from longspan.testing import backend, run_ranks
from tests.checkpoint.test_checkpoint import contents, file_checkpoint, opened, update
from tests.train.small import small_config, train_rank, without_times


def test_paths_of_a_store() -> None:
    root = as_root("memory://bucket/run")
    assert isinstance(root, StorePath) and str(root / "a.txt") == "memory:///bucket/run/a.txt"
    file = root / "step-000001" / "a.txt"
    file.write_text("text")
    assert [path.name for path in root.iterdir()] == ["step-000001"] and (root / "step-000001").is_dir()
    assert (file.stat().st_size, file.read_text(), file.exists(), (root / "none").exists()) == (4, "text", True, False)
    assert file.parent == root / "step-000001" and hash(file.parent) == hash(root / "step-000001")
    assert checkpoints_root(Path("runs/a"), "") == Path("runs/a/checkpoints") and as_root(root) is root
    with pytest.raises(CheckpointError, match=r"nothing://a cannot be opened: .*such as s3fs for s3://"):
        as_root("nothing://a")


def test_a_checkpoint_in_a_store_is_complete_with_its_manifest() -> None:
    root = as_root("memory://complete")
    for step in (1, 2, 3):
        path = root / f"step-{step:06d}"
        save_files(path, step)
    (root / "step-000003" / "manifest.json").unlink()
    said = list[str]()
    assert [step_of(path) for path in complete_checkpoints(root, said.append)] == [2, 1]
    assert said == ["skipping memory:///complete/step-000003: its save was interrupted"]
    remove_unfinished_saves(root)
    assert sorted(path.name for path in root.iterdir()) == ["step-000001", "step-000002"]
    assert read_state(root / "step-000002") == {"step": 2}


def save_files(path: Path, step: int) -> None:
    """A checkpoint as one rank would leave it on disk, put into the store."""
    with tempfile.TemporaryDirectory() as folder:
        written = file_checkpoint(Path(folder), step)
        for file in written.iterdir():
            with (path / file.name).open("wb") as stream:
                stream.write(file.read_bytes())


def store_rank(rank: int, ranks: int, root: str) -> None:
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model, optimizer = opened(world)
        saver = CheckpointSaver(root, world, keep=1)
        for step in (1, 2):
            update(model, optimizer)
            saver.save(model, optimizer, step=step, state={"note": step})
        saver.wait()
        before = [x.clone() for x in contents(model, optimizer)]
        update(model, optimizer)
        path = find_checkpoint(root, world)
        assert path is not None and load_checkpoint(str(path), model, optimizer, world) == {"step": 2, "note": 2}
        assert all((a == b).all() for a, b in zip(before, contents(model, optimizer), strict=True))
        assert [step_of(path) for path in complete_checkpoints(as_root(root))] == [2]
        save_checkpoint(root, model, optimizer, world, step=3, keep=2)
        if rank == 0:
            with (path / shard_name(1)).open("wb") as stream:
                stream.write(b"other")
            (path.parent / "step-000003" / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"step-000002: shard-00002.* has 5 bytes"):
            find_checkpoint(root, world)


def test_saves_in_a_store(tmp_path: Path) -> None:
    run_ranks(store_rank, 2, 2, f"file://{tmp_path}/store")


@pytest.mark.whole
def test_a_run_in_a_store_is_resumed_exported_and_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = {"run__checkpoints": f"local://{tmp_path}/store"}
    for steps in (2, 4):
        run_ranks(train_rank, 2, small_config(tmp_path, train__steps=steps, run__keep_checkpoints=1, **store), 2)
    run = tmp_path / "run"
    assert not (run / "checkpoints").exists()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["step-000004"]
    rows = [without_times(row) for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    exported = export_checkpoint(run, None, tmp_path / "exported", lambda _: None)
    assert exported.step == 4 and (tmp_path / "exported" / "model.safetensors").is_file()
    assert fsspec.filesystem("local").exists(str(tmp_path / "store" / "step-000004" / "optimizer.json"))
    words = ["eval", str(run), "--world", "2", "--compare", str(tmp_path / "exported"), "--json"]
    assert main(words) == 0
    found = json.loads(capfd.readouterr().out)
    (difference,) = found["compare"]["differences"]
    assert found["step"] == 4 and abs(difference["difference"]) < 1e-6
