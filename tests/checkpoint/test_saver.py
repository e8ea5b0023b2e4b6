"""Checkpoints that are written while training goes on, complete or not there."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

from longspan import Layout, World
from longspan.checkpoint import host_copies, saver as module, storage
from longspan.checkpoint.checkpoint import check_checkpoint, load_checkpoint, save_checkpoint
from longspan.checkpoint.files import (
    check_file_hashes,
    checkpoints_root,
    complete_checkpoints,
    read_checked_manifest,
    step_of,
)
from longspan.checkpoint.host_copies import SMALL, HostCopies, StagedTensors
from longspan.checkpoint.saver import CheckpointSaver
from longspan.checkpoint.storage import SafetensorsWriter
from longspan.errors import CheckpointError, CommError
from longspan.testing import backend, run_ranks
from longspan.train.optim.offload_states import offload_optimizer_states
from longspan.train.optim.optimizer import OptimizerChoice, build_optimizer
from longspan.train.optim.stochastic_rounding import RoundingBits
from tests.checkpoint.test_checkpoint import contents, opened, slow, update


def test_what_only_an_update_writes_is_copied_later_and_the_rest_at_once() -> None:
    model = nn.BatchNorm1d(SMALL)
    moments = {"exp_avg": torch.ones(SMALL), "step": torch.tensor(3.0), "none": torch.empty(0, 4)}
    stage = HostCopies(torch.device("cpu"))
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


def background_rank(rank: int, ranks: int, root: Path) -> list[str]:
    said, host_copies.SMALL = list[str](), 256  # bytes: of these models the matrices are copied later
    finish = StagedTensors.finish
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model, optimizer = opened(world)
        saver = CheckpointSaver(root / "background", world, keep=2, log=said.append)
        update(model, optimizer)
        saver.prepare(model, optimizer)
        planned, plan = list[bool](), DefaultSavePlanner._create_global_plan
        DefaultSavePlanner._create_global_plan = lambda self, plans: (
            planned.append(self._enable_plan_caching),
            plan(self, plans),
        )[1]
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
        sizes = {name: size for name, (size, _) in read_checked_manifest(path).items() if name.startswith("shard-")}
        assert figures.bytes == sum(sizes.values()), (figures, sizes)
        check_checkpoint(path, world)
        found, trained = list[list[Tensor]](), contents(model, optimizer)
        for folder in (path, root / "waiting" / path.name):
            update(model, optimizer)
            load_checkpoint(folder, model, optimizer, world)
            found.append(contents(model, optimizer))
        assert len(found[0]) == len(found[1]) > 4 * 11 and all(map(torch.equal, *found))
        assert not all(map(torch.equal, trained, found[0])), "an update was made after it"
        DefaultSavePlanner._create_global_plan = plan
        assert planned.count(True) == (rank == 0)  # once in four saves, on the first rank
        kinds = [record.kind for record in world.process_groups.made]
        assert kinds.count("saves") == 1
        figures_rank(rank, root / "figures", model, world)
        said += failures_rank(rank, root / "failures", model, world)
        optimizers_rank(root / "optimizers", model, world)
    assert not [thread for thread in threading.enumerate() if thread.name == "longspan save"]
    return said


def optimizers_rank(root: Path, model: nn.Module, world: World) -> None:
    """An update waits for the copies, whatever optimizer makes it and wherever its moments are."""
    finish = StagedTensors.finish
    StagedTensors.finish = slow(0.1, finish)  # type: ignore[method-assign]
    for name in ("sgd", "offloaded", "rounding"):
        optimizer = build_optimizer(model, "sgd" if name == "sgd" else "adamw", 1e-2)
        if name == "offloaded":
            optimizer = offload_optimizer_states(optimizer, world)
        if name == "rounding":
            model = model.to(torch.bfloat16)
            optimizer = OptimizerChoice("adamw", 1e-2).build(model.parameters(), rounding=RoundingBits(model, world))
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


def figures_rank(rank: int, root: Path, model: nn.Module, world: World) -> None:
    """Ranks that see at different times that a save has ended."""
    optimizer = build_optimizer(model, lr=1e-2)
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


def failures_rank(rank: int, root: Path, model: nn.Module, world: World) -> list[str]:
    """What goes wrong on one rank is raised on both, and the next save works."""
    texts, module._ENDS = list[str](), 0.1
    optimizer = build_optimizer(model, lr=1e-2)
    update(model, optimizer)
    saver = CheckpointSaver(root, world, log=texts.append)
    saver.save(model, optimizer, step=1)
    saver.wait()
    write = storage.write_chunks

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device", "a file")

    for broken in (refuse, slow(0.5, write)):
        if rank == 1:
            storage.write_chunks = broken
        saver.save(model, optimizer, step=2)
        save = saver._running
        assert save is not None
        phase = "writing its files" if rank == 1 else "waiting for the other ranks' files"
        while broken is not refuse and save.phase != phase:
            time.sleep(0.01)
        saver.timeout = 0.0 if broken is not refuse else saver.timeout
        while not world.control.flag_on_any_rank(saver.has_failed):  # as a step's agreement does
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
    check_file_hashes(path, read_checked_manifest(path))


def test_the_url_of_a_store_is_refused() -> None:
    assert checkpoints_root(Path("runs/a"), "") == Path("runs/a/checkpoints")
    with pytest.raises(CheckpointError, match=r"s3://bucket/a is no folder: mount the store on all machines, and name"):
        checkpoints_root(Path("runs/a"), "s3://bucket/a")
