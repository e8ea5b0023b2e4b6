"""Launchers, ranks and nodes that are killed or stopped: what is lost, and who goes on."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from bench.processes.node_network import missing_permission

from longspan.config.file import to_toml
from longspan.run.loggers import read_metrics
from tests.faults.live_run import (
    LOCAL,
    TORCHRUN,
    children_of,
    last_step,
    ranks_of,
    saved_steps,
    started,
    to_rank,
    wait_for,
)
from tests.train.small import small_config

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
RESTARTS = (*TORCHRUN[:1], "--max-restarts=2", *TORCHRUN[1:])


def test_a_killed_rank_costs_the_steps_since_the_save(tmp_path: Path) -> None:
    keys = {"train__steps": 60, "train__save_every": 5, "run__keep_checkpoints": 2, "run__stopped_status": 0}
    with started(tmp_path, RESTARTS, **keys) as process:
        wait_for(lambda: saved_steps(tmp_path), process, tmp_path / "log")
        to_rank(process, signal.SIGKILL)
        status = process.wait(200)
    log = (tmp_path / "log").read_text()
    assert status == 0, log
    (resumed,) = map(int, re.findall(r"going on from .*step-(\d+)", log))
    lost = [int(step) for step in re.findall(r"error \(rank 0\): .* of step (\d+)", log)]
    assert resumed >= 5 and all(resumed < step <= resumed + 6 for step in lost), log
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "lr" in row] == [*range(1, 61)]


KILL_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from longspan.checkpoint.storage import SafetensorsWriter
from longspan.cli.main import main
def die_once():
    if os.environ["RANK"] == "1" and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
def write(self, *arguments):
    if "000004" in self.path.name:
        die_once()
    return write_now(self, *arguments)
write_now, SafetensorsWriter.write_data = SafetensorsWriter.write_data, write
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("in_background", ["auto", "off"])
def test_a_rank_killed_while_it_saves_is_named(in_background: str, tmp_path: Path) -> None:
    keys = {"train__steps": 6, "train__save_every": 2, "train__eval_every": 0, "train__save_async": in_background}
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path, **keys)))
    (tmp_path / "program.py").write_text(KILL_WHILE_SAVING)
    words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1", "--nproc-per-node=2", "--standalone"]
    words += ["program.py", "config.toml", "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"error \(rank 0\):.*(?:\n .*)*rank(?:\(s\) \(1\)| 1) do(?:es)? not answer", said), said
    assert "going on from" in said and saved_steps(tmp_path) == [2, 4, 6]
    assert not list((tmp_path / "run/checkpoints").glob("*.partial"))


def processes_from(pid: int) -> list[int]:
    children = list[int]()
    with suppress(OSError):
        children = children_of(pid)
    return [pid, *(process for child in children for process in processes_from(child))]


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """Kill a torchrun with its ranks, as a machine that fails does."""
    for pid in processes_from(node.pid):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


@contextmanager
def nodes_of(folder: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """A function that starts another node of one elastic launch of one or two nodes; all end with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run"]
    words += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=3"]
    train = ["-m", "longspan.cli.main", "train", str(folder / "config.toml"), "--device", "cpu"]
    started_nodes = list[subprocess.Popen[bytes]]()

    def start() -> subprocess.Popen[bytes]:
        with (folder / f"log{len(started_nodes)}").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, *train],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started_nodes.append(node)
        return node

    try:
        yield start
    finally:
        for node in started_nodes:
            kill_node(node)


def test_a_node_is_lost_and_comes_back(tmp_path: Path) -> None:
    keys = {"train__steps": 100_000, "train__eval_every": 0, "train__save_every": 5}
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path, **keys, run__keep_checkpoints=2)))
    metrics = tmp_path / "run/metrics.jsonl"

    def steps() -> int:
        return max((row["step"] for row in read_metrics(metrics)), default=0)

    def resumed_on(ranks: int) -> Callable[[], bool]:
        return lambda: any(
            re.search(rf"resumed .*at step \d+ on {ranks} ranks", log.read_text()) for log in tmp_path.glob("log?")
        )

    with nodes_of(tmp_path) as start_node:
        first = start_node()
        time.sleep(2)  # it serves the rendezvous, which the others need as long as the run lasts
        second = start_node()
        wait_for(lambda: steps() > 6, first, tmp_path / "log0")
        assert "4 slots" in (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
        kill_node(second)
        wait_for(resumed_on(2), first, tmp_path / "log0")
        reached = steps()
        wait_for(lambda: steps() > reached, first, tmp_path / "log0")
        third = start_node()
        wait_for(resumed_on(4), first, tmp_path / "log0")
        reached = steps()
        wait_for(lambda: steps() > reached, first, tmp_path / "log0")
        os.kill(ranks_of(first)[0], signal.SIGTERM)
        assert first.wait(90) == 0, (tmp_path / "log0").read_text()
        assert third.wait(90) == 0
    assert saved_steps(tmp_path)[-1] == steps()
    assert re.search(r"all ranks \(\d, \d\) of node \d \(host .*\) do not answer", (tmp_path / "log0").read_text())


def lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("words", [LOCAL, TORCHRUN])
def test_ranks_whose_launcher_was_killed_save_and_end(words: tuple[str, ...], tmp_path: Path) -> None:
    with started(tmp_path, words) as process:
        ranks = ranks_of(process)
        assert len(ranks) == 2
        process.kill()
        process.wait()
        end = time.monotonic() + 90
        while any(map(lives, ranks)):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
    log = (tmp_path / "log").read_text()
    assert saved_steps(tmp_path) == [last_step(tmp_path)], log
    assert log.count("the process that started the ranks is gone: they stop, and a run saves first") == 1
    assert "Traceback" not in log


def test_a_run_outlives_a_launcher_that_stands_still(tmp_path: Path) -> None:
    """Its store does not answer for longer than a question to it may take."""
    with started(tmp_path, LOCAL, run__stopped_status=75) as process:
        process.send_signal(signal.SIGSTOP)
        before, end = last_step(tmp_path), time.monotonic() + 13
        while time.monotonic() < end:
            time.sleep(0.2)
        now = last_step(tmp_path)
        process.send_signal(signal.SIGCONT)
        assert now > before, (tmp_path / "log").read_text()
        wait_for(lambda: last_step(tmp_path) > now, process, tmp_path / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 75, (tmp_path / "log").read_text()
    assert saved_steps(tmp_path) == [last_step(tmp_path)]


READ_ONLY = """
import subprocess, sys
folder, keys = sys.argv[1], sys.argv[2:]
mount = lambda *words: subprocess.run(["mount", *words, folder], check=True)
train = lambda *words: subprocess.run([sys.executable, "-m", "longspan", "train", *keys, *words]).returncode
mount("-t", "tmpfs", "none")
statuses = [train("--train.steps", "2")]
mount("-o", "remount,ro")
statuses += [train("--train.steps", "4")]
mount("-o", "remount,rw")
print("statuses", statuses + [train("--train.steps", "4")])
"""


@pytest.mark.skipif(shutil.which("unshare") is None or bool(missing_permission()), reason="no mounts of one's own here")
def test_a_folder_that_became_read_only(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__eval_every=0, run__dir=str(tmp_path / "mounted/run"))
    (tmp_path / "mounted").mkdir()
    (tmp_path / "config.toml").write_text(to_toml(config))
    words = [str(tmp_path / "mounted"), str(tmp_path / "config.toml"), "--world", "2", "--device", "cpu"]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", READ_ONLY, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert "statuses [0, 2, 0]" in done.stdout, done.stdout + done.stderr
    assert "mounted/run/run.lock: Read-only file system" in done.stderr
