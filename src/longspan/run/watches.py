"""What a run watches in its steps: retries of the allocator, memory that ran out, and a slot slower than the others."""

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine
from longspan.comm.device import allocator_retries, is_out_of_memory, peak_memory_bytes, peak_reserved_bytes
from longspan.comm.watch import error_in_one_line
from longspan.comm.world import open_worlds
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import bytes_text, text_table
from longspan.run.run_data import TrainingRun
from longspan.train.optim.offload_states import OffloadedStates

WARNED_AFTER = 3  # steps one after another in which an allocator had to give memory back


class AllocatorWatch:
    """Counts how often this rank's allocator had to give memory back in a step, and warns once where it goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._count_before = allocator_retries(device)
        # The last step added this number.
        self.of_step: int = 0
        # Each number is the most of any rank in one of the last steps.
        self._last_retries = deque[float](maxlen=WARNED_AFTER)
        self._is_warned = False

    def count_step_retries(self) -> dict[str, int]:
        """Count the retries of the step that ended; return them as a column of its row, none on a CPU."""
        retries = allocator_retries(self._device)
        self.of_step = retries - self._count_before
        self._count_before = retries
        return {"allocator_retries": self.of_step} if self._device.type == "cuda" else {}

    def take_warning(self, most: float) -> str:
        """Note the `most` retries of any rank in a step; return the warning to log, once in a session, "" for none."""
        self._last_retries.append(most)
        if self._is_warned or len(self._last_retries) < WARNED_AFTER or not all(self._last_retries):
            return ""
        self._is_warned = True
        retries = sum(self._last_retries) / WARNED_AFTER
        return allocator_retries_text(retries, peak_memory_bytes(self._device), peak_reserved_bytes(self._device))


def allocator_retries_text(times: float, in_use: int, reserved: int) -> str:
    """Return a warning of an allocator that ran out of memory `times` a step; `in_use`, `reserved` are peak bytes."""
    return (
        f"the GPU's allocator ran out of memory {times:.3g} times a step: each time it waits for the GPU, gives back "
        f"what is free and takes it again ({bytes_text(reserved)} taken at most, {bytes_text(in_use)} in use); a lower "
        "train.device_memory_limit leaves it room (docs/memory.md)"
    )


@contextmanager
def explain_out_of_memory(run: TrainingRun, step: int) -> Iterator[None]:
    """Where the code inside is out of memory in `step`, counted from 1, add what was planned and measured as a note."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            first = f"rank {run.world.rank} was out of memory in step {step}: {error_in_one_line(error)}"
            error.add_note(f"{first}\n{_memory_table(run)}{_write_allocator_snapshot(run)}")
        raise


def _write_allocator_snapshot(run: TrainingRun) -> str:
    """On a CPU nothing is written, and the line says what the measured bytes are."""
    if run.world.device.type != "cuda":
        return "\non a CPU the most is the whole process's, with Python and its libraries"
    file = run.dir / "memory" / f"rank-{run.world.rank}.pickle"
    try:
        file.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
    except (OSError, RuntimeError) as error:
        return f"\nno snapshot of its allocator: {error_in_one_line(error)}"
    return f"\nits allocator's snapshot is {file} (https://pytorch.org/memory_viz)"


def _memory_table(run: TrainingRun) -> str:
    planned = {name: size for name, size in run.memory.to_json()["device"].items() if size} if run.memory else {}
    parameters = list(run.model.parameters())
    optimizer = run.optimizer
    states = optimizer.host_states if isinstance(optimizer, OffloadedStates) else optimizer.state
    tensors = {
        "weights": [parameter for parameter in parameters if parameter.is_floating_point()],
        "packed": [parameter for parameter in parameters if not parameter.is_floating_point()],
        "gradients": [parameter.grad for parameter in parameters],
        "states": [value for state in states.values() for value in state.values()],
    }
    device = run.world.device
    measured = {
        part: sum(
            local.nbytes
            for value in values
            if isinstance(value, torch.Tensor)
            and (local := local_tensor(value.detach())).device.type == device.type
        )
        for part, values in tensors.items()
    }
    measured["most at one time"] = peak_memory_bytes(device)
    if planned:  # torch measures neither buffers of NCCL nor the CUDA context
        planned["most at one time"] = planned.pop("total") - planned.pop("communicators", 0)
    rows = [
        (name, *(bytes_text(sizes[name]) if name in sizes else "" for sizes in (planned, measured)))
        for name in planned | measured
    ]
    note = "" if planned else "\nthis run has no plan of memory (train.plan_memory, docs/memory.md)"
    return f"{text_table(('part', 'planned', 'measured'), rows)}{note}"


# The median of so many steps counts.
STEPS = 20
# A slot is slow that takes so much more than the others for the same rows.
SLOWER = 1.10
MOST_NOTES = 2  # slow slots that a report of a failed collective names, the last ones


class SlowSlots:
    """Watches whether this rank's slot is slower than the others, over the last STEPS steps."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=STEPS)
        self._is_named = False

    def add_ratio(self, ratio: float | None) -> None:
        """Add this slot's seconds a row in a step over those of the other slots; None where they were not timed."""
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
        text = world.control.broadcast_object(text, source=rank, label="name of a slow slot")
        log(text)
        # Each world may have to say why it waits.
        for open_world in open_worlds():
            open_world.watch.notes = (*open_world.watch.notes, text)[-MOST_NOTES:]
