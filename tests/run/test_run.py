"""Whole runs, small: what they leave, that they resume bit for bit, at another size, and leave when told to."""

import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from longspan.checkpoint.files import step_of
from longspan.cli.main import main
from longspan.config.file import load_config, to_toml
from longspan.config.sections import RunConfig, SourceConfig
from longspan.data import run_order as order
from longspan.data.stream import ORDER, ORDER_OF_SOURCES
from longspan.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LongspanError,
    ModelError,
    NonFiniteError,
    RunFolderError,
    plural,
)
from longspan.evaluation.evaluate_saved import _open_held_out_documents
from longspan.evaluation.request import SavedWeights, Subject
from longspan.model.weights.drawn_weights import RandomWeights
from longspan.plan import Machine, Plan, read_plans
from longspan.plan.plan import group_counts
from longspan.plan.shape.model_shape import ModelShape
from longspan.run import records as run_records, set_up
from longspan.run.facts import RunFacts, TrainResult
from longspan.run.folder import _lock_file
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.faults.live_run import children_of, last_step, saved_steps
from tests.run.runs.homes import ALONE, lines_of, refusals, train_rows
from tests.train.small import small_config, train_rank, without_times

LOGGERS = "tests.run.loggers.fake_loggers"
Straight = tuple[RunConfig, TrainResult]


