"""Every collective of whole small runs is started inside of a watch, so that a report can name it: also torch's own."""

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.comm.world import World, open_worlds
from longspan.config.sections import RunConfig
from longspan.layout import Layout
from longspan.testing import backend, run_ranks
from tests.hf.stock import ours
from tests.hf.test_trainer import make
from tests.train.small import small_config, train_rank

on_gloo = pytest.mark.skipif(backend() != "gloo", reason="backward passes on GPUs run in threads the mode does not see")
PACKAGE = f"{Path(longspan.__file__).parent}/"


class WatchedCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()
        self.nameless = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_collective = func._opname not in ("wait_tensor", "_wrap_tensor_autograd")
        if func.namespace in ("c10d", "_c10d_functional") and is_collective:
            self.seen.add(name)
            watches = [world.watch for world in open_worlds()]
            if not any(watch.current or watch.named_operation for watch in watches):
                frames = [frame for frame in traceback.extract_stack() if PACKAGE in frame.filename]
                where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-3:]]
                self.nameless.add(f"{name} at {' '.join(where)}")
        return func(*args, **(kwargs or {}))


MOE = {"model__preset": "qwen3-moe-tiny", "parallel__ep": 2}
ONE = {"context__context_parallel_size": 1, "evaluation__context_parallel_size": 1}
DYNAMIC = {"context__planner": "dynamic"}
RUNS: dict[str, tuple[int, dict[str, Any], str]] = {  # ranks, keys, and a collective that torch starts by itself
    "fsdp": (2, {}, "c10d._reduce_scatter_base_.default"),
    "tp": (2, {"parallel__tp": 2, **ONE}, "c10d.allreduce_.default"),
    "pp": (2, {"parallel__pp": 2, **ONE}, "c10d.gather_.default"),
    "experts": (2, {**MOE, **ONE}, "c10d._reduce_scatter_base_.default"),
    "tp, experts": (4, {**MOE, **ONE, "parallel__tp": 2, "parallel__sequence_parallel": True}, "c10d.gather_.default"),
    "copies": (4, {**DYNAMIC, "parallel__dp_replicate": 2}, "c10d.allreduce_.default"),
    "adapters, free": (2, {**DYNAMIC, "lora__rank": 2, "context__mode": "free"}, "c10d._allgather_base_.default"),
}


def train_watched(rank: int, config: RunConfig, ranks: int) -> tuple[set[str], set[str]]:
    assert talk(ranks) == ["c10d.broadcast_.default"], "one outside is noticed"
    with WatchedCollectives() as mode:
        for steps in (1, 2):
            train_rank(rank, replace(config, train=replace(config.train, steps=steps)), ranks)
    return mode.seen, mode.nameless


def talk(ranks: int) -> list[str]:
    with World(Layout(ranks=ranks), backend="gloo") as world, WatchedCollectives() as mode:
        group, x = world.meshes.fsdp.get_group(), torch.ones(2)
        with world.watch.name_collectives("passes", world.home.ranks):
            dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)
    return [name.partition(" at")[0] for name in sorted(mode.nameless)]


@on_gloo
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "fsdp" else pytest.mark.whole) for kind in RUNS]
)
def test_no_collective_of_a_run_is_nameless(kind: str, tmp_path: Path) -> None:
    ranks, keys, expected = RUNS[kind]
    config = small_config(tmp_path, **{"checkpoint__every": 1, "evaluation__every": 1, **keys})
    for seen, nameless in run_ranks(train_watched, ranks, config, ranks):
        assert not nameless, nameless
        assert {expected, "c10d.send.default"} <= seen, seen
        assert "c10d.scatter_.default" in seen, "as DCP's, which saves and reads"


def train_with_trainer(run: Any) -> Any:
    with WatchedCollectives() as mode:
        for keywords in ({}, {"resume_from_checkpoint": True}):
            trainer = make(run, max_steps=3, eval_steps=2, save_strategy="steps", save_steps=2)
            trainer.train(**keywords)
        trainer.save_model()
    assert not mode.nameless, mode.nameless
    assert "c10d._reduce_scatter_base_.default" in mode.seen
    return trainer


@pytest.mark.whole
@on_gloo
def test_no_collective_of_a_trainer_is_nameless() -> None:
    ours(train_with_trainer, {"context_parallel_size": 2, "eval_context_parallel_size": "1"}, 2)
