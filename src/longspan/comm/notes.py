"""What ranks tell each other through the store when a collective fails: who left, who answers, and the outcome.

The first rank to notice asks, every other rank that lives answers, and all read the one outcome.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from longspan.comm.child import DEAD_KEY
from longspan.layout.layout import short

CALL_SECONDS = 5.0  # a roll call waits this long for answers
NAMED = 8  # ranks named one by one in a message


class Notes:
    """One rank's side. `store` is this world's own corner of the store that all ranks share, `root` the whole of it.

    Its methods raise RuntimeError where the store is gone, but for `leave`.
    """

    def __init__(self, rank: int, ranks: Sequence[int], store: Store, root: Store | None) -> None:
        self._rank, self._ranks, self._store, self._root = rank, tuple(ranks), store, root

    def leave(self, error: str, *, echo: bool) -> None:
        """Tell that this rank leaves with an error; an echo is one that reports another rank's failure."""
        with suppress(RuntimeError):  # the store is gone: the others will find out by themselves
            self._append("left", {"rank": self._rank, "error": error, "echo": echo})

    def somebody_left(self) -> bool:
        """Whether a rank has left with an error."""
        return self._store.check(["left"])

    def asked(self) -> bool:
        """Whether a rank has called the roll."""
        return self._store.check(["incident"])

    def answer(self, doing: str) -> None:
        """Tell what this rank is doing."""
        self._append("answers", {"rank": self._rank, "doing": doing})

    def call(self, doing: str) -> str:
        """The outcome of the one roll call of this world: called now, or by a rank that noticed before."""
        me = str(self._rank)
        self.answer(doing)
        if self._store.compare_set("incident", "", me) == me.encode():
            outcome = self._collect()
            self._store.set("outcome", outcome)
            return outcome
        return self._read("outcome", CALL_SECONDS + 2) or "another rank asked, and did not tell the outcome"

    def _collect(self) -> str:
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            answers = {note["rank"]: note["doing"] for note in self._all("answers")}
            left = {note["rank"]: note for note in self._all("left")}
            missing = [rank for rank in self._ranks if rank not in answers and rank not in left]
            dead = self._deaths(missing)
            if len(dead) == len(missing) or time.monotonic() > deadline:
                return _outcome(answers, left, missing, dead)
            time.sleep(0.05)

    def _deaths(self, missing: Sequence[int]) -> dict[int, str]:
        """How missing ranks died, where a launcher has told."""
        root = self._root
        if root is None:
            return {}
        told = [rank for rank in missing[:64] if root.check([f"{DEAD_KEY}{rank}"])]
        return {rank: root.get(f"{DEAD_KEY}{rank}").decode() for rank in told}

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
