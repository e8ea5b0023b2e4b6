"""LoRA over packed weights equals LoRA over the weights that they stand for: losses and every gradient, bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.model.marks import packed_weights
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.frozen.packed_models import adapted
from tests.model.stock import gradients_of, prepare_untried, texts
from tests.mutation import Change, mutated

LENGTHS = (13, 1, 30, 7, 2, 18)
MUTATIONS: dict[str, Change] = {  # noticed in losses and gradients, or as an error
    "the weight of an earlier gather": (
        "model.fsdp_params",
        "self.unpacking.unpack(packed, weight)",
        "pass",
    ),
    "another type": ("model.fsdp_params", "dtype=self.unpacking.dtype, device=", "device="),
}


@dataclass(frozen=True)
class Home:
    """A layout, a family, how a model is prepared for it, and how documents are planned."""

    layout: Layout
    family: str = "llama"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plans: Literal["fixed", "dynamic", "free"] = "fixed"
    rows: int = 40
    dtype: torch.dtype = torch.bfloat16

    def plan(self) -> Plan:
        if self.plans != "fixed":
            mode: Any = "free" if self.plans == "free" else "lockstep"
            return plan_dynamic(LENGTHS, self.layout, max_tokens_per_slot=22, mode=mode)
        multiple = self.layout.tp if "sequence_parallel" in self.options else 1
        cp = self.layout.slots
        return plan_fixed(LENGTHS, self.layout, cp=cp, max_tokens_per_slot=self.rows, row_multiple=multiple)


ONCE = {"reshard_after_forward": False, "sync_each_batch": False}
FULL = {"activation_checkpointing": "full"}
COMPILED = {"compiled": "layers"}
ONE: Mapping[str, Home] = {
    "three micro-batches, recomputed": Home(Layout(ranks=1), options=FULL, rows=32),
    "float32": Home(Layout(ranks=1), dtype=torch.float32),
}
MORE_OF_ONE: Mapping[str, Home] = {
    "one micro-batch": Home(Layout(ranks=1), rows=80),
    "experts": Home(Layout(ranks=1), "moe"),
    "adapted experts": Home(Layout(ranks=1), "adapted experts"),
    "kept gathered": Home(Layout(ranks=1), options=ONCE, rows=32),
}
TWO: Mapping[str, Home] = {  # tensor parallelism is in test_loaded_models.py
    "dynamic, kept gathered": Home(Layout(ranks=2), options={**ONCE, **FULL}, plans="dynamic"),
    "ep 2, adapted experts": Home(Layout(ranks=2, ep=2), "adapted experts"),
}
MORE_OF_TWO: Mapping[str, Home] = {
    "ep 2": Home(Layout(ranks=2, ep=2), "moe"),
    "pp 2, zero bubble": Home(Layout(ranks=2, pp=2), options={"pipeline_schedule": "zero_bubble"}),
    "cp 2": Home(Layout(ranks=2)),
    "dynamic": Home(Layout(ranks=2), options=FULL, plans="dynamic"),
    "kept gathered": Home(Layout(ranks=2), options=ONCE, rows=20),
    "free": Home(Layout(ranks=2), plans="free"),
    "tp 2": Home(Layout(ranks=2, tp=2)),
    "tp 2, rows split": Home(Layout(ranks=2, tp=2), options={"sequence_parallel": True, **FULL}),
    "experts, tp 2": Home(Layout(ranks=2, tp=2), "moe"),
    "pp 2": Home(Layout(ranks=2, pp=2)),
}
COMPILES: Mapping[str, Home] = {"compiled": Home(Layout(ranks=2), options=COMPILED)}
FOUR: Mapping[str, Home] = {
    "cp 4": Home(Layout(ranks=4)),
    "replicas": Home(Layout(ranks=4, dp_replicate=2)),
    "tp 2, cp 2": Home(Layout(ranks=4, tp=2), options=FULL),
    "ep 2, cp 4": Home(Layout(ranks=4, ep=2), "moe"),
    "pp 2, tp 2": Home(Layout(ranks=4, pp=2, tp=2)),
}


def _run(home: Home, world: World, **frozen: Any) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    compute = None if home.dtype == torch.float32 else home.dtype
    options = {"compute_dtype": compute, **home.options, **frozen}
    dequantised = None if frozen else home.dtype
    model = prepare_untried(adapted(home.family, dequantised=dequantised), world, **options)
    evaluated = home.plan()
    if home.layout.slots > 1 and home.layout.pp == 1:  # at another degree, with the same weights
        evaluated = plan_fixed(LENGTHS, home.layout, cp=1, row_multiple=evaluated.row_multiple)
    losses = [run_step(model, evaluated, texts(LENGTHS), world, backward=False).loss]
    losses += [run_step(model, home.plan(), texts(LENGTHS), world).loss for _ in range(2)]
    return losses, gradients_of(model), packed_weights(model)


def _compare(rank: int, homes: Mapping[str, Home]) -> dict[str, str]:
    differ = dict[str, str]()
    for name, home in homes.items():
        with World(home.layout, backend=backend(), timeout=60) as world:
            losses, gradients, packed = _run(home, world, frozen="nf4")
            wanted_losses, wanted, whole = _run(home, world)
        assert packed, name
        assert not whole
        assert wanted.keys() == gradients.keys()
        assert all(x.abs().max() > 0 for x in wanted.values())
        others = [key for key, x in gradients.items() if not torch.equal(x, wanted[key])]
        differ[name] = f"{losses} {wanted_losses} {others}" if others or losses != wanted_losses else ""
    return differ


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "homes"),
    [
        pytest.param(1, ONE, id="1"),
        pytest.param(2, TWO, id="2"),
        pytest.param(1, MORE_OF_ONE, marks=pytest.mark.whole, id="more of 1"),
        pytest.param(2, MORE_OF_TWO, marks=pytest.mark.whole, id="more of 2"),
        pytest.param(2, COMPILES, marks=pytest.mark.whole, id="compiled"),
        pytest.param(4, FOUR, marks=pytest.mark.whole, id="4"),
    ],
)
def test_losses_and_gradients_are_those_over_dequantised_weights(ranks: int, homes: Mapping[str, Home]) -> None:
    for differ in run_ranks(_compare, ranks, homes, timeout=500):
        assert differ == dict.fromkeys(homes, "")


def _mutated(rank: int, name: str) -> dict[str, str]:
    with mutated(MUTATIONS[name]):
        try:
            return _compare(rank, {name: Home(Layout(ranks=1))})
        except RuntimeError as error:  # of a product of two types
            return {name: str(error)}


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_other_weights_are_noticed(name: str) -> None:
    (differ,) = run_ranks(_mutated, 1, name)
    assert differ[name]
