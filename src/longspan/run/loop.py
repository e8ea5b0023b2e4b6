"""`train`: the loop of a run, from its configuration to its last evaluation, on every rank inside an open world.

A step is: documents of the step, a plan of their lengths, `run_step`. What a run leaves in its folder: config.toml,
corpus/, config.json and the tokenizer's files, run.json, metrics.jsonl, plans.jsonl, groups.jsonl, plans/,
checkpoints/, model/ (Hugging Face), summary.json; run.lock, which keeps a second run out; profiles/ of steps that were
profiled; memory/, where memory was short; hang/, where a collective failed.
"""

import math
import socket
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from longspan.comm import World, raise_first_error
from longspan.comm.all_ranks import LogLine, is_first_rank, result_or_error, run_on_every_rank, run_on_first_rank
from longspan.comm.stop_signal import StopSignal, received_signal, save_signal
from longspan.comm.world import open_worlds
from longspan.config.defaults import settings_line
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import RunFolderFiles
from longspan.errors import ConfigError, LongspanError, ModelError, RunFolderError
from longspan.files import as_json, write_atomically
from longspan.model import save_model
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.weights.hf_folder import read_configuration
from longspan.plan import Plan, PlanAhead
from longspan.plan.plan_rows import group_counts
from longspan.run.checks import check_config
from longspan.run.evaluations import Evaluations, Final
from longspan.run.facts import LOCK
from longspan.run.loggers.metrics_log import read_metrics
from longspan.run.loggers.run_loggers import logger_classes
from longspan.run.memory_short import AllocatorWatch, explain_out_of_memory
from longspan.run.profile import FOLDER, StepProfiles
from longspan.run.progress import ProgressDisplay
from longspan.run.records import Records, note_facts, open_records, run_lock, save_plan
from longspan.run.result import LAST_STEPS, TrainResult
from longspan.run.run_data import StepReader, TrainingRun
from longspan.run.run_facts import facts_of
from longspan.run.saves import Saves
from longspan.run.set_up.run_model import check_adapter_targets
from longspan.run.set_up.set_up import set_up
from longspan.run.set_up.warm_up import warm_up_run
from longspan.train.memory.device_memory import peak_memory_bytes
from longspan.train.plans import plan_steps
from longspan.train.starts import Starts
from longspan.train.step_figures import waiting_text

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


HANG = "hang"  # of what torch recorded of collectives, where one failed


def train(config: RunConfig, world: World, display: ProgressDisplay, starts: Starts | None = None) -> TrainResult:
    """Train to the last step, or until a signal stops the run; all ranks call it together, with the same configuration.

    A signal that stops, on any rank, ends the run after the current step, with a checkpoint; after one of `run.save_on`
    a checkpoint is written, and the run goes on. `starts` has the parts of the start before this call.

    Raises LongspanError for what does not fit, before the first step; for a loss or gradients that are not finite,
    before they are used; for what the disk refuses (after a checkpoint, where all ranks can still write one); and
    RunFolderError where another run is at work in the folder.
    """
    starts = starts or Starts()
    check_config(config, len(world.home.ranks))
    check_adapter_targets(config, world, display.log)
    with StopSignal(config.run.save_on) as stop, run_lock(Path(config.run.dir), world, display.log):
        display.log(settings_line(config))
        names = config.run.loggers if is_first_rank(world) else ()
        classes = run_on_every_rank(world, partial(logger_classes, names), ConfigError)
        run = set_up(config, world, display.log, starts)
        display.set_steps(run.config.train.steps)
        with open_records(run, facts_of(run), classes, display.log) as records:
            for open_world in open_worlds():  # each writes what torch recorded of a failed collective
                open_world.watch.folder = run.dir / HANG
            evaluations = Evaluations(run, display, records, stop)
            profiles = StepProfiles(config.train.profile_steps, run.dir / FOLDER, world, display.log)
            result = _Loop(run, display, records, evaluations, profiles, starts).train(stop)
        summary = as_json(result.summary(), indent=1)
        run_on_first_rank(world, lambda: write_atomically(run.dir / "summary.json", summary), RunFolderError)
        return result


