"""Ranks come back with results, or the caller hears which one failed, how, and where."""

import ctypes
import gc
import os
import pickle
import subprocess
import sys
import time
import traceback
from multiprocessing import Pipe, util
from pathlib import Path
from unittest import mock

import pytest
import torch

from longspan.errors import CommError, RankLostError
from longspan.launch import launch, rank_process
from longspan.launch.launch import LocalRank, LocalRanks
from longspan.launch.worker import Worker
from longspan.testing import run_ranks


def leave_a_lock(rank: int, folder: Path) -> None:
    """What Python unlinks when a process ends, as tqdm's lock is."""
    util.Finalize(None, (folder / str(rank)).touch, exitpriority=0)


def describe(rank: int, folder: Path, *args: object) -> tuple[object, ...]:
    leave_a_lock(rank, folder)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert not torch.distributed.is_initialized()
    assert gc.isenabled() and gc.get_freeze_count() > 100_000, "collections pass over what the fork server imported"
    large = torch.full((1_000_000,), rank, dtype=torch.float64)
    return rank, args, [os.environ[name] for name in names], torch.get_num_threads(), large


def test_results_come_back_by_rank(tmp_path: Path) -> None:
    n = 3
    for rank, (*result, large) in enumerate(run_ranks(describe, n, tmp_path, "a", 2)):
        assert result == [rank, ("a", 2), [str(rank), str(rank), str(n), str(n), "127.0.0.1"], 1]
        assert torch.equal(large, torch.full((1_000_000,), rank, dtype=torch.float64))
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, range(n))} and gc.isenabled()


def test_a_request_to_a_worker_that_is_gone_leaves_no_buffer_in_its_error() -> None:
    """A view of a BytesIO would be told by Python 3.13, when the error is collected in a cycle."""
    connection, other = Pipe()
    other.close()
    with pytest.raises(OSError) as caught:
        Worker.send(mock.Mock(connection=connection), "request")
    values = [value for frame, _ in traceback.walk_tb(caught.tb) for value in frame.f_locals.values()]
    assert {type(value.obj) for value in values if isinstance(value, memoryview)} <= {bytes}


USED_AT_IMPORT = """
import os, torch
open(os.path.join(os.environ["FOLDER"], f"{__name__} {os.getpid()}"), "w").close()
if not hasattr(torch._C, "_cuda_getDeviceCount"):  # a build for CPUs goes as far as one for GPUs
    torch._C._cuda_getDeviceCount = torch.cuda._cudart = "there"
try:
    torch.cuda.get_device_properties(0)
except (AttributeError, TypeError, RuntimeError):  # there is no GPU
    del torch._C._cuda_getDeviceCount
"""
IMPORTS_CUDA = """
import os, sys
from importlib import import_module
from longspan.launch import fork_server
from longspan.launch.launch import run_local
from longspan.launch.worker import Worker
from longspan.plan.plan_ahead import serve_plans

def look(rank, ahead, imported):
    import torch
    usable, preloaded = not torch.cuda._is_in_bad_fork(), ahead in sys.modules
    import_module(imported)
    where = os.environ["RANK"], torch.get_num_threads(), os.getcwd()
    return os.getpid(), usable, preloaded, rank, *where

def leave(rank):
    os._exit(7)

if __name__ == "__main__":
    fork_server.PRELOAD = (*fork_server.PRELOAD[:4], sys.argv[1])
    Worker(serve_plans).end(patience=60)
    print(*run_local(look, 1, sys.argv[1:], threads=1)[0])
    try:
        run_local(leave, 1)
    except BaseException as error:
        print(type(error).__name__, error)
"""