def run(config: RunConfig, ranks: int) -> TrainResult:
    return run_ranks(train_rank, ranks, config, ranks, timeout=90)[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    keys: dict[str, Any] = {"train__steps": 4, "checkpoint__every": 2, "run__loggers": [f"{LOGGERS}.FileLogger"]}
    keys["checkpoint__async_mode"] = "off"  # so that the row after a save has its figures, on slow disks too
    config = small_config(tmp_path_factory.mktemp("straight"), **keys)
    return config, run(config, 2)


Ended = tuple[TrainResult, dict[str, Any], list[dict[str, object]]]  # a run's result, its summary and rows at its end


def run_each(rank: int, configs: Sequence[RunConfig]) -> list[Ended]:
    ended = list[Ended]()
    for config in configs:
        result = train_rank(rank, config, 2)
        if rank == 0:
            ended.append((result, json.loads((Path(config.run.dir) / "summary.json").read_text()), rows_of(config)))
    return ended


def test_a_hierarchical_run_says_which_ranks_form_a_level(straight: Straight, tmp_path: Path) -> None:
    """Its losses are those of the run at degree 2."""
    keys: dict[str, Any] = {"context__context_parallel_size": 4, "evaluation__context_parallel_size": 4}
    keys |= {"context__cp_comm_type": "a2a+p2p", "context__hierarchical_context_parallel_sizes": (2, 2)}
    config = small_config(tmp_path, train__steps=2, evaluation__every=0, **keys)
    run(config, 4)
    losses = [[row["loss"] for row in train_rows(c)] for c in (config, straight[0])]
    assert losses[0] == pytest.approx(losses[1][:2], rel=1e-5)
    groups = [json.loads((Path(c.run.dir) / "run.json").read_text())["attention_groups"] for c in (straight[0], config)]
    assert groups == [["p2p of 2 [0, 1]"], ["a2a+p2p of 4 as a2a [0, 1] [2, 3], ring [0, 2] [1, 3]"]]


def rows_of(config: RunConfig) -> list[dict[str, object]]:
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


def copy_cut_at(config: RunConfig, folder: Path, step: int) -> RunConfig:
    """The run as it would stand if it had been killed soon after its checkpoint of `step`."""
    copied = folder / "run"
    shutil.copytree(config.run.dir, copied)
    for path in (copied / "checkpoints").iterdir():
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    (copied / "summary.json").unlink()
    return replace(config, run=replace(config.run, dir=str(copied)))


def test_what_a_run_leaves(straight: Straight) -> None:
    config, outcome = straight
    folder = Path(config.run.dir)
    assert load_config(folder / "config.toml") == config
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    wanted = "step loss tokens targets grad_norm lr seconds tokens_per_second memory_bytes micro_batches efficiency"
    saved = ["save_shown_seconds", "save_seconds", "save_bytes"]  # in the first row after a checkpoint is published
    assert all([name for name in row if name not in saved] == f"{wanted} groups tflops".split() for row in steps)
    of_saves = [row for row in rows if "save_bytes" in row]
    assert of_saves and all(row["save_bytes"] > 10_000 for row in of_saves)
    assert all(row["save_shown_seconds"] > 0 and row["save_seconds"] > 0 for row in of_saves)
    assert [(row["step"], row["cp"]) for row in rows if "eval_loss" in row] == [(2, 2), (4, 1), (4, 2)]
    for name in ("step-000001", "step-000004", "evaluation-cp1", "evaluation-cp2"):
        assert Plan.from_json((folder / "plans" / f"{name}.json").read_text()).slots == 2
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-000002", "step-000004"}
    assert json.loads((folder / "summary.json").read_text()) == outcome.summary()
    assert steps[-1]["loss"] < steps[0]["loss"] < 1.2 * math.log(300)


def test_what_is_running_is_kept_and_priced_on_no_other_machine(straight: Straight) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(straight[0].run.dir)
    facts = RunFacts.from_json(json.loads((folder / "run.json").read_text()))
    assert facts is not None and (facts.ranks, facts.device, facts.steps, facts.done) == (2, "CPU", 4, 0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", local_files_only=True)
    assert model.config.vocab_size == 300 and (folder / "model" / "tokenizer.json").is_file()
    assert facts.parameters == sum(x.numel() for x in load_file(folder / "model" / "model.safetensors").values())
    assert facts.parameters / 2 <= facts.parameters_of_rank <= facts.parameters / 2 + 1000
    assert dict(facts.lines)["attention"].endswith("; kernel cpu_flash") and facts.priced_for == ""
    rows = read_metrics(folder / "metrics.jsonl")
    assert not any({"mfu", "predicted_seconds", "bound_share"} & row.keys() for row in rows)


def test_every_plan_is_kept_and_loggers_get_every_row_once_from_the_first_rank(straight: Straight) -> None:
    folder = Path(straight[0].run.dir)
    plans, rows = dict(read_plans(folder / "plans.jsonl")), read_metrics(folder / "metrics.jsonl")
    steps = {row["step"]: row["groups"] for row in rows if "groups" in row}
    assert steps == {step: group_counts(plan) for step, plan in plans.items()} and list(steps) == [1, 2, 3, 4]
    first = Plan.from_json((folder / "plans" / "step-000001.json").read_text())
    assert plans[1] == first and plans[1].cost == first.cost
    sessions = [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]
    assert sessions == [{"done": 0, "rows": rows, "summary": False, "closed": True}]


def test_the_last_evaluations_agree_over_degrees(straight: Straight) -> None:
    _, outcome = straight
    one, two = outcome.final
    assert (one.cp, two.cp) == (1, 2) and (one.tokens, one.targets) == (two.tokens, two.targets)
    assert abs(one.loss - two.loss) <= 1e-6 * one.loss
    assert [line.split()[0] for line in outcome.text().splitlines()[-3:]] == ["cp", "1", "2"]


def train_without_drawing(rank: int, config: RunConfig) -> TrainResult:
    """Weights are NaN until the checkpoint is loaded, so one that it lacked would end the run."""
    refuse = mock.Mock(side_effect=AssertionError("weights were read or drawn, and a checkpoint has them"))
    with mock.patch.object(RandomWeights, "read", refuse), mock.patch.object(set_up, "load_run_model", refuse):
        return train_rank(rank, config, 2)


def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(straight: Straight, tmp_path: Path) -> None:
    config, _ = straight
    again = copy_cut_at(config, tmp_path, 2)
    (Path(again.run.dir) / "summary.json").write_text('{"stopped": "SIGTERM"}')  # as the run before left it
    run_ranks(train_without_drawing, 2, again, timeout=90)
    assert rows_of(again) == rows_of(config)
    plans, before = (list(read_plans(Path(c.run.dir) / "plans.jsonl")) for c in (again, config))
    assert plans == before and [step for step, _ in plans] == [1, 2, 3, 4]
    sessions = [json.loads(line) for line in (Path(again.run.dir) / "logged.jsonl").read_text().splitlines()]
    assert [row["step"] for row in sessions[1]["rows"]] == [3, 4, 4, 4] and sessions[1]["done"] == 2
    assert not sessions[1]["summary"], "a run that goes on shows the end of the one before"
    old, new = (load_file(Path(c.run.dir) / "model" / "model.safetensors") for c in (config, again))
    assert old.keys() == new.keys() and all(old[name].equal(new[name]) for name in old)


def test_a_finished_run_is_shown_again_and_not_trained(straight: Straight, tmp_path: Path) -> None:
    config, outcome = straight
    again = copy_cut_at(config, tmp_path, 4)
    folder = Path(again.run.dir)
    lost = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] < 4 or "loss" in row]  # killed then
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lost))
    wide = replace(again.evaluation, planner="dynamic", max_tokens_per_slot=32)  # no degree of the comparison's
    as_trained = (folder / "config.toml").read_text()
    for result, summary, rows in run_ranks(run_each, 2, (again, replace(again, evaluation=wide)))[0]:
        assert result.summary() == outcome.summary() | {"eval_at_degrees": summary["eval_at_degrees"]}
        assert rows == rows_of(config)
    assert (folder / "config.toml").read_text() == as_trained


