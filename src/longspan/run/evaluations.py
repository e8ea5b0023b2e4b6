"""The evaluations of a run: the sets that are due after a step, the prompts of `evaluation.prompts` that are completed
with them, and the records of both.
"""

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path

from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank
from longspan.comm.received_signals import StopSignal, find_received_signal
from longspan.config.keys import AUTO
from longspan.corpus.prompts import Prompt, encode_prompts, read_prompt_rows
from longspan.corpus.tokenizer import TextTokenizer, load_tokenizer
from longspan.errors import DataError, EvaluationStopped, ModelError, RunFolderError
from longspan.evaluation.completions import CompletionSettings, complete_prompts
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.evaluation.result import Evaluation
from longspan.model.stock_copy import StockCopy
from longspan.plan.shape.positions import position_limit
from longspan.resolve.planner_config import PlannerConfig
from longspan.resolve.ways import degrees_to_compare
from longspan.run.progress import ProgressDisplay
from longspan.run.records import Records, save_plan
from longspan.run.run_data import EvaluationSet, TrainingRun
from longspan.run.saves import Saves, is_due
from longspan.train.training import loss_of_documents

_SHOWN = 240  # characters of a completion in lines of the log


def read_prompts_of_run(run: TrainingRun) -> Sequence[Prompt]:
    """Read the prompts of `evaluation.prompts` on the first rank, as tokens of the run's tokenizer, and return them on
    every rank; all ranks call it, before the first step. Raises DataError for prompts that cannot be read, ModelError
    for a model of which there is no stock copy.
    """
    # For its check alone: it refuses a model that has no stock copy before the first step, and gathers no weights.
    # Completions make a copy of their own, of the weights as they are then.
    StockCopy(run.model, run.world)
    file = Path(run.config.evaluation.prompts)

    def read_prompts() -> list[Prompt]:
        return encode_prompts(read_prompt_rows(file), load_tokenizer(run.dir), position_limit(run.model.config))

    return run_on_first_rank(run.world, read_prompts, DataError)


