"""What a run chooses before its first step: scaled positions, slots of a host, and a hybrid's partition by cost."""

import json
import os
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import NemotronHConfig, Qwen3Config

from longspan import World
from longspan.cli.main import main
from longspan.config.defaults import is_hybrid
from longspan.config.file import load_config, to_toml
from longspan.config.sections import ContextConfig, ModelConfig, ParallelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import preset_config
from longspan.plan import Link, Machine, Plan, plan_dynamic
from longspan.resolve.facts import Facts
from longspan.resolve.partition import choose_partition, set_default_partition
from longspan.resolve.planner_config import PlannerConfig, home_of
from longspan.resolve.run_cost import set_node_size
from longspan.run.checks import check_config
from longspan.testing import backend, run_ranks
from longspan.train.run_model.rope_scaling import scale_positions
from tests.run.runs.homes import ALONE, lines_of
from tests.train.small import small_config

KNOWN = Qwen3Config(max_position_embeddings=100)


def test_a_longest_document_that_is_known_changes_nothing() -> None:
    lines = list[str]()
    assert scale_positions(KNOWN, ModelConfig(), 100, "a.txt", lines.append) is KNOWN and not lines
    assert scale_positions(KNOWN, ModelConfig(rope_scaling="yarn"), 100, "a.txt", lines.append) is KNOWN
    assert lines == [
        'rope: the longest document has 100 tokens and the model knows 100: model.rope_scaling = "yarn" changes nothing'
    ]


def test_a_factor_is_chosen_and_said() -> None:
    lines = list[str]()
    scaled = scale_positions(KNOWN, ModelConfig(rope_scaling="yarn"), 130, "a.txt", lines.append)
    assert scaled.rope_parameters["factor"] == 1.5 and scaled.max_position_embeddings == 150
    assert lines == [
        "rope: yarn by 1.5, for documents of up to 150 tokens; the model knows 100, and the longest document has 130"
    ]
    given = scale_positions(KNOWN, ModelConfig(rope_scaling="linear:4"), 130, "a.txt", lines.append)
    assert given.rope_parameters["factor"] == 4.0


def test_longer_documents_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        scale_positions(KNOWN, ModelConfig(), 130, "a.txt", print)
    says = r'130 tokens \(a.txt\), and the model knows 100 positions .* set model.rope_scaling = "yarn:1.5", '
    assert re.search(says + "or cut documents with data.max_document_tokens = 100", str(refused.value))
    says = r'knows 125 positions under model.rope_scaling = "yarn:1.25" .*; set .* = "yarn:1.5", or cut'
    with pytest.raises(ConfigError, match=says):
        scale_positions(KNOWN, ModelConfig(rope_scaling="yarn:1.25"), 130, "a.txt", print)


def test_attention_without_positions_knows_documents_of_any_length() -> None:
    config, lines = NemotronHConfig(max_position_embeddings=100), list[str]()
    assert scale_positions(config, ModelConfig(), 100, "a.txt", lines.append) is config and not lines
    assert scale_positions(config, ModelConfig(), 130, "a.txt", lines.append) is config
    assert lines == [
        "the longest document has 130 tokens, more than max_position_embeddings, 100, which limits nothing: attention "
        "of nemotron_h has no positions"
    ]


NEXT, HOME = preset_config("qwen3-next-tiny", vocab_size=2048), Layout(4)
LENGTHS = [[300] * 12, [900, 400, 20, 7]]


def chosen(model: Any = NEXT, heads: int = 8, **given: Any) -> tuple[RunConfig, str]:
    names = {key: f"evaluation.{key[5:]}" if key.startswith("eval_") else f"context.{key}" for key in given}
    keys = {names[key]: value for key, value in given.items()}
    config = load_config(None, {"model.preset": "qwen3-next-tiny"} | keys)
    assert check_config(config, 4) == HOME
    model = deepcopy(model)
    model.num_attention_heads = heads
    machine = Machine.cpus()
    steps: Any = {"lengths_of_step": LENGTHS.__getitem__, "steps": 2}
    config, reason = choose_partition(config, Facts(home=HOME, machine=machine, model=model, gpu=False, **steps))
    return config, reason


@pytest.mark.parametrize(
    ("planner", "partition", "others"),
    [
        ("fixed", "contiguous", "zigzag under p2p"),
        ("dynamic", "contiguous", "zigzag under p2p"),
        ("padded", "zigzag", ""),
    ],
)
def test_hybrids_exchange_heads_over_contiguous_rows_unless_padded(planner: str, partition: str, others: str) -> None:
    """Contiguous slots have unlike numbers of real rows where documents are padded, and the head skips padding."""
    config, reason = chosen(planner=planner, context_parallel_size=4)
    assert (config.context.partition, config.context.cp_comm_type) == (partition, "a2a")
    assert config.evaluation.cp_comm_type == "a2a" or partition == "zigzag"
    assert reason.startswith(f"{partition} under a2a, by cost; ") and others in reason


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
    config, _ = chosen(**given)
    assert config.context.cp_comm_type == expected[1] and config.context.partition in ("zigzag", "contiguous")
    assert expected[0] in (None, config.context.partition)


def test_evaluations_follow_unless_they_say_otherwise() -> None:
    config, _ = chosen(eval_context_parallel_size=4, eval_cp_comm_type="all_gather")
    assert config.evaluation.cp_comm_type == "all_gather"
    wide, _ = chosen(heads=2, context_parallel_size=2, eval_context_parallel_size=4)  # 2 heads, 4 slots
    assert (wide.context.cp_comm_type, wide.context.partition) == ("a2a", "contiguous")
    assert wide.evaluation.cp_comm_type == "auto"
    of_set = load_config(None, {"model.preset": "bamba-tiny"})
    assert set_default_partition(of_set).context.partition == "contiguous"


