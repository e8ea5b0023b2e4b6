"""A command of a benchmark is ended with all that it started: what is left would write into a removed folder."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.processes.end_processes import end_with_workers

from longspan.launch.orphans import processes_of_torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A command, its child in a group of its own as ranks are, and that one's in a session of its own as compilers are.
SCRIPT = """
import os, subprocess, sys, time
depth, file = int(sys.argv[1]), sys.argv[2]
if depth:
    how = {"process_group": 0} if depth == 2 else {"start_new_session": True}
    subprocess.Popen([sys.executable, __file__, str(depth - 1), file], **how)
with open(f"{file}-{depth}", "w") as number:
    number.write(str(os.getpid()))
time.sleep(100)
"""


def test_a_command_is_ended_with_all_that_descend_from_it(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "command.py"), "2", str(tmp_path / "number")]
    process = subprocess.Popen(words, start_new_session=True)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    files, deadline = [tmp_path / f"number-{depth}" for depth in range(3)], time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    numbers = [int(file.read_text()) for file in files]
    assert len({os.getsid(number) for number in numbers}) == 2 and len(set(map(os.getpgid, numbers))) == 3
    end_with_workers(process, "no such word")
    states = [Path(f"/proc/{number}/stat") for number in numbers]
    assert all(not file.exists() or file.read_text().split()[2] == "Z" for file in states)
    assert bystander.poll() is None
    end_with_workers(bystander, "no such word")
    end_with_workers(bystander, "no such word")  # one that has ended


def test_processes_of_torchrun_are_found_beside_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(os, "getppid", os.getpid)
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    ranks = [subprocess.Popen(waiting, stdin=subprocess.PIPE, env={**os.environ, "RANK": str(i)}) for i in range(2)]
    numbers = {i: process.pid for i, process in enumerate(ranks)}
    try:
        deadline = time.monotonic() + 60
        while processes_of_torchrun() != numbers:  # a process has the variables of this one until it runs its command
            assert time.monotonic() < deadline
        read_bytes = Path.read_bytes

        def read_of_others(path: Path) -> bytes:
            if path.parent.name == str(ranks[0].pid):
                raise FileNotFoundError(path)
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", read_of_others)
        assert processes_of_torchrun() == {1: ranks[1].pid}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