@dataclass(frozen=True)
class _Loop:
    """The steps of a run with the evaluations between them; records and shows both."""

    run: TrainingRun
    display: ProgressDisplay
    records: Records
    evaluations: Evaluations
    profiles: StepProfiles
    starts: Starts

    def train(self, stop: StopSignal) -> TrainResult:
        """Run the remaining steps and, unless the run is stopped, the end of the run."""
        run = self.run
        with plan_steps(run.choice, run.order, run.world.home) as plans:
            if run.done < run.config.train.steps:
                plans.start(run.done)  # they are made while kernels are compiled
            self.starts.end_part("records")
            warm_up_run(run, self.display.log, self.starts)
            self.starts.end_part("kernels")
            saves = Saves(run, self.display.log)
            stopped = self.run_steps(plans, stop, saves)
        done = saves.done
        self.display.end_bar()
        final = Final() if stopped else self.finish(saves)
        return TrainResult(
            dir=run.dir,
            done=done,
            steps=run.config.train.steps,
            stopped=stopped or final.stopped,
            final=final.at_degrees,
            named=final.named,
            last_loss=_last_loss(run.dir / "metrics.jsonl", done) if is_first_rank(run.world) else math.nan,
            vocab_size=run.corpus.manifest.tokenizer_size,
            world=len(run.world.home.ranks),
        )

    def run_steps(self, plans: PlanAhead, stop: StopSignal, saves: Saves) -> str:
        """Run the remaining steps; return the signal that stopped them ("" for none).

        After each step all ranks agree on what comes next: whether to stop, to save, or to name a slow slot. A
        checkpoint comes before an evaluation, in which the step could be lost. A run that goes on first makes the
        evaluation that was due where it stopped, unless it is recorded. `run.done` are the steps before this start,
        `saves.done` all steps; the plans of the first and of the last step of this start are saved as files.
        """
        run, settings, stopped = self.run, self.run.config.train, ""
        slow_slots, reader = SlowSlots(), StepReader(run, plans)
        allocator = AllocatorWatch(run.world.device)
        with saves.save_before_errors():
            if run.done < settings.steps:
                stopped = self.evaluations.evaluate_due(run.done, unless_recorded=True)
                if run.done:
                    saves.keep_if_best(self.evaluations.take_rows())
            while saves.done < settings.steps and not stopped:
                self.display.begin_step(saves.done + 1)
                row, plan = _take_step(run, reader, saves.done, slow_slots, self.profiles)
                saves.done += 1
                self.profiles.write_files()
                row |= saves.columns() | allocator.columns()
                _, failure = result_or_error(partial(self.record_step, row, plan), RunFolderError)
                self.display.show_step(row)
                agreed = _agree_on_end(run.world, stop, failure, saves, slow_slots, allocator.of_step)
                if text := allocator.warning(agreed.allocator_retries):
                    self.display.log(text)
                if saves.done == run.done + 1:
                    self.note_start(plan)
                stopped = agreed.stopped
                if agreed.slow is not None:
                    slow_slots.log_slow_slot(agreed.slow, run.world, self.display.log)
                if saves.done in (run.done + 1, settings.steps) or stopped:
                    save_plan(run, plan, f"step-{saves.done:06d}")
                if stopped or agreed.save_on or saves.is_save_due(minutes_over=agreed.minutes_over):
                    saves.save()  # before an evaluation, in which the step would be lost; it changes no weights
                    stop.answer_save()  # also what other ranks received meanwhile
                saves.reserve_memory()
                if agreed.save_on and not stopped:
                    self.display.log(f"{agreed.save_on} was received: step {saves.done} is saved, and the run goes on")
                if saves.done < settings.steps and not stopped:
                    stopped = self.evaluations.evaluate_due(saves.done)
                    saves.keep_if_best(self.evaluations.take_rows())
                    if stopped:
                        saves.save_if_unsaved()
            saves.wait()
            if figures := saves.saver.take_figures():  # of a checkpoint that no step's row follows
                self.display.log(str(figures))
        return stopped

    def note_start(self, plan: Plan) -> None:
        """Log the seconds of a start, by part until the first step's end, and keep them in run.json; all ranks enter.

        Also log what this step, of this plan, waited for, if its prices are of these devices.
        """
        self.starts.end_part("first step")
        write = partial(note_facts, self.run.dir, {"starts": self.starts.to_json()})
        run_on_first_rank(self.run.world, write, RunFolderError)
        self.display.log(str(self.starts))
        if self.run.figures.priced_here and (text := waiting_text(plan)):
            self.display.log(text)

    def record_step(self, row: dict[str, Any], plan: Plan) -> None:
        """Write a step's metrics, its plan and the groups that it added. Raises OSError for what the disk refuses.

        Raises RunFolderError where the run's folder was removed, as files that are open are written even then.
        """
        if is_first_rank(self.run.world) and not (self.run.dir / LOCK).exists():
            raise RunFolderError(
                f"{self.run.dir} was removed or renamed while the run was at work in it: it has no {LOCK}; put it back "
                "if it is elsewhere, and start the command again"
            )
        self.records.groups.note_groups(plan)
        self.records.plans.write(row["step"], plan)
        self.records.metrics.write(row)

    def finish(self, saves: Saves) -> Final:
        """After the last step: save the weights (under [lora] the adapter), and run the last evaluations.

        Weights are written in the dtype that config.json names, an adapter in its own.
        """
        run = self.run
        dtype = run_on_every_rank(run.world, lambda: read_configuration(run.dir).dtype, ModelError)
        dtype = None if run.config.lora.rank else dtype
        save_model(run.model, run.dir / "model", run.world, RunFolderFiles(run.dir), dtype=dtype)
        final = self.evaluations.evaluate_at_end()
        saves.keep_if_best(self.evaluations.take_rows())
        saves.remove_old_saves()
        return final


