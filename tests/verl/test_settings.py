"""What the engine's keys leave open, without verl: its configuration class is a small one of the same fields."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.plan.cost.machine import CostSettings, Machine
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.resolve.ways import fastest_plan

LENGTHS = (30_000, 2_000, 900, 4_000, 700, 12_000)
ROWS = 16_384
FORWARD = (False, True)


@dataclass
class _EngineConfig:
    strategy: str = ""
    router_replay: Any = field(default_factory=lambda: SimpleNamespace(mode="disabled"))

    def __post_init__(self) -> None:
        pass


class _Registry:
    @staticmethod
    def register(**_: Any) -> Any:
        return lambda made: made


@pytest.fixture
def engine_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("verl", "verl.workers", "verl.workers.config", "verl.workers.engine", "verl.workers.engine.base"):
        module: Any = ModuleType(name)
        module.EngineConfig, module.BaseEngine, module.EngineRegistry = _EngineConfig, object, _Registry
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("longspan.verl")]:
        monkeypatch.delitem(sys.modules, name)
    yield import_module("longspan.verl.settings").LongspanEngineConfig
    for name in [name for name in sys.modules if name.startswith("longspan.verl")]:
        del sys.modules[name]


def options(home: Layout, *, forward: bool) -> dict[str, Any]:
    settings = CostSettings(shards=home.slots, weight_ranks=home.tp, forward=forward)
    return {"max_tokens_per_slot": ROWS, "cost": Machine.known("H200").cost(QWEN3_8B, settings)}


def planned(config: Any, home: Layout, *, forward: bool, lengths: Sequence[int] = LENGTHS) -> Plan:
    return fastest_plan(config.planner_choice(**options(home, forward=forward)), lengths, home)


@pytest.mark.parametrize("forward", FORWARD)
@pytest.mark.parametrize("home", [Layout(4), Layout(8, tp=2)])
def test_keys_that_are_given_make_the_plans_of_their_planner(engine_config: Any, home: Layout, forward: bool) -> None:
    of_slot = options(home, forward=forward)
    of_slot["cost"] = of_slot["cost"].shared_by(home.tp)
    dynamic = plan_dynamic(LENGTHS, home, max_cp=2, **of_slot)
    fixed = plan_fixed(LENGTHS, home, cp=2, cp_comm_type="p2p", **of_slot)
    assert planned(engine_config(plan={"max_cp": 2}), home, forward=forward) == dynamic
    for planner in ("fixed", "auto"):
        config = engine_config(planner=planner, context_parallel_size=2, plan={"cp_comm_type": "p2p"})
        assert planned(config, home, forward=forward) == fixed


def test_what_is_open_is_the_fastest_for_the_mini_batch(engine_config: Any) -> None:
    home = Layout(4)
    of_degrees = [
        planned(engine_config(planner="fixed", context_parallel_size=cp), home, forward=False) for cp in (2, 4)
    ]
    fixed = planned(engine_config(planner="fixed"), home, forward=False)
    assert fixed == min(of_degrees, key=lambda plan: plan.predicted_seconds)
    dynamic = planned(engine_config(), home, forward=False)
    gains = 1.01 * dynamic.predicted_seconds < fixed.predicted_seconds
    assert planned(engine_config(planner="auto"), home, forward=False) == (dynamic if gains else fixed)


def test_samples_of_one_prompt_are_planned_together(engine_config: Any) -> None:
    """4 samples continue 12,000 rows of a prompt; dynamic plans and what is fastest keep them in one group."""
    lengths, parents = (*LENGTHS[:2], 2_000, 2_000, 2_000, 12_000), (-1, 5, 5, 5, 5, -1)
    for planner in ("dynamic", "auto"):
        choice = engine_config(planner=planner).planner_choice(**options(Layout(4), forward=False))
        plan = fastest_plan(choice, lengths, Layout(4), parents=parents)
        assert plan.parents == parents
        apart = fastest_plan(choice, [30_000, *(14_000,) * 4], Layout(4))
        assert plan.predicted_seconds < 0.8 * apart.predicted_seconds


def test_dynamic_plans_and_one_degree_are_refused(engine_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"context_parallel_size is 2, .*engine\.planner=fixed"):
        engine_config(context_parallel_size=2)
    with pytest.raises(ConfigError, match="use auto or dynamic or fixed"):
        engine_config(planner="fastest")
