"""Signals that ranks of a run receive: to stop, or to save; what each rank does with them, and what all of them hear.

How they reach the ranks is in `launch/stop_signals.py`.
"""

import signal
import time
from collections.abc import Collection
from types import FrameType
from typing import Any

from longspan.comm.world import World
from longspan.launch.launcher_watch import launcher_is_gone
from longspan.launch.stop_signals import SAME_PRESS, Interrupted, signals_that_stop

# This stands in place of a signal's name.
LAUNCHER_END = "the end of its launcher"


class StopSignal:
    """While open, remembers the name of the first signal that stops instead of letting it end the process.

    >>> with StopSignal(save_on=["SIGUSR1"]) as stop:
    ...     while not stop.received:
    ...         work()

    These are SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, without those of `save_on`, which ask for a save:
    `save_asked` is the name of the last one until a caller that saves sets it to "". A second one that stops, more than
    a second later, raises Interrupted. Open it in the main thread.
    """

    def __init__(self, save_on: Collection[str] = ()) -> None:
        self.received = self.save_asked = ""
        self._save_on = {signal.Signals[name] for name in save_on}
        self._received_at = self._save_at = -SAME_PRESS  # so long ago that the next signal is another press
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        numbers = self._save_on | set(signals_that_stop())
        self._old_handlers = {number: signal.signal(number, self._remember_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def stop_reason(self) -> str:
        """Return why this rank would stop work that takes long, in words; "" where no signal to stop has come."""
        if not self.received:
            return ""
        if self.received == LAUNCHER_END:
            return "its launcher is gone"
        return f"{self.received} was received"

    def _remember_signal(self, number: int, _: FrameType | None) -> None:
        """One press of Ctrl-C may arrive twice, and counts once; a second press to stop raises Interrupted."""
        now = time.monotonic()
        name = signal.Signals(number).name
        # Where the launcher is gone, this process sent the signal to itself.
        if number == signal.SIGTERM and launcher_is_gone():
            name = LAUNCHER_END
        if number in self._save_on:
            if now - self._save_at > SAME_PRESS:
                self.save_asked: str = name
                self._save_at = now
        elif not self.received:
            self.received: str = name
            self._received_at = now
        elif now - self._received_at > SAME_PRESS:
            raise Interrupted(number)


def find_received_signal(world: World, name: str) -> str:
    """Return the name of a signal that some rank received, on every rank; "" where none did. Entered by all ranks.

    `name` is what this rank received (`StopSignal.received`); of several ranks the home's first counts.
    """
    first = world.control.first_object(name or None, "gather of host values")
    return "" if first is None else first[1]
