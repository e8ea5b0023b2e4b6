"""Whole runs, small: what they leave, that they resume bit for bit, at another size, and leave when told to."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from longspan import World
from longspan.checkpoint.files import step_of
from longspan.cli.main import main
from longspan.config.file import load_config, to_toml
from longspan.config.sections import RunConfig
from longspan.data.stream import ORDER
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
from longspan.plan import Machine, Plan, read_plans
from longspan.plan.plan import group_counts
from longspan.run import records as run_records
from longspan.run import set_up
from longspan.run.checks import check_config
from longspan.run.facts import RunFacts, TrainResult
from longspan.run.loggers import read_metrics
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import run_ranks
from longspan.train.plans import order
from tests.train.small import small_config, train_rank, without_times


def run(config: RunConfig, ranks: int) -> TrainResult:
    return run_ranks(train_rank, ranks, config, ranks, timeout=90)[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, TrainResult]:
    """Six steps on two ranks without a break, a checkpoint at 3 and at 6."""
    loggers = ["tests.run.loggers.fake_loggers.FileLogger"]
    config = small_config(tmp_path_factory.mktemp("straight"), train__save_every=3, run__loggers=loggers)
    return config, run(config, 2)


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


def test_what_a_run_leaves(straight: tuple[RunConfig, TrainResult]) -> None:
    config, outcome = straight
    folder = Path(config.run.dir)
    assert load_config(folder / "config.toml") == config
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    wanted = (
        "step loss tokens targets grad_norm lr seconds tokens_per_second memory_bytes micro_batches efficiency groups "
        "tflops"
    )
    saved = ["save_shown_seconds", "save_seconds", "save_bytes"]  # in the first row after a checkpoint is published
    assert all([name for name in row if name not in saved] == wanted.split() for row in steps)
    of_saves = [row for row in rows if "save_bytes" in row]
    assert of_saves and all(row["save_bytes"] > 10_000 for row in of_saves)
    assert all(row["save_shown_seconds"] > 0 and row["save_seconds"] > 0 for row in of_saves)
    assert [(row["step"], row["cp"]) for row in rows if "eval_loss" in row] == [(2, 2), (4, 2), (6, 1), (6, 2)]
    for name in ("step-000001", "step-000006", "evaluation-cp1", "evaluation-cp2"):
        assert Plan.from_json((folder / "plans" / f"{name}.json").read_text()).slots == 2
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-000003", "step-000006"}
    assert json.loads((folder / "summary.json").read_text()) == outcome.summary()
    assert steps[-1]["loss"] < steps[0]["loss"] < 1.2 * math.log(300)


def test_what_is_running_is_kept_and_priced_on_no_other_machine(straight: tuple[RunConfig, TrainResult]) -> None:
    folder = Path(straight[0].run.dir)
    facts = RunFacts.from_json(json.loads((folder / "run.json").read_text()))
    assert facts is not None and (facts.ranks, facts.device, facts.steps, facts.done) == (2, "CPU", 6, 0)
    model = load_file(folder / "model" / "model.safetensors")
    assert facts.parameters == sum(tensor.numel() for tensor in model.values())
    assert facts.parameters / 2 <= facts.parameters_of_rank <= facts.parameters / 2 + 1000
    assert facts.kernels == ("cpu_flash",) and facts.priced_for == ""
    rows = read_metrics(folder / "metrics.jsonl")
    assert not any({"mfu", "predicted_seconds", "bound_share"} & row.keys() for row in rows)


def test_every_plan_is_kept_and_its_groups_are_in_the_metrics(straight: tuple[RunConfig, TrainResult]) -> None:
    folder = Path(straight[0].run.dir)
    plans, rows = dict(read_plans(folder / "plans.jsonl")), read_metrics(folder / "metrics.jsonl")
    steps = {row["step"]: row["groups"] for row in rows if "groups" in row}
    assert steps == {step: group_counts(plan) for step, plan in plans.items()} and list(steps) == [1, 2, 3, 4, 5, 6]
    first = Plan.from_json((folder / "plans" / "step-000001.json").read_text())
    assert plans[1] == first and plans[1].cost == first.cost


def test_loggers_get_every_row_once_in_a_session_from_the_first_rank(straight: tuple[RunConfig, TrainResult]) -> None:
    folder = Path(straight[0].run.dir)
    sessions = [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]
    assert sessions == [{"done": 0, "rows": read_metrics(folder / "metrics.jsonl"), "summary": False, "closed": True}]


def test_the_last_evaluations_agree_over_degrees(straight: tuple[RunConfig, TrainResult]) -> None:
    _, outcome = straight
    one, two = outcome.final
    assert (one.cp, two.cp) == (1, 2) and (one.tokens, one.targets) == (two.tokens, two.targets)
    assert abs(one.loss - two.loss) <= 1e-6 * one.loss
    assert outcome.text().splitlines()[-2:] and "relative difference" in outcome.text()


def test_the_model_folder_is_the_trained_model(straight: tuple[RunConfig, TrainResult]) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(straight[0].run.dir) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size == 300 and (folder / "tokenizer.json").is_file()


def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(
    straight: tuple[RunConfig, TrainResult], tmp_path: Path
) -> None:
    config, _ = straight
    again = copy_cut_at(config, tmp_path, 3)
    (Path(again.run.dir) / "summary.json").write_text('{"stopped": "SIGTERM"}')  # as the run before left it
    run(again, 2)
    assert rows_of(again) == rows_of(config)
    plans, before = (list(read_plans(Path(c.run.dir) / "plans.jsonl")) for c in (again, config))
    assert plans == before and [step for step, _ in plans] == [1, 2, 3, 4, 5, 6]
    sessions = [json.loads(line) for line in (Path(again.run.dir) / "logged.jsonl").read_text().splitlines()]
    assert [row["step"] for row in sessions[1]["rows"]] == [4, 4, 5, 6, 6, 6] and sessions[1]["done"] == 3
    assert not sessions[1]["summary"], "a run that goes on shows the end of the one before"
    old, new = (load_file(Path(c.run.dir) / "model" / "model.safetensors") for c in (config, again))
    assert old.keys() == new.keys() and all(old[name].equal(new[name]) for name in old)


def test_a_run_resumed_on_other_ranks_has_the_same_losses(
    straight: tuple[RunConfig, TrainResult], tmp_path: Path
) -> None:
    config, _ = straight
    again = copy_cut_at(config, tmp_path, 3)
    context = replace(config.context, context_parallel_size=3).set_evaluation(context_parallel_size=1)
    run(replace(again, context=context), 3)
    for old, new in zip(rows_of(config), rows_of(again), strict=True):
        assert (old["step"], old.get("tokens")) == (new["step"], new.get("tokens"))
        for key in {"loss", "eval_loss"} & old.keys():
            assert old[key] == pytest.approx(new[key], rel=1e-6)


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "killed before its last evaluation"])
def test_a_finished_run_is_shown_again_and_not_trained(
    straight: tuple[RunConfig, TrainResult], tmp_path: Path, lost: bool
) -> None:
    config, outcome = straight
    again = copy_cut_at(config, tmp_path, 6)
    if lost:
        metrics = Path(again.run.dir) / "metrics.jsonl"
        kept = [row for row in read_metrics(metrics) if row["step"] < 6 or "loss" in row]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert run(again, 2).summary() == outcome.summary() | {"eval_at_degrees": run_summary_rows(again)}
    assert rows_of(again) == rows_of(config)
    wide = again.context.set_evaluation(planner="dynamic", max_tokens_per_slot=32)  # no degree of the comparison's
    run(replace(again, context=wide), 2)
    assert rows_of(again) == rows_of(config)


def run_summary_rows(config: RunConfig) -> list[dict[str, Any]]:
    return json.loads((Path(config.run.dir) / "summary.json").read_text())["eval_at_degrees"]


PLANNERS = [
    {
        "context__planner": "padded",
        "context__cp_comm_type": "all_gather",
        "context__eval_planner": "padded",
        "train__save_minutes": 1e-6,
    },
    {"context__planner": "dynamic", "context__eval_planner": "dynamic", "context__cp_comm_type": ["p2p", "all_gather"]},
    {
        "context__planner": "dynamic",
        "context__mode": "free",
        "train__activation_checkpointing": "selective",
        "train__offload_activations": True,
        "parallel__reshard_after_forward": False,
        "context__eval_context_parallel_size": 1,
    },
]


@pytest.mark.parametrize("changes", PLANNERS, ids=["padded", "dynamic", "recomputed"])
def test_other_plans_of_the_same_tokens_have_the_same_losses(
    straight: tuple[RunConfig, TrainResult], tmp_path: Path, changes: dict[str, object]
) -> None:
    config = small_config(tmp_path, train__eval_every=0, **changes)
    run(config, 2)
    losses, others = ([row["loss"] for row in rows_of(c) if "loss" in row] for c in (straight[0], config))
    assert losses == pytest.approx(others, rel=1e-5) and len(losses) == 6
    evaluated = [(row["step"], row["cp"]) for row in rows_of(config) if "eval_loss" in row]
    assert evaluated == [(6, 1), (6, 2)], "each degree once, as asked for where that is it"
    saved = {step_of(path) for path in (Path(config.run.dir) / "checkpoints").iterdir()}
    assert saved == ({1, 2, 3, 4, 5, 6} if config.train.save_minutes < 1 else {6})
    plan = Plan.from_json((Path(config.run.dir) / "plans" / "step-000001.json").read_bytes())
    assert bool(plan.cost.closing_seconds) == (config.context.mode == "free")
    if plan.cost.closing_seconds:  # the other slot's half of 4 bytes a weight, and of 4 a gradient
        weights = sum(x.numel() for x in load_file(Path(config.run.dir) / "model" / "model.safetensors").values())
        cpus = Machine.cpus()
        wire = weights * 8 / 2 / cpus.inside.point.bytes_per_second
        assert plan.cost.closing_seconds == pytest.approx(cpus.micro_batch_seconds + wire, rel=1e-12)


def test_dropout_in_attention_has_the_same_losses_at_every_degree(
    straight: tuple[RunConfig, TrainResult], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(Path(straight[0].run.dir) / "model", tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    losses: list[list[object]] = []
    for dropout, cp, ranks in ((0.3, 1, 1), (0.3, 2, 2), (0.0, 1, 1)):
        (folder / "config.json").write_text(json.dumps(values | {"attention_dropout": dropout}))
        changes = {"model__path": str(folder), "context__context_parallel_size": cp, "train__steps": 2}
        config = small_config(
            tmp_path / f"{dropout}-{cp}-{ranks}", train__eval_every=0, data__eval_documents=0, **changes
        )
        run(config, ranks)
        losses.append([row["loss"] for row in rows_of(config) if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[2][0] - losses[0][0]) > 1e-4  # type: ignore[operator]


def test_contiguous_rows_have_the_losses_of_zigzag_rows(tmp_path: Path) -> None:
    rows: dict[str, list[dict[str, object]]] = {}
    both = {"context__cp_comm_type": "a2a", "context__eval_cp_comm_type": "a2a", "model__dtype": "float64"}
    for partition in ("zigzag", "contiguous"):
        config = small_config(tmp_path / partition, train__steps=3, **both, context__partition=partition)
        run(config, 2)
        rows[partition] = rows_of(config)
        plans = [Plan.from_json(path.read_text()) for path in (Path(config.run.dir) / "plans").glob("*.json")]
        wide = [group for plan in plans for batch in plan.micro_batches for group in batch.groups if group.degree > 1]
        assert wide and {group.partition for group in wide} == {partition}
    for zigzag, contiguous in zip(rows["zigzag"], rows["contiguous"], strict=True):
        losses = [row.get("loss", row.get("eval_loss")) for row in (zigzag, contiguous)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)


REFUSED = [
    (CheckpointError, {"run__resume": "never"}, r"run.resume is 'never' and .*step-000006 is there"),
    (ConfigError, {"train__seed": 1}, r"train.seed was 0 when .*step-000006 was saved and is 1 now; set it back"),
    (ConfigError, {"data__max_document_tokens": 32}, r"data.max_document_tokens was 64 .* and is 32 now"),
    (ConfigError, {"train__steps": 5}, r"is at step 6, beyond train.steps 5"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_resumes_that_would_be_another_run(
    straight: tuple[RunConfig, TrainResult], kind: type[LongspanError], changes: dict[str, object], message: str
) -> None:
    config = small_config(Path(straight[0].run.dir).parent, train__save_every=3, **changes)
    with pytest.raises(kind, match=message):
        run(config, 2)


def test_a_finished_run_is_not_shown_under_other_keys(straight: tuple[RunConfig, TrainResult], tmp_path: Path) -> None:
    again = copy_cut_at(straight[0], tmp_path, 6)
    config = Path(again.run.dir) / "config.toml"
    before = config.read_text()
    changed = replace(again, train=replace(again.train, lr=0.5, weight_decay=0.5))
    config.write_text(to_toml(changed))  # what counts is what it was trained with, whatever the file says
    with pytest.raises(
        ConfigError,
        match=r"has come to its end at step 6 .*: train.lr was 0.006 and is 0.5 now; train.weight_decay was .*raise",
    ):
        run(changed, 2)
    config.write_text(before)
    run(replace(again, context=again.context.set_evaluation(max_tokens_per_slot=32)), 2)
    assert config.read_text() == before


def test_keys_of_one_name_that_changed_after_a_finished_run_are_all_named() -> None:
    before: dict[str, Any] = {"encoder": {"lr": 0.1}, "train": {"lr": 1.0, "steps": 6}, "eval": []}
    now: dict[str, Any] = {"encoder": {"lr": 0.2}, "train": {"lr": 2.0, "steps": 6}, "eval": []}
    with pytest.raises(ConfigError, match=r"encoder.lr was 0.1 and is 0.2 now; train.lr was 1.0 and is 2.0 now"):
        set_up._check_finished_run(before, now, Path("step-000006"), print)


def _train_on_a_full_disk(rank: int, config: RunConfig) -> TrainResult:
    init = run_records.PlanLog.__init__

    def open_on_it(log: run_records.PlanLog, path: Path | None, **keys: int) -> None:
        init(log, path, **keys)
        if path is not None:
            path.unlink()
            path.symlink_to("/dev/full")
            log._file = path.open("ab")

    with mock.patch.object(run_records.PlanLog, "__init__", open_on_it):
        return train_rank(rank, config, 2)


def test_one_run_at_a_time_and_a_disk_that_is_full(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=1, train__eval_every=0, data__eval_documents=0)
    folder = Path(config.run.dir)
    lock = run_records._lock_file(folder, print)
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


def test_a_run_that_was_killed_holds_no_folder(tmp_path: Path) -> None:
    if not (child := os.fork()):
        opened = [run_records._lock_file(tmp_path, print)]  # not closed, of which Python would warn, with imports
        os.kill(os.getpid(), signal.SIGKILL)
        opened.clear()
    os.waitpid(child, 0)
    assert (tmp_path / "run.lock").read_text() == f"process {child} on {gethostname()}"
    run_records._lock_file(tmp_path, print).close()


def test_a_refused_run_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n' * 9 + '{"prompt": "no completion"}\n')
    config, folder = small_config(tmp_path, data__path=str(tmp_path / "rows.jsonl")), tmp_path / "run"
    for before in ([], ["notes.txt"]):
        with pytest.raises(DataError, match=r"line 10"):
            run(config, 2)
        assert [path.name for path in folder.glob("notes.txt")] == before and folder.exists() == bool(before)
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").touch()


def test_a_corpus_that_changed_is_refused_on_every_rank(straight: tuple[RunConfig, TrainResult]) -> None:
    texts, config = Path(straight[0].data.path), straight[0]
    before = (texts / "file03.py").read_text()
    (texts / "file03.py").write_text("other text\n")
    try:
        with pytest.raises(
            DataError, match=r"changed since the run began: file03.py had \d+ bytes and has 11; restore"
        ):
            run(config, 2)
    finally:
        (texts / "file03.py").write_text(before)


def test_nothing_to_resume_where_it_must(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run.resume is 'must' and there is no checkpoint"):
        run(small_config(tmp_path, run__resume="must"), 2)


def test_bad_models_and_data_are_every_ranks_error(straight: tuple[RunConfig, TrainResult], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*nowhere"):
        run(small_config(tmp_path, model__path=str(tmp_path / "nowhere")), 2)
    model = Path(straight[0].run.dir) / "model"
    with pytest.raises(DataError, match=r"does not exist"):
        run(small_config(tmp_path, model__path=str(model), data__path=str(tmp_path / "none")), 2)


def test_a_vocabulary_that_does_not_fit_the_model(straight: tuple[RunConfig, TrainResult], tmp_path: Path) -> None:
    model = shutil.copytree(Path(straight[0].run.dir) / "model", tmp_path / "model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer.json, and its weights know the ids of its own tokenizer"):
        run(small_config(tmp_path, model__path=str(model)), 2)
    with pytest.raises(DataError, match=r"has ids up to 399, the embedding of .*model has 300 rows"):
        run(small_config(tmp_path, model__config=str(model), data__vocab_size=400), 2)


def test_a_list_of_types_must_be_as_long_as_the_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"context.cp_comm_type lists 3 types, the model has 2 layers"):
        run(small_config(tmp_path, context__cp_comm_type=["p2p"] * 3), 2)


@pytest.mark.parametrize("every", [1, 0])
def test_a_step_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path: Path, every: int) -> None:
    steep = {"train__lr": 1e30, "train__warmup_steps": 0, "train__max_grad_norm": 0.0, "train__optimizer": "sgd"}
    config = small_config(tmp_path, train__save_every=every, **steep)
    error = r"step \d: .* the largest weight is \d.*e\+.* lower the learning rate"
    with pytest.raises(NonFiniteError, match=error) as raised:
        run(config, 2)
    rows = [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "loss" in row]
    assert rows and all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    saved = {step_of(path) for path in (Path(config.run.dir) / "checkpoints").iterdir()}
    assert saved == ({row["step"] for row in rows} if every else {rows[-1]["step"]})
    notes = [note for note in raised.value.__notes__ if not note.startswith("rank ")]
    steps, folder = plural(rows[-1]["step"], "step"), Path(config.run.dir) / "checkpoints"
    assert notes == ([] if every else [f"The weights after {steps} are saved in {folder}"])


def test_sigterm_to_the_launcher_saves_and_leaves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, train__steps=10_000, train__eval_every=0, run__stopped_status=75)
    (tmp_path / "config.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "longspan.cli.main", "train", str(tmp_path / "config.toml"), "--world", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        metrics, deadline = Path(config.run.dir) / "metrics.jsonl", time.monotonic() + 60
        while len(read_metrics(metrics)) < 3:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.1)
        assert main([*command[3:], "--device", "cpu"]) == 2 and process.poll() is None
        assert re.search(
            rf"error: another run is at work in \S+run: process \d+ on {gethostname()}; wait", capfd.readouterr().err
        )
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)  # as `timeout` and other supervisors do
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    last = read_metrics(metrics)[-1]["step"]
    assert f"stopped by SIGTERM after step {last} of 10000" in out and not err
    assert out.count("the same command goes on") == 1 and out.endswith("report.html\n")
    saved = Path(config.run.dir) / "checkpoints" / f"step-{last:06d}"
    assert saved.is_dir() and json.loads((saved / "state.json").read_text())["step"] == last
    assert (Path(config.run.dir) / "report.html").is_file()


def test_a_resumed_run_holds_out_what_it_began_with_and_tells_of_another_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"context__context_parallel_size": 1, "context__eval_context_parallel_size": 1}
    config = small_config(tmp_path, data__eval_documents="auto", train__steps=3, train__eval_every=0, **alone)
    first = lines_of(config)
    count = load_config(tmp_path / "run" / "config.toml").data.eval_documents
    assert f"; {count} text held out (data.eval_documents)" in first and "the schedule now ends" not in first
    monkeypatch.setattr(order, "ONE_IN", 3)
    longer = lines_of(replace(config, train=replace(config.train, steps=5)))
    assert f"; {count} text held out (data.eval_documents)" in longer, "and not a third, as a run that begins now would"
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert (
        f"the schedule now ends at step 5: lr {rows[3]['lr']:.3g} at step 4, where it had 0.0006 (train.steps was 3)"
        in longer
    )
    assert "\nresumed    at step 3 on 1 rank\n" in longer and "\nresumed" not in first
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["sessions"] == [[0, 1], [3, 1]]
    total, parts = facts["starts"].pop("total"), facts["starts"]
    assert {"data", "model", "kernels", "first step"} <= parts.keys() and abs(sum(parts.values()) - total) < 0.2
    assert longer.count("\nready after ") == 1
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and rows[2]["lr"] < rows[3]["lr"]


def lines_of(config: RunConfig) -> str:
    """What a run prints that this process alone makes."""
    out = io.StringIO()
    with World(check_config(config, 1), backend="gloo") as world, ProgressDisplay(config.train.steps, out) as display:
        train(config, world, display)
    return out.getvalue()
