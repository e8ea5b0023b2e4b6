"""examples/gpu/slurm.sh with Slurm's commands on this machine: what it does at each status, and at Slurm's signals."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.live_run import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/gpu/slurm.sh"
JOB = 7
# Stands for longspan: the statuses of its attempts, "wait" for one that a signal stops.
STUB = """
if [ "$1" = doctor ]; then echo "✗ a fault"; exit "$DOCTOR"; fi
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $*" >> "calls$((MASTER_PORT - 20007))"
set -- $STATUSES
shift $((MASTER_PORT - 20007))
[ "$1" = wait ] || exit "$1"
trap 'exit 75' USR1
trap 'exit 75' TERM
: > "ready$RANK"
while :; do sleep 0.05; done
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux clusters")


def submit(folder: Path, longspan: str, *words: str, restarted: int = 0, **variables: str) -> subprocess.Popen[str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    slurm = f'exec "{sys.executable}" -IS "{ROOT / "tests/launch/fake_slurm.py"}"'
    for name, text in (("srun", f'{slurm} srun "$@"'), ("scontrol", f'{slurm} scontrol "$@"'), ("longspan", longspan)):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    job: dict[str, object] = {"JOB_ID": JOB, "NTASKS": 2, "NNODES": 2, "NTASKS_PER_NODE": 1, "CPUS_PER_TASK": 1}
    job |= {"JOB_NODELIST": "host[0-1]"}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {f"SLURM_{name}": str(value) for name, value in job.items()}
    environment |= {"SLURM_RESTART_COUNT": str(restarted), "PATH": f"{programs}:{os.environ['PATH']}", **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", SCRIPT, *words], cwd=folder, env=environment, **pipes)


@pytest.fixture
def end_jobs() -> Iterator[list[subprocess.Popen[str]]]:
    jobs = list[subprocess.Popen[str]]()
    yield jobs
    for job in jobs:
        if job.poll() is None:
            job.terminate()
            job.wait(30)


@pytest.mark.parametrize(
    ("statuses", "number", "status", "attempts", "requeued"),
    [
        ("137 3 0", 0, 0, 3, False),  # lost ranks: again in this job
        ("3 3 3 3 0", 0, 3, 4, False),
        ("2 0", 0, 2, 1, False),  # an error to mend
        ("75 0", 0, 75, 1, False),  # somebody stopped the run
        ("wait 0", signal.SIGTERM, 75, 1, False),  # scancel
        ("3 wait 0", signal.SIGUSR1, 75, 2, True),  # the time is over
    ],
)
def test_what_the_script_does(
    statuses: str,
    number: int,
    status: int,
    attempts: int,
    requeued: bool,
    tmp_path: Path,
    end_jobs: list[subprocess.Popen[str]],
) -> None:
    job = submit(tmp_path, STUB, "a b.toml", STATUSES=statuses, DOCTOR="0")
    end_jobs.append(job)
    if number:
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), job, str)
        job.send_signal(number)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == status, printed
    calls = [sorted((tmp_path / f"calls{attempt}").read_text().splitlines()) for attempt in range(attempts)]
    words = "127.0.0.1 train a b.toml --checkpoint.preempted_exit_code 75"
    assert calls == [[f"0 0 2 1 {words}", f"1 1 2 1 {words}"]] * attempts
    assert not (tmp_path / f"calls{attempts}").exists()
    assert (tmp_path / "requeued").exists() == requeued
    logs = sorted(path.name for path in (tmp_path / f"logs/{JOB}-0").iterdir())
    runs = [f"run{attempt}-rank{rank}.log" for attempt in range(attempts) for rank in (0, 1)]
    assert logs == ["doctor-host0.log", "doctor-host1.log", *runs]


def test_no_run_begins_on_a_node_with_a_fault(tmp_path: Path) -> None:
    printed, _ = (job := submit(tmp_path, STUB, "a.toml", STATUSES="0", DOCTOR="1")).communicate(timeout=60)
    assert job.returncode == 1 and "doctor-host1.log:✗ a fault" in printed and not (tmp_path / "calls0").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing() -> None:
    found = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
