"""The seconds of a start by part; attention's kernels compiled ahead: by whom, when not, and where they are noted."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from longspan.config.sections import ModelConfig, RunConfig
from longspan.train.start import gpu_imports, kernels_ahead, start_times
from longspan.train.start.kernels_ahead import CACHE, HOPPER, compile_kernels_ahead
from longspan.train.start.start_times import Starts

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-0.6b"))


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[mock.Mock]]:
    started = list[mock.Mock]()

    def start(*_: Any, environment: dict[str, str], own_session: bool) -> mock.Mock:
        started.append(mock.Mock(environment=environment))
        return started[-1]

    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setattr(kernels_ahead, "Worker", start)
    monkeypatch.setattr(kernels_ahead, "version", lambda package: "1")
    yield started
    for worker in started:
        assert [name for name, _, _ in worker.mock_calls] == ["send", "end", "connection.close"]


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([103.0, 103.5, 106.0])
    monkeypatch.setattr(start_times.time, "time", lambda: next(times))
    parts = Starts(_last=100.0)
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

    monkeypatch.setattr(gpu_imports, "import_module", import_module)
    thread = gpu_imports.begin_gpu_imports(1, compiled=False)
    turns.append(sys.getswitchinterval())
    go_on.set()
    thread.join()
    assert turns == [pytest.approx(gpu_imports.TURN)] * (1 + len(gpu_imports.GPU_MODULES))
    assert sys.getswitchinterval() == usual > gpu_imports.TURN


IMPORTS_BESIDE = """
from longspan.train.start import gpu_imports
gpu_imports.import_module = str  # what the thread imports beside its own needs takes seconds
gpu_imports.begin_gpu_imports(1, compiled=True)
from longspan.run.loop import train
"""


@pytest.mark.whole
def test_a_rank_imports_transformers_whole_beside_that_thread() -> None:
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    subprocess.run([sys.executable, "-c", IMPORTS_BESIDE], env=environment, timeout=100, check=True)


@pytest.mark.parametrize(("slots", "kinds"), [(1, ["1-1-1", "0-1-1"]), (2, ["1-1-1", "1-0-1", "0-1-1", "0-0-1"])])
def test_each_kind_has_a_worker_without_a_gpu(
    slots: int, kinds: list[str], workers: list[mock.Mock], tmp_path: Path
) -> None:
    with compile_kernels_ahead(CONFIG, slots, HOPPER, 132, backward=True):
        requests = [worker.send.call_args.args[0] for worker in workers]
        assert [kind.name for _, kind, _ in requests] == kinds
        assert all(worker.environment["CUDA_VISIBLE_DEVICES"] == "" and not worker.end.called for worker in workers)
    requests[0][2].touch()  # in the cache now
    with compile_kernels_ahead(CONFIG, slots, HOPPER, 132, backward=True):
        assert len(workers) == len(kinds) + len(kinds) - 1
    assert requests[0][2].parent == tmp_path


def test_nothing_is_compiled_ahead_elsewhere(workers: list[mock.Mock], monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = replace(CONFIG, context=replace(CONFIG.context, attention_kernel="cudnn"))
    for config, capability, cache in ((CONFIG, (10, 0), True), (cudnn, HOPPER, True), (CONFIG, HOPPER, False)):
        if not cache:
            monkeypatch.delenv(CACHE)
        with compile_kernels_ahead(config, 2, capability, 132, backward=True):
            assert not workers
