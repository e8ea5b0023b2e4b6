"""Seconds in which one emulated node sends bytes to itself, and to the other: `limited_link RATE BYTES`."""

import socket
import subprocess
import sys
import time

from bench.processes.node_network import NodeNetwork, enter_namespace, is_inside

INSIDE, ACROSS = 20077, 20078  # ports


def main(rate: float, size: int) -> None:
    network = NodeNetwork(rate)
    words = [sys.executable, "-m", "tests.launch.limited_link"]
    receiver, sender = (
        subprocess.Popen(
            network.inside([*words, end, network.address(0), str(ACROSS), str(size)]), stdin=subprocess.PIPE
        )
        for end in ("receive", "send")
    )
    try:
        for node, process in enumerate((receiver, sender)):
            network.join(node, process)
        assert sender.wait(30) == 0 and receiver.wait(30) == 0
    finally:
        for process in (receiver, sender):
            process.kill()


def receive(address: str, port: int, size: int) -> None:
    """Take the bytes of a process of this node, then those of the other node, and print the seconds of each."""
    words = [sys.executable, "-m", "tests.launch.limited_link", "send", address, str(INSIDE), str(size)]
    with socket.create_server((address, INSIDE)) as server, subprocess.Popen(words):
        inside = _seconds(server, size)
    with socket.create_server((address, port)) as server:
        print(inside, _seconds(server, size))


def send(address: str, port: int, size: int) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=20)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    with connection:
        connection.sendall(bytes(size))


def _seconds(server: socket.socket, size: int) -> float:
    connection, _ = server.accept()
    with connection:
        left, started = size, time.monotonic()
        while left:
            left -= len(connection.recv(1 << 20)) or left
    return time.monotonic() - started


if __name__ == "__main__":
    if sys.argv[1] in ("send", "receive"):
        {"send": send, "receive": receive}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif not is_inside():
        enter_namespace("tests.launch.limited_link", sys.argv[1:])
    else:
        main(float(sys.argv[1]), int(sys.argv[2]))
