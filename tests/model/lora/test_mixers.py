"""Adapters of the projections of gated delta nets and Mamba 2, beside the dense PeftModel in float64."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.layout import Layout
from longspan.model import prepare, save_model
from longspan.model.adapters import belongs_to_adapter
from longspan.model.seams.mixers import find_mixers
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.lora.adapted import LENGTHS, OTHER_HYBRIDS, adapted, dense_answer
from tests.model.seams.test_mixers import here
from tests.model.stock import error, gradients_of, texts, weights_of, worst
from tests.mutation import mutated

EXACT = 1e-11


@dataclass(frozen=True)
class Home:
    """A layout, how a model is prepared for it, and whether its plan is dynamic."""

    layout: Layout
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dynamic: bool = False

    def plan(self) -> Plan:
        if self.dynamic:
            return plan_dynamic(LENGTHS, self.layout, max_tokens_per_slot=22)
        return plan_fixed(
            LENGTHS,
            self.layout,
            cp=self.layout.slots,
            max_tokens_per_slot=40,
            partition="contiguous",
            row_multiple=self.layout.tp,
        )


TP, SEQUENCE_PARALLEL = Layout(ranks=4, tp=2), {"sequence_parallel": True}
HOMES = {
    "cp 2": Home(Layout(ranks=2)),
    "dynamic": Home(Layout(ranks=2), {"activation_checkpointing": "full"}, dynamic=True),
    "tp 2": Home(Layout(ranks=2, tp=2)),
    "pp 2": Home(Layout(ranks=2, pp=2)),
    "two stages a rank": Home(Layout(ranks=2, pp=2), {"virtual_stages": 2}),
    "two stages a rank, folded": Home(Layout(ranks=2, pp=2), {"virtual_stages": 2, "pipeline_schedule": "zbv"}),
    "tp 2, cp 2": Home(TP, SEQUENCE_PARALLEL),
    "tp 2, cp 2, copies": Home(TP, {"shard_parameters": False, "activation_checkpointing": "full"}),
}
CASES = (
    ("qwen3-next", "mixers"),
    ("qwen3.5", "every linear"),
    ("bamba", "mixers"),
    ("bamba", "every linear"),
    ("qwen3-next", "projections"),
)
STAGES = ("two stages a rank", "two stages a rank, folded")
OTHERS = tuple((family, "projections") for family in here(OTHER_HYBRIDS))


def _errors(rank: int, homes: tuple[str, ...], cases: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """The largest relative error of loss and gradients."""
    found = dict[str, float]()
    for name in homes:
        home = HOMES[name]
        with World(home.layout, backend=backend(), timeout=60) as world, whole_float64():
            for family, adapter in cases:
                loss, _, gradients = dense_answer(family, adapter, world.device)
                peft_model = adapted(family, adapter)
                mixers = tuple(f"{name}." for name in find_mixers(peft_model.get_base_model()))
                model = prepare(peft_model, world, **home.options)
                result = run_step(model, home.plan(), texts(LENGTHS), world)
                local = gradients_of(model)
                assert home.layout.pp > 1 or local.keys() == gradients.keys()
                assert any(key.startswith(mixers) for key in gradients)
                worst = max((error(x, gradients[key]) for key, x in local.items()), default=0.0)
                found[f"{name}, {family}, {adapter}"] = max(abs(result.loss / loss - 1), worst)
    return found


@pytest.mark.parametrize(
    ("ranks", "homes", "cases"),
    [
        (2, ("dynamic", "tp 2"), (CASES[1], CASES[3])),
        pytest.param(2, ("cp 2", "dynamic", "tp 2", "pp 2"), CASES, marks=pytest.mark.whole),
        pytest.param(2, ("cp 2", "tp 2"), OTHERS, marks=pytest.mark.whole),
        pytest.param(2, ("pp 2", *STAGES), (("zamba2", "projections"),), marks=pytest.mark.whole),
        pytest.param(4, ("tp 2, cp 2", "tp 2, cp 2, copies"), (*CASES, *OTHERS), marks=pytest.mark.whole),
    ],
)
def test_adapters_of_mixers_are_exact(ranks: int, homes: tuple[str, ...], cases: tuple[tuple[str, str], ...]) -> None:
    for found in run_ranks(_errors, ranks, homes, cases, timeout=280):
        assert len(found) == len(homes) * len(cases)
        assert all(value <= EXACT for value in found.values()), found


def _continued(rank: int, family: str, folder: Path) -> float:
    """Two steps at tp 2 with parts of the rows, a folder and a checkpoint; how far what tp 1 reads is from it."""
    documents, (layout, options) = texts(LENGTHS), (TP, SEQUENCE_PARALLEL)
    with World(layout, backend=backend(), timeout=60) as world:
        model = prepare(adapted(family, "projections"), world, **options)
        optimizer = build_optimizer(model, "adamw", lr=1e-2)
        for _ in range(2):
            run_step(model, Home(layout).plan(), documents, world, optimizer)
        checkpoint = save_checkpoint(folder / "checkpoints", model, optimizer, world, step=2)
        save_model(model, folder / "adapter", world)
        weights = {name: x for name, x in weights_of(model).items() if belongs_to_adapter(name)}
    with World(Layout(ranks=4), backend=backend(), timeout=60) as world:
        model = prepare(adapted(family, "projections"), world)
        load_checkpoint(checkpoint, model, build_optimizer(model, "adamw", lr=1e-2), world)
        read = {name: x for name, x in weights_of(model).items() if belongs_to_adapter(name)}
    stock: Any = peft.PeftModel.from_pretrained(adapted(family, "projections").unload(), str(folder / "adapter"))
    of_folder = {name: p for name, p in stock.get_base_model().named_parameters() if belongs_to_adapter(name)}
    return max(worst(read, weights), worst(of_folder, weights))


@pytest.mark.whole
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "bamba"])
def test_checkpoints_and_folders_are_those_of_the_whole_adapter(family: str, tmp_path: Path) -> None:
    assert run_ranks(_continued, 4, family, tmp_path, timeout=200) == [0.0] * 4


MUTANTS = {
    "cp 2": ("model.seams.mixers", "(v * step.unsqueeze(-1))", "(v.detach() * step.unsqueeze(-1))"),
    "tp 2": (
        "model.tensor_parallel.tensor_parallel",
        "whole_view if is_first_adapter_matrix(name)",
        "(lambda x: x) if is_first_adapter_matrix(name)",
    ),
}


def _mutated(rank: int) -> list[float]:
    found = []
    for home, mutant in MUTANTS.items():
        with mutated(mutant):
            found.append(max(_errors(rank, (home,), (("bamba", "mixers"),)).values()))
    return found


def test_a_gradient_that_stops_in_a_scan_or_is_not_summed_over_tp_is_noticed() -> None:
    for found in run_ranks(_mutated, 2, timeout=60):
        assert min(found) > 1e-3, found
