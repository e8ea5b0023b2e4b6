"""What a run writes down, what it shows, and how it hears that it should stop."""

import io
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from longspan.comm import received_signals as stop_module
from longspan.comm.device import peak_memory_bytes
from longspan.comm.received_signals import StopSignal
from longspan.errors import PlanError
from longspan.launch.output import FILE, keep_prints_from_failing
from longspan.launch.stop_signals import SIGNALS
from longspan.layout import Layout
from longspan.plan import plan_fixed, read_plans
from longspan.plan.plan_rows import plan_row
from longspan.run import progress
from longspan.run.metrics import MetricsLog, read_metrics
from longspan.run.progress import ProgressDisplay
from longspan.run.records import PlanLog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_resumed_log_goes_on_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.2}, {"step": 2, "eval_loss": 1.0}, {"step": 3, "loss": 0.1}]
    with MetricsLog(path, after_step=0) as log:
        for number, row in enumerate(rows, 1):
            log.write(row)
            assert read_metrics(path) == rows[:number]  # at once
    with path.open("a") as torn:
        torn.write('{"step": 4, "lo')
    with MetricsLog(path, after_step=2) as log:
        assert log.evaluated == {(2, "")}
        log.write({"step": 3, "loss": 9.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*rows[:3], {"step": 3, "loss": 9.0}]
    with MetricsLog(path, after_step=0) as log:
        assert not log.evaluated and not read_metrics(path)
    with MetricsLog(None, after_step=0) as log:  # writes nothing
        log.write({"step": 1, "eval_loss": 2.0})
        assert log.evaluated == {(1, "")}


ROWS = [b'{"step": 1, "eval_loss": 2.5}\n', b'{"step": 2, "eval_loss": 1.5}\n']
LATER = b'{"step": 3, "eval_loss": 9.5}\n'
ORDER = b'{"eval_loss": 1.5, "step": 2}\n'
# of a run that goes on after step 2: lines of its file, those that stay, and what is said
LINES: list[tuple[list[bytes], list[bytes], str]] = [
    ([*ROWS], [*ROWS], ""),
    (
        [b'x"step": 1, "eval_loss": 0.5}\n', *ROWS],
        [b'x"step": 1, "eval_loss": 0.5}\n', *ROWS],
        "left in place 1 line that",
    ),
    ([b'{"step": 1, "loss" 2}\n', *ROWS], [b'{"step": 1, "loss" 2}\n', *ROWS], "left in place 1 line that"),
    ([ROWS[0], b"\n", ORDER], [ROWS[0], b"\n", ORDER], ""),
    (
        [ROWS[0], b'{"tool": 7}\n', LATER, ROWS[1]],
        [ROWS[0], b'{"tool": 7}\n', ROWS[1]],
        "removed 1 row of steps after 2, left",
    ),
    (
        [b'{ "eval_loss": 1, "step": 4}\n', LATER, *ROWS, b'{"step": 2, "lo'],
        [*ROWS],
        "2 rows of steps after 2, removed a torn",
    ),
    ([ROWS[0], ROWS[1][:-1] + b"\r\n"], [ROWS[0], ROWS[1][:-1] + b"\r\n"], ""),
    ([ROWS[0], ROWS[1][:-1]], [*ROWS], ""),
    ([b"[" * 9999 + b"\n", *ROWS], [b"[" * 9999 + b"\n", *ROWS], "1 line that cannot be read"),
]


@pytest.mark.parametrize(("lines", "left", "says"), LINES, ids=range(len(LINES)))
def test_a_damaged_line_cuts_no_history(lines: list[bytes], left: list[bytes], says: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    said = list[str]()
    with MetricsLog(path, after_step=2, log=said.append) as log:
        assert log.evaluated == {(1, ""), (2, "")}, "patience counts on from all of them"
        log.write({"step": 3, "eval_loss": 1.0})
    assert path.read_bytes() == b"".join(left) + b'{"step": 3, "eval_loss": 1.0}\n'
    assert [says in line and line.startswith(f"{path}: ") for line in said] == [True] * bool(says)


def test_resumed_plans_go_on_after_their_step(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    plans = {step: plan_fixed([100 + step, 7], Layout(4), 2) for step in range(1, 6)}
    with PlanLog(path, after_step=0) as log:
        for step in (1, 2, 3):
            log.write(step, plans[step])
            assert dict(read_plans(path)) == {s: plans[s] for s in range(1, step + 1)}  # at once
    with path.open("a") as torn:
        torn.write(plan_row(4, plans[4])[:40])
    with PlanLog(path, after_step=3) as log:
        log.write(4, plans[4])
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(rows[0] + b"?" + b"".join(rows))
    said = list[str]()
    with PlanLog(path, after_step=2, log=said.append) as log:
        log.write(3, plans[5])
    assert said == [f"{path}: removed 2 rows of steps after 2, left in place 1 line that cannot be read"]
    with pytest.raises(PlanError, match=r"plans.jsonl, line 2 holds no plan"):
        dict(read_plans(path))
    path.write_bytes(path.read_bytes().replace(b"?" + rows[0], b""))
    assert list(read_plans(path)) == [(1, plans[1]), (2, plans[2]), (3, plans[5])]
    with PlanLog(None, after_step=0) as log:
        log.write(1, plans[1])
    with PlanLog(path, after_step=0):
        assert path.read_bytes() == b""


def test_memory_is_that_of_this_process() -> None:
    assert 2**24 < peak_memory_bytes(torch.device("cpu")) < 2**40


ROW = {"loss": 2.5, "lr": 6e-3, "grad_norm": 1.234, "tokens_per_second": 9000.0, "memory_bytes": 2**29}
ON_GPUS = ROW | {"mfu": 0.4127, "memory_bytes": 79.1 * 2**30, "tokens_per_second": 98400.0}
FIGURES = ("loss 2.5000", "lr 0.006", "norm 1.23", "9000 tok/s", "512 MiB")


def test_there_are_plain_lines_and_few() -> None:
    out = io.StringIO()
    with ProgressDisplay(30, out) as display:
        display.log("hello [bold]")
        for step in range(1, 31):
            display.show_step(ROW | {"step": step})
        display.show_evaluation({"step": 30, "eval_loss": 2.25, "eval_tokens": 70, "cp": 4, "seconds": 1.0})
    lines = out.getvalue().splitlines()
    assert lines[0] == "hello [bold]" and len(lines) == 6 and "\x1b" not in out.getvalue()
    assert [line.split()[1] for line in lines[1:5]] == ["1/30", "10/30", "20/30", "30/30"]
    assert all(figure in lines[1] for figure in FIGURES)
    assert "left" in lines[2] and lines[5].startswith("step 30/30  evaluation loss 2.250000 at cp 4")
    assert max(map(len, lines)) <= 80, lines


def test_lines_come_as_often_as_is_asked_for_and_every_thirty_seconds(clock: list[float]) -> None:
    out = io.StringIO()
    display = ProgressDisplay(300, out, log_every=25)
    for step in range(1, 76):
        clock[0] += 1.0 if step <= 50 else 12.0
        display.show_step(ROW | {"step": step, "seconds": 1.0 if step <= 50 else 12.0})
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, 25, 50, *range(52, 75, 2), 75], "two steps of 12 s, not three, in 30 s"


def test_what_takes_long_is_told_of_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)

    def wait_for(words: str) -> None:
        deadline = time.monotonic() + 20
        while not re.search(rf"^{words}: \d+ s so far$", out.getvalue(), re.MULTILINE):
            assert time.monotonic() < deadline, out.getvalue()
            time.sleep(0.005)

    with ProgressDisplay(300, out) as display:
        wait_for("setting up")
        display.begin_work("step 7/300")
        wait_for("step 7/300")
        display.show_step(ROW | {"step": 7})
        wait_for("after step   7/300")
        display.show_eval_progress("of books at cp 2", 3, 40)
        wait_for("evaluation of books at cp 2, 3 of 40 micro-batches")
        pairs = {"eval_rewards/accuracies": 1.0, "eval_rewards/margins": 0.5, "eval_logps/chosen": -3.0}
        display.show_evaluation({"step": 7, "eval_loss": 2.25, "eval_tokens": 70, "cp": 4, "seconds": 1.0} | pairs)
        wait_for("after an evaluation")  # the seconds of the next one are its own
    lines = out.getvalue()
    assert "(70 tokens, rewards/accuracies 100.0%, margin 0.5, in " in lines
    time.sleep(0.1)
    assert out.getvalue() == lines, "nothing is written after the end"


def test_lines_are_in_the_file_at_once() -> None:
    file = io.BytesIO()
    out = io.TextIOWrapper(file, encoding="utf-8")
    ProgressDisplay(3, out).log("hello")
    assert file.getvalue() == b"hello\n" and not out.closed


def test_on_gpus_a_line_says_how_much_of_them_the_model_uses() -> None:
    out = io.StringIO()
    with ProgressDisplay(300, out) as display:
        display.show_step(ON_GPUS | {"step": 10})
        display.show_step(ON_GPUS | {"step": 20, "bound_share": 0.914})
    first, second = out.getvalue().splitlines()
    assert first == "step  10/300  loss 2.5000  lr 0.006  norm 1.23  98400 tok/s  MFU 41%  79.1 GiB"
    assert "  MFU 41%  bound 91%  79.1 GiB" in second


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(59, "59 s left"), (3599, "59 min 59 s left"), (3600, "1 h 00 min left"), (190_000, "52 h 46 min left")],
)
def test_the_time_that_is_left(seconds: int, left: str, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "LINE_SECONDS", math.inf)
    with ProgressDisplay(20, out) as display:
        display.show_step(ROW | {"step": 1})
        clock[0] = seconds * 0.9
        display.show_step(ROW | {"step": 10, "loss": 2.0})
    assert out.getvalue().splitlines()[1].endswith(f"  {left}")