whole = pytest.mark.whole


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("as_transformers_does", "torchao"),
        pytest.param("transformers.modeling_utils", "torchao", marks=whole),
        pytest.param("other", "other", marks=whole),
    ],
)
def test_an_import_of_the_fork_server_uses_no_cuda(module: str, name: str, tmp_path: Path) -> None:
    """transformers imports torchao, which uses CUDA as it is imported, where it is installed: the daily row does the
    same without transformers' other imports. After another module that uses CUDA ranks begin anew."""
    site, folder, strange = tmp_path / "site", tmp_path / "folder", tmp_path / "strange"
    for path in (folder, strange, site / "torchao-0.18.0.dist-info", site / "torchao/prototype/safetensors"):
        path.mkdir(parents=True)
    (site / "torchao-0.18.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.18.0\n")
    for path in (site / "torchao/__init__.py", site / "other.py"):
        path.write_text(USED_AT_IMPORT)
    (site / "as_transformers_does.py").write_text("try:\n    import torchao\nexcept ImportError:\n    pass\n")
    (tmp_path / "program.py").write_text(IMPORTS_CUDA)
    for shadowed in (*sys.stdlib_module_names, "torch", "numpy", "longspan"):  # no process imports these
        (strange / f"{shadowed}.py").write_text(f"open({str(tmp_path / 'shadows')!r}, 'a').write(__name__ + ' ')")
    search = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "../program.py", module, name],
        cwd=strange,
        env={**os.environ, "PYTHONPATH": search, "FOLDER": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not (tmp_path / "shadows").exists(), (tmp_path / "shadows").read_text()
    assert done.returncode == 0, done.stderr
    of_rank, failure = done.stdout.splitlines()
    pid, *words = of_rank.split()
    anew = name == "other"
    assert words == ["True", str(not anew), "0", "0", "1", str(strange)]
    assert failure == "RankLostError rank 0 of 1 left with exit code 7 before it answered"
    assert done.stderr.count("ranks take longer to start") == 2 * anew
    assert len(imported := [path.name.split() for path in folder.iterdir()]) == 1 + anew and [name, pid] in imported


class AwkwardError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


FAILURES = {  # how rank 1 fails -> the error's type and what it says
    "value": (ValueError, "(?m)^boom$"),
    "awkward": (CommError, "rank 1 failed with AwkwardError: 3 and 4"),
    "leave": (RankLostError, "rank 1 of 3 left with exit code 7"),
    "fault": (RankLostError, r"rank 1 of 3 was killed by signal 11 \(SIGSEGV\)"),
}


def fail(rank: int, how: str, folder: Path) -> None:
    leave_a_lock(rank, folder)
    if rank != 1:
        return
    if how == "value":
        raise ValueError("boom")
    if how == "awkward":
        raise AwkwardError(3, 4)
    if how == "fault":
        ctypes.string_at(0)
    os._exit(7)


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_rank_is_named(how: str, tmp_path: Path) -> None:
    kind, message = FAILURES[how]
    with pytest.raises(kind, match=message) as raised:
        run_ranks(fail, 3, how, tmp_path)
    assert raised.type is kind
    died = how in ("leave", "fault")
    assert {path.name for path in tmp_path.iterdir()} == ({"0", "2"} if died else {"0", "1", "2"})
    if not died:
        assert isinstance(raised.value.__cause__, rank_process.RankError)
        assert "on rank 1" in str(raised.value.__cause__) and "in fail" in str(raised.value.__cause__)
    if how == "fault":
        assert "in fail" in raised.value.__notes__[0]


def linger_somewhere(rank: int) -> None:
    if rank != 1:
        time.sleep(60)


def test_a_time_out_says_which_ranks_still_ran_and_where() -> None:
    before = time.monotonic()
    with pytest.raises(CommError, match=r"after 1.5 seconds, rank\(s\) 0, 2 of 3 were still running") as raised:
        run_ranks(linger_somewhere, 3, timeout=1.5)
    assert "in linger_somewhere" in str(raised.value)
    assert time.monotonic() - before < 50


def fail_or_linger(rank: int) -> None:
    if rank == 0:
        raise ValueError("boom")
    time.sleep(60)


def test_the_others_get_a_grace_and_are_then_killed() -> None:
    before = time.monotonic()
    with pytest.raises(ValueError, match="boom"):
        launch.run_local(fail_or_linger, 2, grace=0.5)
    assert time.monotonic() - before < 50


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommError, match="cannot be sent to other processes"):
        run_ranks(lambda rank: rank, 2)
    with pytest.raises(CommError, match="0 ranks were asked for"):
        run_ranks(describe, 0)

    def main(rank: int) -> None:
        raise AssertionError("it is found")

    main.__qualname__ = "main"  # as of a function below `if __name__ == "__main__":`, which ranks do not find
    monkeypatch.setattr(sys.modules[__name__], "main", main, raising=False)
    below = (
        r"does not find what it shall run \(Can't get attribute 'main' on .*; define it at the top of its module, and"
    )
    with pytest.raises(CommError, match=below):
        run_ranks(main, 1)


