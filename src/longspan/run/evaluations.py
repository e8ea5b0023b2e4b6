"""The evaluations of a run: the sets that are due after a step, their records, and samples of image models.

samples.jsonl, which the report shows, has the model's answers for the first documents with images of a set. They come
from one pass, with the true tokens before each predicted one. A row has step, name of the set, text (before the first
target, `<image>` for an image), answer, predicted, and images, each a small PNG in base64.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.comm import World
from longspan.comm.all_ranks import StopSignal, received_signal, run_on_every_rank, run_on_first_rank
from longspan.corpus.tokenizer import TextTokenizer, load_tokenizer
from longspan.data.document import NO_TARGET, Labelled
from longspan.errors import DataError, EvaluationStopped, RunFolderError
from longspan.evaluation.evaluate import evaluate, list_degree_choices
from longspan.evaluation.metrics import EvaluationOptions, TargetRows
from longspan.evaluation.result import Evaluation
from longspan.files import as_json, write_atomically
from longspan.run.progress import ProgressDisplay
from longspan.run.records import Records, save_plan
from longspan.run.run_data import EvaluationSet, TrainingRun
from longspan.run.saves import is_due
from longspan.train.plans import PlanChoice

if TYPE_CHECKING:
    from longspan.corpus.image_documents import ImageDocuments

SAMPLES, LARGEST = 8, 96  # documents of a set; pixels of the longer side of a picture
SAMPLES_FILE = "samples.jsonl"


class _Predictions:
    """A metric that records the token that each row predicts, by (document, position) of the row itself."""

    def __init__(self) -> None:
        self.tokens = dict[tuple[int, int], int]()

    def __call__(self, rows: TargetRows) -> tuple[float, float]:
        likeliest = rows.logits.argmax(-1).tolist()
        keys = zip(rows.documents.tolist(), rows.positions.tolist(), strict=True)
        self.tokens |= dict(zip(keys, likeliest, strict=True))
        return 0.0, 0.0


def image_samples(
    model: Any, documents: Any, choice: PlanChoice, world: World, folder: Path, *, name: str, step: int
) -> list[dict[str, Any]]:
    """Return rows of samples.jsonl for a set: its first SAMPLES documents with images, evaluated once more by all
    ranks.
    """
    if not getattr(documents, "items", ()):  # of a corpus without images
        return []
    numbers = list(dict.fromkeys(documents.ids[item.document] for item in documents.items))[:SAMPLES]
    samples = documents.corpus.select(numbers)
    predictions = _Predictions()
    options = EvaluationOptions(step=step, name=name, metrics={"predictions": predictions})
    evaluate(model, samples, choice, world, options)
    tokens_at = dict[tuple[int, int], int]()
    for tokens in world.control.gather_objects(predictions.tokens, "predicted tokens of samples"):
        tokens_at |= tokens

    def make_rows() -> list[dict[str, Any]]:
        tokenizer = load_tokenizer(folder)
        sample_rows = (_sample_row(samples, number, tokenizer, tokens_at) for number in range(len(samples)))
        return [{"step": step, "name": name, **row} for row in sample_rows]

    return run_on_first_rank(world, make_rows, DataError)  # only this rank opens images


def _sample_row(
    documents: "ImageDocuments", number: int, tokenizer: TextTokenizer, tokens_at: dict[tuple[int, int], int]
) -> dict[str, Any]:
    """The answer is all targets of the document, and the text is what comes before the first of them."""
    document = documents[number]
    positions = np.arange(len(document))
    ids = document[positions]
    labels = document.labels(positions) if isinstance(document, Labelled) else ids
    targets = np.flatnonzero(labels[1:] != NO_TARGET) + 1
    predicted = [tokens_at.get((number, int(position) - 1), NO_TARGET) for position in targets]
    return {
        "text": _text_before_answer(documents, number, tokenizer, ids[: int(targets[0]) if len(targets) else len(ids)]),
        "answer": _decode_ids(tokenizer, labels[targets]),
        "predicted": _decode_ids(tokenizer, predicted),
        "images": [_encode_image(documents, i) for i, item in enumerate(documents.items) if item.document == number],
    }


def _text_before_answer(documents: "ImageDocuments", number: int, tokenizer: TextTokenizer, ids: Any) -> str:
    """`<image>` stands for the placeholders of each image before the answer."""
    pieces, piece_start = list[str](), 0
    for item in documents.items:
        if item.document == number and item.spans[0][0] < len(ids):
            pieces.append(_decode_ids(tokenizer, ids[piece_start : item.spans[0][0]]))
            piece_start = item.spans[-1][1]
    return "<image>".join([*pieces, _decode_ids(tokenizer, ids[piece_start:])])


def _decode_ids(tokenizer: TextTokenizer, ids: Sequence[int] | Any) -> str:
    in_vocabulary = [int(i) for i in ids if 0 <= int(i) < tokenizer.size]
    return tokenizer.engine.decode(in_vocabulary, skip_special_tokens=True)


def _encode_image(documents: "ImageDocuments", number: int) -> str:
    image = documents.picture(number)
    image.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


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
    _recorded: list[dict[str, Any]] = field(default_factory=list)

    def take_rows(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations since the last call, one a set, at its configured degree."""
        rows = self._recorded.copy()
        self._recorded.clear()
        return rows

    def evaluate_due(self, done: int, *, unless_recorded: bool = False) -> str:
        """Evaluate the sets that are due after `done` steps; returns the signal that came meanwhile, or ""."""
        for entry in self.run.sets:
            if not is_due(done, entry.config.every) or (unless_recorded and self._is_recorded(entry, done)):
                continue
            evaluation = self._evaluate_set(entry, self.run.choice_of(entry.config), done)
            if evaluation is not None:
                self._record_evaluations(entry, [evaluation])
            elif signal := received_signal(self.run.world, self.stop.received):
                return signal
        return ""

    def evaluate_at_end(self) -> Final:
        """Evaluate all sets, the held-out documents at every degree; after a signal that is all that is returned."""
        done, at_degrees, set_evaluations = self.run.config.train.steps, list[Evaluation](), list[Evaluation]()
        for entry in self.run.sets:
            evaluations = list[Evaluation]()
            for evaluation in self._final_evaluations(entry, done):
                if evaluation is not None:
                    evaluations.append(evaluation)
                elif signal := received_signal(self.run.world, self.stop.received):
                    return Final(stopped=signal)
            if not self._is_recorded(entry, done):
                self._record_evaluations(entry, evaluations)
            (set_evaluations if entry.name else at_degrees).extend(sorted(evaluations, key=attrgetter("cp")))
        run, samples = self.run, list[dict[str, Any]]()
        for entry in run.sets:
            choice = run.choice_of(entry.config)
            samples += image_samples(run.model, entry.documents, choice, run.world, run.dir, name=entry.name, step=done)
        if samples:
            text = "".join(as_json(row) + "\n" for row in samples)
            run_on_first_rank(run.world, partial(write_atomically, run.dir / SAMPLES_FILE, text), RunFolderError)
        return Final(tuple(at_degrees), tuple(set_evaluations))

    def _final_evaluations(self, entry: EvaluationSet, done: int) -> Iterator[Evaluation | None]:
        """As configured and, of held-out documents, at every other degree; None: stopped."""
        choice = self.run.choice_of(entry.config)
        first = self._evaluate_set(entry, choice, done)
        yield first
        other_choices = () if entry.name else list_degree_choices(choice, entry.documents, self.run.world.home)
        for other_choice in other_choices:
            if first is None or other_choice.degree != first.cp:
                yield self._evaluate_set(entry, other_choice, done)

    def _evaluate_set(self, entry: EvaluationSet, choice: PlanChoice, done: int) -> Evaluation | None:
        options = EvaluationOptions(
            step=done,
            name=entry.name,
            metrics=entry.metrics,
            token_bytes=entry.token_bytes,
            stopped=self.stop.reason,
            progress=partial(self.display.show_eval_progress, entry.name),
        )
        try:
            evaluation = evaluate(self.run.model, entry.documents, choice, self.run.world, options)
        except EvaluationStopped as stopped:
            self.display.log(str(stopped))
            return None
        finally:
            self.display.end_evaluating()
        return evaluation

    def _is_recorded(self, entry: EvaluationSet, done: int) -> bool:
        return self.run.world.control.broadcast_object((done, entry.name) in self.records.metrics.evaluated)

    def _record_evaluations(self, entry: EvaluationSet, evaluations: Sequence[Evaluation]) -> None:
        """Losses of documents, and the row for `take_rows`, are of the first: a degree changes no loss."""
        world = self.run.world
        self._recorded.extend(evaluation.row() for evaluation in evaluations[:1])
        for evaluation in sorted(evaluations, key=attrgetter("cp")):
            row = evaluation.row()
            run_on_every_rank(world, partial(self.records.metrics.write, row), RunFolderError)
            self.display.show_evaluation(row)
            name_parts = ("evaluation", entry.name, f"cp{evaluation.cp}")
            save_plan(self.run, evaluation.plan, "-".join(filter(None, name_parts)))
