"""Signals to a run: at the first that stops it finishes its step and saves, at the second it ends; others only save."""

import signal
import time
from collections.abc import Collection
from types import FrameType
from typing import Any

from longspan.comm import World
from longspan.launch.stop_signals import SAME_PRESS, Interrupted, leave_closed_output, signals_that_stop


class StopSignal:
    """While open, remembers the name of the first signal that stops instead of letting it end the process.

    >>> with StopSignal(save_on=["SIGUSR1"]) as stop:
    ...     while not stop.received:
    ...         work()

    These are SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, without those of `save_on`, which ask for a save:
    `save_asked` is the name of the last one until `answer_save`. A second one that stops, more than a second later,
    raises Interrupted. Open it in the main thread.
    """

    def __init__(self, save_on: Collection[str] = ()) -> None:
        self.received = self.save_asked = ""
        self._save_on = {signal.Signals[name] for name in save_on}
        self._received_at = self._save_at = -SAME_PRESS  # so long ago that the next signal is another press
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        numbers = self._save_on | set(signals_that_stop())
        self._old_handlers = {number: signal.signal(number, self._note_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """Why this rank would stop work that takes long, in words; "" where no signal to stop has come."""
        return f"{self.received} was received" if self.received else ""

    def answer_save(self) -> None:
        """Forget the signals that asked for a save until now, as that save is under way."""
        self.save_asked = ""

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        """One press of Ctrl-C may arrive twice. A terminal that closed takes no output any more."""
        now, name = time.monotonic(), signal.Signals(number).name
        leave_closed_output()
        if number in self._save_on:
            if now - self._save_at > SAME_PRESS:
                self.save_asked: str = name
                self._save_at = now
        elif not self.received:
            self.received: str = name
            self._received_at = now
        elif now - self._received_at > SAME_PRESS:
            raise Interrupted(number)


def received_signal(world: World, name: str) -> str:
    """Return the signal of this `name` that any rank received, such as `stop.received`; "" for none; entered by all
    ranks.
    """
    first = world.control.first_object(name or None, "gather of host values")
    return "" if first is None else first[1]
