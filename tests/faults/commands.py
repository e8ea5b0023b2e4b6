"""Commands of longspan in processes of their own, on a small run, and what they leave: processes and files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.live_run import read_process

VERBS: dict[str, list[str]] = {  # in a folder with config.toml, texts, model and (but for train) run
    "train": ["train", "config.toml", "--world", "2", "--device", "cpu"],
    "eval": ["eval", "run", "--world", "2", "--device", "cpu"],
    "generate": ["generate", "run", "--prompt", "def", "--max-new-tokens", "4", "--world", "1", "--device", "cpu"],
    "export": ["export", "run", "out"],
    "report": ["report", "run"],
    "plan": ["plan", "--same", "2x64", "--slots", "2"],
    "show": ["train", "config.toml", "--show", "1"],
}


@dataclass
class Ended:
    status: int
    output: str
    error: str
    seconds: float


class Command:
    """A command in a session of its own, in a folder; its temporary files lie in `folder/tmp`."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        prefix: Sequence[str] = (),
        setup: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        def prepare() -> None:
            # A shell's background jobs ignore it, and so do their children.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if setup is not None:
                setup()

        self.folder: Path = folder
        (folder / "tmp").mkdir(exist_ok=True)
        own = {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= own | {"CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        self.start: float = time.monotonic()
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [*prefix, sys.executable, "-m", "longspan", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509
            **pipes,
        )

    def wait_for_handlers(self) -> bool:
        """Wait until the command, no longer the interpreter, handles signals; False where it has ended before."""
        while self.process.poll() is None:
            caught = [line for line in read_process(self.process.pid, "status").splitlines() if "SigCgt" in line]
            if caught and int(caught[0].split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                return True
            time.sleep(0.002)
        return False

    def end(self, seconds: float = 120) -> Ended:
        """Wait for the end, of which no process and no temporary file is left."""
        try:
            output, error = self.process.communicate(timeout=seconds)
            took = time.monotonic() - self.start
            deadline = time.monotonic() + 10
            while (left := session_of(self.process.pid)) and time.monotonic() < deadline:
                time.sleep(0.02)
            text = (error or b"").decode()
            assert not left, (left, text)
            assert not list((self.folder / "tmp").iterdir()), (list((self.folder / "tmp").iterdir()), text)
            return Ended(self.process.returncode, (output or b"").decode(), text, took)
        finally:
            for pid in session_of(self.process.pid):
                os.kill(int(pid), signal.SIGKILL)


def session_of(leader: int) -> Mapping[int, str]:
    """The processes of a session that live, with their command lines."""
    processes = dict[int, str]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            state, _, _, session, *_ = read_process(int(entry.name), "stat").rpartition(")")[2].split() or "Z000"
            if state not in "ZX" and int(session) == leader:
                processes[int(entry.name)] = read_process(int(entry.name), "cmdline").replace("\0", " ")
    return processes


def run_command(folder: Path, words: Sequence[str], **options: Any) -> Ended:
    return Command(folder, words, **options).end()


def leftovers(folder: Path) -> list[Path]:
    """What an unfinished write has left in a folder."""
    return [path for path in folder.rglob("*") if "partial" in path.name or path.name.startswith(".config-")]
