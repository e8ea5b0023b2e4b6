"""Times of parts of a step on this rank: by the host's clock, on a GPU by its events."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceClock:
    """Adds up the seconds of blocks; those of a GPU are read once the step has waited for it anyway."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._spans = list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._seconds = 0.0

    @contextmanager
    def add_time(self) -> Iterator[None]:
        """Add the time of the `with` block; a block that raises is not counted."""
        started = time.perf_counter()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._gpu else []
        for event in events[:1]:
            event.record()
        yield
        self._seconds += time.perf_counter() - started
        if events:
            events[1].record()
            self._spans.append((events[0], events[1]))

    def seconds(self) -> float:
        """Return the seconds of all blocks so far; on a GPU it waits for the end of the last one."""
        if not self._gpu:
            return self._seconds
        for _, end in self._spans:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans) / 1e3
