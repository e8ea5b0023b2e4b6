"""`train`: the loop of a run, from its configuration to its last evaluation, on every rank inside an open world.

A step is: documents of the step, a plan of their lengths, `run_step`. What a run leaves in its folder: config.toml,
corpus/, config.json and the tokenizer's files, run.json, metrics.jsonl, plans.jsonl, plans/,
checkpoints/, model/ (Hugging Face), summary.json; run.lock, which keeps a second run out; profiles/ of steps that were
profiled; memory/, where memory was short; hang/, where a collective failed.
"""

import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from longspan.comm import World, raise_first_error
from longspan.comm.all_ranks import (
    LogLine,
    StopSignal,
    is_first_rank,
    result_or_error,
    run_on_every_rank,
    signal_of_any_rank,
)
from longspan.comm.watch import error_in_one_line, is_out_of_memory
from longspan.comm.world import open_worlds
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, LongspanError, RunFolderError
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import bytes_text, text_table
from longspan.plan import AsyncPlanner, Plan
from longspan.plan.plan import group_counts
from longspan.run.checks import check_config
from longspan.run.evaluations import Evaluations, Final
from longspan.run.facts import TrainResult
from longspan.run.loggers import logger_classes
from longspan.run.profile import FOLDER, StepProfiles
from longspan.run.progress import ProgressDisplay
from longspan.run.records import Records, open_records, record_start_seconds, run_lock, save_plan, write_facts
from longspan.run.run_data import StepReader, TrainingRun
from longspan.run.saves import Saves, save_final_model
from longspan.run.set_up import set_up
from longspan.run.warm_up import warm_up_coming_steps
from longspan.train.plans import plan_steps
from longspan.train.run_memory import allocator_retries, allocator_retries_text, peak_memory_bytes, peak_reserved_bytes
from longspan.train.starts import Starts

WARNED_AFTER = 3  # steps one after another in which an allocator had to give memory back


class AllocatorWatch:
    """Counts how often this rank's allocator had to give memory back in a step, and warns once where it goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._count_before = device, allocator_retries(device)
        self.of_step: int = 0  # what the last step added
        self._last_retries = deque[float](maxlen=WARNED_AFTER)  # of the last steps, the most of any rank
        self._is_warned = False

    def count_step_retries(self) -> dict[str, int]:
        """Count the retries of the step that ended; return them as a column of its row, none on a CPU."""
        retries = allocator_retries(self._device)
        self.of_step, self._count_before = retries - self._count_before, retries
        return {"allocator_retries": self.of_step} if self._device.type == "cuda" else {}

    def warning_once(self, most: float) -> str:
        """Return the line to log after a step, once in a session; "" for none. `most` is the largest of any rank."""
        self._last_retries.append(most)
        if self._is_warned or len(self._last_retries) < WARNED_AFTER or not all(self._last_retries):
            return ""
        self._is_warned = True
        retries = sum(self._last_retries) / WARNED_AFTER
        return allocator_retries_text(retries, peak_memory_bytes(self._device), peak_reserved_bytes(self._device))


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
    measured = _measured_bytes(run)
    measured["most at one time"] = peak_memory_bytes(run.world.device)
    if planned:
        planned["most at one time"] = planned.pop("total") - planned.pop("communicators", 0)
    rows = [
        (name, *(bytes_text(sizes[name]) if name in sizes else "" for sizes in (planned, measured)))
        for name in planned | measured
    ]
    note = "" if planned else "\nthis run has no plan of memory (train.plan_memory, docs/memory.md)"
    return f"{text_table(('part', 'planned', 'measured'), rows)}{note}"


def _measured_bytes(run: TrainingRun) -> dict[str, int]:
    parameters = list(run.model.parameters())
    tensors = {
        "weights": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "states": [value for state in run.optimizer.state.values() for value in state.values()],
    }
    device = run.world.device.type
    return {
        part: sum(
            local.nbytes
            for x in values
            if isinstance(x, torch.Tensor) and (local := local_tensor(x.detach())).device.type == device
        )
        for part, values in tensors.items()
    }


STEPS = 20  # whose median counts
SLOWER = 1.10  # than the other slots for the same rows
MOST_NOTES = 2  # slow slots that a report of a failed collective names, the last ones


class SlowSlots:
    """Watches whether this rank's slot is slower than the others, over the last STEPS steps."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=STEPS)
        self._is_named = False

    def note_ratio(self, ratio: float | None) -> None:
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
    save_on: str  # a signal of `checkpoint.save_signals` that any rank received; "" for none
    minutes_over: bool  # a checkpoint is due by the clock