def test_a_cost_without_states_leaves_contiguous_rows() -> None:
    config, reason = chosen(preset_config("qwen3-tiny", vocab_size=2048))
    assert (config.context.partition, config.context.cp_comm_type, reason) == ("contiguous", "auto", "")


def test_plans_of_a_choice_are_priced_as_they_run() -> None:
    config = load_config(None, {"model.preset": "qwen3-next-tiny", "context.partition": "contiguous"})
    cost = Machine.cpus().cost(NEXT)
    plan = PlannerConfig.training(config, cost=cost, heads=8).plan((900, 400), HOME)
    assert plan.cost.states and plan.cost.states.partition == "contiguous"
    evaluation = PlannerConfig.evaluation(config, cost=cost, heads=8).plan((900, 400), HOME)
    assert evaluation.cost.states and evaluation.cost.states.partition == "contiguous"


def test_other_models_stay_as_they_are() -> None:
    for preset in ("qwen3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny"):
        assert not is_hybrid(ModelConfig(preset=preset))
        for given in ({}, {"context.partition": "auto"}):
            config = load_config(None, {"model.preset": preset} | given)
            assert (config.context.partition, config.context.cp_comm_type) == ("zigzag", "p2p")
            assert config.evaluation.cp_comm_type == "p2p"
    assert not is_hybrid(ModelConfig(path="no/such/folder")) and is_hybrid(ModelConfig(preset="bamba-tiny"))
    assert 'partition = "auto"' in to_toml(load_config(None, {"model.preset": "bamba-tiny"}))


def on_hosts(rank: int, config: RunConfig, ranks: int, local: int) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    return lines_of(rank, config, ranks)


def resolve(rank: int, config: RunConfig, ranks: int, local: int) -> tuple[Any, str]:
    os.environ["LOCAL_WORLD_SIZE"] = str(min(local, ranks - rank // local * local))
    with World(home_of(config.parallel, ranks), backend=backend()) as world:
        size = set_node_size(config, world.node_size).context.node_size
        try:
            set_node_size(replace(config, context=ContextConfig(node_size=5)), world.node_size)
        except ConfigError as error:
            return size, str(error)
        return size, ""


# ranks, ranks of a host (the last may have fewer), home, slots of a host
HOSTS = [(6, 4, ParallelConfig(tp=2), 2), (4, 2, ParallelConfig(pp=2), 2)]


@pytest.mark.parametrize(("ranks", "local", "parallel", "slots"), HOSTS)
def test_every_rank_plans_for_its_hosts(ranks: int, local: int, parallel: ParallelConfig, slots: int) -> None:
    config = replace(RunConfig(), parallel=parallel)
    results = run_ranks(resolve, ranks, config, ranks, local)
    line = (
        f"context.node_size is 5, and this world has {slots} slots a host (LOCAL_WORLD_SIZE / tp); use {slots}, "
        'or "auto", its default'
    )
    assert results == [(slots, line)] * ranks
    fitted = replace(config, context=ContextConfig(planner="dynamic", max_tokens_per_slot=0, node_size=slots))
    plan = PlannerConfig.training(fitted).plan((40, 30, 20, 9, 9), home_of(parallel, ranks))
    assert plan.node_size == slots


def groups_across(plan: Plan, node_size: int) -> list[tuple[int, ...]]:
    groups = [group.slots for batch in plan.micro_batches for group in batch.groups]
    return [slots for slots in groups if len({slot // node_size for slot in slots}) > 1]


def test_a_run_on_two_hosts_keeps_its_groups_inside_them(tmp_path: Path) -> None:
    links = {"inside": Link.of(0.0, 1e12), "across": Link.of(0.0, 1e5)}  # only a host's own are fast
    rates = {"product_flops_per_second": 1e8, "attention_flops_per_second": 1e8, "micro_batch_seconds": 0.0}
    slow = replace(Machine.cpus(), **rates, **links)
    (tmp_path / "machine.json").write_text(json.dumps(slow.to_json()))
    few = {"train__steps": 1, "evaluation__every": 0, "evaluation__documents": 0, "train__tokens_per_step": 64}
    config = small_config(tmp_path, context__planner="dynamic", run__machine=str(tmp_path / "machine.json"), **few)
    shown, *_ = run_ranks(on_hosts, 4, config, 4, 2)
    plan = Plan.from_json((tmp_path / "run" / "plans" / "step-000001.json").read_text())
    assert plan.node_size == 2 and not groups_across(plan, 2)
    usual = plan_dynamic(plan.lengths, Layout(4), max_tokens_per_slot=64, cost=plan.cost)
    assert groups_across(usual, 2), "hosts of 8 would not have kept them"
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["node_size"], facts["hosts"]) == (2, 2) and "layout     4 slots (2 a host) for" in shown
    assert load_config(tmp_path / "run" / "config.toml").context.node_size == "auto"


def test_saved_weights_are_evaluated_on_other_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, train__steps=1, evaluation__every=0, **ALONE)
    lines_of(0, config, 1)
    toml = tmp_path / "run" / "config.toml"
    toml.write_text(to_toml(replace(config, context=replace(config.context, node_size=8))))
    assert main(["eval", str(tmp_path / "run"), "--world", "2", "--device", "cpu"]) == 0
    assert "on 2 ranks: context.node_size 8 -> auto" in capfd.readouterr().err
    words = ["--world", "2", "--device", "cpu", "--context.node_size", "8"]
    assert main(["eval", str(tmp_path / "run"), *words]) == 2
    assert "error: context.node_size is 8, and this world has 2 slots a host" in capfd.readouterr().err
