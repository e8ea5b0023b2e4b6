"""Stages of Zamba 2 train, save and resume like one process; copies and their moments stay equal bit by bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.layout import Layout
from longspan.model import load_model, prepare, save_model
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan import Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.deep import weights_after
from tests.model.stock import error, texts, weights_of, worst
from tests.train.steps.shared_stages.cases import LENGTHS, Case, zamba2


def _copies_of_stages(model: PipelineModel, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """The trained copies of shared parameters here, with their moments."""
    shared = {entry.names[0] for entry in model.stages[0].shared}
    parameters = {name: p for name, p in model.named_parameters() if name in shared}
    moments = {
        name: [optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]] for name, p in parameters.items()
    }
    return {name: [_local(x) for x in (p.detach(), *moments[name])] for name, p in parameters.items()}


def _local(x: Any) -> torch.Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).clone()


SAVED = [Case("1f1b", 2, 2), Case("zbv", 2, 2, "copies"), Case("1f1b", 4)]
RESUMED = [Case("1f1b", 4), Case("1f1b", 2, 1, "sharded", tp=2), Case("zbv", 2, 2)]
THREE_STEPS = [
    Case("1f1b", 2, 2, "recomputed"),
    Case("zbv", 2, 2, "copies", "dynamic"),
    Case("zbv", 2, 2, "recomputed", "dynamic"),
    Case("1f1b", 4),
]
RATE = 1e-2


def _train(model: Any, plan: Plan, optimizer: torch.optim.Optimizer, world: World, steps: range) -> None:
    for step in steps:
        run_step(model, plan, texts(LENGTHS, step), world, optimizer, max_grad_norm=0.5, step=step)


def _save_and_resume(rank: int, saved: Case, resumed: Case, folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint and a folder, and two more; the same after the checkpoint in another home, and in one
    without stages."""
    path = Path(folder)
    with whole_float64():
        with World(saved.home, backend=backend(), timeout=60) as world:
            model = saved.prepared(world)
            optimizer = build_optimizer(model, "adamw", RATE, 0.1)
            _train(model, saved.plan(), optimizer, world, range(2))
            checkpoint = save_checkpoint(path / "checkpoints", model, optimizer, world, step=2)
            save_model(model, path / "saved", world)
            weights = weights_of(model)
            _train(model, saved.plan(), optimizer, world, range(2, 4))
            copies = world.control.gather_objects((world.coordinates.slot, _copies_of_stages(model, optimizer)))
            final = {name: x for part in world.control.gather_objects(weights_of(model)) for name, x in part.items()}
        errors = []
        for home, case in ((resumed.home, resumed), (Layout(ranks=4), None)):
            with World(home, backend=backend(), timeout=60) as world:
                model: Any = case.prepared(world) if case else prepare(zamba2(), world)
                optimizer = build_optimizer(model, "adamw", RATE, 0.1)
                load_checkpoint(checkpoint, model, optimizer, world)
                plan = case.plan() if case else plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=20)
                _train(model, plan, optimizer, world, range(2, 4))
                errors += [error(x, final[name]) for name, x in weights_of(model).items()]
        loaded = weights_of(load_model(path / "saved", dtype="float64"))
    return {
        "resumed": max(errors),
        "folder": worst(weights, {name: loaded[name] for name in weights}),
        "names": set(final) == set(loaded),
        "copies": _alike(copies),
    }


def _alike(copies: Sequence[tuple[int, dict[str, list[torch.Tensor]]]]) -> bool:
    """Whether copies of one parameter on several stages, and their moments, are equal bit by bit, slot by slot."""
    first: dict[tuple[int, str], list[torch.Tensor]] = {}
    several = False
    for slot, parameters in copies:
        for name, values in parameters.items():
            several |= (slot, name) in first
            wanted = first.setdefault((slot, name), values)
            if not all(map(torch.equal, values, wanted)):
                return False
    return several


@pytest.mark.whole
@pytest.mark.parametrize(("saved", "resumed"), [*zip(SAVED, RESUMED, strict=True)])
def test_what_is_saved_goes_on_in_another_home(saved: Case, resumed: Case, tmp_path: Path) -> None:
    for found in run_ranks(_save_and_resume, 4, saved, resumed, str(tmp_path), timeout=280):
        assert found["copies"] and found["names"] and found["folder"] == 0 and found["resumed"] < 1e-11, found


def _sgd(rank: int, cases: Sequence[Case], wanted: dict[str, torch.Tensor]) -> list[float]:
    found = []
    with whole_float64():
        for case in cases:
            with World(case.home, backend=backend(), timeout=60) as world:
                model = case.prepared(world)
                optimizer = build_optimizer(model, "sgd", 0.5)
                _train(model, case.plan(), optimizer, world, range(3))
                found.append(max(error(weight, wanted[name]) for name, weight in weights_of(model).items()))
    return found


@pytest.mark.whole
def test_three_clipped_steps() -> None:
    with whole_float64():
        wanted = weights_after(
            zamba2(), [texts(LENGTHS, i) for i in range(3)], torch.device("cpu"), lr=0.5, max_norm=0.5
        )
    for found in run_ranks(_sgd, 4, THREE_STEPS, wanted, timeout=280):
        assert max(found) < 1e-11, found
