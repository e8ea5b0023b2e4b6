"""A run in processes of its own, under the local launcher or torchrun, that signals are sent to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longspan.checkpoint.files import step_of
from longspan.config.file import to_toml
from longspan.launch.launcher_watch import has_ended
from longspan.run.metrics import read_metrics
from tests.train.small import small_config

Process = subprocess.Popen[bytes]
LOCAL = ("longspan.cli.main", "train", "--world", "2", "--device", "cpu")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "longspan.cli.main", "train")


def saved_steps(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in (folder / "run" / "checkpoints").glob("step-??????"))


def lives(pid: int) -> bool:
    return not has_ended(pid)


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[Any]", output: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (process.poll(), output())
        time.sleep(0.05)


@contextmanager
def started(folder: Path, words: tuple[str, ...], **keys: Any) -> Iterator[Process]:
    defaults = {"train__steps": 100_000, "evaluation__every": 0, "checkpoint__preempted_exit_code": 75}
    (folder / "config.toml").write_text(to_toml(small_config(folder, **(defaults | keys))))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, str(folder / "config.toml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    try:
        metrics = folder / "run" / "metrics.jsonl"
        wait_for(lambda: len(read_metrics(metrics)) >= 3, process, (folder / "log").read_text)
        yield process
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_step(folder: Path) -> int:
    return read_metrics(folder / "run" / "metrics.jsonl")[-1]["step"]


def read_process(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children_of(pid: int) -> list[int]:
    return [int(child) for child in read_process(pid, f"task/{pid}/children").split()]


def ranks_of(process: Process) -> list[int]:
    """The processes that train: torchrun's, or those of the launcher's fork server."""
    children = children_of(process.pid)
    servers = [pid for pid in children if "multiprocessing.forkserver" in read_process(pid, "cmdline")]
    return [pid for server in servers for pid in children_of(server)] or children


def to_launcher(process: Process, number: int) -> None:
    process.send_signal(number)


def to_group(process: Process, number: int) -> None:
    os.killpg(process.pid, number)


def to_rank(process: Process, number: int) -> None:
    os.kill(ranks_of(process)[1], number)
