"""Slots of a host: those of the world, in plans and run.json; another number is refused."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan import World
from longspan.cli.main import main
from longspan.config.file import load_config, to_toml
from longspan.config.sections import ContextConfig, ParallelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Link, Machine, Plan, plan_dynamic
from longspan.run.checks import check_config
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from longspan.train.plans import PlanChoice, home_of
from longspan.train.plans.resolve import set_node_size
from tests.train.small import small_config, train_rank


def on_hosts(rank: int, config: RunConfig, ranks: int, local: int) -> str:
    """Train on hosts of so many ranks, the last of which may have fewer; what the first rank shows."""
    os.environ["LOCAL_WORLD_SIZE"] = str(min(local, ranks - rank // local * local))
    out = io.StringIO()
    home = check_config(config, ranks)
    stream = out if rank == 0 else None
    with World(home, backend=backend(), timeout=60) as world, ProgressDisplay(config.train.steps, stream) as display:
        train(config, world, display)
    return out.getvalue()


def resolve(rank: int, config: RunConfig, ranks: int, local: int) -> tuple[Any, str]:
    """The node size of a world, and the error of a configuration that has another number."""
    os.environ["LOCAL_WORLD_SIZE"] = str(min(local, ranks - rank // local * local))
    with World(home_of(config.parallel, ranks), backend=backend()) as world:
        size = set_node_size(config, world).context.node_size
        try:
            set_node_size(replace(config, context=ContextConfig(node_size=5)), world)
        except ConfigError as error:
            return size, str(error)
        return size, ""


# ranks, ranks of a host (the last may have fewer), home, slots of a host
HOSTS = [
    (2, 2, ParallelConfig(), 2),
    (4, 2, ParallelConfig(), 2),
    (3, 2, ParallelConfig(), 2),
    (6, 4, ParallelConfig(tp=2), 2),
    (4, 2, ParallelConfig(pp=2), 2),
]


@pytest.mark.parametrize(("ranks", "local", "parallel", "slots"), HOSTS)
def test_every_rank_plans_for_the_worlds_hosts_and_refuses_others(
    ranks: int, local: int, parallel: ParallelConfig, slots: int
) -> None:
    config = replace(RunConfig(), parallel=parallel)
    results = run_ranks(resolve, ranks, config, ranks, local)
    line = (
        f"context.node_size is 5, and this world has {slots} slots a host (LOCAL_WORLD_SIZE / tp); use {slots}, "
        'or "auto", its default'
    )
    assert results == [(slots, line)] * ranks
    fitted = replace(config, context=ContextConfig(planner="dynamic", max_tokens_per_slot=0, node_size=slots))
    plan = PlanChoice.training(fitted).plan((40, 30, 20, 9, 9), home_of(parallel, ranks))
    assert plan.node_size == slots


def groups_across(plan: Plan, node_size: int) -> list[tuple[int, ...]]:
    """The slots of groups that span hosts."""
    groups = [group.slots for batch in plan.micro_batches for group in batch.groups]
    return [slots for slots in groups if len({slot // node_size for slot in slots}) > 1]


def test_a_run_on_two_hosts_keeps_its_groups_inside_them(tmp_path: Path) -> None:
    links = {"inside": Link.of(0.0, 1e12), "across": Link.of(0.0, 1e5)}  # only a host's own are fast
    rates = {"product_flops_per_second": 1e8, "attention_flops_per_second": 1e8, "micro_batch_seconds": 0.0}
    slow = replace(Machine.cpus(), **rates, **links)
    (tmp_path / "machine.json").write_text(json.dumps(slow.to_json()))
    few = {"train__steps": 2, "train__eval_every": 0, "data__eval_documents": 0, "train__tokens_per_step": 64}
    config = small_config(tmp_path, context__planner="dynamic", run__machine=str(tmp_path / "machine.json"), **few)
    shown, *_ = run_ranks(on_hosts, 4, config, 4, 2)
    plans = [Plan.from_json(path.read_text()) for path in sorted((tmp_path / "run" / "plans").glob("step-*.json"))]
    assert len(plans) == 2 and all(plan.node_size == 2 and not groups_across(plan, 2) for plan in plans)
    usual = [plan_dynamic(p.lengths, Layout(4), max_tokens_per_slot=64, cost=p.cost) for p in plans]
    assert all(groups_across(plan, 2) for plan in usual), "hosts of 8 would not have kept them"
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["node_size"], facts["hosts"]) == (2, 2) and "home       4 slots (2 a host)\n" in shown
    assert load_config(tmp_path / "run" / "config.toml").context.node_size == "auto"


def test_a_run_with_another_number_is_refused_before_its_data_is_read(tmp_path: Path) -> None:
    config = small_config(tmp_path, context__node_size=8)
    with pytest.raises(ConfigError, match=r"^context\.node_size is 8, and this world has 2 slots a host") as refused:
        run_ranks(train_rank, 2, config, 2)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_saved_weights_are_evaluated_on_other_hosts_than_the_run_had(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, train__steps=1, train__eval_every=0)
    run_ranks(train_rank, 2, config, 2)
    toml = tmp_path / "run" / "config.toml"
    toml.write_text(to_toml(replace(config, context=replace(config.context, node_size=8))))
    assert main(["eval", str(tmp_path / "run"), "--world", "2", "--device", "cpu"]) == 0
    assert "on 2 ranks: context.node_size 8 -> 2 (hosts of 2 slots)" in capfd.readouterr().err
    words = ["--world", "2", "--device", "cpu", "--context.node_size", "8"]
    assert main(["eval", str(tmp_path / "run"), *words]) == 2
    assert "error: context.node_size is 8, and this world has 2 slots a host" in capfd.readouterr().err