def test_other_plans_of_the_same_tokens_have_the_same_losses(straight: Straight, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"train__steps": 2, "evaluation__every": 0}  # while the rate rises
    padded = keys | {"context__planner": "padded", "context__cp_comm_type": "all_gather", "checkpoint__minutes": 1e-6}
    free = keys | {"context__planner": "dynamic", "context__mode": "free", "context__max_tokens_per_slot": 32}
    free |= {"context__partition": "contiguous", "context__cp_comm_type": ["a2a", "all_gather"]}
    free |= {"train__activation_checkpointing": "selective+host", "parallel__reshard_after_forward": False}
    configs = [
        small_config(tmp_path / "padded", **padded, evaluation__planner="padded"),
        small_config(tmp_path / "free", **free, evaluation__context_parallel_size=1),
    ]
    run_ranks(run_each, 2, configs)
    for config in configs:
        losses, others = ([row["loss"] for row in rows_of(c) if "loss" in row] for c in (straight[0], config))
        assert losses[:2] == pytest.approx(others, rel=1e-5)
        evaluated = [(row["step"], row["cp"]) for row in rows_of(config) if "eval_loss" in row]
        assert evaluated == [(2, 1), (2, 2)], "each degree once, as asked for where that is it"
        folder = Path(config.run.dir)
        saved = {step_of(path) for path in (folder / "checkpoints").iterdir()}
        assert saved == ({1, 2} if config.checkpoint.minutes < 1 else {2})
        plans = [Plan.from_json(path.read_bytes()) for path in sorted((folder / "plans").glob("step-*.json"))]
        wide = [group for plan in plans for group in plan.groups if group.degree > 1]
        assert wide and {group.partition for group in wide} == {config.context.partition}
        closing = plans[0].cost.closing_seconds
        assert bool(closing) == (config.context.mode == "free")
        if closing:  # the other slot's half of 2 bytes a weight, and of 4 a gradient, and FSDP2's copies
            weights = ModelShape.of(folder / "model").stored_weights
            cpus = Machine.cpus()
            wire = weights * 6 / 2 / cpus.sharding_bytes_per_second
            seconds = cpus.micro_batch_seconds + 2 * weights * cpus.weight_copy_seconds + wire
            assert closing == pytest.approx(seconds, rel=1e-12)


def test_dropout_of_a_configuration_is_that_of_training(straight: Straight, tmp_path: Path) -> None:
    values = json.loads((Path(straight[0].run.dir) / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"attention_dropout": 0.3}))
    keys = {"model__config": str(tmp_path), "train__steps": 1, "evaluation__every": 0, **ALONE}
    (row,) = train_rows(small_config(tmp_path, **keys), 1)
    assert abs(row["loss"] - rows_of(straight[0])[0]["loss"]) > 1e-4  # type: ignore[operator]


