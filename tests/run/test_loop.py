"""The loop of a run: signals, and steps prepared ahead."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from longspan.config.sections import RunConfig
from longspan.data.step_order import StepOrder
from longspan.plan import AsyncPlanner, Plan
from longspan.run.run_data import TrainingRun
from longspan.testing import run_ranks
from longspan.train.step_end import StepEnd
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
)
from tests.run.runs.homes import ALONE, lines_of
from tests.train.small import small_config, train_rank

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


STOPS = [
    (LOCAL, to_group, signal.SIGUSR2, 75),
    (LOCAL, to_rank, signal.SIGUSR1, 75),
    (LOCAL, to_launcher, signal.SIGHUP, 75),
    (TORCHRUN, to_rank, signal.SIGUSR1, 1),  # torchrun's own, where any rank ends with another status than 0
    (TORCHRUN, to_launcher, signal.SIGHUP, 1),
]


@linux
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


def receive_on_rank_1(rank: int, configs: list[RunConfig]) -> list[tuple[str, int]]:
    take_step = TrainingRun.take_step

    def take(self: Any, plan: Any, documents: Any, step: int, *host_work: Any) -> Any:
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take_step(self, plan, documents, step, *host_work)

    with mock.patch.object(TrainingRun, "take_step", take):
        results = [train_rank(rank, config, 2) for config in configs]
    return [(result.stopped, result.done) for result in results]


def test_a_signal_on_one_rank_saves_on_all(tmp_path: Path) -> None:
    keys = {"train__steps": 3, "evaluation__every": 0, "evaluation__documents": 0}
    save_on = {"on": ["SIGUSR1"], "off": []}
    configs = [small_config(tmp_path / name, checkpoint__save_signals=on, **keys) for name, on in save_on.items()]
    assert run_ranks(receive_on_rank_1, 2, configs) == [[("", 3), ("SIGUSR1", 2)]] * 2
    assert [saved_steps(tmp_path / name) for name in ("on", "off")] == [[2, 3], [2]]


ABSENT = 2  # documents of one step are not to be had when they are first selected


def test_the_next_step_is_prepared_before_sums_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    plan_inline, select, make_sums = AsyncPlanner._plan_inline, StepOrder.select, StepEnd._split_and_check_sums

    def note_plan(plans: AsyncPlanner, step: int) -> Plan:
        if plans._made_inline is None or plans._made_inline[0] != step:
            events.append(f"plan {step}")
        return plan_inline(plans, step)

    def note_documents(order: StepOrder, corpus: Any, step: int) -> Any:
        events.append(f"documents {step}")
        if step == ABSENT and events.count(f"documents {step}") == 1:
            raise OSError("the disk does not answer")
        return select(order, corpus, step)

    def note_sums(*arguments: Any) -> Any:
        events.append("sums")
        return make_sums(*arguments)

    monkeypatch.setattr(AsyncPlanner, "_plan_inline", note_plan)
    monkeypatch.setattr(StepOrder, "select", note_documents)
    monkeypatch.setattr(StepEnd, "_split_and_check_sums", note_sums)
    lines_of(0, small_config(tmp_path, train__steps=4, evaluation__documents=0, evaluation__every=0, **ALONE), 1)
    events = events[events.index("documents 0") :]
    assert events[: events.index("sums") + 1][-3:] == ["plan 1", "documents 1", "sums"]
    assert [event for event in events if event != "plan 0"] == [
        *("documents 0", "plan 1", "documents 1", "sums"),
        *("plan 2", "documents 2", "sums"),  # an error is left to the step, which selects again
        *("documents 2", "plan 3", "documents 3", "sums"),
        "sums",
    ]
