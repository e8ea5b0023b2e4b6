"""The page of a run: what it shows of what a run left behind, whatever that is."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.errors import ConfigError
from longspan.plan import Plan
from longspan.plan.plan_rows import plan_row
from longspan.report import RunFolder, write_report
from tests.report.pages import charts_of, parts_of, report_of, words_of
from tests.report.runs import FACTS, VOCABULARY, evaluation_row, train_row, write_run

GIB = 1 << 30
KINDS = ("weights", "gradients", "states", "gathered", "kept", "work", "logits", "communicators", "total")
DEVICE = dict.fromkeys(KINDS, 0) | {"weights": 4 * GIB, "kept": 40 * GIB, "communicators": GIB, "total": 53 * GIB}
HOST = {"kept": 3 * GIB, "total": 3 * GIB}
MEMORY = {"checkpoint_policies": ["selective+host"] * 2 + ["none"] * 3, "device": DEVICE, "host": HOST}


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def test_curves_are_the_metrics_of_the_run(tmp_path: Path) -> None:
    rows = [train_row(step, mtp_loss_1=3.0, mfu=0.4, tflops=400.0) for step in range(1, 61)]
    rows[6]["grad_norm"] = 99.0
    charts = charts_of(report_of(write_run(tmp_path / "run", rows=rows)))
    columns = {"Speed": "tokens_per_second", "Rows used": "efficiency", "Time of a step": "seconds"}
    columns |= {"Gradient norm": "grad_norm", "Learning rate": "lr", "Peak memory": "memory_bytes"}
    columns |= {"Model FLOPs utilisation": "mfu", "Multi-token prediction": "mtp_loss_1"}
    assert charts.keys() == columns.keys() | {"Training and evaluation"}
    for title, name in columns.items():
        series = charts[title]["series"][0]
        assert series["x"] == [*range(1, 61)] and series["y"] == pytest.approx([row[name] for row in rows])
    raw, averaged, evaluation = charts["Training and evaluation"]["series"]
    assert raw["y"] == pytest.approx([row["loss"] for row in rows]) and averaged["kind"] == "line"
    assert (evaluation["name"], evaluation["x"], evaluation["kind"]) == ("evaluation, cp 4", [60], "marks")
    assert charts["Training and evaluation"]["references"][0][0] == math.log(VOCABULARY)
    assert charts["Gradient norm"]["log"] and not charts["Speed"]["log"] and charts["Speed"]["zero"]


def test_losses_of_scores_are_of_no_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    config = (run / "config.toml").read_text()
    for added, unit in (("", "nats per predicted token"), ("num_labels = 3\n", "mean of what is scored")):
        (run / "config.toml").write_text(config.replace("[model]\n", f"[model]\n{added}"))
        assert charts_of(report_of(run))["Training and evaluation"]["unit"] == unit


def test_long_runs_stay_small_and_spikes_survive(tmp_path: Path) -> None:
    rows = [train_row(step, loss=99.0 if step == 3_777 else 4.0) for step in range(1, 5_001)]
    run = write_run(tmp_path, rows=rows, plans=False)
    series = charts_of(report_of(run))["Training and evaluation"]["series"][0]
    assert dict(zip(series["x"], series["y"], strict=True))[3_777] == 99.0 and len(series["x"]) < 1000
    assert (run / "report.html").stat().st_size < 500_000


NO_MEMORY = ({}, {"device": {}}, {"device": {"total": "much"}, "checkpoint_policies": 3})
SHARES = {"tflops": 420.0, "mfu": 0.4247, "bound_share": 0.88, "predicted_seconds": 0.3}
ENCODER = {"encoder_share": 0.2, "predicted_encoder_share": 0.21}
SESSION = {"date": "2026-01-01 10:00", "command": "longspan train x.toml"}
SAVES = {"save_bytes": GIB, "save_seconds": 2.0, "save_shown_seconds": 0.25}
OLDER = [{"step": step, "eval_loss": 2.0, "cp": 4, "eval_tokens": 900} for step in (1, 2)]
DIFFERING = {"eval_at_degrees": [evaluation_row(60, 1, 4.0), evaluation_row(60, 2, 4.1), {"cp": 8}, "x"]}
DYNAMIC = [evaluation_row(step, cp, 4.5) | {"planner": "dynamic"} for step, cp in ((30, 4), (60, 2))]
STOPPED = {"stopped": "SIGTERM", "step": 60, "steps": 300}
OTHERS = "✗ differs | Notes | Saves | Samples | measured / predicted | Evaluation sets"
# Columns of each step, "rows" besides, or files of the run; words that are there; words that are not, after "but not".
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "Loss 7.44 → 5.49 in 18 s of steps; 4.6 on held-out documents, the same at degrees 1, 2, 4"),
    ({}, f"qwen3-tiny on a<b>&c · steps 1 to 60 | torch 2.13.0 | of ln V = {math.log(VOCABULARY):.3f} | [context]"),
    ({"run.json": FACTS}, f"median; 18 s in all, 60 steps, 240K tokens, 239K targets | ✓ equal but not {OTHERS}"),
    ({}, "Notes | run.json is missing: what ran, and on what, is not shown | +3.0e-08 but not summary.json"),
    ({"run.json": FACTS | SESSION}, "2026-01-01 10:00 · longspan train x.toml but not when the run ends"),
    ({"run.json": FACTS, **SHARES}, "42.5% | median; 420 TFLOP/s a device | measured / predicted | 8 of 128 experts"),
    ({"run.json": FACTS, **SHARES}, "median: the plan's lower bound, priced for the model on H200s, over the time"),
    ({"run.json": {"model": "of another release"}}, "Loss but not The run"),
    ({"tflops": 0.0161}, "16.1 GFLOP/s | Model FLOPs but not utilisation"),
    (ENCODER, "Encoder | 20% | of the step, median but not \npredicted | 21%"),
    (ENCODER | SHARES, "of the step, median; predicted 21% | measured | \npredicted"),
    ({"router_balance_loss": 1.0, "router_z_loss": 2.0}, "Router balance loss | Router z-loss"),
    ({"summary.json": STOPPED}, "stopped by SIGTERM after step 60 of 300"),
    (
        {"summary.json": DIFFERING},
        "4 on held-out documents, different at degrees 1, 2 to 2.5e-02. | ✗ differs but not ✓",
    ),
    ({"rows": DYNAMIC, "summary.json": {}}, "evaluation, dynamic plans | after step 60; degrees 4, dynamic differ by"),
    ({"rows": OLDER}, "is left out: it has no planner, eval_documents"),
    (SAVES, "Saves | 1 GiB | 2 s | 250 ms"),
    ({"run.json": FACTS | {"memory": MEMORY}}, "2 of 5 layers keep their input and attention's output in host memory"),
    ({"run.json": FACTS | {"memory": MEMORY}}, "total\n53 GiB\n3 GiB | total without communicators\n52 GiB"),
    (
        {"run.json": FACTS | {"memory": MEMORY}},
        "measured peak\n572.2 MiB | planned 52 GiB | 3 keep all. but not logits",
    ),
    *(({"run.json": FACTS | {"memory": memory}}, "572.2 MiB but not Memory") for memory in NO_MEMORY),
    ({"run.json": FACTS | {"sessions": [[0, 4], [3, 4], [7, 2]]}}, "3\nresumed | 7\nresumed on 2 ranks"),
]


@pytest.mark.parametrize(("changes", "expected"), CASES, ids=[case[1][:30] for case in CASES])
def test_what_the_page_says(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    present, _, absent = expected.partition(" but not ")
    columns = {key: value for key, value in changes.items() if key != "rows" and "." not in key}
    rows = [*(train_row(step, **columns) for step in range(1, 61)), *changes.get("rows", [])]
    run = write_run(tmp_path / "run", rows=rows)
    for name, value in changes.items():
        if "." in name:
            write_json(run / name, value)
    words = words_of(report_of(run))
    assert [part for part in present.split(" | ") if part not in words] == []
    assert [part for part in absent.split(" | ") if part and part in words] == []


def test_an_interrupted_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1, finished=False, plans=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 4.')
    for folder in ("plans", "hang", "checkpoints/step-000001"):
        (run / folder).mkdir(parents=True)
    (run / "plans" / "step-000001.json").write_text("{")
    words = words_of(report_of(run))
    notes = (
        "has not finished",
        "1 line of metrics.jsonl could not",
        "plans/step-000001.json is left out",
        "folder hang",
    )
    assert [note for note in notes if note not in words] == []


@pytest.mark.parametrize(
    ("config", "shown"),
    [("", True), ('[checkpoint]\ndir = "/far"\n', False)],
    ids=["in the folder", "elsewhere"],
)
def test_checkpoints_are_listed_where_they_stand_in_the_folder(tmp_path: Path, config: str, shown: bool) -> None:
    run = write_run(tmp_path, steps=1)
    (run / "config.toml").write_text(config)
    (run / "checkpoints/step-000001").mkdir(parents=True)
    assert ("in the folder: step 1" in words_of(report_of(run))) is shown


COLUMNS = {"grad_norm": "Gradient norm", "tokens_per_second": "Speed", "efficiency": "Rows used", "loss": ""}
COLUMNS |= {"memory_bytes": "Peak memory", "lr": "Learning rate", "seconds": "Time of a step"}


def test_metrics_may_be_missing_or_not_finite(tmp_path: Path) -> None:
    every = charts_of(report_of(write_run(tmp_path / "all", steps=8))).keys()
    for name, title in COLUMNS.items():
        rows = [train_row(step, **{name: math.nan if step % 2 else None}) for step in range(1, 9)]
        run = write_run(tmp_path / name / "empty", rows=rows)
        assert charts_of(report_of(run)).keys() == every - {title}, name
        assert np.isnan(RunFolder.read(run).train[name]).all()
        rows = [{k: v for k, v in train_row(step).items() if k != name or name == "loss"} for step in range(1, 9)]
        run = write_run(tmp_path / name / "absent", rows=rows, finished=False, plans=False)
        assert charts_of(report_of(run)).keys() == every - {title}, name


def test_evaluation_alone_and_steps_that_were_repeated(tmp_path: Path) -> None:
    words = words_of(report_of(write_run(tmp_path / "a", rows=[], finished=False, plans=False)))
    assert "no training step" in words and "4.6000" in words
    rows = [train_row(1, loss=5.0), train_row(2, loss=6.0), train_row(2, loss=4.0), train_row(3, loss=3.0)]
    run = RunFolder.read(write_run(tmp_path / "b", rows=rows))
    assert run.step.tolist() == [1, 2, 3] and run.train["loss"].tolist() == [5.0, 4.0, 3.0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not the folder of a run: no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"there is no metrics\.jsonl in it; give the folder that"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('nothing\n[1]\n{"step": true}\n{"loss": 3}\n')
    with pytest.raises(ConfigError, match=r"holds no step \(4 unreadable lines\)"):
        write_report(tmp_path)


# ---- plans


@pytest.mark.parametrize(
    ("source", "predicts"), [("the model on H200s", True), ("the model on H200s", False), ("", False)]
)
def test_only_a_measured_machine_predicts(source: str, predicts: bool, tmp_path: Path) -> None:
    """Also where a resumed run has a step that something else disturbed: no prediction stands beside its seconds."""
    shares = {"predicted_seconds": 0.29, "bound_share": 0.9} if predicts else {}
    rows = [train_row(step, seconds=1.3 if step == 27 else 0.3, **shares) for step in range(1, 61)]
    run = write_run(tmp_path / "run", rows=rows)
    for file in (run / "plans").iterdir():
        plan = Plan.from_json(file.read_bytes())
        file.write_text(replace(plan, cost=replace(plan.cost, source=source)).to_json())
    write_json(run / "run.json", FACTS | {"sessions": [[0, 4], [26, 4]]})
    value = report_of(run)
    (plans,) = parts_of(value, "plans")
    facts = dict(plans["plans"][1]["facts"])
    assert facts["measured"] == "300 ms" and ("predicted" in facts) == predicts
    assert ("times only compare" in facts["priced for"]) == (not predicts)
    assert ("predicted" in json.dumps(plans)) == predicts == ("measured / predicted" in words_of(value))


def test_the_plan_of_the_median_step_shows_first(tmp_path: Path) -> None:
    rows = [train_row(step, seconds=1.0 + (step * 7 % 11)) for step in range(1, 12)]
    run = write_run(tmp_path / "run", rows=rows)
    priced = Plan.from_json((run / "plans" / "step-000001.json").read_bytes())
    (run / "plans.jsonl").write_text("".join(plan_row(step, priced) + "\n" for step in range(1, 12)))
    (plans,) = parts_of(report_of(run), "plans")
    median = next(row["step"] for row in rows if row["seconds"] == 6.0)
    shown = plans["plans"][plans["first"]]
    assert shown["name"] == f"step {median}, the median" and dict(shown["facts"])["measured"] == "6 s"
    write_run(run, rows=[train_row(step, seconds=None) for step in range(1, 12)])
    (plans,) = parts_of(report_of(run), "plans")
    assert [plan["name"] for plan in plans["plans"]] == ["step 1", "step 60", "evaluation-cp4"] and plans["first"] == 1
    plan = (run / "plans" / "step-000001.json").read_text()
    for step in range(2, 40):
        (run / "plans" / f"step-{step:06d}.json").write_text(plan)
    names = [name for name, _ in RunFolder.read(run).plans]
    assert len(names) == 8 and names[0] == "step 1" and names[-1] == "evaluation-cp4"
