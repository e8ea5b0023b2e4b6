"""The seconds of a start by part; attention's kernels compiled ahead: by whom, when not, and where they are noted."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.config.sections import ModelConfig, RunConfig
from longspan.train import kernels_ahead, starts
from longspan.train.kernels_ahead import CACHE, HOPPER, compile_ahead
from longspan.train.starts import Starts

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-0.6b"))


class WorkerRecord:
    """Stands in for a worker: what it was sent, and whether it was ended."""

    def __init__(self, serve: Any, *, environment: dict[str, str], own_session: bool) -> None:
        self.environment, self.requests, self.ended = environment, list[Any](), False
        self.connection = self

    def send(self, request: Any) -> None:
        self.requests.append(request)

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        assert self.ended


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WorkerRecord]]:
    started = list[WorkerRecord]()

    def start(*args: Any, **kwargs: Any) -> WorkerRecord:
        started.append(WorkerRecord(*args, **kwargs))
        return started[-1]

    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setattr(kernels_ahead, "Worker", start)
    monkeypatch.setattr(kernels_ahead, "version", lambda package: "1")
    yield started
    assert all(worker.ended for worker in started)


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([103.0, 103.5, 106.0])
    monkeypatch.setattr(starts.time, "time", lambda: next(times))
    parts = Starts(100.0)
    for name in ("processes", "model", "processes"):
        parts.end_part(name)
    assert str(parts) == "ready after 6.0 s: processes 5.5, model 0.5"
    assert parts.to_json() == {"processes": 5.5, "model": 0.5, "total": 6.0}


def test_modules_that_are_absent_are_left_to_who_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "GPU_MODULES", ("longspan.no_such_module", "this"))
    thread = starts.begin_gpu_imports(1, compiled=False)
    thread.join()
    assert threading.current_thread() is not thread and "this" in sys.modules


def test_threads_take_short_turns_while_one_of_them_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, turns, go_on = sys.getswitchinterval(), list[float](), threading.Event()
    monkeypatch.setattr(starts, "import_module", lambda name: (go_on.wait(10), turns.append(sys.getswitchinterval())))
    thread = starts.begin_gpu_imports(1, compiled=False)
    turns.append(sys.getswitchinterval())
    go_on.set()
    thread.join()
    assert turns == [pytest.approx(starts.TURN)] * (1 + len(starts.GPU_MODULES))
    assert sys.getswitchinterval() == usual > starts.TURN


@pytest.mark.parametrize(("slots", "kinds"), [(1, ["1-1-1", "0-1-1"]), (2, ["1-1-1", "1-0-1", "0-1-1", "0-0-1"])])
def test_each_kind_has_a_worker_without_a_gpu(
    slots: int, kinds: list[str], workers: list[WorkerRecord], tmp_path: Path
) -> None:
    with compile_ahead(CONFIG, slots, HOPPER, 132, backward=True):
        requests = [request for worker in workers for request in worker.requests]
        assert [kind.name for _, kind, _ in requests] == kinds
        assert all(worker.environment["CUDA_VISIBLE_DEVICES"] == "" and not worker.ended for worker in workers)
    requests[0][2].touch()  # in the cache now
    workers_before = len(workers)
    with compile_ahead(CONFIG, slots, HOPPER, 132, backward=True):
        assert len(workers) - workers_before == len(kinds) - 1
    assert requests[0][2].parent == tmp_path


def test_nothing_is_compiled_ahead_elsewhere(workers: list[WorkerRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = replace(CONFIG, context=replace(CONFIG.context, attention_kernel="cudnn"))
    for config, capability, cache in ((CONFIG, (10, 0), True), (cudnn, HOPPER, True), (CONFIG, HOPPER, False)):
        if not cache:
            monkeypatch.delenv(CACHE)
        with compile_ahead(config, 2, capability, 132, backward=True):
            assert not workers


def test_kernels_are_noted_by_the_model_and_the_versions(
    workers: list[WorkerRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    digests = {
        kernels_ahead._model_digest(ModelConfig(preset="qwen3-0.6b")),
        kernels_ahead._model_digest(ModelConfig(path=str(tmp_path))),
    }
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 128}))
    digests.add(kernels_ahead._model_digest(ModelConfig(path=str(tmp_path))))
    monkeypatch.setattr(kernels_ahead, "version", lambda package: "2")
    digests.add(kernels_ahead._model_digest(ModelConfig(path=str(tmp_path))))
    assert len(digests) == 4 and "" not in digests
