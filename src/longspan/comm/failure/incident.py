"""What ranks tell each other through the store when a collective fails: who left, who answers, and the outcome.

The first rank to notice calls the roll, every other rank that lives answers, and all read the one outcome. Roll calls
are numbered, so that a world in which ranks caught an error and went on has a new one at its next failure.
"""

import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from longspan.comm.rendezvous import clone, corner
from longspan.launch.rank_process import DEAD_KEY
from longspan.layout.layout import short

CALL_SECONDS = 5.0  # a roll call waits this long for answers
NAMED = 8  # ranks named one by one in a message


class Notes:
    """One rank's side. `root` is a connection to the store that all ranks share, `name` this world's corner of it.

    Its methods raise RuntimeError where the store does not answer, but for `leave`.
    """

    def __init__(self, rank: int, ranks: Sequence[int], root: Store, name: str) -> None:
        self._rank, self._ranks, self._root, self._name = rank, tuple(ranks), root, name
        self._store = corner(root, name)
        self._answered, self._answered_at = 0, -math.inf  # the last roll call that this rank answered, and when
        self._answering = threading.Lock()

    def connect_again(self) -> None:
        """Use a new connection, where the one at hand has failed."""
        self._root = clone(self._root)
        self._store = corner(self._root, self._name)

    def leave(self, error: str, *, echo: bool) -> None:
        """Tell that this rank leaves with an error; an echo is one that reports another rank's failure."""
        with suppress(RuntimeError):  # the store is gone: the others will find out by themselves
            self._append("left", {"rank": self._rank, "error": error, "echo": echo})

    def somebody_left(self) -> bool:
        """Whether a rank has left with an error."""
        return self._store.check(["left"])

    def unanswered(self) -> int:
        """The number of a roll call that this rank has not answered; 0 where there is none."""
        following = self._answered + 1
        return following if self._store.check([f"{following}/asked"]) else 0

    def answer(self, number: int, doing: str) -> None:
        """Tell what this rank is doing, once for each roll call."""
        with self._answering:
            if number > self._answered:
                self._append(f"{number}/answers", {"rank": self._rank, "doing": doing})
                self._answered, self._answered_at = number, time.monotonic()

    def call(self, doing: str, since: float) -> str:
        """The outcome of a roll call for a collective that this rank entered at the monotonic time `since`.

        It is the last roll call where that came after; else the next, called by this rank or by one that was faster.
        """
        number, me = self._answered + (since > self._answered_at), str(self._rank)
        first = self._store.compare_set(f"{number}/asked", "", me) == me.encode()
        self.answer(number, doing)
        if first:
            outcome = self._collect(number)
            self._store.set(f"{number}/outcome", outcome)
            return outcome
        return self._read(f"{number}/outcome", CALL_SECONDS + 2) or "another rank asked, and did not tell the outcome"

    def _collect(self, number: int) -> str:
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            answers = {note["rank"]: note["doing"] for note in self._all(f"{number}/answers")}
            left = {note["rank"]: note for note in self._all("left")}
            missing = [rank for rank in self._ranks if rank not in answers and rank not in left]
            dead = self._deaths(missing)
            if len(dead) == len(missing) or time.monotonic() > deadline:
                return _outcome(answers, left, missing, dead)
            time.sleep(0.05)

    def _deaths(self, missing: Sequence[int]) -> dict[int, str]:
        """How missing ranks died, where a launcher has told."""
        told = [rank for rank in missing[:64] if self._root.check([f"{DEAD_KEY}{rank}"])]
        return {rank: self._root.get(f"{DEAD_KEY}{rank}").decode() for rank in told}

    def _all(self, key: str) -> list[dict[str, Any]]:
        if not self._store.check([key]):
            return []
        return [json.loads(line) for line in self._store.get(key).decode().splitlines()]

    def _append(self, key: str, note: dict[str, Any]) -> None:
        self._store.append(key, json.dumps(note) + "\n")  # pyright: ignore[reportAttributeAccessIssue]

    def _read(self, key: str, seconds: float) -> str | None:
        """A key once it is there. Asks again and again: a blocking read would keep the answering thread waiting too."""
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return self._store.get(key).decode()


def _outcome(answers: dict[int, str], left: dict[int, Any], missing: list[int], dead: dict[int, str]) -> str:
    first = [note for note in left.values() if not note["echo"]]
    lines = [f"rank {note['rank']} left with {note['error']}" for note in first[:NAMED]]
    lines += [f"rank {rank} does not answer: it {dead[rank]}" for rank in list(dead)[:NAMED]]
    silent = [rank for rank in missing if rank not in dead]
    if silent:
        lines.append(f"rank(s) {short(silent)} do not answer: killed, cut off or stopped")
    answering = [rank for rank in sorted(answers) if rank not in left]
    lines += [f"rank {rank} is {answers[rank]}" for rank in answering[:NAMED]]
    if len(answering) > NAMED:
        lines.append(f"{len(answering) - NAMED} more ranks answer")
    return "; ".join(lines)
