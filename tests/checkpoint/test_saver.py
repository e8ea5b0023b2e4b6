"""Checkpoints that are written while training goes on: the same files, one at a time, complete or not there."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Layout, World
from longspan.checkpoint import saver as module
from longspan.checkpoint.checkpoint import check_checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from longspan.checkpoint.files import complete_checkpoints, publish_checkpoint, step_of
from longspan.checkpoint.saver import CheckpointSaver
from longspan.checkpoint.stage import StagedTensors
from longspan.errors import CheckpointError, CommError
from longspan.testing import backend, run_ranks
from longspan.train.optim.offload_states import offload_states
from longspan.train.optim.optimizer import OptimizerChoice, build_optimizer
from longspan.train.optim.stochastic_rounding import StochasticRounding
from tests.checkpoint.test_checkpoint import contents, opened, update


def tensors_of(path: Path, world: World) -> list[Tensor]:
    """What a checkpoint holds, loaded into a model and an optimizer of another seed."""
    model, optimizer = opened(world, seed=9)
    load_checkpoint(path, model, optimizer, world)
    return contents(model, optimizer)


def same_as_synchronous_rank(rank: int, ranks: int, root: Path) -> list[str]:
    """Save in the background and update at once: the checkpoint is that of the weights before the update."""
    said = list[str]()
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model, optimizer = opened(world)
        saver = CheckpointSaver(root / "background", world, keep=2, log=said.append)
        for step in range(1, 5):
            update(model, optimizer)
            save_checkpoint(root / "waiting", model, optimizer, world, step=step, state={"note": step})
            saver.save(model, optimizer, step=step, state={"note": step})
        saver.prepare(model, optimizer)
        update(model, optimizer)
        saver.wait()
        assert saver.take_figures() is not None and saver.take_figures() is None
        kept = [step_of(path) for path in complete_checkpoints(root / "background")]
        assert kept == [4, 3]
        for step in kept:
            name = f"step-{step:06d}"
            check_checkpoint(root / "background" / name, world)
            for one, other in zip(
                tensors_of(root / "background" / name, world), tensors_of(root / "waiting" / name, world), strict=True
            ):
                assert torch.equal(one, other)
        assert saver._plans.planned == 1  # of four saves
    assert not [t for t in threading.enumerate() if t.name == "longspan save"]
    return said


def test_a_background_save_holds_what_a_synchronous_one_holds(tmp_path: Path) -> None:
    run_ranks(same_as_synchronous_rank, 2, 2, tmp_path)
    files = {path.name for path in (tmp_path / "background" / "step-000004").iterdir()}
    assert files == {path.name for path in (tmp_path / "waiting" / "step-000004").iterdir()}
