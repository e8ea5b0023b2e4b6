"""Memory of processes as /proc tells it, and samples of it while a block runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sampled(sample: Callable[[], None], every: float) -> Iterator[None]:
    """Call `sample` in a thread, every so many seconds until the block ends."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(every):
            sample()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def resident(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process's memory by their names in /proc, such as VmRSS and RssAnon; none where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name.startswith(("Vm", "Rss"))}
