"""Several torchruns of this machine that stand for nodes, each of the same command.

Where there are GPUs, each node has a part of them and its own NCCL_HOSTID, so that NCCL goes through sockets between
nodes. With a `NodeNetwork` each node has a network of its own, and a slow link to the others.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from bench.processes.end_processes import end_with_workers
from bench.processes.node_network import NodeNetwork

MARK = "LONGSPAN_EMULATED_NODES"  # in the environment of all processes of the nodes, by which they are ended
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Nodes:
    """So many nodes of so many ranks each, and the GPUs of each (empty: ranks on CPUs)."""

    count: int
    ranks: int
    gpus: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def on_this_machine(
        cls, count: int, ranks: int = 0, *, on_cpus: int = 4, cpu: bool = False, same_gpus: bool = False
    ) -> "Nodes":
        """Nodes that share out this machine's GPUs, with `ranks` of them each (0: as many as there are).

        Without GPUs, or with `cpu`, a node has `ranks` or `on_cpus` ranks. With `same_gpus` every node has the first
        `ranks` GPUs (0: all), which take turns: results are right, times are not those of as many GPUs. Raises
        ValueError if the GPUs are too few.
        """
        gpus = () if cpu else _visible_gpus()
        if not gpus:
            return cls(count, ranks or on_cpus)
        if same_gpus:
            ranks = ranks or len(gpus)
            if ranks > len(gpus):
                raise ValueError(f"a node of {ranks} ranks needs {ranks} GPUs, and this machine has {len(gpus)}")
            return cls(count, ranks, (gpus[:ranks],) * count)
        ranks = ranks or len(gpus) // count
        if not ranks or count * ranks > len(gpus):
            need = f"{count} nodes of {max(1, ranks)} rank(s) need {count * max(1, ranks)} GPUs"
            raise ValueError(
                f"{need}, and this machine has {len(gpus)}; give fewer ranks, nodes on the same GPUs (--same-gpus), or "
                "ranks on CPUs"
            )
        return cls(count, ranks, tuple(tuple(gpus[node * ranks : (node + 1) * ranks]) for node in range(count)))

    def __str__(self) -> str:
        return f"{self.count} nodes of {self.ranks} rank(s) each, on {'GPUs' if self.gpus else 'CPUs'}"


class EmulatedNodes:
    """The torchruns of some nodes, as a context that leaves none of their processes behind.

    `words` is what follows torchrun's flags. Output of a node goes to its file of `logs`; None is this terminal.
    """

    def __init__(
        self, nodes: Nodes, words: Sequence[str], logs: Sequence[Path | None], network: NodeNetwork | None = None
    ) -> None:
        self.nodes = nodes
        self._words = list(words)
        self._logs = logs
        self._network = network
        self.processes: list[subprocess.Popen[bytes]] = []
        self._mark, self._port = uuid4().hex, free_port()

    def __enter__(self) -> "EmulatedNodes":
        try:
            for node in range(self.nodes.count):
                self.processes.append(self._start(node))
                if self._network is not None:
                    self._network.join(node, self.processes[node])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            end_with_workers(process, f"{MARK}={self._mark}")

    def running(self) -> list[int]:
        return [node for node, process in enumerate(self.processes) if process.poll() is None]

    def failed(self) -> list[int]:
        return [node for node, process in enumerate(self.processes) if process.poll()]

    def signal(self, number: int) -> None:
        for node in self.running():
            self.processes[node].send_signal(number)

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        network = self._network
        log = self._logs[node]
        address, interface = ("127.0.0.1", "lo") if network is None else (network.address(0), network.INTERFACE)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.nodes.count)]
        torchrun += ["--node-rank", str(node), "--nproc-per-node", str(self.nodes.ranks)]
        torchrun += ["--master-addr", address, "--master-port", str(self._port), *self._words]
        with ExitStack() as stack:
            out = None if log is None else stack.enter_context(log.open("w"))
            return subprocess.Popen(
                torchrun if network is None else network.inside(torchrun),
                stdin=subprocess.DEVNULL if network is None else subprocess.PIPE,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C comes through this process
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (no threads run here)
                env=self._environment(node, interface),
            )

    def _environment(self, node: int, interface: str) -> dict[str, str]:
        quiet = {} if self._network is None else {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # its addresses have no names
        environment = {"NCCL_NET": "Socket", "OMP_NUM_THREADS": "1"} | quiet | os.environ | {MARK: self._mark}
        environment |= {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
        return environment | {"CUDA_VISIBLE_DEVICES": ",".join(self.nodes.gpus[node]) if self.nodes.gpus else ""}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _visible_gpus() -> tuple[str, ...]:
    """This machine's GPUs as CUDA_VISIBLE_DEVICES names them; torch is imported only if there is a driver."""
    if not Path("/dev/nvidiactl").exists():
        return ()
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return tuple(names[:count]) if len(names) >= count and names[0] else tuple(map(str, range(count)))


def _end_with_parent() -> None:
    """Let this process, which becomes a torchrun, get SIGTERM when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
