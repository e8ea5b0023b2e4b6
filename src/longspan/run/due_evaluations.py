"""The evaluations of a run: which sets are due after a step, and what is recorded, shown and kept of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longspan.comm.all_ranks import on_every_rank, on_first_rank
from longspan.comm.stop_signal import StopSignal, received_signal
from longspan.errors import EvaluationStopped, RunFolderError
from longspan.evaluation.evaluate import choices_at_degrees, evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.evaluation.result import Evaluation
from longspan.evaluation.sets import EvaluationSet
from longspan.files import as_json, write_atomically
from longspan.plan import Plan
from longspan.run.evaluations.samples import SAMPLES_FILE, image_samples
from longspan.run.progress import ProgressDisplay
from longspan.run.records.open_records import Records
from longspan.run.saves import is_due
from longspan.run.training_run import TrainingRun
from longspan.train.plans import PlanChoice


@dataclass(frozen=True)
class Final:
    """The evaluations after the last step: of the held-out documents at every degree, and of the named sets.

    `stopped` is the signal that ended them early, "" for none.
    """

    at_degrees: tuple[Evaluation, ...] = ()
    named: tuple[Evaluation, ...] = ()
    stopped: str = ""


@dataclass(frozen=True)
class Evaluations:
    """Evaluates the sets of a run; all ranks call each method together.

    A signal, or a set's time limit, ends an evaluation after a portion of its micro-batches: that is said, and nothing
    of it is recorded. Weights, optimizer and data are as before.
    """

    run: TrainingRun
    display: ProgressDisplay
    records: Records
    stop: StopSignal

    def after_step(self, done: int, *, unless_recorded: bool = False) -> str:
        """Evaluate the sets that are due after so many steps; returns the signal that came meanwhile, or ""."""
        for entry in self.run.sets:
            if not is_due(done, entry.config.every) or (unless_recorded and self._recorded(entry, done)):
                continue
            evaluation = self._evaluation(entry, self.run.choice_of(entry.config), done)
            if evaluation is not None:
                self._record(entry, [evaluation])
            elif signal := received_signal(self.run.world, self.stop):
                return signal
        return ""

    def after_last_step(self) -> Final:
        """Evaluate all sets, the held-out documents at every degree; each is recorded once, however often it is run."""
        done, at_degrees, named = self.run.config.train.steps, list[Evaluation](), list[Evaluation]()
        for entry in self.run.sets:
            evaluations = list[Evaluation]()
            for evaluation in self._at_last(entry, done):
                if evaluation is not None:
                    evaluations.append(evaluation)
                elif signal := received_signal(self.run.world, self.stop):
                    return Final(stopped=signal)
            if not self._recorded(entry, done):
                self._record(entry, evaluations)
            (named if entry.name else at_degrees).extend(sorted(evaluations, key=_degree))
        self._write_samples(done)
        return Final(tuple(at_degrees), tuple(named))

    def _write_samples(self, done: int) -> None:
        """What the model says of some documents of each set that has images."""
        run, rows = self.run, list[dict[str, Any]]()
        for entry in run.sets:
            choice = run.choice_of(entry.config)
            rows += image_samples(run.model, entry.documents, choice, run.world, run.dir, name=entry.name, step=done)
        if rows:
            on_first_rank(run.world, partial(_write_lines, run.dir / SAMPLES_FILE, rows), RunFolderError)

    def _at_last(self, entry: EvaluationSet, done: int) -> Iterator[Evaluation | None]:
        """The evaluation of a set as it is asked for and, of the held-out documents, at every other degree."""
        choice = self.run.choice_of(entry.config)
        first = self._evaluation(entry, choice, done)
        yield first
        others = () if entry.name else choices_at_degrees(choice, entry.documents, self.run.world.home)
        for other in others:
            if first is None or other.degree != first.cp:
                yield self._evaluation(entry, other, done)

    def _evaluation(self, entry: EvaluationSet, choice: PlanChoice, done: int) -> Evaluation | None:
        """Loss and metrics of a set under plans of `choice`; None where it was broken off."""
        settings, kernel = self.run.config.train, entry.config.attention_kernel
        options = EvaluationOptions(
            step=done,
            name=entry.name,
            loss_chunk_rows=settings.loss_chunk_rows,
            metrics=entry.metrics,
            token_bytes=entry.token_bytes,
            attention_kernel=kernel or None,
            seconds=entry.config.max_seconds or None,
            stopped=self.stop.reason,
            progress=partial(self.display.show_evaluating, entry.name),
        )
        try:
            evaluation = evaluate(self.run.model, entry.documents, choice, self.run.world, options)
        except EvaluationStopped as stopped:
            self.display.log(str(stopped))
            return None
        finally:
            self.display.end_evaluating()
        on_every_rank(self.run.world, partial(self.records.groups.note, evaluation.plan, "evaluation"), RunFolderError)
        return evaluation

    def _recorded(self, entry: EvaluationSet, done: int) -> bool:
        """Whether the run's metrics have an evaluation of a set after so many steps; the same on every rank."""
        return self.run.world.control.broadcast_object((done, entry.name) in self.records.metrics.evaluated)

    def _record(self, entry: EvaluationSet, evaluations: Sequence[Evaluation]) -> None:
        """Write and show evaluations of one set after one step, and keep their plans; of the first, documents' losses.

        They are of the same weights and documents, at several degrees.
        """
        world = self.run.world
        for evaluation in sorted(evaluations, key=_degree):
            row = evaluation.row()
            on_every_rank(world, partial(self.records.metrics.write, row), RunFolderError)
            self.display.show_evaluation(row)
            words = ("evaluation", entry.name, f"cp{evaluation.cp}")
            save_plan(self.run, evaluation.plan, "-".join(filter(None, words)))
        if self.run.config.train.eval_document_losses and evaluations:
            prefix = f"{entry.name}-" if entry.name else ""
            file = self.run.dir / "evaluations" / f"{prefix}step-{evaluations[0].step:06d}.jsonl"
            rows = evaluations[0].document_rows(entry.documents.origins)
            on_first_rank(world, partial(_write_lines, file, rows), RunFolderError)


def save_plan(run: TrainingRun, plan: Plan, name: str) -> None:
    """Keep a plan as plans/NAME.json, for the report; all ranks call it together."""
    file = run.dir / "plans" / f"{name}.json"

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, plan.to_json())

    on_first_rank(run.world, write, RunFolderError)


def _write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, "".join(as_json(row) + "\n" for row in rows))


def _degree(evaluation: Evaluation) -> int:
    return evaluation.cp
