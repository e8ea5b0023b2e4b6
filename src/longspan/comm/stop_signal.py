"""Signals that stop a run: at the first SIGTERM or Ctrl-C it finishes its step and saves, at the second it ends."""

import signal
import time
from types import FrameType
from typing import Any

from longspan.comm import World
from longspan.launch.stop_signals import SAME_PRESS, SIGNALS, Interrupted


class StopSignal:
    """While open, remembers the name of the first SIGTERM or SIGINT instead of ending the process.

    >>> with StopSignal() as stop:
    ...     while not stop.received:
    ...         work()

    A second one, more than a second later, raises Interrupted. Open it in the main thread.
    """

    def __init__(self) -> None:
        self.received = ""
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """Why this rank would stop what takes long, in words; "" where it received nothing."""
        return f"{self.received} was received" if self.received else ""

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        """Note a first signal for the run to end at its next step; a later one ends it at once."""
        now = time.monotonic()
        if self.received and now - self._at > SAME_PRESS:
            raise Interrupted(number)
        if not self.received:
            self.received, self._at = signal.Signals(number).name, now


def received_signal(world: World, stop: StopSignal) -> str:
    """The signal that any rank received, "" for none; all ranks ask together."""
    first = world.control.first_object(stop.received or None, "gather of host values")
    return "" if first is None else first[1]