def test_evaluations_are_in_the_time_that_is_left(clock: list[float]) -> None:
    """Steps of 100 tokens, 40 of them in prefixes that are computed once, take a second after the first; 600 tokens of
    evaluations are to come, 300 after the first.
    """
    out = io.StringIO()
    with ProgressDisplay(1, out, log_every=1) as display:
        display.set_schedule(20, [(300, 10, 1)])
        for step in range(1, 12):
            clock[0] += 1.0 if step > 1 else 50.0
            display.show_step(ROW | {"step": step, "tokens": 60, "spared_tokens": 40})
            if step == 10:
                clock[0] += 9.0
                display.show_evaluation({"step": 10, "eval_loss": 2.25, "eval_tokens": 300, "cp": 4, "seconds": 9.0})
    lines = out.getvalue().splitlines()
    assert "left" not in lines[0] and lines[1].endswith("  20 s left"), "18 steps, and 600 tokens at a third of 10 ms"
    assert lines[9].endswith("  12 s left") and lines[11].endswith("  18 s left"), "9 steps, and 300 tokens at 30 ms"


def test_the_time_that_is_left_stands_in_lines_of_a_resumed_run(clock: list[float]) -> None:
    out = io.StringIO()
    with ProgressDisplay(40, out) as display:
        for step in range(21, 41):
            clock[0] += 1.0
            display.show_step(ROW | {"step": step})
    assert [line.endswith("  10 s left") for line in out.getvalue().splitlines()] == [True, False]


