"""A rank that is out of memory in a step says what the plan of memory had and what was measured, and keeps it."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from longspan.run import loop
from longspan.run.run_data import TrainingRun
from longspan.testing import run_ranks
from tests.train.small import small_config, train_rank

SHORT = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes"
ONE = {"context__context_parallel_size": 1, "context__eval_context_parallel_size": 1, "train__eval_every": 0}


def run_short(rank: int, config: Any, error: type[RuntimeError]) -> list[str]:
    """A run whose second step finds no memory; returns the notes of its error."""
    take_step = TrainingRun.take_step

    def take(run: TrainingRun, plan: Any, documents: Any, step: int, *meanwhile: Any) -> Any:
        if step == 1:
            raise error(SHORT)
        return take_step(run, plan, documents, step, *meanwhile)

    with mock.patch.object(TrainingRun, "take_step", take), pytest.raises(error) as raised:
        train_rank(rank, config, 1)
    return list(getattr(raised.value, "__notes__", []))


def sizes_of(text: str) -> dict[str, list[str]]:
    """The cells of the table by the name of the part."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("part "))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start + 1 : start + 10]]
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("planned", [True, False], ids=["with a plan", "without"])
def test_the_plan_of_memory_stands_next_to_what_was_measured(tmp_path: Path, planned: bool) -> None:
    keys = {"train__memory_bytes": 1 << 32} if planned else {}
    config = small_config(tmp_path, **ONE, **keys)
    ((note,),) = run_ranks(run_short, 1, config, RuntimeError)
    assert "rank 0 was out of memory in step 2: RuntimeError" in note and "can't allocate memory" in note
    sizes = sizes_of(note)
    assert {"weights", "gradients", "states", "most at one time"} <= set(sizes), note
    assert sizes["states"][-1] != "0 B" and sizes["weights"][-1] != "0 B", "a step was taken"
    if planned:
        for part in ("weights", "gradients", "states"):
            planned_size, measured = (float(cell.removesuffix(" MiB")) for cell in sizes[part])
            assert measured == pytest.approx(planned_size, rel=0.01), note
        assert "kept" in sizes
    else:
        assert "no plan of memory" in note


def test_other_errors_get_no_note(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes") as raised, loop.explain_out_of_memory(_IDLE, 1):
        raise RuntimeError("shapes do not match")
    assert not getattr(raised.value, "__notes__", [])


_IDLE: Any = None  # no run is looked at for an error that is not about memory


def test_a_gpu_gets_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[str]()
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    run: Any = type("Run", (), {"dir": tmp_path})
    run.world = type("World", (), {"device": torch.device("cuda", 0), "rank": 3})
    text = loop._write_snapshot(run)
    assert written == [str(tmp_path / "memory" / "rank-3.pickle")] and written[0] in text


def count_up(monkeypatch: pytest.MonkeyPatch, *retries: int) -> loop.AllocatorWatch:
    """A watch of a GPU whose allocator counts so many retries in one step after another."""
    totals = iter([0, *(sum(retries[: i + 1]) for i in range(len(retries)))])
    monkeypatch.setattr(loop, "allocator_retries", lambda _: next(totals))
    monkeypatch.setattr(loop, "peak_memory_bytes", lambda _: 125 << 30)
    monkeypatch.setattr(loop, "peak_reserved_bytes", lambda _: 137 << 30)
    return loop.AllocatorWatch(torch.device("cuda", 0))


def test_an_allocator_that_gives_memory_back_is_counted_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (5, 0, 2, 3, 4, 3, 0)
    watch, lines = count_up(monkeypatch, *steps), list[str]()
    for retries in steps:
        assert watch.columns() == {"allocator_retries": retries} and watch.of_step == retries
        lines.append(watch.warning(retries))
    assert [bool(line) for line in lines] == [False] * 4 + [True] + [False] * 2
    assert lines[4] == (
        "the GPU's allocator ran out of memory 3 times a step: each time it waits for the GPU, gives back what is free "
        "and takes it again (137 GiB taken at most, 125 GiB in use); a lower "
        "train.memory_bytes leaves it room (docs/memory.md)"
    )


def test_a_cpu_has_no_column_of_its_allocator() -> None:
    watch = loop.AllocatorWatch(torch.device("cpu"))
    assert watch.columns() == {} and watch.warning(0.0) == ""
