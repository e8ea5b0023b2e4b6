"""Two torchruns of this machine as two nodes, and what ranks and the command say of a node that dies."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bench.processes import two_nodes
from bench.processes.node_network import missing_permission
from bench.processes.two_nodes import bytes_per_second, torchrun_words
from torch.distributed import HashStore

from longspan.comm import World, failure_reports, run_local
from longspan.comm.failure_reports import FailureReports, Nodes
from longspan.errors import RankLostError
from longspan.layout import Layout
from longspan.plan import Machine
from longspan.testing import backend
from tests.faults.live_run import children_of, lives, read_process, wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = [str(ROOT / "bench/two_nodes.sh"), "--cpu"]
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
    direct = children_of(pid)
    yield from direct
    for child in direct:
        yield from _children(child)


def lose_a_node(rank: int) -> None:
    os.environ["GROUP_RANK"] = str(rank)
    with (
        mock.patch.object(failure_reports, "ANSWER_SECONDS", 0.5),
        mock.patch.object(FailureReports, "has_died", lambda *_: False),  # a launcher ends with its node
        World(Layout(ranks=2), backend="gloo", timeout=60) as world,
    ):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.control.barrier()


@on_cpus
def test_ranks_name_a_node_that_died() -> None:
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9") as raised:
        run_local(lose_a_node, 2, timeout=100, grace=30, threads=1)
    (note,) = raised.value.__notes__
    assert re.search(r"rank 0: .* all ranks \(1\) of node 1 \(host .*\) do not answer: killed", note), note


ENDS = [(signal.SIGKILL, "node 1 was killed by SIGKILL"), (signal.SIGINT, "ended by SIGINT")]


@on_cpus
@reads_proc
@pytest.mark.parametrize(("number", "said"), ENDS)
def test_a_node_that_dies_and_ctrl_c_end_everything(number: signal.Signals, said: str, tmp_path: Path) -> None:
    """With a stand-in for torchrun, which starts without torch."""
    (stand_in := tmp_path / "torch" / "distributed").mkdir(parents=True)
    (stand_in / "run.py").write_text(TORCHRUN)
    (tmp_path / "torch" / "__init__.py").touch()
    words = ("--ranks", "1", "sh", "-c", "echo here $GROUP_RANK; sleep 100 & wait")
    nodes = _start(*words, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def with_words(words: str) -> list[int]:
        line = words.replace(" ", "\0")
        return [pid for pid in _children(nodes.pid) if line in read_process(pid, "cmdline")]

    wait_for(lambda: len(with_words("sleep 100 ")) == 2, nodes, lambda: nodes.communicate(timeout=5))
    everything = [*_children(nodes.pid)]
    if number == signal.SIGINT:
        os.killpg(nodes.pid, number)
    else:
        dying = with_words("--node-rank 1")[0]
        for pid in dict.fromkeys((dying, *_children(dying), *with_words("sleep 100 "))):
            os.kill(pid, number)  # the other node has nothing left to wait for, and ends
    out, err = nodes.communicate(timeout=100)
    assert nodes.returncode == 128 + number and out == "here 0\n"
    (log,) = re.findall(rf"{said}; output of node 1: (.*)", err)
    assert Path(log).read_text().startswith("here 1\n") and not [pid for pid in everything if lives(pid)]


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


def test_ranks_with_their_nodes() -> None:
    nodes = Nodes(("node 0", "node 1", "node 2"), ((0, 1), (2, 3), (4, 5)))
    assert nodes.describe_ranks([2, 3]) == "all ranks (2, 3) of node 1"
    assert nodes.describe_ranks([5, 0, 1]) == "all ranks (0, 1) of node 0 and rank(s) (5) of node 2"
    reports = FailureReports(0, range(6), HashStore(), "world")
    assert reports.server_text() == "the launcher, which serves the store, does not answer: killed, cut off or stopped"
    reports.nodes = nodes
    assert "which serves the store on node 0, with ranks (0, 1), does not answer" in reports.server_text()
    many = Nodes(tuple(f"node {i}" for i in range(12)), tuple((i,) for i in range(12)))
    assert many.describe_ranks(range(1, 12)).endswith("all ranks (8) of node 8 and 3 more nodes")


def test_without_namespaces_a_line_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