def test_what_does_not_fit_is_the_error_of_every_rank(straight: Straight, tmp_path: Path) -> None:
    folder = Path(straight[0].run.dir)
    fresh = partial(small_config, tmp_path)
    resumed = partial(small_config, folder.parent, checkpoint__every=2)
    ended = copy_cut_at(straight[0], tmp_path / "ended", 4)
    ended = replace(ended, optimizer=replace(ended.optimizer, lr=0.5, weight_decay=0.5))
    (Path(ended.run.dir) / "config.toml").write_text(to_toml(ended))  # what counts is what it was trained with
    model = str(folder / "model")
    bare = Path(shutil.copytree(model, tmp_path / "model"))
    (bare / "tokenizer.json").unlink()
    vocabulary = fresh(model__config=str(bare), data__vocab_size=400)
    on_nodes = fresh(context__node_size=8, run__dir=str(tmp_path / "none"))
    refusing = fresh(run__loggers=[f"{LOGGERS}.FileLogger", f"{LOGGERS}.Refusing"])
    linked = fresh(run__dir=str(tmp_path / "linked"))
    unfinished = tmp_path / "of somebody" / "step-000009.partial"
    unfinished.mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "checkpoints").symlink_to(unfinished.parent)
    cases: list[tuple[RunConfig, type[LongspanError], str]] = [
        (
            resumed(checkpoint__resume="never"),
            CheckpointError,
            r"checkpoint.resume is 'never' and .*step-000004 is there",
        ),
        (resumed(train__seed=1), ConfigError, r"train.seed was 0 when .*000004 .* and is 1 now; set it back"),
        (resumed(data__max_document_tokens=32), ConfigError, r"data.max_document_tokens was 64 .* and is 32 now"),
        (resumed(train__steps=3), ConfigError, r"is at step 4, beyond train.steps 3"),
        (
            ended,
            ConfigError,
            (
                r"has come to its end at step 4 .*: optimizer.lr was 0.006 and is 0.5 now; "
                r"optimizer.weight_decay was .*raise"
            ),
        ),
        (fresh(checkpoint__resume="must"), CheckpointError, r"checkpoint.resume is 'must' and there is no checkpoint"),
        (fresh(model__path=str(tmp_path / "nowhere")), ModelError, r"no model folder .*nowhere"),
        (fresh(model__path=model, data__path=str(tmp_path / "none")), DataError, r"does not exist"),
        (vocabulary, DataError, r"has ids up to 399, the embedding of .*model has 300 rows"),
        (
            fresh(context__cp_comm_type=["p2p"] * 3),
            ConfigError,
            r"context.cp_comm_type lists 3 types, the model has 2 layers",
        ),
        (on_nodes, ConfigError, r"^context\.node_size is 8, and this world has 2 slots a host[^\n]*$"),
        (refusing, ConfigError, r"logger tests\.run\.loggers\.fake_loggers\.Refusing .* no server for run"),
        (linked, CheckpointError, r"linked/checkpoints is a link, .* checkpoint.dir to .*/of somebody, or move"),
    ]
    for error, (_, kind, message) in zip(refusals([config for config, *_ in cases]), cases, strict=True):
        assert type(error) is kind and re.search(message, str(error)), (message, error)
    assert json.loads((tmp_path / "run" / "logged.jsonl").read_text())["closed"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "none").exists()
    assert unfinished.is_dir(), "nothing is removed through a link"


def test_keys_of_one_name_that_changed_after_a_finished_run_are_all_named() -> None:
    keys = (
        {"encoder.lr": lr / 10, "optimizer.lr": lr, "train.steps": 6, "evaluation.patience": int(lr)}
        for lr in (1.0, 2.0)
    )
    before, now = (load_config(None, given) for given in keys)
    state = {"step": 6, "begin": 7, "config": json.loads(json.dumps(before.tables()))}
    data: Any = SimpleNamespace(order=SimpleNamespace(begin_of_step={6: 7}.get))
    changes = "encoder.lr was 0.1 and is 0.2 now; evaluation.patience was 1 and is 2 now; optimizer.lr was 1.0 and is 2"
    with pytest.raises(ConfigError, match=changes):
        set_up.check_steps_left(now, data, Path("step-000006"), state, print)


