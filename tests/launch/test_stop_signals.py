"""Signals to a command, at whatever moment and to whomever: one line, a status, and nothing left behind."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from longspan.cli.eval import eval_rank
from longspan.cli.main import main
from longspan.cli.train import train_rank
from longspan.comm.failure_reports import FailureReports
from longspan.comm.received_signals import StopSignal
from longspan.comm.watch import AnsweringThread, Watch
from longspan.config.file import to_toml
from longspan.errors import CheckpointError
from longspan.evaluation.request import EvalRequest
from longspan.launch import fork_server, launcher_watch, stop_signals
from longspan.launch.fork_server import import_for_ranks
from longspan.launch.launch import run_local, start_store_server
from longspan.launch.launcher_watch import processes_of_torchrun
from longspan.launch.stop_signals import (
    NOTICES,
    SIGNALS,
    Forwarding,
    Interrupted,
    ignore_signals,
    raise_on_stop_signals,
)
from longspan.train.start.start_times import Starts
from tests.faults.live_run import children_of, read_process
from tests.train.small import small_config

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """A shell starts what it runs in the background with SIGINT ignored, which stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SENT = [  # at which second which signal comes -> those that the ranks get
    ([(0.0, signal.SIGTERM), (0.0, signal.SIGTERM), (0.9, signal.SIGTERM), (1.1, signal.SIGINT)], [15, 9]),
    ([(5.0 * i, number) for i, number in enumerate([*NOTICES, signal.SIGUSR1, signal.SIGTERM])], None),
]


