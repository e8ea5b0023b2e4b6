"""Two torchruns of this machine as two nodes: plans keep to nodes, a node that dies is named, one node goes on."""

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

import pytest
from bench.processes import two_nodes
from bench.processes.node_network import missing_permission
from bench.processes.two_nodes import bytes_per_second, torchrun_words
from torch.distributed import HashStore

from longspan.comm.failure_reports import FailureReports, Nodes
from longspan.config.file import to_toml
from longspan.plan import Machine, Plan
from longspan.testing import backend, run_ranks
from tests.train.small import small_config, train_rank

ROOT = Path(__file__).parents[2]
SCRIPT = [str(ROOT / "bench/two_nodes.sh"), "--cpu"]
RUN = {"context.planner": "dynamic", "context.node_size": 2, "context.max_tokens_per_slot": 34}
RUN |= {"train.eval_every": 0, "train.tokens_per_step": 400, "train.seed": 1}  # of documents of up to 64 tokens

on_cpus = pytest.mark.skipif(backend() != "gloo", reason="on CPUs")
reads_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def _start(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(folder)}
    command = [*SCRIPT, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def _children(pid: int) -> Iterator[int]:
    """All processes that come from one, with those that it started itself first."""
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
    nodes = _start("--ranks", "2", "longspan", "train", str(tmp_path / "small.toml"), folder=tmp_path)
    _wait_for(lambda: checkpoints.is_dir() and [*checkpoints.glob("step-*[0-9]")], nodes)
    torchrun = [pid for pid in _children(nodes.pid) if b"--node-rank\x001" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    dying = [torchrun[0], *_children(torchrun[0])]
    started = time.monotonic()
    for pid in dying:
        os.kill(pid, signal.SIGKILL)
    out, err = nodes.communicate(timeout=100)
    assert nodes.returncode == 128 + signal.SIGKILL and time.monotonic() - started < 90
    assert re.search(r"error \(rank 0\): .* all ranks \(2, 3\) of node 1 \(host .*\) do not answer: killed", err), err
    (log,) = re.findall(r"node 1 was killed by SIGKILL; output of node 1: (.*)", err)
    assert "step      1/100000" in out and Path(log).is_file() and not [pid for pid in dying if _lives(pid)]

    assert json.loads((run / "run.json").read_text())["hosts"] == 2, "by the number of slots of a node of the world"
    plans = [Plan.from_json(file.read_text()) for file in (run / "plans").glob("step-*.json")]
    groups = [group.slots for plan in plans for batch in plan.micro_batches for group in batch.groups]
    assert {len(slots) for slots in groups} >= {1, 2} and all(slots[0] // 2 == slots[-1] // 2 for slots in groups)

    before = max(int(folder.name[-6:]) for folder in checkpoints.glob("step-*[0-9]"))
    shorter = small_config(tmp_path, **RUN, train__steps=before + 2, train__save_every=0)
    (result, _) = run_ranks(train_rank, 2, shorter, 2)
    assert result.done == before + 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row][-2:] == [before + 1, before + 2]


@on_cpus
@reads_proc
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    nodes = _start("--ranks", "1", "sh", "-c", "echo here $GROUP_RANK; sleep 100 & wait", folder=tmp_path)
    _wait_for(lambda: len(_sleeping(nodes.pid)) == 2, nodes)
    everything = [*_children(nodes.pid)]
    os.killpg(nodes.pid, signal.SIGINT)
    out, err = nodes.communicate(timeout=100)
    assert nodes.returncode == 128 + signal.SIGINT and out == "here 0\n"
    (log,) = re.findall(r"ended by SIGINT; output of node 1: (.*)", err)
    assert Path(log).read_text().startswith("here 1\n") and not [pid for pid in everything if _lives(pid)]


def _sleeping(pid: int) -> list[int]:
    return [p for p in _children(pid) if Path(f"/proc/{p}/cmdline").read_bytes() == b"sleep\x00100\x00"]


def _lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@on_cpus
@pytest.mark.skipif(bool(missing_permission()), reason="no network namespaces here")
def test_a_link_has_its_limit_and_the_inside_of_a_node_has_none() -> None:
    words = [sys.executable, "-m", "tests.launch.limited_link", "4e6", "3000000"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    inside, across = map(float, done.stdout.split())
    assert inside < 0.3 and 0.5 < across < 2, "3 MB at 4 MB/s, less what passes at once"


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
    assert capsys.readouterr().err == (
        "two_nodes: no limit between the nodes, for this system allows no network namespaces "
        "(unshare: Operation not permitted)\n"
    )


def test_commands_as_torchrun_takes_them() -> None:
    assert torchrun_words(["longspan", "bench", "step"]) == ["-m", "longspan", "bench", "step"]
    assert torchrun_words([".venv/bin/python", "a.py", "-m"]) == ["a.py", "-m"]
    assert torchrun_words(["python3.12", "-m", "tests"]) == ["-m", "tests"]
    assert torchrun_words(["python", "-c", "pass"]) == ["--no-python", "python", "-c", "pass"]
    assert torchrun_words(["script.py"]) == ["script.py"]
    with pytest.raises(ValueError, match="each node is a torchrun already"):
        torchrun_words(["torchrun", "script.py"])


def test_speeds() -> None:
    speeds = {"2.65G": 2.65e9, "50M": 5e7, "10kB": 1e4, "3e": None, "800": 800, "0": None, "1.5GB/s": 1.5e9}
    for text, speed in speeds.items():
        if speed is None:
            with pytest.raises(argparse.ArgumentTypeError, match="is no speed; give bytes a second"):
                bytes_per_second(text)
        else:
            assert bytes_per_second(text) == speed


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
