"""What is written when a rank of a run is out of memory in a step: the plan of memory next to what was measured there.

RUN/memory/rank-0.txt has the table, and on a GPU rank-0.pickle a snapshot of its allocator, which
https://pytorch.org/memory_viz shows. With `train.memory_history` a snapshot names the lines of the program that made
each allocation; torch then records a stack at each, so that it is off by default. Where memory is only just enough, an
allocator gives back and takes again in every step, which a line of the log says (`AllocatorWatch`). How a run is
refused whose plan does not fit is in `train/memory`.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from longspan.comm.watch import is_out_of_memory, one_line
from longspan.files import write_atomically
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import bytes_text, text_table
from longspan.run.run_data import TrainingRun
from longspan.train.memory.device_memory import (
    allocator_retries,
    peak_memory_bytes,
    peak_reserved_bytes,
    retries_text,
)

FOLDER = "memory"  # of the run's folder
STORED = ("weights", "gradients", "states")  # parts that are measured by their tensors
NAMES = ("part", "planned", "measured")
WARNED_AFTER = 3  # steps one after another in which an allocator had to give memory back


class AllocatorWatch:
    """Counts how often this rank's allocator had to give memory back in a step, and warns once where it goes on.

    >>> watch = AllocatorWatch(world.device)
    >>> columns = watch.columns()  # after each step
    >>> if text := watch.warning(most_of_any_rank):
    ...     display.log(text)
    """

    def __init__(self, device: torch.device) -> None:
        """Begin at the allocator's count so far; `of_step` is what the last step added."""
        self._device, self._count_before = device, allocator_retries(device)
        self.of_step: int = 0
        self._last_retries = deque[float](maxlen=WARNED_AFTER)  # of the last steps, the most of any rank
        self._is_warned = False

    def columns(self) -> dict[str, int]:
        """Count the retries of the step that ended (`of_step`); return them as a column of its row, none on a CPU."""
        retries = allocator_retries(self._device)
        self.of_step, self._count_before = retries - self._count_before, retries
        return {"allocator_retries": self.of_step} if self._device.type == "cuda" else {}

    def warning(self, most: float) -> str:
        """Return the line to log after a step, once in a session; "" for none.

        `most` is the largest `of_step` of any rank. The line comes when that was above 0 for WARNED_AFTER steps.
        """
        self._last_retries.append(most)
        if self._is_warned or len(self._last_retries) < WARNED_AFTER or not all(self._last_retries):
            return ""
        self._is_warned = True
        return retries_text(
            sum(self._last_retries) / WARNED_AFTER, peak_memory_bytes(self._device), peak_reserved_bytes(self._device)
        )


@contextmanager
def explain_out_of_memory(run: TrainingRun, step: int) -> Iterator[None]:
    """Where the code inside is out of memory, write the rank's files, and add their text to the error as a note.

    `step` counts from 1.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            error.add_note(_write_explanation(run, step, error))
        raise


def record_history(run: TrainingRun) -> None:
    """Let torch record the stacks of a GPU's last allocations: `train.memory_history` of them, 0 for none."""
    if (entries := run.config.train.memory_history) and run.world.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=entries)


def _write_explanation(run: TrainingRun, step: int, error: BaseException) -> str:
    """Write the files of this rank; returns the table, and where they are."""
    rank, folder = run.world.rank, run.dir / FOLDER
    text = f"rank {rank} was out of memory in step {step}: {one_line(error)}\n{memory_table(run)}"
    with suppress(OSError):  # where the disk refuses a file, the note has the table alone
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"rank-{rank}.txt", f"{text}\n")
        text = f"{text}\nkept as {folder / f'rank-{rank}.txt'}{_write_snapshot(run, folder)}"
    return text


def _write_snapshot(run: TrainingRun, folder: Path) -> str:
    """Write the snapshot of a GPU's allocator; returns the end of a sentence that names the file, "" on a CPU."""
    if run.world.device.type != "cuda":
        return ""
    file = folder / f"rank-{run.world.rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(file))
    except RuntimeError as error:
        return f" (no snapshot: {one_line(error)})"
    stacks = "" if run.config.train.memory_history else "; train.memory_history = 100000 gives it the program's lines"
    return f", its allocator's snapshot as {file} (https://pytorch.org/memory_viz{stacks})"


def memory_table(run: TrainingRun) -> str:
    """Return a table of bytes by part: as the plan of memory has them, and as measured on this rank.

    Only weights, gradients and states can be measured, by their tensors; "the rest of them" is what the peak had beyond
    these three. The peak is that of torch, which does not allocate communicators, so communicators are
    subtracted from the planned total. Without a plan the column "planned" is empty.
    """
    planned = run.memory.to_json()["device"] if run.memory is not None else {}
    if planned:
        planned["total"] -= planned["communicators"]
    measured = _count_stored_bytes(run)
    peak, stored_bytes = peak_memory_bytes(run.world.device), sum(measured.values())
    parts = [name for name in planned if name != "total"] or list(STORED)
    shown_parts = [name for name in parts if name in STORED or planned[name]]  # no line for a planned 0
    rows = [(name, _cell(planned, name), _cell(measured, name)) for name in shown_parts]
    planned_rest = planned.get("total", 0) - sum(planned.get(name, 0) for name in STORED)
    rows.append(("the rest of them", bytes_text(planned_rest) if planned else "", bytes_text(peak - stored_bytes)))
    rows.append(("most at one time", _cell(planned, "total"), bytes_text(peak)))
    note = "" if planned else "\nthis run has no plan of memory (train.memory, docs/memory.md)"
    on_cpu = "\non a CPU the most is the whole process's, with Python and its libraries"
    return f"{text_table(NAMES, rows)}{note}{'' if run.world.device.type == 'cuda' else on_cpu}"


def _cell(sizes: Mapping[str, int], part: str) -> str:
    """Write the bytes of a part; "" where they are not known."""
    return bytes_text(sizes[part]) if part in sizes else ""


def _count_stored_bytes(run: TrainingRun) -> dict[str, int]:
    """Return bytes of this rank's parameters, gradients and optimizer states, without those that the host stores."""
    device = run.world.device.type
    sizes: dict[str, int] = dict.fromkeys(STORED, 0)
    for parameter in run.model.parameters():
        sizes["weights"] += _count_bytes(local_tensor(parameter.detach()), device)
        if parameter.grad is not None:
            sizes["gradients"] += _count_bytes(local_tensor(parameter.grad), device)
    for state in run.optimizer.state.values():
        tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
        sizes["states"] += sum(_count_bytes(local_tensor(value), device) for value in tensors)
    return sizes


def _count_bytes(x: torch.Tensor, device: str) -> int:
    """Return the bytes of a tensor; 0 if it is on another type of device, as states that wait on the host are."""
    return x.nbytes if x.device.type == device else 0
