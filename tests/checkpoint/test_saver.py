"""Checkpoints that are written while training goes on, complete or not there; and those in stores of fsspec."""

import json
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

from longspan import Layout, World
from longspan.checkpoint import saver as module
from longspan.checkpoint import storage
from longspan.checkpoint.checkpoint import check_checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from longspan.checkpoint.export import export_checkpoint
from longspan.checkpoint.files import (
    StorePath,
    as_root,
    check_contents,
    check_sizes,
    checkpoints_root,
    complete_checkpoints,
    read_state,
    remove_unfinished_saves,
    step_of,
)
from longspan.checkpoint.saver import SMALL, CheckpointSaver, Stage, StagedTensors
from longspan.checkpoint.storage import SafetensorsWriter, shard_name
from longspan.cli.main import main
from longspan.errors import CheckpointError, CommError
from longspan.run.loggers import read_metrics
from longspan.testing import backend, run_ranks
from longspan.train.optim.offload_states import offload_states
from longspan.train.optim.optimizer import OptimizerChoice, StochasticRounding
from tests.checkpoint.test_checkpoint import contents, file_checkpoint, opened, slow, update
from tests.train.small import small_config, train_rank, without_times


def test_what_only_an_update_writes_is_copied_later_and_the_rest_at_once() -> None:
    model = nn.BatchNorm1d(SMALL)
    moments = {"exp_avg": torch.ones(SMALL), "step": torch.tensor(3.0), "none": torch.empty(0, 4)}
    stage = Stage(torch.device("cpu"))
    staged = stage.begin_copies({"model": model.state_dict(), "optimizer": moments}, model)
    model.weight.data.fill_(5), moments["exp_avg"].fill_(5)  # type: ignore[union-attr]
    model.running_mean.fill_(5), moments["step"].fill_(5)  # type: ignore[union-attr]
    staged.finish()
    model.weight.data.fill_(6)
    copies = staged.tensors
    assert copies["model"]["weight"].unique().tolist() == copies["optimizer"]["exp_avg"].unique().tolist() == [5]
    assert copies["model"]["running_mean"].unique().tolist() == [0] and copies["optimizer"]["step"] == 3
    assert copies["optimizer"]["none"].shape == (0, 4)
    taken, first = stage.bytes, copies["model"]["weight"].data_ptr()
    again = stage.begin_copies({"model": model.state_dict(), "optimizer": moments}, model).tensors
    assert (stage.bytes, again["model"]["weight"].data_ptr()) == (taken, first), "memory is kept from save to save"


def tensors_of(path: Path, world: World) -> list[Tensor]:
    """What a checkpoint holds, loaded into a model and an optimizer of another seed."""
    model, optimizer = opened(world, seed=9)
    load_checkpoint(path, model, optimizer, world)
    return contents(model, optimizer)


def background_rank(rank: int, ranks: int, root: Path) -> list[str]:
    said = list[str]()
    finish = StagedTensors.finish
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model, optimizer = opened(world)
        saver = CheckpointSaver(root / "background", world, keep=2, log=said.append)
        update(model, optimizer)
        saver.prepare(model, optimizer)
        listed = list[type]()
        create = DefaultSavePlanner.create_local_plan
        DefaultSavePlanner.create_local_plan = lambda self: (listed.append(type(self)), create(self))[1]  # type: ignore
        for step in range(1, 5):
            if step == 4:
                save_checkpoint(root / "waiting", model, optimizer, world, step=step, state={"note": step})
            StagedTensors.finish = slow(0.2, finish) if step == 2 else finish  # type: ignore[method-assign]
            saver.save(model, optimizer, step=step, state={"note": step})
            update(model, optimizer)  # at once: it waits for the copies
        path = root / "background" / "step-000004"
        while not path.exists():  # published by the threads: the ranks do not meet here
            assert not saver.has_failed
            time.sleep(0.01)
        saver.wait()
        assert [step_of(path) for path in complete_checkpoints(root / "background")] == [4, 3]
        figures = saver.take_figures()
        assert figures is not None and saver.take_figures() is None
        assert figures.step == 4 and figures.shown_seconds > 0 and figures.seconds > 0
        sizes = {name: size for name, (size, _) in check_sizes(path).items() if name.startswith("shard-")}
        assert figures.bytes == sum(sizes.values()), (figures, sizes)
        check_checkpoint(path, world)
        saved, waited = tensors_of(path, world), tensors_of(root / "waiting" / path.name, world)
        assert len(saved) == len(waited) > 40 and all(map(torch.equal, saved, waited))
        DefaultSavePlanner.create_local_plan = create
        assert listed.count(module.CachedPlanner) == 1  # of four saves
        kinds = [record.kind for record in world.process_groups.made]
        assert kinds.count("saves") == 1
        optimizers_rank(root / "optimizers", world)
        figures_rank(rank, root / "figures", world)
        said += failures_rank(rank, root / "failures", world)
    assert not [thread for thread in threading.enumerate() if thread.name == "longspan save"]
    return said


