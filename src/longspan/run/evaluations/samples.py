"""What the model says of the first documents with images of a set: samples.jsonl, which the report shows.

Answers are those of one pass, in which the true tokens stand before each that is predicted. A row has step, name of the
set, text (what stands before the first target, `<image>` for an image), answer, predicted, and images, each a small PNG
in base64.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longspan.comm import World
from longspan.comm.all_ranks import on_first_rank
from longspan.corpus.corpus_images.image_documents import ImageDocuments
from longspan.corpus.tokenizer import TextTokenizer, load_tokenizer
from longspan.data.document import NO_TARGET, Labelled
from longspan.errors import DataError
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.metrics import EvaluationOptions, TargetRows
from longspan.train.plans import PlanChoice

SAMPLES, LARGEST = 8, 96  # documents of a set; pixels of the longer side of a picture
SAMPLES_FILE = "samples.jsonl"


class _Predictions:
    """A metric that keeps the likeliest token at each row that it is shown: {(document, position): token}."""

    def __init__(self) -> None:
        self.tokens = dict[tuple[int, int], int]()

    def __call__(self, rows: TargetRows) -> tuple[float, float]:
        likeliest = rows.logits.argmax(-1).tolist()
        places = zip(rows.documents.tolist(), rows.positions.tolist(), strict=True)
        self.tokens |= dict(zip(places, likeliest, strict=True))
        return 0.0, 0.0


def image_samples(
    model: Any, documents: Any, choice: PlanChoice, world: World, folder: Path, *, name: str, step: int
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl for a set, read by the tokenizer in a folder; none where its documents have no images.

    All ranks call it together.
    """
    if not isinstance(documents, ImageDocuments) or not documents.items:
        return []
    chosen = list(dict.fromkeys(documents.ids[item.document] for item in documents.items))[:SAMPLES]
    shown = documents.corpus.select(chosen)
    assert isinstance(shown, ImageDocuments)
    predictions = _Predictions()
    options = EvaluationOptions(step=step, name=name, metrics={"predictions": predictions})
    evaluate(model, shown, choice, world, options)
    tokens_at = dict[tuple[int, int], int]()
    for tokens in world.control.gather_objects(predictions.tokens, "predicted tokens of samples"):
        tokens_at |= tokens

    def rows() -> list[dict[str, Any]]:
        tokenizer = load_tokenizer(folder)
        made = (_row(shown, number, tokenizer, tokens_at) for number in range(len(shown)))
        return [{"step": step, "name": name, **row} for row in made]

    return on_first_rank(world, rows, DataError)  # which alone opens the pictures


def _row(documents: ImageDocuments, number: int, tokenizer: TextTokenizer, found: dict[tuple[int, int], int]) -> Any:
    """One document: where the model answers the targets from, and what it puts there."""
    document = documents[number]
    positions = np.arange(len(document))
    ids = document[positions]
    labels = document.labels(positions) if isinstance(document, Labelled) else ids
    targets = np.flatnonzero(labels[1:] != NO_TARGET) + 1
    predicted = [found.get((number, int(position) - 1), NO_TARGET) for position in targets]
    return {
        "text": _text(documents, number, tokenizer, ids[: int(targets[0]) if len(targets) else len(ids)]),
        "answer": _decoded(tokenizer, labels[targets]),
        "predicted": _decoded(tokenizer, predicted),
        "images": [_picture(documents, i) for i, item in enumerate(documents.items) if item.document == number],
    }


def _text(documents: ImageDocuments, number: int, tokenizer: TextTokenizer, ids: Any) -> str:
    """The text before an answer, with one word for the placeholders of each image."""
    pieces, at = list[str](), 0
    for item in documents.items:
        if item.document == number and item.spans[0][0] < len(ids):
            pieces.append(_decoded(tokenizer, ids[at : item.spans[0][0]]))
            at = item.spans[-1][1]
    return "<image>".join([*pieces, _decoded(tokenizer, ids[at:])])


def _decoded(tokenizer: TextTokenizer, ids: Sequence[int] | Any) -> str:
    known = [int(i) for i in ids if 0 <= int(i) < tokenizer.size]
    return tokenizer.engine.decode(known, skip_special_tokens=True)


def _picture(documents: ImageDocuments, item: int) -> str:
    image = documents.picture(item)
    image.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
