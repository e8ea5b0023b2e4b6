"""Launchers, ranks and nodes that are killed or stopped: what is lost, and who goes on."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.processes.node_network import missing_permission

from longspan.config.file import to_toml
from longspan.run.metrics import read_metrics
from tests.faults.live_run import LOCAL, TORCHRUN, last_step, lives, ranks_of, saved_steps, started, wait_for
from tests.train.small import small_config

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
KILL_ONCE = """
import os, signal, sys
from pathlib import Path
from longspan.checkpoint.storage import SafetensorsWriter
from longspan.cli.main import main
from longspan.run.run_data import TrainingRun
def die_once():
    if os.environ["RANK"] == "1" and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
def write(self, *arguments):
    if "000004" in self.path.name:
        die_once()
    return write_now(self, *arguments)
def take(self, plan, documents, step, *meanwhile):
    if step == 5:
        die_once()
    return take_now(self, plan, documents, step, *meanwhile)
if sys.argv[1] == "step":
    take_now, TrainingRun.take_step = TrainingRun.take_step, take
else:
    write_now, SafetensorsWriter.write_data = SafetensorsWriter.write_data, write
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.parametrize(("during", "in_background"), [("step", "off"), ("save", "auto"), ("save", "off")])
def test_a_killed_rank_costs_the_steps_since_the_save(during: str, in_background: str, tmp_path: Path) -> None:
    keys = {"train__steps": 6, "checkpoint__every": 2, "evaluation__every": 0, "checkpoint__async_mode": in_background}
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path, **keys)))
    (tmp_path / "program.py").write_text(KILL_ONCE)
    words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1", "--nproc-per-node=2", "--standalone"]
    words += ["program.py", during, "config.toml", "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"error \(rank 0\):.*(?:\n .*)*rank(?:\(s\) \(1\)| 1) do(?:es)? not answer", said), said
    assert f"step-{4 if during == 'step' else 2:06}" in re.findall(r"going on from .*", said)[0], said
    assert saved_steps(tmp_path) == [2, 4, 6] and not list((tmp_path / "run/checkpoints").glob("*.partial"))
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "lr" in row] == [*range(1, 7)]


@pytest.mark.parametrize("words", [LOCAL, TORCHRUN])
def test_ranks_whose_launcher_was_killed_save_and_end(words: tuple[str, ...], tmp_path: Path) -> None:
    with started(tmp_path, words) as process:
        ranks = ranks_of(process)
        assert len(ranks) == 2
        for number in (signal.SIGSTOP, signal.SIGCONT):  # their threads look for the launcher and ask it at once then
            for rank in ranks:
                os.kill(rank, number)
            if number == signal.SIGSTOP:
                time.sleep(0.5)
                process.kill()
                process.wait()
        end = time.monotonic() + 90
        while any(map(lives, ranks)):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
    log = (tmp_path / "log").read_text()
    assert saved_steps(tmp_path) == [last_step(tmp_path)], log
    assert log.count("the process that started the ranks is gone: they stop, and a run saves first") == 1
    assert "Traceback" not in log and "SIGTERM" not in log and "frame #" not in log, log


def test_a_run_outlives_a_launcher_that_stands_still(tmp_path: Path) -> None:
    """Its store does not answer for longer than a question to it may take."""
    with started(tmp_path, LOCAL, checkpoint__preempted_exit_code=75) as process:
        process.send_signal(signal.SIGSTOP)
        before, end = last_step(tmp_path), time.monotonic() + 13
        while time.monotonic() < end:
            time.sleep(0.2)
        now = last_step(tmp_path)
        process.send_signal(signal.SIGCONT)
        assert now > before, (tmp_path / "log").read_text()
        wait_for(lambda: last_step(tmp_path) > now, process, (tmp_path / "log").read_text)
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
    config = small_config(tmp_path, evaluation__every=0, run__dir=str(tmp_path / "mounted/run"))
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