def test_a_screen_without_a_stream_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(3, None) as display:
        display.log("x")
        display.show_step(ROW | {"step": 1})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_asks_and_a_second_one_aborts(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.received
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the same press, delivered twice
        assert stop.received == number.name
        monkeypatch.setattr(stop_module, "SAME_PRESS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_signal_that_saves_asks_once_for_each_press_and_never_stops(clock: list[float]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal(save_on=["SIGUSR1"]) as stop:
        for seconds, asks in ((0.0, True), (0.9, False), (1.1, True), (9.0, True)):
            clock[0] = 50.0 + seconds
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (stop.save_asked, stop.received) == ("SIGUSR1" if asks else "", "")
            stop.save_asked = ""
        os.kill(os.getpid(), signal.SIGHUP)  # which nohup ignores
        assert not stop.received
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.received == "SIGUSR2"
    signal.signal(signal.SIGHUP, before)


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, stream)
        keep_prints_from_failing(tmp_path, ["stdout"])
        with ProgressDisplay(3, sys.stdout) as display:
            display.log("one")
            assert os.read(reader, 99) == b"one\n"
            os.close(reader)
            display.log("two")
            display.log("three")
    reason, *lines = (tmp_path / FILE).read_text().splitlines()
    assert reason.startswith("standard output does not take this (Broken pipe)") and lines == ["two", "three"]
