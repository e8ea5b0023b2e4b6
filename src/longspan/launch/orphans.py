"""Ranks whose launcher is gone, killed or not: they stop as at SIGTERM, instead of training on where nobody sees them.

Such ranks would keep GPUs busy and the run's folder locked. A run ends its step and saves first; its ranks talk over
connections of their own, so they can. Nothing here knows a run: what SIGTERM does is `comm/all_ranks.py`'s.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

from longspan.launch.stop_signals import leave_closed_output

PATIENCE = 600.0  # seconds for the step and the save of a rank that heeds SIGTERM
_CHECK_SECONDS = 0.1
_gone = threading.Event()


def stop_without_launcher(wait: Callable[[], object], *, with_message: bool) -> None:
    """Send this process SIGTERM once `wait` has returned, which is called in a thread, and SIGKILL much later.

    >>> stop_without_launcher(lambda: connection.wait([parent.sentinel]), with_message=rank == 0)

    `with_message`: also write what happened to standard error, which one rank of a launch should do.
    """

    def stop() -> None:
        """Wait until the launcher is gone; then stop this process by SIGTERM, and kill it after PATIENCE seconds."""
        wait()
        _gone.set()
        if with_message:
            leave_closed_output()
            os.write(2, b"longspan: the process that started the ranks is gone: they stop, and a run saves first\n")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=stop, name="launcher watch", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the launcher of this rank is gone, and with it the store that it served to the ranks of its host."""
    return _gone.is_set()


def stop_without_torchrun() -> None:
    """Stop this process once the torchrun that started it is gone; nothing happens if another program started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torchrun = os.getppid()

        def wait() -> None:
            while os.getppid() == torchrun:
                time.sleep(_CHECK_SECONDS)

        stop_without_launcher(wait, with_message=os.environ.get("LOCAL_RANK") == "0")
