"""Several torchruns of this machine that stand for nodes, of one script each with the command line of this process.

Where there are GPUs, each has a part of them and its own NCCL_HOSTID, so that NCCL goes through sockets between them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench.processes.end_processes import end_with_workers


def run_on_nodes(nodes: int, ranks: int, timeout: float) -> dict[str, Any]:
    """What the first rank writes to the file of `--results`, a flag that is added to the command line of this script.

    Exits with the output of the nodes where nothing is written in that many seconds.
    """
    if ranks % nodes or ranks < 2 * nodes:
        sys.exit(f"--ranks is {ranks}; give a multiple of {nodes}, at least {2 * nodes}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the nodes end too
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, results = free.getsockname()[1], Path(folder) / "results.json"
        free.close()
        logs = [Path(folder) / f"node{node}.txt" for node in range(nodes)]
        started = [_start(node, (nodes, ranks // nodes, port), results, log) for node, log in enumerate(logs)]
        try:
            end = time.monotonic() + timeout
            while any(node.poll() is None for node in started) and time.monotonic() < end:
                if any(node.poll() for node in started):
                    break
                time.sleep(0.1)
        finally:
            for node in started:
                end_with_workers(node, str(results))
        if not results.exists():
            sys.exit("\n".join(f"{log.stem}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs))
        return json.loads(results.read_text())


def _start(node: int, sizes: tuple[int, int, int], results: Path, log: Path) -> subprocess.Popen[bytes]:
    """One torchrun, of (nodes, ranks of each, port), with its part of the GPUs."""
    nodes, here, port = sizes
    environment = os.environ | {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(node * here + i) for i in range(here))
    else:
        environment["OMP_NUM_THREADS"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)]
    torchrun += ["--nproc-per-node", str(here), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    words = [*torchrun, *sys.argv, "--results", str(results)]
    with log.open("w") as out:
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
