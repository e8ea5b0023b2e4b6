"""Slots that are slower than their plan: named once, with their host, in a line of the run's log, and in the report of
a collective that fails later.

Each rank watches its own slot (`train/terms/slot_pace.py`). The number of a rank whose slot is slow goes with the
message by which ranks agree on the end of each step: nothing is gathered.
"""

import socket
from collections import deque
from statistics import median

from longspan.comm import World
from longspan.comm.all_ranks import LogLine
from longspan.comm.world import open_worlds

STEPS = 20  # whose median counts
SLOWER = 1.10  # than the other slots for the same rows
MOST_NOTES = 2  # slow slots that a report of a failed collective names, the last ones


class SlowSlots:
    """Watches whether this rank's slot is slower than the others, over the last STEPS steps.

    >>> slots = SlowSlots()
    >>> for _ in range(20):
    ...     slots.note_ratio(1.2)
    >>> slots.is_slow
    True
    """

    def __init__(self) -> None:
        """Begin without a step; a slot is logged once in a session."""
        self._ratios: deque[float] = deque(maxlen=STEPS)
        self._is_named = False

    def note_ratio(self, ratio: float | None) -> None:
        """Note a step's ratio: this slot's seconds a row over the other slots'; None for a step that was not timed."""
        if ratio is not None:
            self._ratios.append(ratio)

    @property
    def is_slow(self) -> bool:
        """Whether the slot is slow (by its median ratio over STEPS steps), and not yet logged."""
        return not self._is_named and len(self._ratios) == STEPS and median(self._ratios) >= SLOWER

    def log_slow_slot(self, rank: int, world: World, log: LogLine) -> None:
        """Log that the slot of `rank` is slow, and note it for reports of failed collectives; entered by all ranks."""
        text = ""
        if rank == world.rank:
            self._is_named = True
            slot = f"slot {world.slot} (rank {rank}, host {socket.gethostname()})"
            text = (
                f"{slot} has been {100 * (median(self._ratios) - 1):.0f} % slower than its plan for {STEPS} steps: it "
                "takes so much longer than the other slots for the same rows; look at the clocks and temperature of "
                "its device and at what else runs there"
            )
        text = world.control.broadcast_object(text, source=rank, what="name of a slow slot")
        log(text)
        for open_world in open_worlds():  # each of which may have to say why it waits
            open_world.watch.notes = (*open_world.watch.notes, text)[-MOST_NOTES:]
