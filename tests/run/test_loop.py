"""The loop of a run: signals, slow slots, steps prepared ahead, and what a rank that is out of memory says."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from longspan.config.sections import RunConfig
from longspan.data.step_order import StepOrder
from longspan.plan import AsyncPlanner, Plan
from longspan.run import loop
from longspan.run.loop import STEPS, SlowSlots
from longspan.run.run_data import TrainingRun
from longspan.testing import run_ranks
from longspan.train import step as step_module
from longspan.train.step_end import StepEnd
from longspan.train.training import Training
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
    configs = [
        small_config(tmp_path / name, checkpoint__save_signals=on, **keys)
        for name, on in (("on", ["SIGUSR1"]), ("off", []))
    ]
    assert run_ranks(receive_on_rank_1, 2, configs) == [[("", 3), ("SIGUSR1", 2)]] * 2
    assert [saved_steps(tmp_path / name) for name in ("on", "off")] == [[2, 3], [2]]


def train_with_a_slow_slot(rank: int, config: RunConfig) -> str:
    """What is logged of a run in which the second slot's losses take longer, and three steps count instead of 20."""

    def sums(term: Any) -> list[float]:
        term._seconds = 1e-3 * term._rows * (1.25 if rank == 1 else 1.0)
        return [term._seconds, float(term._rows)]

    with (
        mock.patch.object(loop, "STEPS", 3),
        mock.patch.object(Training, "time_slots", True),
        mock.patch.object(step_module, "LEAST_LOGITS", 1),
        mock.patch.object(step_module.SlotPaceTerm, "sums", sums),
    ):
        return lines_of(rank, config, 2)


def test_a_slow_slot_is_named_once_with_its_host(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=5, evaluation__every=0, evaluation__documents=0)
    log = run_ranks(train_with_a_slow_slot, 2, config, timeout=120)[0]
    assert log.count("slower than its plan") == 1
    assert "slot 1 (rank 1, host " in log and "has been 25 % slower than its plan for 3 steps" in log


def test_a_slot_is_slow_by_the_median_of_its_steps() -> None:
    slots = SlowSlots()
    for _ in range(STEPS - 1):
        slots.note_ratio(1.11)
        slots.note_ratio(None)
    assert not slots.is_slow
    slots.note_ratio(5.0)
    assert slots.is_slow
    for _ in range(STEPS):
        slots.note_ratio(1.09)
    assert not slots.is_slow


ABSENT = 2  # documents of one step are not to be had when they are first selected


def test_the_next_step_is_prepared_before_the_sums_of_a_step_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()
    plan_inline, select, make_sums = AsyncPlanner._plan_inline, StepOrder.select, StepEnd._split_sums

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
    monkeypatch.setattr(StepEnd, "_split_sums", note_sums)
    lines_of(0, small_config(tmp_path, train__steps=4, evaluation__documents=0, evaluation__every=0, **ALONE), 1)
    events = events[events.index("documents 0") :]
    assert events[: events.index("sums") + 1][-3:] == ["plan 1", "documents 1", "sums"]
    assert [event for event in events if event != "plan 0"] == [
        *("documents 0", "plan 1", "documents 1", "sums"),
        *("plan 2", "documents 2", "sums"),  # an error is left to the step, which selects again
        *("documents 2", "plan 3", "documents 3", "sums"),
        "sums",
    ]


SHORT = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes"


def run_short(rank: int, configs: list[RunConfig]) -> list[str]:
    take_step, notes = TrainingRun.take_step, list[str]()

    def take(run: TrainingRun, plan: Any, documents: Any, step: int, *host_work: Any) -> Any:
        if step == 1:
            raise RuntimeError(SHORT)
        return take_step(run, plan, documents, step, *host_work)

    for config in configs:
        with mock.patch.object(TrainingRun, "take_step", take), pytest.raises(RuntimeError) as raised:
            train_rank(rank, config, 1)
        notes += raised.value.__notes__
    return notes


def sizes_of(text: str) -> dict[str, list[str]]:
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("part "))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start + 1 : start + 10]]
    return {name: cells for name, *cells in rows}


def test_the_plan_of_memory_stands_next_to_what_was_measured(tmp_path: Path) -> None:
    keys = {"evaluation__every": 0, **ALONE, "context__max_tokens_per_slot": 64}
    # With more room gradients stay whole through a step, and the plan counts them as gathered.
    planned_keys = {"train__device_memory_limit": 20 << 20, **keys}
    configs = [small_config(tmp_path / "planned", **planned_keys), small_config(tmp_path, **keys)]
    ((planned, unplanned),) = run_ranks(run_short, 1, configs)
    for note in (planned, unplanned):
        assert "rank 0 was out of memory in step 2: RuntimeError" in note and "can't allocate memory" in note
        sizes = sizes_of(note)
        assert {"weights", "gradients", "states", "most at one time"} <= set(sizes), note
        assert sizes["states"][-1] != "0 B" and sizes["weights"][-1] != "0 B", "a step was taken"
    for part in ("weights", "gradients", "states"):
        planned_size, measured = (float(cell.removesuffix(" MiB")) for cell in sizes_of(planned)[part])
        assert measured == pytest.approx(planned_size, rel=0.01), planned
    assert "kept" in sizes_of(planned) and "no plan of memory" in unplanned


def test_other_errors_get_no_note() -> None:
    run: Any = None  # which is not looked at
    with pytest.raises(RuntimeError, match="shapes") as raised, loop.explain_out_of_memory(run, 1):
        raise RuntimeError("shapes do not match")
    assert not getattr(raised.value, "__notes__", [])


def test_a_gpu_gets_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[str]()
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    run: Any = type("Run", (), {"dir": tmp_path})
    run.world = type("World", (), {"device": torch.device("cuda", 0), "rank": 3})
    text = loop._write_allocator_snapshot(run)
    assert written == [str(tmp_path / "memory" / "rank-3.pickle")] and written[0] in text


def test_a_cpu_has_no_column_of_its_allocator() -> None:
    watch = loop.AllocatorWatch(torch.device("cpu"))
    assert watch.count_step_retries() == {} and watch.warning_once(0.0) == ""


def test_an_allocator_that_gives_memory_back_is_counted_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (5, 0, 2, 3, 4, 3, 0)
    totals, lines = iter([0, *(sum(steps[: i + 1]) for i in range(len(steps)))]), list[str]()
    monkeypatch.setattr(loop, "allocator_retries", lambda _: next(totals))
    monkeypatch.setattr(loop, "peak_memory_bytes", lambda _: 125 << 30)
    monkeypatch.setattr(loop, "peak_reserved_bytes", lambda _: 137 << 30)
    watch = loop.AllocatorWatch(torch.device("cuda", 0))
    for retries in steps:
        assert watch.count_step_retries() == {"allocator_retries": retries} and watch.of_step == retries
        lines.append(watch.warning_once(retries))
    assert [bool(line) for line in lines] == [False] * 4 + [True] + [False] * 2
    assert lines[4] == (
        "the GPU's allocator ran out of memory 3 times a step: each time it waits for the GPU, gives back what is free "
        "and takes it again (137 GiB taken at most, 125 GiB in use); a lower train.device_memory_limit leaves it room "
        "(docs/memory.md)"
    )
