"""`train`: the loop of a run, from its configuration to its last evaluation, on every rank inside an open world.

A step is: documents of the step, a plan of their lengths, `run_step`. What a run leaves in its folder: config.toml,
corpus/, config.json and the tokenizer's files, run.json, metrics.jsonl, plans.jsonl, completions.jsonl, plans/,
checkpoints/, model/ (Hugging Face), summary.json; run.lock, which keeps a second run out; profiles/ of steps that were
profiled; memory/, where memory was short; hang/, where a collective failed.
"""

import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from longspan.comm import World, raise_first_error
from longspan.comm.all_ranks import LogLine, is_first_rank, result_or_error, run_on_every_rank
from longspan.comm.device import peak_memory_bytes
from longspan.comm.received_signals import StopSignal, find_received_signal
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import CorpusDocuments
from longspan.data.shared_prefixes import cut_documents
from longspan.errors import ConfigError, LongspanError, RunFolderError, plural
from longspan.evaluation.result import Evaluation
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import AsyncPlanner, Plan
from longspan.plan.plan import group_counts
from longspan.resolve.planner_config import plan_steps_ahead
from longspan.run.checks import check_config
from longspan.run.evaluations import Evaluations, read_prompts_of_run
from longspan.run.facts import TrainResult
from longspan.run.folder import check_free_disk, run_lock
from longspan.run.loggers import logger_classes
from longspan.run.profile import FOLDER, StepProfiles
from longspan.run.progress import ProgressDisplay
from longspan.run.records import open_records, record_start_seconds, save_plan, write_facts
from longspan.run.run_data import TrainingRun
from longspan.run.saves import Saves, save_final_model
from longspan.run.set_up import set_up
from longspan.run.warm_up import needs_warm_up, warm_up_coming_steps
from longspan.run.watches import AllocatorWatch, SlowSlots, explain_out_of_memory
from longspan.train.optim.schedule import Schedule
from longspan.train.prefix_sharing import shared_prefixes_line
from longspan.train.start.start_times import Starts


