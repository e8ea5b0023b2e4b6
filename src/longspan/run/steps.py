"""One step of a run on this rank, its row of metrics, and what the ranks agree on after it."""

import socket
import time
from collections import deque
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from longspan.comm import World, raise_first_error
from longspan.comm.all_ranks import LogLine
from longspan.comm.stop_signal import StopSignal, received_signal, save_signal
from longspan.comm.world import open_worlds
from longspan.errors import LongspanError
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan, PlanAhead
from longspan.plan.plan_rows import group_counts
from longspan.run.memory_short import AllocatorWatch, explain_out_of_memory
from longspan.run.profile import FOLDER, StepProfiles
from longspan.run.run_data import StepReader, TrainingRun
from longspan.run.saves import Saves
from longspan.train.memory.device_memory import peak_memory_bytes

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


class Agreement(NamedTuple):
    """What the ranks agreed on after a step."""

    stopped: str  # by a signal that any rank received; "" for none
    save_on: str  # a signal of `run.save_on` that any rank received; "" for none
    minutes_over: bool  # a checkpoint is due by the clock


class Steps:
    """Takes the steps of a run on this rank, and agrees with the other ranks on what comes after each."""

    def __init__(self, run: TrainingRun, plans: PlanAhead, log: LogLine) -> None:
        self._run, self._log = run, log
        self._reader, self._slow_slots = StepReader(run, plans), SlowSlots()
        self._profiles = StepProfiles(run.config.train.profile_steps, run.dir / FOLDER, run.world, log)
        self._allocator = AllocatorWatch(run.world.device)

    def take_step(self, step: int) -> tuple[dict[str, Any], Plan]:
        """Run one optimizer step (counted from 0); returns its row of metrics (counted from 1) and its plan.

        The images of the next step are read meanwhile. A step that is profiled is slower than usual: its seconds count
        not for slow slots. The row has figures that any run has, then those of runs with several sources, images,
        routers, or depths of prediction.
        """
        run, reader = self._run, self._reader
        started, is_usual = time.perf_counter(), not self._profiles.has_step(step + 1)
        documents, plan = reader.read_step(step)
        if isinstance(run.model, MultimodalModel) and step + 1 < run.config.train.steps:
            reader.prepare_images(run.model, step + 1)
        with explain_out_of_memory(run, step + 1), self._profiles.profile_step(step + 1):
            result = run.take_step(plan, documents, step, partial(reader.prepare_documents, step + 1))
        seconds = time.perf_counter() - started
        if is_usual:
            self._slow_slots.note_ratio(result.slot_ratio)
        row = {"step": step + 1, "loss": result.loss, "tokens": result.tokens, "targets": result.targets}
        row |= {"grad_norm": result.grad_norm, "lr": run.optimizer.param_groups[0]["lr"], "seconds": round(seconds, 6)}
        row |= {
            "tokens_per_second": round(result.tokens / seconds, 3),
            "memory_bytes": peak_memory_bytes(run.world.device),
        }
        row |= {"micro_batches": result.micro_batches, "efficiency": round(plan.efficiency, 6)}
        row["groups"] = group_counts(plan)
        if len(run.order.stream.sources) > 1:
            row["source_tokens"] = run.order.source_tokens(step)
        images = [item.rows for item in getattr(documents, "items", ())]  # texts alone have no items
        row |= run.figures.step_figures(plan, seconds, images, result.encoders)
        if result.router is not None:
            row |= {"router_balance_loss": result.router.balance, "router_z_loss": result.router.z}
        row |= {f"mtp_loss_{depth}": loss for depth, loss in enumerate(result.mtp_losses, 1)}
        self._profiles.write_files()
        return row | self._allocator.columns(), plan

    def agree_on_end(self, stop: StopSignal, failure: LongspanError | None, saves: Saves) -> Agreement:
        """Return what the ranks agree on after a step, by one message if none received a signal or failed.

        The message gives the largest of each figure over the ranks: flags are 0 or 1, and a slow slot is its rank + 1,
        as 0 is none; of several, the highest rank is named first. A slow slot, and an allocator that often gives memory
        back, are logged. Raises on every rank the error of a rank whose records (`failure`) or save failed.
        """
        world = self._run.world
        flags = (bool(stop.received) or failure is not None, bool(stop.save_asked), saves.minutes_are_over())
        slow = world.rank + 1 if self._slow_slots.is_slow else 0
        figures = (saves.saver.has_failed, slow, self._allocator.of_step)
        stops, saves_now, minutes, save_failed, slow_rank, most_retries = world.control.largest_of(
            [*map(float, flags), *map(float, figures)], "agreement on a flag"
        )
        stopped = save_on = ""
        if save_failed:
            saves.saver.raise_failure()
        if stops:
            raise_first_error(world, failure)
            stopped = received_signal(world, stop)
        if saves_now:
            save_on = save_signal(world, stop)
        if text := self._allocator.warning(most_retries):
            self._log(text)
        if slow_rank:
            self._slow_slots.log_slow_slot(int(slow_rank) - 1, world, self._log)
        return Agreement(stopped, save_on, bool(minutes))
