"""Signals and lost ranks of a run in processes of its own: what is saved, whether it goes on, and its exit status."""

import os
import pty
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from longspan.testing import run_ranks
from tests.faults.live_run import (
    LOCAL,
    TORCHRUN,
    Process,
    last_step,
    saved_steps,
    started,
    to_group,
    to_launcher,
    to_rank,
    wait_for,
)
from tests.train.small import small_config, train_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_closed_terminal_stops_a_run_that_a_signal_has_saved(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    shown = list[bytes]()

    def read() -> None:
        with suppress(OSError):
            while closing.is_set() is False:
                shown.append(os.read(controller, 4096))

    closing = threading.Event()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with started(tmp_path, LOCAL, terminal, run__save_on=["SIGUSR1"], run__keep_checkpoints=0) as process:
        os.close(terminal)
        for count in (1, 2):  # neither press stops the run, or kills its ranks
            process.send_signal(signal.SIGUSR1)
            os.killpg(process.pid, signal.SIGUSR1)  # as Slurm does
            steps = wait_for(lambda: (s := saved_steps(tmp_path))[count - 1 :] and s, process, tmp_path / "log")  # noqa: B023
            assert len(steps) == count
            wait_for(lambda: last_step(tmp_path) > steps[-1] + 3, process, tmp_path / "log")  # noqa: B023
            time.sleep(1.1)
        assert saved_steps(tmp_path) == steps, "one checkpoint a signal"
        closing.set()  # the reader ends at the next output, and then the terminal is closed
        reader.join()
        os.close(controller)
        assert process.wait(60) == 75
    last = last_step(tmp_path)
    assert saved_steps(tmp_path) == [*steps, last] and (tmp_path / "run" / "report.html").is_file()
    text = b"".join(shown).decode()
    assert all(f"SIGUSR1 was received: step {step} is saved, and the run goes on" in text for step in steps)


STOPS = [
    (LOCAL, to_launcher, signal.SIGUSR1, 75),
    (LOCAL, to_group, signal.SIGUSR2, 75),
    (LOCAL, to_rank, signal.SIGUSR1, 75),
    (LOCAL, to_launcher, signal.SIGHUP, 75),
    (TORCHRUN, to_rank, signal.SIGUSR1, 1),  # torchrun's own, where any rank ends with another status than 0
    (TORCHRUN, to_launcher, signal.SIGHUP, 1),
]


@pytest.mark.whole
@pytest.mark.parametrize(("words", "press", "number", "status"), STOPS)
def test_a_signal_saves_and_stops(
    words: tuple[str, ...], press: Callable[[Process, int], None], number: signal.Signals, status: int, tmp_path: Path
) -> None:
    with started(tmp_path, words) as process:
        press(process, number)
        assert process.wait(60) == status, (tmp_path / "log").read_text()
    last = last_step(tmp_path)
    log = (tmp_path / "log").read_text()
    assert saved_steps(tmp_path) == [last], log
    assert f"stopped by {number.name} after step {last} of 100000" in log
    assert "was killed" not in log and "leaked" not in log


@pytest.mark.whole
@pytest.mark.parametrize("words", [LOCAL, TORCHRUN])
def test_a_lost_rank_is_named_and_ends_the_run_with_3(words: tuple[str, ...], tmp_path: Path) -> None:
    with started(tmp_path, words, train__save_every=1) as process:
        to_rank(process, signal.SIGKILL)
        status = process.wait(60)
    log = (tmp_path / "log").read_text()
    if words is LOCAL:
        assert status == 3 and re.search(r"error: rank [01] of 2 was killed by signal 9 \(SIGKILL\)", log), log
    else:  # whose agent reports the status of the rank that was killed
        assert status == 1 and "exitcode  : -9" in log, log
    assert saved_steps(tmp_path)


def receive_on_rank_1(rank: int, config: Any) -> tuple[str, int]:
    """A run in which rank 1 receives SIGUSR1 in its second step."""
    from longspan.run.run_data import TrainingRun

    take = TrainingRun.take_step

    def take_and_receive(self: Any, plan: Any, documents: Any, step: int, *meanwhile: Any) -> Any:
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take(self, plan, documents, step, *meanwhile)

    TrainingRun.take_step = take_and_receive
    result = train_rank(rank, config, 2)
    return result.stopped, result.done


@pytest.mark.parametrize("save_on", [["SIGUSR1"], []])
def test_a_signal_on_one_rank_saves_on_all(save_on: list[str], tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=4, train__eval_every=0, run__save_on=save_on)
    results = run_ranks(receive_on_rank_1, 2, config)
    assert results == [("", 4)] * 2 if save_on else [("SIGUSR1", 2)] * 2
    assert saved_steps(tmp_path) == ([2, 4] if save_on else [2])