class Steps:
    """Takes the steps of a run, and lets the ranks agree on what comes after each; all ranks call `take_step` and
    `agree_after_step` together.
    """

    def __init__(self, run: TrainingRun, plans: AsyncPlanner, log: LogLine) -> None:
        self._run = run
        self._log = log
        self._plans = plans
        self._next: tuple[int, Any, Plan] | None = None  # a step that is selected ahead, its documents and its plan
        self._slow_slots = SlowSlots()
        steps = run.config.train.profile_steps
        self._profiles = StepProfiles(steps, run.dir / FOLDER, run.world, log) if steps else None
        self._allocator = AllocatorWatch(run.world.device)
        self._logged_shared = False
        self._logged_divided = False

    def take_step(self, step: int) -> tuple[dict[str, Any], Plan]:
        """Run one optimizer step, counted from 0; returns its row of metrics, where it is counted from 1, and its plan.

        The first step with shared prefixes is logged, and a profiled step leaves its files. A profiled step's seconds
        do not count for slow slots.
        """
        run = self._run
        started = time.perf_counter()
        profiles = self._profiles
        if self._next is not None and self._next[0] == step:
            _, documents, plan = self._next
        else:
            plan = self._plans.plan(step)  # waits until the plan is made
            documents = self._select_documents(step, plan)
        self._next = None
        # Threads read images while the step runs.
        if isinstance(run.model, MultimodalModel):
            self._prefetch_step(step + 1, run.model)
        with explain_out_of_memory(run, step + 1), profiles.profile_step(step + 1) if profiles else nullcontext():
            result = run.take_step(plan, documents, step, partial(self._work_beside_step, step))
        seconds = time.perf_counter() - started
        if profiles is None or step + 1 not in profiles.steps:
            self._slow_slots.add_ratio(result.slot_ratio)
        row = {
            "step": step + 1,
            "loss": result.loss,
            "tokens": result.tokens,
            "targets": result.targets,
            "grad_norm": result.grad_norm,
            "lr": Schedule.of(run.config.optimizer, run.config.train.steps).lr_at(step),
            "seconds": round(seconds, 6),
            # The tokens are those of all documents: rows that a shared prefix spares are trained on as well.
            "tokens_per_second": round((result.tokens + plan.spared_rows) / seconds, 3),
            "memory_bytes": peak_memory_bytes(run.world.device),
            "micro_batches": result.micro_batches,
            "efficiency": round(plan.efficiency, 6),
            **result.figures,
            "groups": group_counts(plan),
        }
        if len(run.order.stream.sources) > 1:
            row["source_tokens"] = run.order.tokens_of_step_by_source(step)
        if plan.parents is not None:
            row["spared_tokens"] = plan.spared_rows
            if not self._logged_shared:
                self._log(f"step {step + 1}: {shared_prefixes_line(plan, run.figures.shape)}")
            self._logged_shared = True
        images = [item.rows for item in getattr(documents, "items", ())]  # texts alone have no items
        row |= run.figures.step_figures(plan, seconds, images, result.encoders)
        if result.router is not None:
            row |= {"router_balance_loss": result.router.balance, "router_z_loss": result.router.z}
        row |= {f"mtp_loss_{depth}": loss for depth, loss in enumerate(result.mtp_losses, 1)}
        if profiles is not None:
            profiles.write_files()
        return row | self._allocator.count_step_retries(), plan

    def _work_beside_step(self, step: int) -> None:
        """Runs while `step` (from 0) computes, and enters no collective."""
        self._prefetch_step(step + 1)
        run = self._run
        if self._logged_divided or not is_first_rank(run.world):
            return
        documents = run.order.documents_to_share(step)
        line = "" if documents is None else divided_trees_line(run, documents)
        if line:
            self._log(f"step {step + 1}: {line}")
            self._logged_divided = True

    def _select_documents(self, step: int, plan: Plan) -> Any:
        """Where the plan shares prefixes, documents are cut into prefixes and what follows."""
        run = self._run
        documents = run.order.select(run.corpus, step)
        if plan.parents is None:
            return documents
        return cut_documents(documents, plan.lengths, plan.parents, depths=run.config.mtp.num_layers)

    def _prefetch_step(self, step: int, model: MultimodalModel | None = None) -> None:
        """Nothing waits for a plan. An error here is dropped: that step itself meets and raises it. With `model`,
        threads also plan and read the waves of its images while the step before runs."""
        run = self._run
        if (
            self._next is not None
            or step >= run.config.train.steps
            or (model is not None and not run.corpus.images)
        ):
            return
        with suppress(Exception):
            plan = self._plans.plan_if_made(step)
            if plan is None:
                return
            documents = self._select_documents(step, plan)
            self._next = (step, documents, plan)
            if model is not None:
                from longspan.train.terms.waves_ahead import plan_waves_ahead

                plan_waves_ahead(model, plan, documents, depths=run.config.mtp.num_layers)

    def agree_after_step(
        self, stop: StopSignal, failure: LongspanError | None, saves: Saves
    ) -> tuple[str, str, bool]:
        """Agree with the other ranks on what comes after a step, by one message if none has received a signal or
        failed.

        Returns the signal that stops the run, the signal that asks for a checkpoint ("" for none), whichever rank
        received it, and whether a checkpoint is due by the clock. Raises, on every rank, the first `failure` of a rank
        and that of a save. A warning of the allocator and the name of a slow slot are logged.
        """
        world = self._run.world
        flags = (bool(stop.received) or failure is not None, bool(stop.save_asked), saves.minutes_are_over())
        slow_rank_here = world.rank + 1 if self._slow_slots.is_slow else 0  # 0: none
        figures = (saves.saver.has_failed, slow_rank_here, self._allocator.of_step)
        stops, saves_now, minutes_over, save_failed, slow_rank, most_retries = world.control.largest_over_ranks(
            [*map(float, flags), *map(float, figures)], "agreement on a flag"
        )
        stopped = save_on = ""
        if save_failed:
            saves.saver.raise_failure()
        if stops:
            raise_first_error(world, failure)
            stopped = find_received_signal(world, stop.received)
        if saves_now:
            save_on = find_received_signal(world, stop.save_asked)
        if text := self._allocator.take_warning(most_retries):
            self._log(text)
        if slow_rank:
            self._slow_slots.log_slow_slot(int(slow_rank) - 1, world, self._log)
        return stopped, save_on, bool(minutes_over)


def divided_trees_line(run: TrainingRun, documents: CorpusDocuments) -> str:
    """Say which documents of a step begin alike and have more rows together than a group holds; "" for none."""
    choice = run.training_choice
    home = run.world.home
    most = choice.most_tree_rows(home)
    # no tree has more rows than its documents
    if most is None or sum(documents.lengths) <= most:
        return ""
    trees = choice.find_prefix_trees(documents, home, run.order.length_limits)
    if trees is None or trees.too_large is None:
        return ""
    count, rows = trees.too_large
    return (
        f"{plural(count, 'document')} that begin alike have {rows:,} rows as one prefix tree, and a group holds "
        f"{most:,} (context.max_tokens_per_slot {choice.options.rows:,} × degree {choice.widest_even_degree(home)}): "
        "they are divided, or trained as separate documents (docs/shared-prefixes.md)"
    )


