"""Two torchruns of this machine as two nodes: a node that dies is named, and one node goes on."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.processes import two_nodes
from bench.processes.node_network import missing_permission
from bench.processes.two_nodes import bytes_per_second, torchrun_words
from torch.distributed import HashStore

from longspan.comm.failure_reports import FailureReports, Nodes
from longspan.config.file import to_toml
from longspan.plan import Machine
from longspan.testing import backend, run_ranks
from tests.launch.test_launch import alive
from tests.train.small import small_config, train_rank

ROOT = Path(__file__).parents[2]
SCRIPT = [str(ROOT / "bench/two_nodes.sh"), "--cpu"]
RUN = {"context.context_parallel_size": 1, "context.eval_context_parallel_size": 1, "train.eval_every": 0}
TORCHRUN = """
import os, signal, subprocess, sys
words = sys.argv[sys.argv.index("--no-python") + 1 :]
group = sys.argv[sys.argv.index("--node-rank") + 1]
rank = subprocess.Popen(words, env={**os.environ, "GROUP_RANK": group}, process_group=0)
signal.signal(signal.SIGINT, lambda *_: os.killpg(rank.pid, signal.SIGTERM))
sys.exit(-rank.wait())
"""

on_cpus = pytest.mark.skipif(backend() != "gloo", reason="on CPUs")
reads_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def _start(*words: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(folder)} | variables
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*SCRIPT, *words], **pipes, env=environment, start_new_session=True)


def _children(pid: int) -> Iterator[int]:
    direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    yield from direct
    for child in direct:
        yield from _children(child)


def _wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 150
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=5)
        time.sleep(0.05)


@on_cpus
@reads_proc
def test_a_node_that_dies_is_named_and_one_node_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, **RUN, train__steps=100000, train__save_every=2)
    (tmp_path / "small.toml").write_text(to_toml(config))
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    nodes = _start("--ranks", "1", "longspan", "train", str(tmp_path / "small.toml"), folder=tmp_path)
    _wait_for(lambda: checkpoints.is_dir() and [*checkpoints.glob("step-*[0-9]")], nodes)
    torchrun = [pid for pid in _children(nodes.pid) if b"--node-rank\x001" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    dying = [torchrun[0], *_children(torchrun[0])]
    started = time.monotonic()
    for pid in dying:
        os.kill(pid, signal.SIGKILL)
    out, err = nodes.communicate(timeout=100)
    assert nodes.returncode == 128 + signal.SIGKILL and time.monotonic() - started < 90
    assert re.search(r"error \(rank 0\): .* all ranks \(1\) of node 1 \(host .*\) do not answer: killed", err), err
    (log,) = re.findall(r"node 1 was killed by SIGKILL; output of node 1: (.*)", err)
    assert "step      1/100000" in out and Path(log).is_file() and not [pid for pid in dying if alive(pid)]
    assert json.loads((run / "run.json").read_text())["hosts"] == 2, "by the number of slots of a node of the world"

    before = max(int(folder.name[-6:]) for folder in checkpoints.glob("step-*[0-9]"))
    shorter = small_config(tmp_path, **RUN, train__steps=before + 2, train__save_every=0)
    (result,) = run_ranks(train_rank, 1, shorter, 1)
    assert result.done == before + 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row][-2:] == [before + 1, before + 2]


@on_cpus
@reads_proc
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """With a stand-in for torchrun, which starts without torch."""
    (stand_in := tmp_path / "torch" / "distributed").mkdir(parents=True)
    (stand_in / "run.py").write_text(TORCHRUN)
    (tmp_path / "torch" / "__init__.py").touch()
    words = ("--ranks", "1", "sh", "-c", "echo here $GROUP_RANK; sleep 100 & wait")
    nodes = _start(*words, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def sleeping() -> list[int]:
        return [p for p in _children(nodes.pid) if Path(f"/proc/{p}/cmdline").read_bytes() == b"sleep\x00100\x00"]

    _wait_for(lambda: len(sleeping()) == 2, nodes)
    everything = [*_children(nodes.pid)]
    os.killpg(nodes.pid, signal.SIGINT)
    out, err = nodes.communicate(timeout=100)
    assert nodes.returncode == 128 + signal.SIGINT and out == "here 0\n"
    (log,) = re.findall(r"ended by SIGINT; output of node 1: (.*)", err)
    assert Path(log).read_text().startswith("here 1\n") and not [pid for pid in everything if alive(pid)]


@pytest.mark.whole  # tests/cli/test_calibrate.py has two hosts without torchrun
@on_cpus
@pytest.mark.skipif(bool(missing_permission()), reason="no network namespaces here")
def test_calibration_finds_the_nodes_and_the_speed_between_them(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    rounds = ["--warmup=0", "--repeats=2"]
    words = ["--ranks", "2", "--rate", "20M", "longspan", "bench", "calibrate", *rounds, "--out", str(out)]
    printed, err = _start(*words, folder=tmp_path).communicate(timeout=200)
    assert "hosts of 2 as the launcher counts them" in printed, err
    machine = Machine.from_json(json.loads(out.read_text()))
    assert (machine.world, machine.node_size) == (4, 2) and not {"inside", "across"} & {*machine.assumed_parts}
    each = 1e6 / float(machine.across.point.seconds(1e6))
    assert 4e6 < each < 20e6, "two slots of a node send at once"
    assert float(machine.inside.point.seconds(1e6)) < 1e6 / each / 2


def test_without_namespaces_it_goes_on_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(two_nodes, "missing_permission", lambda: "unshare: Operation not permitted")
    assert two_nodes._network(5e6, []) is None and two_nodes._network(None, []) is None
    said = capsys.readouterr().err
    assert said.startswith("two_nodes: no limit between the nodes") and "(unshare: Operation not permitted)\n" in said
    assert len(said.splitlines()) == 1


def test_words_of_torchrun_and_speeds() -> None:
    assert torchrun_words(["longspan", "bench", "step"]) == ["-m", "longspan", "bench", "step"]
    assert torchrun_words([".venv/bin/python", "a.py", "-m"]) == ["a.py", "-m"]
    assert torchrun_words(["python3.12", "-m", "tests"]) == ["-m", "tests"]
    assert torchrun_words(["python", "-c", "pass"]) == ["--no-python", "python", "-c", "pass"]
    assert torchrun_words(["script.py"]) == ["script.py"]
    with pytest.raises(ValueError, match="each node is a torchrun already"):
        torchrun_words(["torchrun", "script.py"])
    for text, speed in {"2.65G": 2.65e9, "50M": 5e7, "10kB": 1e4, "800": 800, "1.5GB/s": 1.5e9}.items():
        assert bytes_per_second(text) == speed
    for text in ("3e", "0"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no speed; give bytes a second"):
            bytes_per_second(text)


def test_ranks_with_their_nodes() -> None:
    nodes = Nodes(("node 0", "node 1", "node 2"), ((0, 1), (2, 3), (4, 5)))
    assert nodes.describe_ranks([2, 3]) == "all ranks (2, 3) of node 1"
    assert nodes.describe_ranks([5, 0, 1]) == "all ranks (0, 1) of node 0 and rank(s) (5) of node 2"
    reports = FailureReports(0, range(6), HashStore(), "world")
    assert reports.store_node_text() == ""
    reports.nodes = nodes
    assert reports.store_node_text() == "; it was served on node 0, with ranks (0, 1)"
    many = Nodes(tuple(f"node {i}" for i in range(12)), tuple((i,) for i in range(12)))
    assert many.describe_ranks(range(1, 12)).endswith("all ranks (8) of node 8 and 3 more nodes")
