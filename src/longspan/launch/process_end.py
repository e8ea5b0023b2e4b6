"""How a process ended, in words, by its exit code."""

import signal


def describe_end(code: int | None) -> str:
    """Return how a process ended, from its exit code, for messages."""
    if code is None or code >= 0:
        return f"left with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


_USUAL_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", as Linux does where memory runs out",
    signal.SIGBUS: ", as Linux does where a mapped file, as of a corpus, was cut, or the disk below it fails",
}


def describe_death(code: int | None) -> str:
    """Return how a rank that gave no answer ended, by its exit code; signals with their usual cause."""
    if code is not None and code < 0:
        return describe_end(code) + _USUAL_CAUSES.get(-code, "")
    return f"{describe_end(code)} before it answered"
