"""Zamba 2 through a pipeline equals one process: blocks that stages share, and the embedding that all layers read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.comm import World
from longspan.doctor.float64 import whole_float64
from longspan.layout import Layout
from longspan.model import load_model, prepare, save_model
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.small.shrink import shrunken
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from tests.model.deep import Answer, answer, weights_after
from tests.model.stock import at_random, error, gradients_of, texts, weights_of, worst
from tests.mutation import Change, mutated

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)


def zamba2() -> PreTrainedModel:
    """A layer of Mamba 2, and seven that call two blocks in turn, each with adapters of its own.

    Of four stages the first has neither block; where a rank has two of the others it has two copies of a block.
    """
    config = shrunken(CONFIG_MAPPING["zamba2"](use_shared_attention_adapter=True, use_mem_rope=True))
    config.num_hidden_layers, config.num_mem_blocks = 8, 2
    config.layers_block_type, config.hybrid_layer_ids = ["linear_attention"] + ["hybrid"] * 7, [*range(1, 8)]
    return at_random(config)


@dataclass(frozen=True)
class Case:
    """A pipeline of two or four ranks; `kind` is copies, sharded (FSDP2), or recomputed (both)."""

    schedule: str
    pp: int
    vpp: int = 1
    kind: str = "sharded"
    planner: str = "fixed"
    tp: int = 1
    sequence_parallel: bool = False
    ranks: int = 4

    @property
    def home(self) -> Layout:
        return Layout(ranks=self.ranks, pp=self.pp, tp=self.tp)

    def prepared(self, world: World) -> PipelineModel:
        model = prepare(
            zamba2(),
            world,
            shard_parameters=self.kind != "copies",
            activation_checkpointing=self.kind == "recomputed",
            virtual_stages=self.vpp,
            pipeline_schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
        )
        assert isinstance(model, PipelineModel)
        return model

    def plan(self) -> Plan:
        rows = {"row_multiple": self.row_multiple, "max_tokens_per_slot": 40 // self.home.slots}
        if self.planner == "dynamic":
            return plan_dynamic(LENGTHS, self.home, **rows)
        return plan_fixed(LENGTHS, self.home, cp=self.home.slots, **rows)

    def evaluation_plan(self) -> Plan:
        """At another degree, where there is more than one slot."""
        return plan_fixed(LENGTHS, self.home, cp=1, row_multiple=self.row_multiple, max_tokens_per_slot=40)

    @property
    def row_multiple(self) -> int:
        return self.tp if self.sequence_parallel else 1


IN_CI = Case("zbv", 2, 2, "recomputed", "dynamic", ranks=2)
CASES = [
    Case("1f1b", 2, 2, "recomputed"),
    Case("zbv", 2, 2, "copies", "dynamic"),
    Case("zbv", 2, 2, "recomputed", "dynamic"),
    Case("1f1b", 2),
    Case("1f1b", 2, 2, "copies", "dynamic"),
    Case("gpipe", 2, 2, "recomputed", "dynamic"),
    Case("zero_bubble", 2, 1, "sharded", "dynamic"),
    Case("zero_bubble", 2, 2, "copies"),
    Case("zbv", 2, 2),
    Case("1f1b", 4),
    Case("1f1b", 4, 2, "recomputed"),
    Case("zero_bubble", 4, 1, "copies", "dynamic"),
    Case("zbv", 4, 2),
    Case("1f1b", 2, tp=2),
    Case("1f1b", 2, 2, "copies", tp=2, sequence_parallel=True),
    Case("zbv", 2, 2, "recomputed", tp=2, sequence_parallel=True),
]


@cache
def _wanted() -> Answer:
    with whole_float64():
        return answer(zamba2(), texts(LENGTHS), "cpu")


def _errors(model: PipelineModel, case: Case, wanted: Answer, world: World) -> dict[str, float]:
    """Of one step's loss, gradient norm and gradients here, and of an evaluation at another degree."""
    result = run_step(model, case.plan(), texts(LENGTHS), world)
    found, names = gradients_of(model), {name for name, _ in model.named_parameters()}
    model.zero_grad()
    evaluated = run_step(model, case.evaluation_plan(), texts(LENGTHS), world, backward=False)
    assert result.grad_norm is not None
    return {
        "loss": abs(result.loss / wanted.loss - 1),
        "norm": abs(result.grad_norm / wanted.norm - 1),
        "evaluation": abs(evaluated.loss / wanted.loss - 1),
        "gradients": max(error(found[n], wanted.gradients[n]) for n in found) if found.keys() == names else np.inf,
    }


def _compare(rank: int, cases: Sequence[Case], wanted: Answer) -> list[dict[str, float]]:
    found = []
    with whole_float64():
        for case in cases:
            with World(case.home, backend=backend(), timeout=60) as world:
                found.append(_errors(case.prepared(world), case, wanted, world))
    return found


def _check(cases: Sequence[Case]) -> None:
    for found in run_ranks(_compare, cases[0].ranks, cases, _wanted(), timeout=280):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) < 1e-12, (case, errors)


def test_equals_one_process() -> None:
    _check([IN_CI])


@pytest.mark.whole
@pytest.mark.parametrize("tp", [1, 2])
def test_every_schedule(tp: int) -> None:
    _check([case for case in CASES if case.tp == tp])


# ---- training, checkpoints and folders


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
    for found in run_ranks(_sgd, 4, [*CASES[:3], Case("1f1b", 4)], wanted, timeout=280):
        assert max(found) < 1e-11, found


# ---- what is dropped is noticed

ROOM = "model.pipeline"
MUTANTS: dict[str, tuple[Change, Callable[[dict[str, float]], bool]]] = {
    "the sum over stages": (
        (f"{ROOM}.copies", "gradient.copy_(summed([*parts.values()]))", "pass"),
        lambda errors: errors["gradients"] > 1e-3,
    ),
    "the sum over stages of a rank": (
        (f"{ROOM}.copies", "add_gradient(first.parameter, other.parameter.grad)", "pass"),
        lambda errors: errors["gradients"] > 1e-3,
    ),
    "the embedding on later stages": (
        (f"{ROOM}.embedding_argument", "arguments[argument] = embedding", "pass"),
        lambda errors: errors["loss"] > 1e-6,
    ),
    "the embedding's gradient from later stages": (
        (f"{ROOM}.stages", "torch.cat([hidden, rows], dim=1)", "torch.cat([hidden, rows.detach()], dim=1)"),
        lambda errors: errors["gradients"] > 1e-3,
    ),
    "that a parameter is counted once": (
        ("train.gradients", "if parameter not in skipped", "if True"),
        lambda errors: errors["norm"] > 1e-6,
    ),
}


def _mutants(rank: int, names: Sequence[str], wanted: Answer) -> dict[str, dict[str, float]]:
    found, case = {}, CASES[1]
    with whole_float64(), World(case.home, backend=backend(), timeout=60) as world:
        for name in names:
            with mutated(MUTANTS[name][0]):
                found[name] = _errors(case.prepared(world), case, wanted, world)
    return found


@pytest.mark.whole
def test_what_is_dropped_is_noticed() -> None:
    of_ranks = run_ranks(_mutants, 4, tuple(MUTANTS), _wanted(), timeout=280)
    for name, (_, noticed) in MUTANTS.items():
        assert any(noticed(found[name]) for found in of_ranks), (name, [found[name] for found in of_ranks])
