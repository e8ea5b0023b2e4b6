"""Run a command on two emulated nodes of this machine; `bench/two_nodes.sh` is how it is called.

bench/two_nodes.sh longspan train examples/first.toml
bench/two_nodes.sh --ranks 2 --rate 50M longspan bench calibrate --out machine.json
bench/two_nodes.sh python script.py

COMMAND is `longspan …`, `python …`, a script or a program, without torchrun: each node is a torchrun of its own. GPUs
are shared out between the nodes, or with --same-gpus each node has all of them; without GPUs, ranks are on CPUs with
gloo. NCCL and gloo use sockets between nodes.
With --rate each node has a network of its own with a link of that speed to the other, if this system allows network
namespaces (as root, or by `unshare --map-root-user`; `ip` and `tc` are needed). Inside a node there is no limit. The
nodes then reach nothing outside of this machine.

The output of node 0 comes to the terminal. That of other nodes goes to files, which are named if something fails. The
exit status is that of the node that fails first. Ctrl-C is passed on to all ranks; a second one kills them.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from bench.processes.emulated_nodes import EmulatedNodes, Nodes
from bench.processes.node_network import NodeNetwork, enter_namespace, is_inside, missing_permission

GRACE_SECONDS = 60.0  # that the other nodes have to report, once one has failed or a signal was passed on
SAME_PRESS = 1.0  # seconds: signals that come this close are one
FLAGS_VARIABLE = "LONGSPAN_TWO_NODES"  # in the environment of a command: what the call of bench/two_nodes.sh had
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    os.environ[FLAGS_VARIABLE] = shlex.join(arguments)
    try:
        words = torchrun_words(options.command)
        nodes = Nodes.on_this_machine(options.nodes, options.ranks, cpu=options.cpu, same_gpus=options.same_gpus)
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    network = _network(options.rate, arguments)
    link = "" if network is None else f", with links of {network.rate / 1e6:,.6g} MB/s between them"
    _say(f"{nodes}{link}")
    return run_command(nodes, words, network)


def run_command(nodes: Nodes, words: Sequence[str], network: NodeNetwork | None) -> int:
    folder = Path(tempfile.mkdtemp(prefix="two-nodes-"))
    logs = [None, *(folder / f"node{node}.txt" for node in range(1, nodes.count))]
    with ExitStack() as stack:
        passing = _PassedSignals()
        stack.callback(passing.close)
        emulated = stack.enter_context(EmulatedNodes(nodes, words, logs, network))
        passing.to(emulated)
        first = _wait(emulated, passing)
    if first is None and not passing.numbers:
        for log in folder.iterdir():
            log.unlink()
        folder.rmdir()
        return 0
    files = ", ".join(f"node {node}: {log}" for node, log in enumerate(logs) if log is not None)
    if passing.numbers:
        _say(f"ended by {signal.Signals(passing.numbers[0]).name}; output of {files}")
        return 128 + passing.numbers[0]
    assert first is not None
    status = emulated.processes[first].returncode
    end = f"left with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
    _say(f"node {first} {end}; output of {files}")
    return status if status > 0 else 128 - status


def torchrun_words(command: Sequence[str]) -> list[str]:
    """What torchrun is given to run a command. Raises ValueError for one that starts torchrun itself.

    >>> torchrun_words(["longspan", "train"]), torchrun_words(["python", "script.py"])
    (['-m', 'longspan', 'train'], ['script.py'])
    """
    first, *rest = command
    name = Path(first).name
    if name == "torchrun":
        raise ValueError("leave torchrun and its flags out: each node is a torchrun already")
    if name == "longspan":
        return ["-m", "longspan", *rest]
    if re.fullmatch(r"python[\d.]*", name) and rest and (rest[0] == "-m" or not rest[0].startswith("-")):
        return rest
    return list(command) if first.endswith(".py") else ["--no-python", *command]


def bytes_per_second(text: str) -> float:
    """A speed from a number with K, M or G, or without.

    >>> bytes_per_second("2.65G")
    2650000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([KMG]?)B?(?:/s)?", text, flags=re.IGNORECASE)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no speed; give bytes a second, as in 2.65G or 50M")
    return float(match[1]) * UNITS[match[2].upper()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/two_nodes.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=_count, default=2, help="how many nodes (2)")
    parser.add_argument("--ranks", type=_count, default=0, help="of each node (its share of the GPUs; 4 on CPUs)")
    parser.add_argument("--rate", type=bytes_per_second, help="bytes a second between nodes, each way: 2.65G, 50M")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs aside")
    parser.add_argument(
        "--same-gpus", action="store_true", help="all nodes on the same GPUs, which take turns: right results, slower"
    )
    parser.add_argument("command", nargs=argparse.PARSER, metavar="COMMAND", help="with its own flags")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give 1 or more")
    return int(text)


def _network(rate: float | None, arguments: Sequence[str]) -> NodeNetwork | None:
    """The network of that rate, in a namespace that this process enters first; None if there is to be none, or may."""
    if rate is None:
        return None
    if not is_inside():
        if reason := missing_permission():
            _say(f"no limit between the nodes, for this system allows no network namespaces ({reason})")
            return None
        enter_namespace("bench.processes.two_nodes", arguments)
    try:
        return NodeNetwork(rate)
    except OSError as error:
        _say(f"no limit between the nodes ({error})")
        return None


class _PassedSignals:
    """SIGINT, SIGTERM and SIGHUP, passed on to all nodes. A second one, more than a second later, ends the wait."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.since = 0.0
        self.again = False
        self._nodes: EmulatedNodes | None = None
        self._before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}

    def to(self, nodes: EmulatedNodes) -> None:
        self._nodes = nodes
        if self.numbers:
            nodes.signal(self.numbers[0])

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.numbers:
            self.again = self.again or time.monotonic() - self.since > SAME_PRESS
            return
        self.numbers.append(number)
        self.since = time.monotonic()
        if self._nodes is not None:
            self._nodes.signal(number)


def _wait(nodes: EmulatedNodes, passing: _PassedSignals) -> int | None:
    first = None
    since = 0.0
    while nodes.running() and not passing.again:
        if first is None and (failed := nodes.failed()):
            first = failed[0]
            since = time.monotonic()
        started = passing.since or since
        if started and time.monotonic() - started > GRACE_SECONDS:
            _say(f"node(s) {nodes.running()} still run after {GRACE_SECONDS:g} s and are killed")
            break
        time.sleep(0.1)
    return first if first is not None else next(iter(nodes.failed()), None)


def _say(text: str) -> None:
    print(f"two_nodes: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
