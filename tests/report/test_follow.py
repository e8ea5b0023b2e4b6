"""A run that is followed while another process writes its folder."""

import json
import os
import signal
import subprocess
import sys
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
from longspan.plan import Plan, plan_fixed
from longspan.plan.plan_rows import find_plan, plan_row, read_plans
from longspan.report import write_report
from longspan.report.follow import Follower
from longspan.report.follow.live_page import live_parts
from longspan.report.follow.live_run import LiveRecords, LiveRun
from longspan.report.follow.server import is_over
from longspan.report.follow.tail import Tail, lock_holder
from longspan.run.loggers.metrics_log import MetricsLog
from longspan.run.records import PlanLog
from tests.report.runs import FACTS, evaluation_row, train_row, write_run

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.write("process 7 on node-a"); file.flush(); print("locked", flush=True); sys.stdin.read()
"""


@contextmanager
def at_work(run: Path) -> Iterator[None]:
    """Another process holds the lock of a run's folder while this is open."""
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-S", "-c", HOLD, str(run / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        yield
        process.stdin.close()
        process.wait()


def read_now(records: LiveRecords) -> LiveRun:
    """The run as it is now, though it was read a moment ago."""
    records._read_at = -1e9
    return records.read()


def add_rows(run: Path, *rows: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def fetch(address: str, **headers: str) -> str:
    with urlopen(Request(address, headers=headers), timeout=10) as answer:
        return answer.read().decode()


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    file, tail = tmp_path / "rows", Tail(tmp_path / "rows", most_bytes=9)
    assert [*tail.lines()] == []
    file.write_bytes(b"one\ntwo\nthr")
    assert [*tail.lines()] == [b"one\n", b"two\n"]
    file.write_bytes(b"one\ntwo\nthree\n" + b"x" * 20 + b"\nfour\n")
    assert [*tail.lines()] == [b"three\n", b"four\n"] and [*tail.lines()] == []
    assert not tail.is_first


@pytest.mark.parametrize("change", ["replaced", "cut", "cut and longer"])
def test_a_tail_notices_a_file_that_begins_anew(tmp_path: Path, change: str) -> None:
    file, tail = tmp_path / "rows", Tail(tmp_path / "rows")
    file.write_bytes(b"one\ntwo\n")
    assert len([*tail.lines()]) == 2
    words = b"uno\nzwei\ndrei\n" if change == "cut and longer" else b"uno\n"
    if change == "replaced":
        (tmp_path / "other").write_bytes(words)
        (tmp_path / "other").replace(file)
    else:
        with file.open("r+b") as stream:
            stream.truncate(0)
            stream.write(words)
    firsts = [tail.is_first for _ in tail.lines()]
    assert firsts[0] and not any(firsts[1:]) and len(firsts) == words.count(b"\n")


def test_states_of_a_run_from_nothing_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    records = LiveRecords(run)
    live = records.read()
    assert live.state == "waiting" and not is_over(live, has_begun=False) and live_parts(live)["loss"] == ""
    with at_work(run):
        (run / "run.json").write_text(json.dumps(FACTS))
        live = read_now(records)
        assert (live.state, live.holder, live.step, live.steps) == ("running", "process 7 on node-a", 0, 300)
        assert "sets up, before step 1 of 300" in live_parts(live)["status"]
        add_rows(run, train_row(1), train_row(2), evaluation_row(2, 2, 5.5))
        live = read_now(records)
        assert live.step == 2 and "step 2 of 300" in live_parts(live)["status"]
        assert "5.500000" in live_parts(live)["evaluations"]
    live = read_now(records)
    assert live.state == "broken" and is_over(live, has_begun=True) and not is_over(live, has_begun=False)
    for stopped, steps, state in (("SIGTERM", 300, "stopped"), ("", 2, "done"), ("", 300, "broken")):
        (run / "summary.json").write_text(json.dumps({"step": 2, "steps": steps, "stopped": stopped}))
        assert read_now(records).state == state
    (run / "summary.json").write_text(json.dumps({"step": 1, "steps": 2, "stopped": "SIGTERM"}))  # of a session before
    assert read_now(records).state == "broken"


def test_asking_for_the_lock_does_not_take_it(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) == ""
    with at_work(tmp_path):
        assert lock_holder(tmp_path) == "process 7 on node-a"
    assert lock_holder(tmp_path) == ""  # the text of a killed process stays in the file
    with at_work(tmp_path):
        pass


def test_a_resumed_run_goes_on_from_its_step(tmp_path: Path) -> None:
    """Its metrics are replaced by those up to the checkpoint, and its plans are cut."""
    plans = [plan_fixed([900, 300, n], Layout(4), cp=2, max_tokens_per_slot=512) for n in (20, 21, 22, 23)]
    with PlanLog(tmp_path / "plans.jsonl", after_step=0) as log:
        for step in (1, 2, 3):
            log.write(step, plans[step - 1])
    add_rows(tmp_path, *(train_row(step, loss=9.0 - step) for step in (1, 2, 3)))
    records = LiveRecords(tmp_path)
    live = records.read()
    assert live.step == 3 and live.plan == (3, plans[2])
    with (
        PlanLog(tmp_path / "plans.jsonl", after_step=2) as log,
        MetricsLog(tmp_path / "metrics.jsonl", after_step=2) as metrics,
    ):
        assert read_now(records).run.train["loss"].tolist() == [8.0, 7.0]
        log.write(3, plans[3])
        metrics.write(train_row(3, loss=5.0, save_bytes=1 << 20, save_seconds=2.0, save_shown_seconds=0.25))
        live = read_now(records)
    assert live.run.train["loss"].tolist() == [8.0, 7.0, 5.0] and live.plan == (3, plans[3])
    saves = live_parts(live)["saves"]
    assert "1 MiB" in saves and "250 ms" in saves


def test_the_newest_plan_has_the_cost_of_the_rows_before(tmp_path: Path) -> None:
    plan = plan_fixed([900, 300, 20], Layout(4), cp=2, max_tokens_per_slot=512, cp_comm_type="a2a")
    plan = replace(plan, cost=replace(plan.cost, linear_seconds=1e-3, source="a machine"))
    rows = [plan_row(1, plan), plan_row(2, plan, after=plan.cost), plan_row(3, plan, after=plan.cost)]
    (tmp_path / "plans.jsonl").write_text("".join(row + "\n" for row in rows))
    add_rows(tmp_path, train_row(3))
    live = LiveRecords(tmp_path).read()
    assert live.plan == (3, plan) and live.plan[1].cost.source == "a machine"
    assert find_plan(tmp_path / "plans.jsonl", 2) == plan and find_plan(tmp_path / "plans.jsonl", 4) is None
    part = live_parts(live)["plan"]
    assert "<td>a2a</td>" in part and "Plan of step 3, the newest" in part and "3 groups" not in part


def test_the_note_on_an_evaluation_goes_with_its_file(tmp_path: Path) -> None:
    add_rows(tmp_path, train_row(1), {"step": 1, "eval_loss": 5.5})
    records = LiveRecords(tmp_path)
    assert "is left out" in records.read().notes[0]
    (tmp_path / "metrics.jsonl").unlink()
    add_rows(tmp_path, train_row(2, loss=3.0))
    assert read_now(records).notes == ()


@pytest.mark.parametrize("change", [{"slots": 1 << 40}, {"micro_batches": [[[0, 0, 1 << 40, 0]]]}, {"kinds": []}])
def test_a_plan_that_no_run_writes_is_a_note(tmp_path: Path, change: dict[str, Any]) -> None:
    row = json.loads(plan_row(1, plan_fixed([900], Layout(2), cp=2, max_tokens_per_slot=512))) | change
    (tmp_path / "plans.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    add_rows(tmp_path, train_row(1))
    live = LiveRecords(tmp_path).read()
    assert live.plan is None and "holds no plan" in live_parts(live)["notes"]
    with pytest.raises(PlanError, match="line 1 holds no plan"):
        next(iter(read_plans(tmp_path / "plans.jsonl")))


def test_a_page_gets_what_changed_and_the_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    with at_work(run), Follower(run, farewell=0.0) as follower:
        page = fetch(follower.address)
        assert page.count("data-part=") == 9 and "step 60" in page
        first = json.loads(fetch(f"{follower.address}parts"))
        tags = "&".join(f"{name}={tag}" for name, (tag, _) in first["changed"].items())
        assert len(first["changed"]) == 9 and not first["over"] and first["title"].startswith("60 trains")
        add_rows(run, train_row(61, loss=2.5))
        read_now(follower.records)
        second = json.loads(fetch(f"{follower.address}parts?{tags}", **{"Accept-Encoding": ""}))
        assert (
            {"status", "figures", "loss", "speed"} <= set(second["changed"]) <= {*first["changed"]} - {"saves", "notes"}
        )
    (run / "summary.json").write_text(json.dumps({"step": 61, "steps": 61, "stopped": ""}))
    with Follower(run, farewell=0.0) as follower:
        live = follower.wait()
        assert live.state_sentence() == "the run has come to its end at step 61 of 61"
        last = json.loads(fetch(f"{follower.address}parts"))
        assert last["over"] and "61/61 done" in last["title"]


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


def test_the_median_step_and_resumes_are_in_the_report(tmp_path: Path) -> None:
    rows = [train_row(step, seconds=1.0 + (step * 7 % 11)) for step in range(1, 12)]
    run = write_run(tmp_path / "run", rows=rows)
    plan = Plan.from_json((run / "plans" / "step-000001.json").read_bytes())
    (run / "plans.jsonl").write_text("".join(plan_row(step, plan) + "\n" for step in range(1, 12)))
    (run / "run.json").write_text(json.dumps(FACTS | {"sessions": [[0, 4], [3, 4], [7, 2]]}))
    html = write_report(run).read_text()
    median = next(row["step"] for row in rows if row["seconds"] == 6.0)
    assert f"selected>step {median}, the median</option>" in html
    assert "resumed on 2 ranks" in html and html.count("resumed on") == 2  # in the wide and the narrow chart


def test_following_needs_no_torch() -> None:
    """It runs next to training, and should start at once."""
    code = "import sys, longspan.cli.report, longspan.report.follow.server; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
