"""A run that is followed while another process writes its folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.request import Request, urlopen

import pytest

from longspan.cli.main import main
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import plan_fixed
from longspan.plan.plan_rows import find_plan, plan_row, read_plans
from longspan.report.follow import Follower, LiveRun, is_run_over, live_page, lock_holder_text
from tests.report.pages import parts_of, value_of, words_of
from tests.report.runs import FACTS, evaluation_row, train_row, write_run

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.write("process 7 on node-a"); file.flush(); print("locked", flush=True); sys.stdin.read()
"""


@contextmanager
def at_work(run: Path) -> Iterator[None]:
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-S", "-c", HOLD, str(run / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        yield
        process.stdin.close()
        process.wait()


def add_rows(run: Path, *rows: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def fetch(address: str, **headers: str) -> str:
    with urlopen(Request(address, headers=headers), timeout=10) as answer:
        return answer.read().decode()


def test_states_of_a_run_from_nothing_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    live = LiveRun.read(run)
    assert live.state == "waiting" and not is_run_over(live, has_begun=False) and live_page(live)[1]["sections"] == []
    with at_work(run):
        (run / "run.json").write_text(json.dumps(FACTS))
        live = LiveRun.read(run)
        assert (live.state, live.holder, live.step, live.steps) == ("running", "process 7 on node-a", 0, 300)
        head = live_page(live)[1]["head"]
        assert head["story"] == "sets up, before step 1 of 300" and "at work: process 7 on node-a" in head["lines"]
        add_rows(run, train_row(1), train_row(2), evaluation_row(2, 2, 5.5))
        live = LiveRun.read(run)
        title, value = live_page(live)
        assert title == "2/300 trains · run · longspan" and value["head"]["progress"] == (2, 300)
        assert value["head"]["story"] == "step 2 of 300 · about 89.4 s of steps left"
        assert "5.500000000" in words_of(value)
        (run / "config.toml").write_text('[checkpoint]\nkeep_best = "eval_loss"\n')
        best = {"set": "", "column": "eval_loss", "higher": False, "bests": [{"step": 2, "value": 5.5}]}
        (run / "best.json").write_text(json.dumps(best))
        assert "step 2 is the best by eval_loss 5.5 so far" in live_page(LiveRun.read(run))[1]["head"]["lines"]
    assert (
        lock_holder_text(run) == ""
    )  # asking for the lock did not take it; the text of a killed process stays in the file
    live = LiveRun.read(run)
    assert live.state == "broken" and is_run_over(live, has_begun=True) and not is_run_over(live, has_begun=False)
    ends = (
        ("SIGTERM", 300, "", "stopped"),
        ("", 2, "", "done"),
        ("", 300, "", "broken"),
        ("", 300, "patience", "done"),
    )
    for stopped, steps, reason, state in ends:
        summary = {"step": 2, "steps": steps, "stopped": stopped, "end_reason": reason}
        (run / "summary.json").write_text(json.dumps(summary | {"best": {"figure": 1, "step": "x", "value": []}}))
        assert LiveRun.read(run).state == state and LiveRun.read(run).run.best_text() == ""
    (run / "summary.json").write_text(json.dumps({"step": 1, "steps": 2, "stopped": "SIGTERM"}))  # of a session before
    assert LiveRun.read(run).state == "broken"


def test_a_step_that_is_late_is_said(tmp_path: Path) -> None:
    with at_work(tmp_path / "run"):
        add_rows(tmp_path / "run", train_row(1))
        os.utime(tmp_path / "run" / "metrics.jsonl", (0, time.time() - 60))
        story = live_page(LiveRun.read(tmp_path / "run"))[1]["head"]["story"]
    assert "no step for 60 s, where one takes 300 ms" in story


def test_the_newest_plan_has_the_cost_of_the_rows_before(tmp_path: Path) -> None:
    plan = plan_fixed([900, 300, 20], Layout(4), cp=2, max_tokens_per_slot=512, cp_comm_type="a2a")
    plan = replace(plan, cost=replace(plan.cost, linear_seconds=1e-3, source="a machine"))
    rows = [plan_row(1, plan), plan_row(2, plan, after=plan.cost), plan_row(3, plan, after=plan.cost)]
    (tmp_path / "plans.jsonl").write_text("".join(row + "\n" for row in rows))
    add_rows(tmp_path, train_row(3))
    ((name, newest),) = LiveRun.read(tmp_path).run.plans
    assert (name, newest, newest.cost.source) == ("step 3", plan, "a machine")
    assert find_plan(tmp_path / "plans.jsonl", 2) == plan and find_plan(tmp_path / "plans.jsonl", 4) is None
    value = live_page(LiveRun.read(tmp_path))[1]
    (plans,) = parts_of(value, "plans")
    assert dict(plans["plans"][0]["facts"])["groups"] == "2 groups of 2 slots, by a2a"
    assert "Plan of step 3, the newest" in [section["title"] for section in value["sections"]]


@pytest.mark.parametrize("change", [{"slots": 1 << 40}, {"micro_batches": [[[0, 0, 1 << 40, 0]]]}, {"kinds": []}])
def test_a_plan_that_no_run_writes_is_a_note(tmp_path: Path, change: dict[str, Any]) -> None:
    row = json.loads(plan_row(1, plan_fixed([900], Layout(2), cp=2, max_tokens_per_slot=512))) | change
    (tmp_path / "plans.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    add_rows(tmp_path, train_row(1))
    live = LiveRun.read(tmp_path)
    assert not live.run.plans and "holds no plan" in words_of(live_page(live)[1])
    with pytest.raises(PlanError, match="line 1 holds no plan"):
        next(iter(read_plans(tmp_path / "plans.jsonl")))


def test_a_page_gets_what_changed_and_the_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    with at_work(run), Follower(run, farewell=0.0) as follower:
        page = value_of(fetch(follower.address))
        assert page["live"] and "step 60" in page["head"]["story"]
        first = json.loads(fetch(f"{follower.address}data"))
        assert first["page"]["sections"] == page["sections"] and not first["over"]
        assert first["page"]["name"].startswith("60 trains")
        assert fetch(f"{follower.address}data?{first['mark']}") == ""  # it is what the page shows
        add_rows(run, train_row(61, loss=2.5))
        follower._due = 0.0
        second = json.loads(fetch(f"{follower.address}data?{first['mark']}", **{"Accept-Encoding": ""}))
        before, after = ({s["key"]: s for s in answer["page"]["sections"]} for answer in (first, second))
        changed = {key for key in after if before.get(key) != after[key]}
        assert {"figures", "Loss", "Steps"} <= changed and "configuration" in after.keys() - changed
    (run / "summary.json").write_text(json.dumps({"step": 61, "steps": 61, "stopped": ""}))
    with Follower(run, farewell=0.0) as follower:
        live = follower.wait_until_run_ends()
        assert live.state_sentence() == "the run has come to its end at step 61 of 61"
        last = json.loads(fetch(f"{follower.address}data"))
        assert last["over"] and "61/61 done" in last["page"]["name"]


def test_the_longer_reading_takes_the_rarer_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> LiveRun:
        time.sleep(0.1)
        return live

    live = LiveRun.read(tmp_path)
    monkeypatch.setattr(LiveRun, "read", read)
    with Follower(tmp_path) as follower:
        began = time.monotonic()
        assert follower.read_run() is live and follower._due - began > 2.0


def test_the_verb_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"step": 60, "steps": 60, "stopped": ""}))
    assert main(["report", str(run), "--follow"]) == 0
    assert capsys.readouterr().out.startswith("the run has come to its end at step 60 of 60; its page: ")
    assert main(["report", str(run), "--follow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"state": "done", "step": 60, "steps": 60}
    with Follower(run) as follower:
        port = follower.address.split(":")[2].split("/")[0]
        wrong = {("--port", port): f"--port {port} of 127.0.0.1 is taken", ("--port", "70000"): "from 1 to 65535"}
        for words, message in wrong.items():
            assert main(["report", str(run), "--follow", *words]) == 2 and message in capsys.readouterr().err
    assert main(["report", str(run), "--port", "80"]) == 2 and "is for --follow" in capsys.readouterr().err
    plan = run / "plans" / "step-000001.json"
    assert main(["report", str(plan), "--follow"]) == 2 and "leave --follow out" in capsys.readouterr().err


def test_ctrl_c_ends_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        timer = Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        assert main(["report", str(tmp_path / "later"), "--follow"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "later (no run has begun here; waits for one to begin): http://127.0.0.1:" in lines[0]
    assert lines[1:] == ["Ctrl-C ends this; the run goes on", "no run has begun here"] and not printed.err