class Steps:
    """Takes the steps of a run on this rank, and agrees with the other ranks on what comes after each."""

    def __init__(self, run: TrainingRun, plans: AsyncPlanner, log: LogLine) -> None:
        self._run, self._log = run, log
        self._reader, self._slow_slots = StepReader(run, plans), SlowSlots()
        steps = run.config.train.profile_steps
        self._profiles = StepProfiles(steps, run.dir / FOLDER, run.world, log) if steps else None
        self._allocator = AllocatorWatch(run.world.device)

    def take_step(self, step: int) -> tuple[dict[str, Any], Plan]:
        """Run one optimizer step (from 0); returns its row of metrics (from 1) and its plan. A profiled step's seconds
        do not count for slow slots.
        """
        run, reader = self._run, self._reader
        started, profiles = time.perf_counter(), self._profiles
        documents, plan = reader.read_step(step)
        if isinstance(run.model, MultimodalModel):
            reader.prepare_step(step + 1, run.model)
        with explain_out_of_memory(run, step + 1), profiles.profile_step(step + 1) if profiles else nullcontext():
            result = run.take_step(plan, documents, step, partial(reader.prepare_step, step + 1))
        seconds = time.perf_counter() - started
        if profiles is None or not profiles.has_step(step + 1):
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
        if profiles is not None:
            profiles.write_files()
        return row | self._allocator.count_step_retries(), plan

    def agree_after_step(self, stop: StopSignal, failure: LongspanError | None, saves: Saves) -> Agreement:
        """Return what the ranks agree on after a step, by one message if none received a signal or failed."""
        world = self._run.world
        flags = (bool(stop.received) or failure is not None, bool(stop.save_asked), saves.minutes_are_over())
        slow = world.rank + 1 if self._slow_slots.is_slow else 0
        figures = (saves.saver.has_failed, slow, self._allocator.of_step)
        stops, saves_now, minutes, save_failed, slow_rank, most_retries = world.control.largest_over_ranks(
            [*map(float, flags), *map(float, figures)], "agreement on a flag"
        )
        stopped = save_on = ""
        if save_failed:
            saves.saver.raise_failure()
        if stops:
            raise_first_error(world, failure)
            stopped = signal_of_any_rank(world, stop.received)
        if saves_now:
            save_on = signal_of_any_rank(world, stop.save_asked)
        if text := self._allocator.warning_once(most_retries):
            self._log(text)
        if slow_rank:
            self._slow_slots.log_slow_slot(int(slow_rank) - 1, world, self._log)
        return Agreement(stopped, save_on, bool(minutes))


def train(config: RunConfig, world: World, display: ProgressDisplay, starts: Starts | None = None) -> TrainResult:
    """Train to the last step, or until a signal stops the run; all ranks call it together, with the same configuration.

    A signal that stops, on any rank, ends the run after the current step, with a checkpoint; after one of
    `checkpoint.save_signals`
    a checkpoint is written, and the run goes on. `starts` has the parts of the start before this call.

    Raises LongspanError for what does not fit, before the first step; for a loss or gradients that are not finite,
    before they are used; for what the disk refuses (after a checkpoint, where all ranks can still write one); and
    RunFolderError where another run is at work in the folder.
    """
    starts = starts or Starts()
    check_config(config, len(world.home.ranks))
    with StopSignal(config.checkpoint.save_signals) as stop, run_lock(Path(config.run.dir), world, display.log):
        names = config.run.loggers if is_first_rank(world) else ()
        classes = run_on_every_rank(world, partial(logger_classes, names), ConfigError)
        run = set_up(config, world, display.log, starts)
        with open_records(run, classes, display.log) as records:
            evaluations = Evaluations(run, display, records, stop)
            display.set_length(run.config.train.steps, evaluations.list_work())
            result = _Loop(run, display, records, evaluations, starts).train(stop)
        write_facts(run, "summary.json", result.summary())
        return result


