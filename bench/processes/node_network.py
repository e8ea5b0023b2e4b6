"""A network between emulated nodes whose links have a limit, where the system allows network namespaces.

Each node's processes are in a namespace of their own, with one link to a bridge that joins all nodes; `tc` limits both
directions of each link. Traffic inside a node does not pass it. Namespaces have no names: they are gone with their
processes. Nodes with such a network reach nothing outside of this machine.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

_INSIDE = "LONGSPAN_NODE_NETWORK"  # set in a process that `enter_namespace` has started
_BRIDGE = "nodes"
_LINK = "ip link add name {0} type veth peer name {1}"
_LIMIT = "tc qdisc add dev {0} root tbf rate {1}bit burst {2} latency 50ms"


def missing_permission() -> str:
    """What this system refuses of such a network, in one line; empty if it works."""
    commands = [
        _LINK.format("one", "two"),
        _LIMIT.format("one", 10**6, 10**5),
        f"ip link add name {_BRIDGE} type bridge",
    ]
    script = " && ".join(commands)
    try:
        trial = subprocess.run([*_unshare(), "sh", "-c", script], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "unshare is not installed"
    if trial.returncode == 0:
        return ""
    return " ".join(trial.stderr.split()) or f"a trial left with status {trial.returncode}"


def is_inside() -> bool:
    return os.environ.get(_INSIDE) == "1"


def enter_namespace(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become `python -m module ARGUMENTS` in a network namespace in which `NodeNetwork` may make links."""
    os.environ[_INSIDE] = "1"
    words = [*_unshare(), sys.executable, "-m", module, *arguments]
    os.execvp(words[0], words)


class NodeNetwork:
    """Links of `rate` bytes a second, each way, of every node to all others. Made inside `enter_namespace` only."""

    INTERFACE: ClassVar[str] = "node"  # the link, as a node sees it

    def __init__(self, rate: float) -> None:
        self.rate = rate
        _run(f"ip link add name {_BRIDGE} type bridge")
        _run(f"ip link set dev {_BRIDGE} up")

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def inside(self, words: Sequence[str]) -> list[str]:
        """The command that runs these words in a namespace once `join` has made its link. It needs a pipe as stdin."""
        return ["unshare", "--net", "sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh", *words]

    def join(self, node: int, process: subprocess.Popen[bytes]) -> None:
        """Give a node that was started by the command of `inside` its link, and let it go on."""
        _wait_for_namespace(process)
        outer = f"to{node}"
        name = self.INTERFACE
        here = f"nsenter --target {process.pid} --net "
        _run(f"{_LINK.format(outer, name)} netns {process.pid}")
        _run(f"ip link set dev {outer} mtu 9000 master {_BRIDGE} up")
        for command in ("ip link set dev lo up", f"ip address add {self.address(node)}/24 dev {name}"):
            _run(here + command)
        _run(f"{here}ip link set dev {name} mtu 9000 up")
        burst = max(256 * 1024, int(self.rate / 250))  # of a timer's tick at least
        for prefix, device in ((here, name), ("", outer)):
            _run(prefix + _LIMIT.format(device, int(8 * self.rate), burst))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()


def _unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 and _may_unshare() else ["unshare", "--map-root-user", "--net"]


def _may_unshare() -> bool:
    """Whether this process may make a namespace without one of users, as root of a machine may."""
    return subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode == 0


def _wait_for_namespace(process: subprocess.Popen[bytes]) -> None:
    here = Path("/proc/self/ns/net").readlink()
    end = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/ns/net").readlink() == here:
        if process.poll() is not None or time.monotonic() > end:
            raise OSError("a node could not enter a network namespace")
        time.sleep(0.01)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {' '.join(done.stderr.split())}")