AHEAD = """
import os, sys, time
from multiprocessing import forkserver
from longspan.launch import fork_server

fork_server.PRELOAD = ("torch",)

def environment(rank):
    return os.getppid(), os.environ.get("LONGSPAN_TEST"), "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ

if __name__ == "__main__":
    with fork_server.import_for_ranks({"LONGSPAN_TEST": "imports"}):
        pid = forkserver._forkserver._forkserver_pid
        variables, begun = {"LONGSPAN_TEST=imports", "PYTORCH_NVML_BASED_CUDA_CHECK=1"}, []
        for _ in range(100):  # the file is incomplete while the process begins
            begun = open(f"/proc/{pid}/environ").read().split(chr(0))
            if variables <= {*begun}:
                break
            time.sleep(0.05)
        assert variables <= {*begun}, begun
        assert not {"torch", "numpy", "transformers"} & set(sys.modules), "the launcher imports before its server"
        from longspan.launch.launch import run_local
        assert run_local(environment, 2) == [(pid, None, False)] * 2
    assert not os.path.exists(f"/proc/{pid}"), "the server outlives its command"
    try:
        with fork_server.import_for_ranks({}):
            pid = forkserver._forkserver._forkserver_pid
            raise ValueError("of a flag")
    except ValueError:
        assert not os.path.exists(f"/proc/{pid}"), "the server outlives an error"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_fork_server_imports_ahead_and_ends_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "ahead.py").write_text(AHEAD)
    done = subprocess.run([sys.executable, tmp_path / "ahead.py"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SAW = rank_process.RankAnswer(False, pickle.dumps(CommError("rank 2 does not answer")), summary="saw", consequence=True)
FAILED = rank_process.RankAnswer(False, pickle.dumps(ValueError("boom")), summary="ValueError: boom")
DEATH = "was killed by signal 9 (SIGKILL)"
ARRIVED = [  # how ranks 0, 1, ... failed, in the order of their failures -> the error that is raised
    ([SAW], "rank 2 does not answer"),
    ([SAW, FAILED], "boom"),
    ([FAILED, SAW], "boom"),
    ([FAILED, DEATH], f"rank 1 of 2 {DEATH}"),
    ([SAW, FAILED, DEATH], f"rank 2 of 3 {DEATH}"),
]


@pytest.mark.parametrize(("failures", "message"), ARRIVED)
def test_the_cause_comes_before_what_others_saw_of_it(
    failures: list[rank_process.RankAnswer | str], message: str, tmp_path: Path
) -> None:
    ranks = object.__new__(LocalRanks)
    ranks.folder, ranks.ranks = tmp_path, []
    for index, failure in enumerate(failures):
        rank = LocalRank(index, None, None)  # pyright: ignore[reportArgumentType]
        rank.waiting, rank.death = False, failure if isinstance(failure, str) else None
        rank.answer = None if isinstance(failure, str) else failure
        ranks.ranks.append(rank)
    ranks.failed = list(ranks.ranks)
    error = ranks._error_to_raise(60)
    assert str(error) == message
    summaries = [DEATH if isinstance(x, str) else x.summary for x in failures]
    assert {note.partition(": ")[2] for note in getattr(error, "__notes__", [])} <= set(summaries)