def train(config: RunConfig, world: World, display: ProgressDisplay, starts: Starts | None = None) -> TrainResult:
    """Train to the last step, or until a signal stops the run; all ranks call it together, with the same configuration.

    A signal that stops, on any rank, ends the run after the current step, with a checkpoint; after one of
    `checkpoint.save_signals` a checkpoint is written, and the run goes on. `starts` has the parts of the start before
    this call.

    Raises LongspanError for what does not fit, before the first step; for a loss or gradients that are not finite,
    before they are used; for what the disk refuses (after a checkpoint, where all ranks can still write one); and
    RunFolderError where another run is at work in the folder.
    """
    starts = starts or Starts()
    check_config(config, len(world.home.ranks))
    with StopSignal(config.checkpoint.save_signals) as stop, run_lock(Path(config.run.dir), world, display.log):
        # Other ranks have no loggers.
        names = config.run.loggers if is_first_rank(world) else ()
        classes = (
            run_on_every_rank(world, partial(logger_classes, names), ConfigError) if config.run.loggers else {}
        )
        run = set_up(config, world, display.log, starts, stop.stop_reason)
        with open_records(run, classes, display.log) as records:
            prompts = read_prompts_of_run(run) if config.evaluation.prompts else ()
            evaluations = Evaluations(run, display, records, stop, prompts)
            display.set_schedule(run.config.train.steps, evaluations.evaluation_schedule())
            result = _train_and_evaluate(evaluations, starts)
        write_facts(run, "summary.json", result.summary())
        return result


def _train_and_evaluate(evaluations: Evaluations, starts: Starts) -> TrainResult:
    """All ranks call it. With `evaluation.patience` the best weights are saved and evaluated, not the last ones."""
    run = evaluations.run
    log = evaluations.display.log
    with plan_steps_ahead(run.training_choice, run.order, run.world.home) as plans:
        if run.done < run.config.train.steps:
            check_free_disk(run, log)
            # The plans are made while kernels are compiled.
            plans.start(run.done)
        starts.end_part("records")
        if needs_warm_up(run.world):
            warm_up_coming_steps(run, log, starts)
        starts.end_part("kernels")
        saves = Saves(run, log)
        stopped = _run_steps(Steps(run, plans, log), evaluations, saves, starts)
    done = saves.done
    model_step = 0
    final: tuple[Evaluation, ...] = ()
    named: tuple[Evaluation, ...] = ()
    if not stopped:
        model_step = saves.take_best()
        save_final_model(run)
        final, named, stopped = evaluations.evaluate_at_end(model_step, saves)
        saves.remove_old_saves()
    predicts_tokens = not (run.config.train.loss or run.config.distils) and run.corpus.labels is None
    return TrainResult(
        dir=run.dir,
        done=done,
        steps=run.config.train.steps,
        stopped=stopped,
        end_reason=saves.end_reason,
        model_step=model_step,
        best=saves.best_figure,
        final=final,
        named=named,
        last_loss=evaluations.records.last_loss(done),
        vocab_size=run.corpus.manifest.tokenizer_size if predicts_tokens else 0,
        world=len(run.world.home.ranks),
    )


def _run_steps(steps: Steps, evaluations: Evaluations, saves: Saves, starts: Starts) -> str:
    """A checkpoint comes before an evaluation, in which the step could be lost. A run that goes on first makes the
    evaluation that was due where it stopped. `run.done` are the steps before this start, `saves.done` all steps.
    A run whose evaluations get no better ends early, with its reason in `saves.end_reason`; the result is the
    signal that stopped it."""
    run = evaluations.run
    display = evaluations.display
    records = evaluations.records
    stop = evaluations.stop
    settings = run.config.train
    stopped = ""
    is_over = False
    with saves.save_before_errors():
        if run.done:
            stopped = evaluations.evaluate_due(saves, unless_recorded=True)
            is_over = run.done < settings.steps and saves.loses_patience(records.metrics.evaluated)
        while saves.done < settings.steps and not stopped and not is_over:
            display.begin_work(f"step {saves.done + 1}/{settings.steps}")
            row, plan = steps.take_step(saves.done)
            saves.done += 1
            row |= saves.take_save_columns()
            # What one rank cannot write `agree_after_step` raises on all of them.
            _, failure = result_or_error(partial(records.write_step, row, plan), RunFolderError)
            display.show_step(row)
            stopped, save_on, minutes_over = steps.agree_after_step(stop, failure, saves)
            if saves.done == run.done + 1:
                starts.end_part("first step")
                record_start_seconds(run, starts, display.log)
            if saves.done in (run.done + 1, settings.steps) or stopped:
                save_plan(run, plan, f"step-{saves.done:06d}")
            if stopped or save_on or saves.is_checkpoint_due(minutes_over=minutes_over):
                # The checkpoint comes before an evaluation, in which the step would be lost; that changes no weights.
                saves.save()
                # This holds on every rank, also where the signal came after the ranks had agreed.
                stop.save_asked = ""
            saves.reserve_memory()
            if save_on and not stopped:
                display.log(f"{save_on} was received: step {saves.done} is saved, and the run goes on")
            if not stopped and evaluations.are_due(saves.done):
                stopped = evaluations.evaluate_due(saves)
                is_over = saves.done < settings.steps and saves.loses_patience(records.metrics.evaluated)
                if stopped or is_over:
                    saves.save_if_unsaved()
        saves.wait()
        saves.take_save_columns()  # logs the checkpoint that no step's row follows
    return stopped
