"""What a run watches: slow slots, retries of an allocator, and what a rank that is out of memory says."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from longspan.config.sections import RunConfig
from longspan.run import watches
from longspan.run.run_data import TrainingRun
from longspan.run.watches import STEPS, SlowSlots
from longspan.testing import run_ranks
from longspan.train.terms import slot_pace
from longspan.train.training import Training
from tests.run.runs.homes import ALONE, lines_of
from tests.train.small import small_config, train_rank


def train_with_a_slow_slot(rank: int, config: RunConfig) -> str:
    """What is logged of a run in which the second slot's losses take longer, and three steps count instead of 20."""

    def sums(term: Any) -> list[float]:
        term._seconds = 1e-3 * term._rows * (1.25 if rank == 1 else 1.0)
        return [term._seconds, float(term._rows)]

    with (
        mock.patch.object(watches, "STEPS", 3),
        mock.patch.object(Training, "time_slots", True),
        mock.patch.object(slot_pace, "LEAST_LOGITS", 1),
        mock.patch.object(slot_pace.SlotPaceTerm, "sums", sums),
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
        slots.add_ratio(1.11)
        slots.add_ratio(None)
    assert not slots.is_slow
    slots.add_ratio(5.0)
    assert slots.is_slow
    for _ in range(STEPS):
        slots.add_ratio(1.09)
    assert not slots.is_slow


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
    with pytest.raises(RuntimeError, match="shapes") as raised, watches.explain_out_of_memory(run, 1):
        raise RuntimeError("shapes do not match")
    assert not getattr(raised.value, "__notes__", [])


def test_a_gpu_gets_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[str]()
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    run: Any = type("Run", (), {"dir": tmp_path})
    run.world = type("World", (), {"device": torch.device("cuda", 0), "rank": 3})
    text = watches._write_allocator_snapshot(run)
    assert written == [str(tmp_path / "memory" / "rank-3.pickle")] and written[0] in text


def test_a_cpu_has_no_column_of_its_allocator() -> None:
    watch = watches.AllocatorWatch(torch.device("cpu"))
    assert watch.count_step_retries() == {} and watch.take_warning(0.0) == ""


def test_an_allocator_that_gives_memory_back_is_counted_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (5, 0, 2, 3, 4, 3, 0)
    totals, lines = iter([0, *(sum(steps[: i + 1]) for i in range(len(steps)))]), list[str]()
    monkeypatch.setattr(watches, "allocator_retries", lambda _: next(totals))
    monkeypatch.setattr(watches, "peak_memory_bytes", lambda _: 125 << 30)
    monkeypatch.setattr(watches, "peak_reserved_bytes", lambda _: 137 << 30)
    watch = watches.AllocatorWatch(torch.device("cuda", 0))
    for retries in steps:
        assert watch.count_step_retries() == {"allocator_retries": retries} and watch.of_step == retries
        lines.append(watch.take_warning(retries))
    assert [bool(line) for line in lines] == [False] * 4 + [True] + [False] * 2
    assert lines[4] == (
        "the GPU's allocator ran out of memory 3 times a step: each time it waits for the GPU, gives back what is free "
        "and takes it again (137 GiB taken at most, 125 GiB in use); a lower train.device_memory_limit leaves it room "
        "(docs/memory.md)"
    )