@pytest.mark.parametrize(("presses", "expected"), SENT)
def test_a_press_is_forwarded_once_and_a_later_one_kills_and_notices_are_forwarded_each_time(
    presses: list[tuple[float, int]],
    expected: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    received, now = list[int](), [50.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    forwarding = Forwarding(received.append)
    for seconds, number in presses:
        now[0] = 50.0 + seconds
        forwarding._forward_signal(number, None)
    assert received == forwarding.sent == (expected or [number for _, number in presses])
    killed = "longspan: SIGINT again: the processes are killed, and what they have not saved is lost\n"
    assert capfd.readouterr().err == (killed if expected else "")
    if expected:
        with raise_on_stop_signals(), pytest.raises(Interrupted, match="SIGINT"):
            signal.raise_signal(forwarding.received)


def test_what_is_passed_over_does_nothing_and_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    before, received = signal.getsignal(signal.SIGUSR1), list[int]()
    with raise_on_stop_signals():
        ignore_signals([signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        with Forwarding(received.append):
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Interrupted, match="SIGUSR2") as raised:
            signal.raise_signal(signal.SIGUSR2)
    assert raised.value.status == 128 + signal.SIGUSR2
    assert received == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is before


def test_the_end_of_a_launcher_is_no_signal_and_its_store_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gone = list[bool](), list[bool]()
    monkeypatch.setattr(FailureReports, "has_departure_or_request", lambda _: bool(asked.append(True)))
    monkeypatch.setattr(launcher_watch, "_checks", [lambda: bool(gone)])
    thread = AnsweringThread(Watch(0, (0, 1), 9.0, FailureReports(0, (0, 1), HashStore(), "world")))
    thread.start()
    with StopSignal() as stop:
        while not asked:
            time.sleep(0.01)
        gone.append(True)
        time.sleep(0.05)  # for a question that was under way
        asked.clear()
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)
    thread.stop()
    assert (stop.received, stop.stop_reason()) == ("the end of its launcher", "its launcher is gone") and not asked


def test_a_run_outlives_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is on a full device, and nobody reads standard error: of the launcher and of its ranks."""
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path, train__steps=1, optimizer__warmup_steps=1)))
    reader, writer = os.pipe()
    os.close(reader)
    full, kept = os.open("/dev/full", os.O_WRONLY), [os.dup(number) for number in (1, 2)]
    streams = [open(number, "w", buffering=1, closefd=False) for number in (1, 2)]  # noqa: SIM115
    with monkeypatch.context() as patched:
        for name, stream, number, target in zip(("stdout", "stderr"), streams, (1, 2), (full, writer), strict=True):
            patched.setattr(sys, name, stream)
            patched.setattr(sys, f"__{name}__", stream)
            os.dup2(target, number)
        try:
            status = main(["train", str(tmp_path / "config.toml"), "--world", "2", "--device", "cpu"])
        finally:
            for number, target in zip((1, 2), kept, strict=True):
                os.dup2(target, number)
                os.close(target)
            os.close(full)
            os.close(writer)
    lines = (tmp_path / "run/output.txt").read_text().splitlines()
    assert status == 0, lines
    first = [i for i, line in enumerate(lines) if line.startswith("standard output does not take this (No space left")]
    step, last = (next(i for i, line in enumerate(lines) if part in line) for part in ("step 1/1  loss", "Open /"))
    assert len(first) == 2 and min(first) < step < last, lines  # of the rank and of the launcher


def test_a_command_is_interrupted_once_by_a_press_that_comes_twice() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with raise_on_stop_signals(), pytest.raises(Interrupted) as raised:
        signal.raise_signal(signal.SIGTERM)
    with raise_on_stop_signals():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.number, again.status, str(again)) == (signal.SIGTERM, 143, "SIGTERM")


def test_an_import_that_catches_the_exception_of_a_signal_is_interrupted() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), raise_on_stop_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            raise ImportError("no datetime") from None
    with pytest.raises(ImportError), raise_on_stop_signals():
        raise ImportError("no datetime")


def test_a_signal_that_comes_as_the_fork_server_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while signals are held back, and the server would import on, its output open, for nobody."""
    killed = list[bool]()
    monkeypatch.setattr(forkserver, "ensure_running", lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(fork_server, "kill_fork_server", lambda: killed.append(True))
    with raise_on_stop_signals(), pytest.raises(Interrupted, match="SIGTERM"), import_for_ranks({}):
        pass
    assert killed


class CatchesAll(ModuleType):
    """Is interrupted while it is imported, and does as dill does, which torch imports where it is installed."""

    def __getattr__(self, name: str) -> Any:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            return None


def train_as_torchrun_does(folder: Path) -> None:
    train_rank(0, small_config(folder), 1, "gloo", False, Starts())


def evaluate_as_torchrun_does(folder: Path) -> None:
    subject: Any = SimpleNamespace(config=small_config(folder))
    eval_rank(0, EvalRequest(subjects=(subject,)), 1, "gloo", Starts())


@pytest.mark.parametrize(
    ("imported", "start"),
    [
        ("torch.distributed", lambda _: start_store_server()),
        ("longspan.run.loop", train_as_torchrun_does),
        ("longspan.evaluation.evaluate_saved", evaluate_as_torchrun_does),
    ],
)
def test_no_import_catches_the_signal_that_ends_a_command(
    imported: str, start: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, imported, CatchesAll(imported))
    with raise_on_stop_signals(), pytest.raises(Interrupted, match="SIGTERM"):
        start(tmp_path)


def masked(rank: int) -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@on_linux
def test_ranks_heed_signals_and_the_fork_server_does_not() -> None:
    assert run_local(masked, 2) == [[], []]
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()  # pyright: ignore
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert all(mask >> (number - 1) & 1 for number in SIGNALS)


def fail_after_a_signal(rank: int, folder: Path) -> None:
    received = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    (folder / str(rank)).touch()
    while not received:
        time.sleep(0.01)
    raise CheckpointError("the disk is full")


def test_an_error_after_a_signal_is_raised_and_not_hidden_by_it(tmp_path: Path) -> None:
    def send() -> None:
        name = Forwarding._forward_signal.__qualname__
        while len([*tmp_path.iterdir()]) < 2 or name != getattr(signal.getsignal(signal.SIGTERM), "__qualname__", ""):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    with raise_on_stop_signals(), pytest.raises(CheckpointError, match="the disk is full"):
        run_local(fail_after_a_signal, 2, (tmp_path,))
    sender.join()


def fork_server_of(pid: int) -> int:
    servers = (child for child in children_of(pid) if "multiprocessing.forkserver" in read_process(child, "cmdline"))
    return next(servers, 0)


def a_rank_is_there(pid: int) -> bool:
    server = fork_server_of(pid)
    return server > 0 and bool(children_of(server))


def press_in_the_group(process: "subprocess.Popen[str]", number: int) -> None:
    os.killpg(process.pid, number)


def press_as_timeout_does(process: "subprocess.Popen[str]", number: int) -> None:
    process.send_signal(number)
    os.killpg(process.pid, number)


def of_session(pid: int) -> list[str]:
    paths = (path for path in Path("/proc").glob("[0-9]*/stat") if path.exists())
    fields = [path.read_text().rpartition(")")[2].split() for path in paths]
    return [state for state, _, _, session, *_ in fields if int(session) == pid and state != "Z"]


def interrupted(words: list[str], when: Callable[[int], object], press: Any, number: int) -> tuple[int, str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *words], **pipes, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not when(process.pid):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    press(process, number)
    out, err = process.communicate(timeout=60)
    while of_session(process.pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)
    return process.returncode, out, err


def test_a_command_that_reads_its_configuration_is_interrupted_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")

    def reads(pid: int) -> bool:
        return bool(os.open(tmp_path / "config.toml", os.O_WRONLY))  # waits for the reader

    words = ["-m", "longspan", "train", str(tmp_path / "config.toml")]
    assert interrupted(words, reads, press_in_the_group, signal.SIGTERM) == (143, "", "interrupted by SIGTERM\n")


MOMENTS = [
    (fork_server_of, press_as_timeout_does, signal.SIGTERM),
    pytest.param(a_rank_is_there, press_in_the_group, signal.SIGINT, marks=pytest.mark.whole),
    pytest.param(a_rank_is_there, subprocess.Popen.send_signal, signal.SIGTERM, marks=pytest.mark.whole),
]


@on_linux
@pytest.mark.parametrize(("when", "press", "number"), MOMENTS)
def test_a_signal_while_processes_start_ends_them_in_one_line(
    when: Callable[[int], object], press: Any, number: signal.Signals, tmp_path: Path
) -> None:
    config = small_config(tmp_path)
    keys = {"data.path": config.data.path, "run.dir": config.run.dir, "evaluation.context_parallel_size": 2}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    done = interrupted(["-m", "longspan", "train", "--world", "2", *words], when, press, number)
    assert done == (128 + number, "", f"interrupted by {number.name}\n")


@on_linux
def test_processes_of_torchrun_are_found_beside_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(os, "getppid", os.getpid)
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    ranks = [subprocess.Popen(waiting, stdin=subprocess.PIPE, env={**os.environ, "RANK": str(i)}) for i in range(2)]
    numbers = {i: process.pid for i, process in enumerate(ranks)}
    try:
        deadline = time.monotonic() + 60
        while processes_of_torchrun() != numbers:  # a process has the variables of this one until it runs its command
            assert time.monotonic() < deadline
        read_bytes = Path.read_bytes

        def read_of_others(path: Path) -> bytes:
            if path.parent.name == str(ranks[0].pid):
                raise FileNotFoundError(path)
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", read_of_others)
        assert processes_of_torchrun() == {1: ranks[1].pid}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
