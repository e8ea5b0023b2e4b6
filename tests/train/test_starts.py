"""The seconds of a start by part, and the thread that imports meanwhile."""

import sys
import threading

import pytest

from longspan.train import starts
from longspan.train.starts import Starts


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([103.0, 103.5, 106.0])
    monkeypatch.setattr(starts.time, "time", lambda: next(times))
    parts = Starts(100.0)
    for name in ("processes", "model", "processes"):
        parts.end_part(name)
    assert str(parts) == "ready after 6.0 s: processes 5.5, model 0.5"
    assert parts.to_json() == {"processes": 5.5, "model": 0.5, "total": 6.0}


def test_threads_take_short_turns_while_one_of_them_imports_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, turns, go_on = sys.getswitchinterval(), list[float](), threading.Event()

    def import_module(name: str) -> None:
        go_on.wait(10)
        turns.append(sys.getswitchinterval())
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(starts, "import_module", import_module)
    thread = starts.begin_gpu_imports(1, compiled=False)
    turns.append(sys.getswitchinterval())
    go_on.set()
    thread.join()
    assert turns == [pytest.approx(starts.TURN)] * (1 + len(starts.GPU_MODULES))
    assert sys.getswitchinterval() == usual > starts.TURN
