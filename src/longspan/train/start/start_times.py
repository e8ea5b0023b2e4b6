"""The seconds of a start by part, from the command to the end of step 1, as the first rank sees them.

A part is all that happens between two notes, whatever thread does it. A run logs them in one line after its first step
and keeps them in run.json under "starts"; `bench/training/first_steps.py` records them.
"""

import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class Starts:
    """Seconds by part of one process's start, which begins here."""

    parts: dict[str, float] = field(default_factory=dict[str, float])
    _last: float = field(default_factory=time.time)  # when the last part ended

    def end_part(self, name: str) -> None:
        """Note that a part has ended now; the next one begins. Parts of one name are added."""
        now = time.time()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._last
        self._last = now

    def to_json(self) -> dict[str, float]:
        """Return the seconds of each part, and of all, for run.json."""
        return {name: round(seconds, 2) for name, seconds in self.parts.items()} | {
            "total": round(sum(self.parts.values()), 2)
        }

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.05)
        return f"ready after {sum(self.parts.values()):.1f} s: {parts}"