def _train_on_a_full_disk(rank: int, config: RunConfig) -> TrainResult:
    init = run_records.PlanLog.__init__

    def open_on_it(plans: run_records.PlanLog, path: Path | None, **keys: Any) -> None:
        init(plans, path, **keys)
        if path is not None:
            path.unlink()
            path.symlink_to("/dev/full")
            plans._file = path.open("ab")

    with mock.patch.object(run_records.PlanLog, "__init__", open_on_it):
        return train_rank(rank, config, 2)


def test_one_run_at_a_time_and_a_disk_that_is_full(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=1, evaluation__every=0, evaluation__documents=0)
    folder = Path(config.run.dir)
    lock = _lock_file(folder, print)
    with pytest.raises(
        RunFolderError, match=rf"another run is at work in .*: process {os.getpid()} on {gethostname()};"
    ):
        run(config, 2)
    assert [path.name for path in folder.iterdir()] == ["run.lock"]
    lock.close()
    with pytest.raises(
        RunFolderError, match=r"^\S*plans.jsonl: No space left on device \([\d,]+ bytes are free\); make"
    ) as refused:
        run_ranks(_train_on_a_full_disk, 2, config)
    assert f"The weights after 1 step are saved in {folder / 'checkpoints'}" in refused.value.__notes__
    state = json.loads((folder / "checkpoints" / "step-000001" / "state.json").read_text())
    assert (state["step"], state["order"]) == (1, ORDER)
    with pytest.raises(
        CheckpointError, match=rf"saved by a run with order 2 of documents, .* has order {ORDER}: resume"
    ):
        set_up._check_same_run(config, state | {"order": 2}, Path("step-000001"))
    mixed = replace(config, data=replace(config.data, sources=(SourceConfig("a"), SourceConfig("b"))))
    with pytest.raises(CheckpointError, match=rf"run with order {ORDER} of .* has order {ORDER_OF_SOURCES}: resume"):
        set_up._check_same_run(mixed, state, Path("step-000001"))
    weights = SavedWeights(folder, folder)
    checked: Any = SimpleNamespace(subject=Subject(weights, mixed), checkpoint=folder / "checkpoints" / "step-000001")
    with pytest.raises(DataError, match=rf"an earlier version chose the documents .* \(order {ORDER}\)"):
        _open_held_out_documents(checked)


def test_a_run_that_was_killed_holds_no_folder(tmp_path: Path) -> None:
    if not (child := os.fork()):
        opened = [_lock_file(tmp_path, print)]  # not closed, of which Python would warn, with imports
        os.kill(os.getpid(), signal.SIGKILL)
        opened.clear()
    os.waitpid(child, 0)
    assert (tmp_path / "run.lock").read_text() == f"process {child} on {gethostname()}"
    _lock_file(tmp_path, print).close()


def test_a_refused_run_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n' * 9 + '{"prompt": "no completion"}\n')
    config, folder = small_config(tmp_path, data__path=str(tmp_path / "rows.jsonl"), **ALONE), tmp_path / "run"
    for before in ([], ["notes.txt"]):
        with pytest.raises(DataError, match=r"line 10"):
            lines_of(0, config, 1)
        assert [path.name for path in folder.glob("notes.txt")] == before and folder.exists() == bool(before)
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").touch()


def test_a_corpus_that_changed_is_refused(straight: Straight) -> None:
    config, changed = straight[0], Path(straight[0].data.path) / "file03.py"
    context, evaluation = (replace(section, context_parallel_size=1) for section in (config.context, config.evaluation))
    before = changed.read_text()
    changed.write_text("other text\n")
    try:
        with pytest.raises(
            DataError, match=r"changed since the run began: file03.py had \d+ bytes and has 11; restore"
        ):
            lines_of(0, replace(config, context=context, evaluation=evaluation), 1)
    finally:
        changed.write_text(before)