@dataclass(frozen=True)
class Evaluations:
    """Evaluates the sets of a run and completes its prompts; all ranks call each method together.

    A signal ends an evaluation after a portion of its micro-batches; nothing of it is recorded.
    """

    run: TrainingRun
    display: ProgressDisplay
    records: Records
    stop: StopSignal
    # The model completes these prompts.
    prompts: Sequence[Prompt] = ()
    # The key is a set; the best step is not chosen yet.
    _of_last_step: dict[str, Evaluation] = field(default_factory=dict)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.run.dir)

    def are_due(self, done: int) -> bool:
        """Return whether sets or prompts are due after `done` steps."""
        every = {self.run.config.evaluation.every, *(entry.config.every for entry in self.run.sets)}
        return any(self._is_due(done, steps) for steps in every)

    def _is_due(self, done: int, every: int) -> bool:
        """The last step is evaluated at the end, and with `evaluation.patience` before that, as it may be the best."""
        if done == self.run.config.train.steps:
            return self.run.config.evaluation.patience > 0
        return is_due(done, every)

    def evaluate_due(self, saves: Saves, *, unless_recorded: bool = False) -> str:
        """Evaluate the sets that are due after the steps that `saves` counts, record the results, and complete the
        prompts if they are due, once the checkpoint of a best step is there.

        With `unless_recorded` a set that metrics.jsonl has after that step is left out. A signal ends the call: its
        name is returned, otherwise "".
        """
        done = saves.done
        is_last = done == self.run.config.train.steps
        for entry in self.run.sets:
            if not self._is_due(done, entry.config.every) or (unless_recorded and self._is_recorded(entry, done)):
                continue
            evaluation = self._evaluate_set(entry, self.run.evaluation_choice(entry.config), done)
            if evaluation is not None:
                self._record_evaluations(entry, [evaluation])
                saves.save_if_best(evaluation.row())
                if is_last:
                    self._of_last_step[entry.name] = evaluation
            elif signal := find_received_signal(self.run.world, self.stop.received):
                return signal
        if not is_last and is_due(done, self.run.config.evaluation.every):
            saves.wait_for_best()
            self._record_completions(done)
        return ""

    def evaluate_at_end(
        self, done: int, saves: Saves
    ) -> tuple[tuple[Evaluation, ...], tuple[Evaluation, ...], str]:
        """Evaluate all sets with the weights after `done` steps, record what is not recorded yet, and complete the
        prompts.

        Returns the evaluations of held-out documents at every degree, those of named sets, and "". Where a signal ends
        them early, it returns no evaluations, and the signal's name.
        """
        at_degrees = list[Evaluation]()
        set_evaluations = list[Evaluation]()
        for entry in self.run.sets:
            evaluations = list[Evaluation]()
            for evaluation in self._evaluate_set_at_end(entry, done):
                if evaluation is not None:
                    evaluations.append(evaluation)
                elif signal := find_received_signal(self.run.world, self.stop.received):
                    return (), (), signal
            if not self._is_recorded(entry, done):
                self._record_evaluations(entry, evaluations)
                if done == saves.done:
                    saves.save_if_best(evaluations[0].row())  # a degree changes no loss
            elif evaluations[0] is self._of_last_step.get(entry.name):
                self._record_evaluations(entry, evaluations[1:])
            same_kind = set_evaluations if entry.name else at_degrees
            same_kind += sorted(evaluations, key=attrgetter("cp"))
        self._record_completions(done)
        return tuple(at_degrees), tuple(set_evaluations), ""

    def evaluation_schedule(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each set its tokens, the steps between its evaluations, and how many come at the end."""
        for entry in self.run.sets:
            choice = PlannerConfig.unpriced(entry.config, self.run.config, self.run.heads)
            # held-out documents are evaluated at every degree
            degrees = () if entry.name else degrees_to_compare(self.run.world.home, choice)
            at_end = len({choice.degree, *degrees})
            yield int(sum(entry.documents.lengths)), entry.config.every, at_end

    def _evaluate_set_at_end(self, entry: EvaluationSet, done: int) -> Iterator[Evaluation | None]:
        """First at the set's degree, then held-out documents at the degrees 1, 2, 4, … and all slots that heads
        allow, where a slot gets as many rows as the longest document needs. None: a signal ended the evaluation."""
        choice = self.run.evaluation_choice(entry.config)
        first = self._of_last_step.get(entry.name) if done == self.run.config.train.steps else None
        first = first or self._evaluate_set(entry, choice, done)
        yield first
        for degree in () if entry.name else degrees_to_compare(self.run.world.home, choice):
            if first is None or degree != first.cp:
                at_degree = choice.at_degree(degree, longest=max(entry.documents.lengths))
                yield self._evaluate_set(entry, at_degree, done)

    def _evaluate_set(self, entry: EvaluationSet, choice: PlannerConfig, done: int) -> Evaluation | None:
        """None where a signal ended it, which is logged."""
        degree = f"at cp {choice.degree}" if choice.has_one_degree else f"by {choice.planner} plans"
        subject = " ".join(filter(None, (entry.name and f"of {entry.name}", degree)))
        options = EvaluationOptions(
            step=done,
            name=entry.name,
            metrics=entry.metrics,
            token_bytes=entry.token_bytes,
            share_prefixes=self.run.config.data.share_prefixes == AUTO,
            stopped=self.stop.stop_reason,
            progress=partial(self.display.show_eval_progress, subject),
            loss=loss_of_documents(entry.documents, self.run.config.train),
            distillation=self.run.distillation,
        )
        self.run.finish_update()
        try:
            return evaluate(self.run.model, entry.documents, choice, self.run.world, options)
        except EvaluationStopped as stopped:
            self.display.log(str(stopped))
            return None

    def _is_recorded(self, entry: EvaluationSet, done: int) -> bool:
        """metrics.jsonl is that of the first rank."""
        return self.run.world.control.broadcast_object((done, entry.name) in self.records.metrics.evaluated)

    def _record_evaluations(self, entry: EvaluationSet, evaluations: Sequence[Evaluation]) -> None:
        """Evaluations are written in the order of degrees."""
        world = self.run.world
        for evaluation in sorted(evaluations, key=attrgetter("cp")):
            row = evaluation.row()
            run_on_every_rank(world, partial(self.records.metrics.write, row), RunFolderError)
            self.display.show_evaluation(row)
            name_parts = ("evaluation", entry.name, f"cp{evaluation.cp}")
            save_plan(self.run, evaluation.plan, "-".join(filter(None, name_parts)))

    def _record_completions(self, done: int) -> None:
        """Nothing is recorded after a signal, nor where the first rank has no room for the model, which is logged."""
        run = self.run
        completions = self.records.completions
        if not self.prompts or run.world.control.broadcast_object(done in completions.steps):
            return
        self.display.begin_work("completions of prompts")
        run.finish_update()
        settings = CompletionSettings(
            self._tokenizer,
            run.dir,
            run.config.evaluation.max_new_tokens,
            seed=run.config.train.seed,
            stopped=lambda: self.stop.received,
        )
        try:
            written = complete_prompts(run.model, self.prompts, run.world, settings)
        except ModelError as error:  # there is no room; every rank has it
            self.display.log(f"prompts are not completed: {error}")
            return
        rows = [row._asdict() for row in written.rows]
        if len(rows) < len(self.prompts):  # a signal came: the run completes all of them when it goes on
            return
        run_on_every_rank(run.world, partial(completions.write_rows, done, rows), RunFolderError)
        for row in written.rows:
            rest = " …" if len(row.completion) > _SHOWN else ""
            self.display.log(f"  {reprlib.repr(row.prompt)} -> {row.completion[:_SHOWN]!r}{rest}")
        self.display.log(f"after step {done}: {written.cost}")