@dataclass(frozen=True)
class _Loop:
    run: TrainingRun
    display: ProgressDisplay
    records: Records
    evaluations: Evaluations
    starts: Starts

    def train(self, stop: StopSignal) -> TrainResult:
        run = self.run
        with plan_steps(run.training_choice, run.order, run.world.home) as plans:
            if run.done < run.config.train.steps:
                plans.start(run.done)  # they are made while kernels are compiled
            self.starts.end_part("records")
            warm_up_coming_steps(run, self.display.log, self.starts)
            self.starts.end_part("kernels")
            saves = Saves(run, self.display.log)
            stopped = self.run_steps(Steps(run, plans, self.display.log), stop, saves)
        done = saves.done
        final = Final() if stopped else self.evaluate_and_save_at_end(saves)
        return TrainResult(
            dir=run.dir,
            done=done,
            steps=run.config.train.steps,
            stopped=stopped or final.stopped,
            final=final.at_degrees,
            named=final.named,
            last_loss=self.records.last_loss(done),
            vocab_size=run.corpus.manifest.tokenizer_size if run.corpus.labels is None else 0,
            world=len(run.world.home.ranks),
        )

    def run_steps(self, steps: Steps, stop: StopSignal, saves: Saves) -> str:
        """Run the remaining steps; return the signal that stopped them ("" for none).

        A checkpoint comes before an evaluation, in which the step could be lost. A run that goes on first makes the
        evaluation that was due where it stopped. `run.done` are the steps before this start, `saves.done` all steps.
        """
        run, settings, stopped = self.run, self.run.config.train, ""
        with saves.save_before_errors():
            if run.done < settings.steps:
                stopped = self.evaluations.evaluate_due(run.done, unless_recorded=True)
                if run.done:
                    saves.keep_if_best(self.evaluations.take_new_rows())
            while saves.done < settings.steps and not stopped:
                self.display.begin_step(saves.done + 1)
                row, plan = steps.take_step(saves.done)
                saves.done += 1
                row |= saves.take_save_columns()
                _, failure = result_or_error(partial(self.records.write_step, row, plan), RunFolderError)
                self.display.show_step(row)
                agreed = steps.agree_after_step(stop, failure, saves)
                if saves.done == run.done + 1:
                    self.starts.end_part("first step")
                    record_start_seconds(run, self.starts, self.display.log)
                stopped = agreed.stopped
                if saves.done in (run.done + 1, settings.steps) or stopped:
                    save_plan(run, plan, f"step-{saves.done:06d}")
                if stopped or agreed.save_on or saves.is_checkpoint_due(minutes_over=agreed.minutes_over):
                    saves.save()  # before an evaluation, in which the step would be lost; it changes no weights
                    stop.forget_save_request()  # also what other ranks received meanwhile
                saves.reserve_memory()
                if agreed.save_on and not stopped:
                    self.display.log(f"{agreed.save_on} was received: step {saves.done} is saved, and the run goes on")
                if saves.done < settings.steps and not stopped:
                    stopped = self.evaluations.evaluate_due(saves.done)
                    saves.keep_if_best(self.evaluations.take_new_rows())
                    if stopped:
                        saves.save_if_unsaved()
            saves.wait()
            saves.take_save_columns()  # logs the checkpoint that no step's row follows
        return stopped

    def evaluate_and_save_at_end(self, saves: Saves) -> Final:
        save_final_model(self.run)
        final = self.evaluations.evaluate_at_end()
        saves.keep_if_best(self.evaluations.take_new_rows())
        saves.remove_old_saves()
        return final
