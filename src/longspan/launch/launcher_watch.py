"""What a rank knows of its launcher. Once that is gone, killed or not, the rank stops as at SIGTERM: nobody would see
it train on.

A run ends its step and saves first: its ranks talk over connections of their own. See `comm/all_ranks.py`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

from longspan.launch.output import write_error

PATIENCE = 600.0  # seconds for the step and the save of a rank that heeds SIGTERM
_CHECK_SECONDS = 0.1
_checks: list[Callable[[], bool]] = []


def stop_when_launcher_is_gone(is_gone: Callable[[], bool], *, with_message: bool) -> None:
    """Send this process SIGTERM once `is_gone`, which is called in threads, and SIGKILL PATIENCE seconds later.
    `with_message`: also write what happened to standard error, which one rank of a launch should do.
    """
    _checks.append(is_gone)

    def stop() -> None:
        while not is_gone():
            time.sleep(_CHECK_SECONDS)
        if with_message:
            write_error("longspan: the process that started the ranks is gone: they stop, and a run saves first\n")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=stop, name="launcher watch", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the launcher of this rank is gone now, and with it the store that it served to the ranks of its host."""
    return any(is_gone() for is_gone in _checks)


def stop_when_torchrun_is_gone() -> None:
    """Stop this process once the torchrun that started it is gone; nothing happens if another program started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torchrun = os.getppid()
        stop_when_launcher_is_gone(
            lambda: os.getppid() != torchrun, with_message=os.environ.get("LOCAL_RANK") == "0"
        )