def test_a_step_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    steep = {"optimizer__lr": 1e30, "optimizer__warmup_steps": 0, "optimizer__max_grad_norm": 0.0}
    steep |= {"optimizer__class": "sgd"}
    configs = {every: small_config(tmp_path / str(every), checkpoint__every=every, **steep) for every in (1, 0)}
    for (every, config), error in zip(configs.items(), refusals([*configs.values()]), strict=True):
        assert type(error) is NonFiniteError
        assert re.search(r"step \d: .* the largest weight is \d.*e\+.* lower the learning rate", str(error))
        rows = train_rows(config)
        assert rows and all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
        folder = Path(config.run.dir) / "checkpoints"
        saved = {step_of(path) for path in folder.iterdir()}
        assert saved == ({row["step"] for row in rows} if every else {rows[-1]["step"]})
        steps = plural(rows[-1]["step"], "step")
        notes = [] if every else [f"The weights after {steps} are saved in {folder}"]
        assert getattr(error, "__notes__", []) == notes


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigusr1_to_all_processes_saves_and_sigterm_leaves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = {"checkpoint__save_signals": ["SIGUSR1"], "checkpoint__preempted_exit_code": 75, "evaluation__every": 0}
    keys["checkpoint__save_total_limit"] = 0  # one more would be seen
    config = small_config(tmp_path, train__steps=10_000, **keys)
    (tmp_path / "config.toml").write_text(to_toml(config))

    def press() -> None:
        wait_for(lambda: len(read_metrics(tmp_path / "run" / "metrics.jsonl")) >= 3)
        server = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
        for pid in (os.getpid(), server, *children_of(server)):
            os.kill(pid, signal.SIGUSR1)  # as Slurm does: neither stops the run, or kills its ranks
        wait_for(lambda: saved_steps(tmp_path))
        wait_for(lambda: last_step(tmp_path) > min(saved_steps(tmp_path), default=0) + 1)
        for _ in range(2):  # as `timeout` and other supervisors do
            os.kill(os.getpid(), signal.SIGTERM)

    pressing = threading.Thread(target=press)
    pressing.start()
    assert main(["train", str(tmp_path / "config.toml"), "--world", "2", "--device", "cpu"]) == 75
    pressing.join()
    out, err = capfd.readouterr()
    (saved, last), end = saved_steps(tmp_path), last_step(tmp_path)  # one checkpoint a signal
    assert last == end > saved + 1 and not err
    assert f"SIGUSR1 was received: step {saved} is saved, and the run goes on" in out
    assert f"stopped by SIGTERM after step {last} of 10000" in out
    assert out.count("the same command goes on") == 1 and out.endswith("report.html\n")
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{last:06d}"
    assert json.loads((checkpoint / "state.json").read_text())["step"] == last
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_resumed_run_holds_out_what_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, evaluation__documents="auto", train__steps=3, evaluation__every=0, **ALONE)
    assert config.model.preset == "qwen3-tiny"
    first = lines_of(0, config, 1)
    count = load_config(tmp_path / "run" / "config.toml").evaluation.documents
    assert f"; {count} text held out (evaluation.documents)" in first
    monkeypatch.setattr(order, "ONE_IN", 3)
    more = {"train": replace(config.train, steps=5), "model": replace(config.model, preset="")}
    longer = lines_of(0, replace(config, **more), 1)
    assert f"; {count} text held out (evaluation.documents)" in longer, "not a third, as of a run that begins now"
    rows = train_rows(config)
    assert "\nresumed    at step 3 on 1 rank\n" in longer and "\nresumed" not in first
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["sessions"] == [[0, 1], [3, 1]]
    total, parts = facts["starts"].pop("total"), facts["starts"]
    assert {"data", "model", "kernels", "first step"} <= parts.keys() and abs(sum(parts.values()) - total) < 0.2
    assert longer.count("\nready after ") == 1
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and rows[2]["lr"] < rows[3]["lr"]
