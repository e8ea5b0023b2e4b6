"""Importing this, a process asks no name server what this machine's own address is called; the fork server does.

For its log, torch looks up a name for each end of a store's connection (`formatSockAddr` of its socket.cpp, 2.11 to
2.13). The address is ::ffff:127.0.0.1, which /etc/hosts does not list, so a name server is asked; where a packet is
lost, all ranks of a world wait five seconds for it. After a look-up that failed torch makes no other: one fails here.
Local ranks, which are forked from the process that imports this, inherit that; torch's log has addresses in place of
names then. Not covered: the launcher itself, and ranks of torchrun, which are processes of the user's.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPTIONS = "RES_OPTIONS"  # of the resolver: resolv.conf(5)


@contextmanager
def _ask_no_name_server() -> Iterator[None]:
    """Let threads that begin inside ask no name server; standard error, where torch warns of that, goes nowhere."""
    earlier_options, stderr = os.environ.get(_OPTIONS), os.dup(2)
    os.environ[_OPTIONS] = "attempts:0"  # at a name server: a name that no file has is not found, at once
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.pop(_OPTIONS)
        if earlier_options is not None:
            os.environ[_OPTIONS] = earlier_options


def _open_store() -> None:
    """Serve a store, and connect to it: torch then fails to look up the names of its ends, and looks up none later."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


with _ask_no_name_server():  # in a new thread: a thread reads the options once
    thread = threading.Thread(target=_open_store)
    thread.start()
    thread.join()
