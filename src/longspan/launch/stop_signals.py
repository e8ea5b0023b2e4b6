"""Signals that stop, from the start of a command to its end: what they do in its launcher, and how they reach ranks.

While a command imports and starts its ranks, a signal raises `Interrupted` in it. The fork server heeds none of them,
wherever a terminal or a supervisor sends them, and ranks heed them once they call their function. While ranks run, a
signal goes to them. What a run makes of it is in `comm/received_signals.py`.
"""

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from longspan.launch.output import write_error

KILLS = (signal.SIGINT, signal.SIGTERM)  # always a request to end: a launcher kills its ranks at the second one
# A closed terminal and schedulers send these; `checkpoint.save_signals` may name them.
NOTICES = (
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
SIGNALS = (*KILLS, *NOTICES)
# seconds: a terminal, a supervisor and a launcher may all deliver one Ctrl-C, or one request to end
SAME_PRESS = 1.0


class Interrupted(KeyboardInterrupt):
    """A command that a signal ended; `status` is its exit status, as a shell gives it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number: int = number
        self.status: int = 128 + number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Let signals that stop raise Interrupted inside, but not within a second of the last one that did: a terminal may
    send several at one press of keys. Ignored signals stay ignored; only the main thread receives signals.

    A library that catches every exception, as numpy does while it is imported, raises its own in place of Interrupted:
    it leaves as Interrupted.
    """
    raised_at = -SAME_PRESS  # the time of the last Interrupted; at first so long ago that any signal raises
    received = list[int]()

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal raised_at
        now = time.monotonic()
        if now - raised_at > SAME_PRESS:
            raised_at = now
            received.append(number)
            raise Interrupted(number)

    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    old_handlers = _set_handler(interrupt, heeded)
    try:
        yield
    except Exception as error:
        if not received:
            raise
        raise Interrupted(received[-1]) from error
    finally:
        _restore_handlers(old_handlers)


def ignore_signals(numbers: Collection[int]) -> None:
    """Let signals do nothing in this process until it sets a handler for them. Processes that it starts do not inherit
    this, as they would inherit ignored signals.
    """
    _set_handler(lambda number, frame: None, numbers)


def signals_that_stop() -> tuple[signal.Signals, ...]:
    """The signals that stop, without those notices that are ignored here, as nohup ignores SIGHUP."""
    return (*KILLS, *(number for number in NOTICES if signal.getsignal(number) is not signal.SIG_IGN))


def block_signals() -> AbstractContextManager[None]:
    """Hold back signals while this is open; a process that starts inside gets none until it opens `unblock_signals`."""
    return _mask_signals(signal.SIG_BLOCK)


def unblock_signals() -> AbstractContextManager[None]:
    """Let signals through again that `block_signals` holds back, while this is open."""
    return _mask_signals(signal.SIG_UNBLOCK)


@contextmanager
def _mask_signals(how: int) -> Iterator[None]:
    old_mask = signal.pthread_sigmask(how, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


class Forwarding:
    """While open, signals that stop go to ranks instead of ending their launcher. Ranks know what a notice asks for,
    and get each. A second SIGINT or SIGTERM, more than a second after the first, kills them; within a second it is of
    the same press, and does nothing. `send` sends a signal to all ranks; `sent` are all that were sent, and `received`
    is the one that this process got last, of those that it sent on.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self.sent: list[int] = []
        self._send = send
        self._first_signal_at: float | None = None  # when the first of KILLS came
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Forwarding":
        self._old_handlers = _set_handler(self._forward_signal, signals_that_stop())
        return self

    def __exit__(self, *_: object) -> None:
        _restore_handlers(self._old_handlers)

    def _forward_signal(self, number: int, _: FrameType | None) -> None:
        """The second request to end, of another press, kills the ranks."""
        now = time.monotonic()
        if number in NOTICES:
            self._send_to_ranks(number, number)
        elif self._first_signal_at is None:
            self._first_signal_at = now
            self._send_to_ranks(number, number)
        elif now - self._first_signal_at > SAME_PRESS:
            name = signal.Signals(number).name
            text = f"longspan: {name} again: the processes are killed, and what they have not saved is lost\n"
            write_error(text)  # the handler may have interrupted a print
            self._send_to_ranks(number, signal.SIGKILL)

    def _send_to_ranks(self, number: int, to_ranks: int) -> None:
        self.received = number
        self.sent.append(to_ranks)
        self._send(to_ranks)


def _set_handler(handler: Any, numbers: Collection[int]) -> dict[int, Any]:
    """Outside of the main thread, which receives no signals, nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def _restore_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
