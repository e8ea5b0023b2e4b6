"""The evaluations of a run: the sets that are due after a step, and their records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from longspan.comm.all_ranks import run_on_every_rank
from longspan.comm.received_signals import StopSignal, signal_of_any_rank
from longspan.config.keys import AUTO
from longspan.errors import EvaluationStopped, RunFolderError
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.evaluation.result import Evaluation
from longspan.resolve.choice import PlannerConfig, degrees_to_compare, query_heads
from longspan.run.progress import ProgressDisplay
from longspan.run.prompts import PromptCompletions
from longspan.run.records import Records, save_plan
from longspan.run.run_data import EvaluationSet, TrainingRun
from longspan.run.saves import is_due
from longspan.train.training import loss_of_documents


@dataclass(frozen=True)
class Final:
    """The evaluations after the last step; `stopped` is the signal that ended them early, "" for none."""

    at_degrees: tuple[Evaluation, ...] = ()
    named: tuple[Evaluation, ...] = ()
    stopped: str = ""


@dataclass(frozen=True)
class Evaluations:
    """Evaluates the sets of a run; all ranks call each method together.

    A signal ends an evaluation after a portion of its micro-batches; nothing of it is recorded.
    """

    run: TrainingRun
    display: ProgressDisplay
    records: Records
    stop: StopSignal
    completions: PromptCompletions
    _recorded: list[dict[str, Any]] = field(default_factory=list)

    def take_new_rows(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations since the last call, one a set, at its configured degree."""
        rows = self._recorded.copy()
        self._recorded.clear()
        return rows

    def evaluate_due(self, done: int, *, unless_recorded: bool = False) -> str:
        """Evaluate the sets that are due after `done` steps; returns the signal that came meanwhile, or ""."""
        for entry in self.run.sets:
            if not is_due(done, entry.config.every) or (unless_recorded and self._is_recorded(entry, done)):
                continue
            evaluation = self._evaluate_set(entry, self.run.evaluation_choice(entry.config), done)
            if evaluation is not None:
                self._record_evaluations(entry, [evaluation])
            elif signal := signal_of_any_rank(self.run.world, self.stop.received):
                return signal
        if is_due(done, self.run.config.evaluation.every):
            self.completions.record_completions(done)
        return ""

    def evaluate_at_end(self, done: int) -> Final:
        """Evaluate all sets, the held-out documents at every degree, with the weights after `done` steps; after a
        signal that is all that is returned.
        """
        at_degrees = list[Evaluation]()
        set_evaluations = list[Evaluation]()
        for entry in self.run.sets:
            evaluations = list[Evaluation]()
            for evaluation in self._evaluate_set_at_end(entry, done):
                if evaluation is not None:
                    evaluations.append(evaluation)
                elif signal := signal_of_any_rank(self.run.world, self.stop.received):
                    return Final(stopped=signal)
            if not self._is_recorded(entry, done):
                self._record_evaluations(entry, evaluations)
            (set_evaluations if entry.name else at_degrees).extend(sorted(evaluations, key=attrgetter("cp")))
        self.completions.record_completions(done)
        return Final(tuple(at_degrees), tuple(set_evaluations))

    def list_work(self) -> Iterator[tuple[int, int, int]]:
        """Yield of each set what `ProgressDisplay.set_length` takes."""
        heads = query_heads(self.run.model.config)
        for entry in self.run.sets:
            choice = PlannerConfig.unpriced(entry.config, self.run.config, heads)
            # held-out documents are evaluated at every degree
            degrees = () if entry.name else degrees_to_compare(self.run.world.home, choice)
            at_end = len({choice.degree, *degrees})
            yield int(sum(entry.documents.lengths)), entry.config.every, at_end

    def _evaluate_set_at_end(self, entry: EvaluationSet, done: int) -> Iterator[Evaluation | None]:
        """Yield the evaluation of a set at its configured degree, and then of held-out documents at 1, 2, 4, … and all
        slots, as far as heads allow, under caps that hold them; None for one that a signal ended.
        """
        choice = self.run.evaluation_choice(entry.config)
        first = self._evaluate_set(entry, choice, done)
        yield first
        for degree in () if entry.name else degrees_to_compare(self.run.world.home, choice):
            if first is None or degree != first.cp:
                at_degree = choice.at_degree(degree, longest=max(entry.documents.lengths))
                yield self._evaluate_set(entry, at_degree, done)

    def _evaluate_set(self, entry: EvaluationSet, choice: PlannerConfig, done: int) -> Evaluation | None:
        """Evaluate a set under these plans after `done` steps; None, which is logged, where a signal ended it."""
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
        )
        self.run.finish_update()
        try:
            return evaluate(self.run.model, entry.documents, choice, self.run.world, options)
        except EvaluationStopped as stopped:
            self.display.log(str(stopped))
            return None

    def _is_recorded(self, entry: EvaluationSet, done: int) -> bool:
        """Return whether metrics.jsonl, of the first rank, has an evaluation of the set after `done` steps."""
        return self.run.world.control.broadcast_object((done, entry.name) in self.records.metrics.evaluated)

    def _record_evaluations(self, entry: EvaluationSet, evaluations: Sequence[Evaluation]) -> None:
        """Write the rows and plans of a set's evaluations, in the order of degrees, and show them.

        `take_new_rows` gives the row of the first evaluation alone: a degree changes no loss.
        """
        world = self.run.world
        self._recorded.extend(evaluation.row() for evaluation in evaluations[:1])
        for evaluation in sorted(evaluations, key=attrgetter("cp")):
            row = evaluation.row()
            run_on_every_rank(world, partial(self.records.metrics.write, row), RunFolderError)
            self.display.show_evaluation(row)
            name_parts = ("evaluation", entry.name, f"cp{evaluation.cp}")
            save_plan(self.run, evaluation.plan, "-".join(filter(None, name_parts)))