def optimizers_rank(root: Path, world: World) -> None:
    """An update waits for the copies, whatever optimizer makes it and wherever its moments are."""
    finish = StagedTensors.finish
    StagedTensors.finish = slow(0.2, finish)  # type: ignore[method-assign]
    for name in ("sgd", "offloaded", "rounding"):
        model, optimizer = opened(world, "sgd" if name == "sgd" else "adamw")
        if name == "offloaded":
            optimizer = offload_states(optimizer, world)
        if name == "rounding":
            model = model.to(torch.bfloat16)
            optimizer = StochasticRounding(OptimizerChoice("adamw", 1e-2, 0.1), model, world)
        update(model, optimizer)
        before = [x.clone() for x in contents(model, optimizer)]
        saver = CheckpointSaver(root / name, world)
        saver.save(model, optimizer, step=1)
        update(model, optimizer)
        saver.close()
        assert not all(map(torch.equal, before, contents(model, optimizer)))
        load_checkpoint(root / name / "step-000001", model, optimizer, world)
        assert all(map(torch.equal, before, contents(model, optimizer))), name
    StagedTensors.finish = finish  # type: ignore[method-assign]


def figures_rank(rank: int, root: Path, world: World) -> None:
    """Ranks that see at different times that a save has ended."""
    model, optimizer = opened(world)
    saver, steps = CheckpointSaver(root, world, log=[].append), list[int]()
    for step in (1, 2):
        update(model, optimizer)
        saver.save(model, optimizer, step=step)
        if rank == 0:  # another rank's thread may end later
            assert saver._running is not None and saver._running.ended.wait(30)
            steps += [figures.step for figures in (saver.take_figures(), saver.take_figures()) if figures]
    saver.wait()
    assert steps == ([1, 2] if rank == 0 else [])
    assert {step_of(path) for path in complete_checkpoints(root)} == {1, 2}


def failures_rank(rank: int, root: Path, world: World) -> list[str]:
    """What goes wrong on one rank is raised on both, and the next save works."""
    texts, module._ENDS = list[str](), 0.1
    model, optimizer = opened(world)
    update(model, optimizer)
    saver = CheckpointSaver(root, world, log=texts.append)
    saver.save(model, optimizer, step=1)
    saver.wait()
    write = storage.write_chunks

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device", "a file")

    for broken in (refuse, slow(1.0, write)):
        if rank == 1:
            storage.write_chunks = broken
        saver.save(model, optimizer, step=2)
        save = saver._running
        assert save is not None
        phase = "writing its files" if rank == 1 else "waiting for the other ranks' files"
        while broken is not refuse and save.phase != phase:
            time.sleep(0.01)
        saver.timeout = 0.0 if broken is not refuse else saver.timeout
        while not world.control.any_rank(saver.has_failed):  # as a step's agreement does
            assert "step-000002 (" in world.watch.activity().text or saver.has_failed
            time.sleep(0.01)
        with pytest.raises(CheckpointError) as error:
            saver.raise_failure()
        texts.append(str(error.value))
        storage.write_chunks = write
        assert error.value.on_all_ranks
        save.ended.wait()
        world.control.barrier()
    saver.save(model, optimizer, step=3)
    saver.close()
    assert [step_of(path) for path in complete_checkpoints(root)] == [3, 1]
    return texts


def test_saves_in_the_background(tmp_path: Path) -> None:
    (first, second) = run_ranks(background_rank, 2, 2, tmp_path)
    files = {path.name for path in (tmp_path / "background" / "step-000004").iterdir()}
    assert files == {path.name for path in (tmp_path / "waiting" / "step-000004").iterdir()}
    *waited, refused, line, over = first
    assert [refused, over] == second and all(text.startswith("step ") for text in waited)
    assert line.startswith("the next checkpoints are written while training waits: the threads of this one have not")
    assert refused.endswith("-000002 could not be written: [Errno 28] No space left on device: 'a file' (on rank 1)")
    assert re.search(
        r"could not be written: it has not ended in 0 s: rank\(s\) \(1\): writing its "
        r"files; rank\(s\) \(0\): .*; check the storage$",
        over,
    ), over


def kill_here(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_rank(rank: int, root: Path, lost: int, place: str) -> None:
    """A rank is killed while a second checkpoint is written, and training goes on until that is noticed."""
    with World(Layout(2), backend=backend(), timeout=20) as world:
        model, optimizer = opened(world)
        saver = CheckpointSaver(root, world, keep=1)
        for step in (1, 2):
            update(model, optimizer)
            if step == 2 and rank == lost and place == "writing":
                SafetensorsWriter.write_data = kill_here  # type: ignore[method-assign]
            if step == 2 and rank == lost and place == "publishing":
                Path.rename = kill_here  # type: ignore[method-assign]  # all is written, and the folder has no name yet
            saver.save(model, optimizer, step=step)
            if step == 1:
                saver.wait()
        while True:
            world.control.barrier("a step")
            time.sleep(0.01)


@pytest.mark.parametrize(("lost", "place"), [(1, "writing"), (0, "publishing")])
def test_a_rank_that_is_killed_while_saving_leaves_the_older_checkpoint(tmp_path: Path, lost: int, place: str) -> None:
    with pytest.raises(CommError, match=rf"rank {lost} of 2 was killed by signal 9") as raised:
        run_ranks(killed_rank, 2, tmp_path, lost, place)
    (note,) = raised.value.__notes__
    assert "RankLostError: 'a step'" in note, note
    (path,) = complete_checkpoints(tmp_path)
    assert step_of(path) == 1
    check_contents(path, check_sizes(path))


# ---- stores


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
