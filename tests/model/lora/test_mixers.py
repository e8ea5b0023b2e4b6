"""Adapters of the projections of gated delta nets and Mamba 2, beside the dense PeftModel in float64."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from longspan.comm import World
from longspan.doctor.float64 import whole_float64
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.lora.adapted import LENGTHS, adapted, dense_answer
from tests.model.stock import error, gradients_of, texts
from tests.mutation import mutate, restore

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
        return plan_fixed(LENGTHS, self.layout, cp=self.layout.slots, max_tokens_per_slot=40, partition="contiguous")


HOMES = {
    "cp 2": Home(Layout(ranks=2)),
    "dynamic": Home(Layout(ranks=2), {"activation_checkpointing": "full"}, dynamic=True),
    "pp 2": Home(Layout(ranks=2, pp=2)),
}
CASES = (("qwen3-next", "mixers"), ("qwen3.5", "every linear"), ("bamba", "mixers"), ("bamba", "every linear"))


def _errors(rank: int, homes: tuple[str, ...], cases: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """The largest relative error of loss and gradients."""
    found = dict[str, float]()
    for name in homes:
        home = HOMES[name]
        with World(home.layout, backend=backend(), timeout=60) as world, whole_float64():
            for family, adapter in cases:
                loss, _, gradients = dense_answer(family, adapter, world.device)
                model = prepare(adapted(family, adapter), world, **home.options)
                result = run_step(model, home.plan(), texts(LENGTHS), world)
                local = gradients_of(model)
                assert home.layout.pp > 1 or local.keys() == gradients.keys()
                assert any(".mamba." in key or ".linear_attn." in key for key in gradients)
                worst = max((error(x, gradients[key]) for key, x in local.items()), default=0.0)
                found[f"{name}, {family}, {adapter}"] = max(abs(result.loss / loss - 1), worst)
    return found


@pytest.mark.parametrize(
    ("homes", "cases"),
    [(("cp 2", "dynamic"), CASES[1:3]), pytest.param(tuple(HOMES), CASES, marks=pytest.mark.whole)],
)
def test_adapters_of_mixers_are_exact(homes: tuple[str, ...], cases: tuple[tuple[str, str], ...]) -> None:
    for found in run_ranks(_errors, 2, homes, cases, timeout=120):
        assert len(found) == len(homes) * len(cases)
        assert all(value <= EXACT for value in found.values()), found


def _refused(rank: int) -> list[str]:
    messages = list[str]()
    with World(Layout(ranks=2, tp=2), backend=backend(), timeout=60) as world:
        for family in ("qwen3-next", "bamba"):
            with pytest.raises(ModelError) as refusal:
                prepare(adapted(family, "mixers"), world)
            messages.append(str(refusal.value))
    return messages


def test_tensor_parallelism_refuses_adapters_of_mixers_by_name() -> None:
    for delta_net, mamba in run_ranks(_refused, 2, timeout=60):
        assert "layers.0.linear_attn." in delta_net and "use tp 1" in delta_net
        assert "layers.0.mamba." in mamba and "use tp 1" in mamba


MUTANTS = {
    "no gradient of values": (
        "model.seams.mixer_calls",
        "(v * step.unsqueeze(-1))",
        "(v.detach() * step.unsqueeze(-1))",
    )
}


def _mutated(rank: int) -> float:
    undo = mutate(*MUTANTS["no gradient of values"])
    try:
        return max(_errors(rank, ("cp 2",), (("bamba", "mixers"),)).values())
    finally:
        restore(undo)


def test_a_gradient_that_stops_in_a_scan_is_noticed() -> None:
    assert min(run_ranks(_mutated, 2, timeout=60)) > 1e-3
