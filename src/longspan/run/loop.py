"""`train`: the loop of a run, from its configuration to its last evaluation, on every rank inside an open world.

A step is: documents of the step, a plan of their lengths, `run_step`. What a run leaves in its folder: config.toml,
corpus/, config.json and the tokenizer's files, run.json, metrics.jsonl, plans.jsonl, groups.jsonl, plans/,
checkpoints/, model/ (Hugging Face), summary.json; run.lock, which keeps a second run out; profiles/ of steps that were
profiled; memory/, where memory was short; hang/, where a collective failed.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longspan.comm import World
from longspan.comm.all_ranks import result_or_error
from longspan.comm.stop_signal import StopSignal
from longspan.config.sections import RunConfig
from longspan.errors import RunFolderError
from longspan.run.evaluations import Evaluations, Final
from longspan.run.progress import ProgressDisplay
from longspan.run.records import (
    Records,
    import_loggers,
    note_start,
    open_records,
    run_lock,
    save_plan,
    write_facts,
)
from longspan.run.result import TrainResult
from longspan.run.run_data import TrainingRun
from longspan.run.saves import Saves, save_final_model
from longspan.run.set_up.set_up import check_run, set_up
from longspan.run.set_up.warm_up import warm_up_run
from longspan.run.steps import Steps
from longspan.train.starts import Starts


def train(config: RunConfig, world: World, display: ProgressDisplay, starts: Starts | None = None) -> TrainResult:
    """Train to the last step, or until a signal stops the run; all ranks call it together, with the same configuration.

    A signal that stops, on any rank, ends the run after the current step, with a checkpoint; after one of `run.save_on`
    a checkpoint is written, and the run goes on. `starts` has the parts of the start before this call.

    Raises LongspanError for what does not fit, before the first step; for a loss or gradients that are not finite,
    before they are used; for what the disk refuses (after a checkpoint, where all ranks can still write one); and
    RunFolderError where another run is at work in the folder.
    """
    starts = starts or Starts()
    check_run(config, world, display.log)
    with StopSignal(config.run.save_on) as stop, run_lock(Path(config.run.dir), world, display.log):
        classes = import_loggers(config, world)
        run = set_up(config, world, display.log, starts)
        display.set_steps(run.config.train.steps)
        with open_records(run, classes, display.log) as records:
            evaluations = Evaluations(run, display, records, stop)
            result = _Loop(run, display, records, evaluations, starts).train(stop)
        write_facts(run, "summary.json", result.summary())
        return result


@dataclass(frozen=True)
class _Loop:
    """The steps of a run with the evaluations between them; records and shows both."""

    run: TrainingRun
    display: ProgressDisplay
    records: Records
    evaluations: Evaluations
    starts: Starts

    def train(self, stop: StopSignal) -> TrainResult:
        """Run the remaining steps and, unless the run is stopped, the end of the run."""
        run = self.run
        with run.plan_steps() as plans:
            if run.done < run.config.train.steps:
                plans.start(run.done)  # they are made while kernels are compiled
            self.starts.end_part("records")
            warm_up_run(run, self.display.log, self.starts)
            self.starts.end_part("kernels")
            saves = Saves(run, self.display.log)
            stopped = self.run_steps(Steps(run, plans, self.display.log), stop, saves)
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
            last_loss=self.records.last_loss(done),
            vocab_size=run.corpus.manifest.tokenizer_size,
            world=len(run.world.home.ranks),
        )

    def run_steps(self, steps: Steps, stop: StopSignal, saves: Saves) -> str:
        """Run the remaining steps; return the signal that stopped them ("" for none).

        After each step all ranks agree on what comes next: whether to stop, or to save. A checkpoint comes before an
        evaluation, in which the step could be lost. A run that goes on first makes the evaluation that was due where it
        stopped, unless it is recorded. `run.done` are the steps before this start, `saves.done` all steps; the plans of
        the first and of the last step of this start are saved as files.
        """
        run, settings, stopped = self.run, self.run.config.train, ""
        with saves.save_before_errors():
            if run.done < settings.steps:
                stopped = self.evaluations.evaluate_due(run.done, unless_recorded=True)
                if run.done:
                    saves.keep_if_best(self.evaluations.take_rows())
            while saves.done < settings.steps and not stopped:
                self.display.begin_step(saves.done + 1)
                row, plan = steps.take_step(saves.done)
                saves.done += 1
                row |= saves.columns()
                _, failure = result_or_error(partial(self.records.write_step, row, plan), RunFolderError)
                self.display.show_step(row)
                agreed = steps.agree_on_end(stop, failure, saves)
                if saves.done == run.done + 1:
                    self.starts.end_part("first step")
                    note_start(run, self.starts, plan, self.display.log)
                stopped = agreed.stopped
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
            saves.columns()  # logs the checkpoint that no step's row follows
        return stopped

    def finish(self, saves: Saves) -> Final:
        """After the last step: save the weights (under [lora] the adapter), and run the last evaluations."""
        save_final_model(self.run)
        final = self.evaluations.evaluate_at_end()
        saves.keep_if_best(self.evaluations.take_rows())
        saves.remove_old_saves()
        return final