def _take_step(
    run: TrainingRun, reader: StepReader, step: int, slow_slots: SlowSlots, profiles: StepProfiles
) -> tuple[dict[str, Any], Plan]:
    """Run one optimizer step (counted from 0); returns its row of metrics (counted from 1) and its plan.

    The images of the next step are read meanwhile. A step that is profiled is slower than usual: its seconds count
    not for slow slots. The row has figures that any
    run has, then those of runs with several sources, images, routers, or depths of prediction.
    """
    started, is_usual = time.perf_counter(), not profiles.has_step(step + 1)
    documents, plan = reader.read_step(step)
    if isinstance(run.model, MultimodalModel) and step + 1 < run.config.train.steps:
        reader.prepare_images(run.model, step + 1)
    with explain_out_of_memory(run, step + 1), profiles.profile_step(step + 1):
        result = run.take_step(plan, documents, step, partial(reader.prepare_documents, step + 1))
    seconds = time.perf_counter() - started
    if is_usual:
        slow_slots.note_ratio(result.slot_ratio)
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
    return row, plan


class _Agreement(NamedTuple):
    """What the ranks agreed on after a step."""

    stopped: str  # by a signal that any rank received; "" for none
    save_on: str  # a signal of `run.save_on` that any rank received; "" for none
    minutes_over: bool  # a checkpoint is due by the clock
    slow: int | None  # a rank whose slot is slow
    allocator_retries: float  # the most of a rank in this step


def _agree_on_end(
    world: World,
    stop: StopSignal,
    failure: LongspanError | None,
    saves: Saves,
    slow_slots: SlowSlots,
    allocator_retries: int,
) -> _Agreement:
    """Return what the ranks agree on after a step, by one message if none received a signal or failed.

    The message gives the largest of each figure over the ranks: flags are 0 or 1, and a slow slot is its rank + 1, as
    0 is none; of several, the highest rank is named first. Raises on every rank the error of a rank whose records
    (`failure`) or save failed.
    """
    flags = (bool(stop.received) or failure is not None, bool(stop.save_asked), saves.minutes_are_over())
    slow = world.rank + 1 if slow_slots.is_slow else 0
    figures = (saves.saver.has_failed, slow, allocator_retries)
    stops, saves_now, minutes, save_failed, named_rank, most_retries = world.control.largest_of(
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
    return _Agreement(stopped, save_on, bool(minutes), int(named_rank) - 1 if named_rank else None, most_retries)


def _last_loss(file: Path, done: int) -> float:
    rows = (row for row in read_metrics(file) if done - LAST_STEPS < row["step"] <= done)
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    return math.fsum(losses) / len(losses) if losses else math.nan
