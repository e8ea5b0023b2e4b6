"""Slurm's commands as examples/gpu/slurm.sh uses them, on this machine: `python fake_slurm.py srun|scontrol WORDS…`.

srun starts its tasks here, sends SIGUSR1 and SIGTERM on to them, and ends with the highest of their statuses.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def srun(words: list[str]) -> int:
    options = dict[str, str](word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    start = next(i for i, word in enumerate(words) if not word.startswith("--"))
    tasks = list[subprocess.Popen[bytes]]()
    for task in range(int(options.get("ntasks", os.environ["SLURM_NTASKS"]))):
        log = options["output"].replace("%t", str(task)).replace("%N", f"host{task}")
        with Path(log).open("wb") as output:
            environment = {**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
            pipes = {"stdout": output, "stderr": subprocess.STDOUT}
            tasks.append(subprocess.Popen(words[start:], env=environment, process_group=0, **pipes))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: send_all(tasks, number))
    statuses = [task.wait() for task in tasks]
    return max(128 - status if status < 0 else status for status in statuses)


def send_all(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        task.send_signal(number)


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("127.0.0.1\nhost1")
    else:
        with Path("requeued").open("a") as file:
            print(*words, file=file)
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
