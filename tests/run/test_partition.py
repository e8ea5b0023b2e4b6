"""A hybrid's partition and communication type in a run: chosen by cost where the user does not say, and kept if so."""

from typing import Any

import pytest

from longspan.config.defaults import is_hybrid
from longspan.config.file import load_config, to_toml
from longspan.config.sections import ContextConfig, ModelConfig
from longspan.layout import Layout
from longspan.model import preset_config
from longspan.plan import Cost, Machine
from longspan.run.checks import check_config
from longspan.train.plans import PlanChoice
from longspan.train.plans.resolve import choose_partition, set_usual_partition

COST, HOME = Machine.cpus().cost(preset_config("qwen3-next-tiny", vocab_size=2048)), Layout(4)
LENGTHS = [[300] * 12, [900, 400, 20, 7]]


def chosen(cost: Cost = COST, heads: int = 8, **given: Any) -> tuple[ContextConfig, str]:
    keys = {f"context.{key}": value for key, value in given.items()}
    config = load_config(None, {"model.preset": "qwen3-next-tiny"} | keys)
    assert check_config(config, 4) == HOME
    config, reason = choose_partition(config, LENGTHS, HOME, cost=cost, heads=heads)
    return config.context, reason


@pytest.mark.parametrize("planner", ["fixed", "dynamic"])
def test_a_hybrid_has_contiguous_rows_and_exchanges_heads(planner: str) -> None:
    context, reason = chosen(planner=planner, context_parallel_size=4)
    assert (context.partition, context.cp_comm_type) == ("contiguous", "a2a")
    assert context.evaluation.cp_comm_type == "a2a"
    assert reason.startswith("contiguous under a2a, by cost; ") and "zigzag under p2p" in reason


def test_padded_documents_of_a_hybrid_are_in_zigzag() -> None:
    """Contiguous slots have unlike numbers of real rows, and the head skips padding."""
    context, reason = chosen(planner="padded", context_parallel_size=4)
    assert (context.partition, context.cp_comm_type) == ("zigzag", "a2a")
    assert reason.startswith("zigzag under a2a, by cost; ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"partition": "zigzag"}, ("zigzag", "p2p")),
        ({"partition": "contiguous"}, ("contiguous", "auto")),
        ({"partition": "contiguous", "cp_comm_type": "p2p"}, ("contiguous", "p2p")),
        ({"cp_comm_type": ("p2p", "a2a", "p2p", "p2p")}, (None, ("p2p", "a2a", "p2p", "p2p"))),
        ({"cp_comm_type": "p2p"}, (None, "p2p")),
        ({"partition": "auto", "cp_comm_type": "auto"}, ("contiguous", "a2a")),
    ],
)
def test_what_the_user_says_is_kept(given: dict[str, Any], expected: tuple[Any, Any]) -> None:
    context, _ = chosen(**given)
    assert context.cp_comm_type == expected[1] and context.partition in ("zigzag", "contiguous")
    assert expected[0] in (None, context.partition)


def test_evaluations_follow_unless_they_say_otherwise() -> None:
    context, _ = chosen(eval_context_parallel_size=4, eval_cp_comm_type="all_gather")
    assert context.evaluation.cp_comm_type == "all_gather"
    wide, _ = chosen(heads=2, context_parallel_size=2, eval_context_parallel_size=4)  # 2 heads, 4 slots
    assert (wide.cp_comm_type, wide.partition, wide.evaluation.cp_comm_type) == ("a2a", "contiguous", "auto")
    of_set = load_config(None, {"model.preset": "bamba-tiny"})
    assert set_usual_partition(of_set).context.partition == "contiguous"


def test_a_cost_without_states_leaves_contiguous_rows() -> None:
    context, reason = chosen(cost=Cost())
    assert (context.partition, context.cp_comm_type, reason) == ("contiguous", "auto", "")


def test_plans_of_a_choice_are_priced_as_they_run() -> None:
    config = load_config(None, {"model.preset": "qwen3-next-tiny", "context.partition": "contiguous"})
    plan = PlanChoice.training(config, cost=COST, heads=8).plan((900, 400), HOME)
    assert plan.cost.states and plan.cost.states.partition == "contiguous"
    evaluation = PlanChoice.evaluation(config, cost=COST, heads=8).plan((900, 400), HOME)
    assert evaluation.cost.states and evaluation.cost.states.partition == "contiguous"


def test_other_models_stay_as_they_are() -> None:
    for preset in ("qwen3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny"):
        assert not is_hybrid(ModelConfig(preset=preset))
        for given in ({}, {"context.partition": "auto"}):
            context = load_config(None, {"model.preset": preset} | given).context
            assert (context.partition, context.cp_comm_type) == ("zigzag", "p2p")
            assert context.evaluation.cp_comm_type == "p2p"
    assert not is_hybrid(ModelConfig(path="no/such/folder")) and is_hybrid(ModelConfig(preset="bamba-tiny"))
    assert 'partition = "auto"' in to_toml(load_config(None, {"model.preset": "bamba-tiny"}))
