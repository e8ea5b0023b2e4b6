"""The documents of a proof: random tokens, and tokens with images and videos, for a small configuration.

What they predict (`document_labels`) is for the stock model; `run_step` finds the same targets itself.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspan.data.document import Document
from longspan.data.item_documents import MediaDocuments, items_at_placeholders
from longspan.doctor.cases import IMAGES, LENGTHS
from longspan.errors import ModelError
from longspan.model.exactness.image_documents import (
    TrialDocument,
    make_trial_documents,
    make_video_document,
    ordinary_ids,
)
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.multimodal.image_modules import refuse_model_without_images, video_tokens
from longspan.model.vision.image_tokens import image_tokens

NO_LABEL = -100


def draw_documents(config: PreTrainedConfig, lengths: Sequence[int]) -> list[np.ndarray]:
    """Draw documents of random token ids, without those that mean something to the model: padding, images."""
    usual = np.array(ordinary_ids(config))
    random = np.random.default_rng(0)
    return [random.choice(usual, length) for length in lengths]


def make_image_documents(config: PreTrainedConfig) -> tuple[TrialDocument, ...]:
    """Make documents with images for a small configuration, LENGTHS tokens of text and IMAGES images each, and one with
    videos if its model reads them. Raises ModelError if `prepare(encoder=…)` refuses the model.
    """
    model = make_tiny_model(config, torch.float32, images=True)
    refuse_model_without_images(model)
    image_trials = make_trial_documents(model, tuple(zip(LENGTHS, IMAGES, strict=True)))
    return (*image_trials, *(() if no_video_reason(config) else (make_video_document(model),)))


def no_video_reason(config: PreTrainedConfig) -> str:
    """Return why no document of a small configuration has videos; "" where one has."""
    try:
        video_tokens(config)
    except ModelError as error:
        return str(error)
    return ""


def make_item_documents(config: PreTrainedConfig, documents: Sequence[TrialDocument]) -> MediaDocuments:
    """Return the documents as `run_step` takes them, with images of all documents before frames of all videos."""
    ids = [document.ids for document in documents]
    image_rows, frame_rows = zip(*(_split_items(document, document.rows) for document in documents), strict=True)
    items = items_at_placeholders(ids, image_tokens(config).placeholder, image_rows)
    if any(frame_rows):
        items += items_at_placeholders(ids, video_tokens(config).placeholder, frame_rows)
    images, frames = zip(*(_split_items(document, document.images) for document in documents), strict=True)
    tokens = [
        Document(d.ids, loss_mask=np.arange(len(d.ids)) >= d.prefix) if d.prefix else d.ids for d in documents
    ]
    return MediaDocuments(tokens, items, [*chain(*images, *frames)], lambda number: documents[number].positions)


def _split_items(document: TrialDocument, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    frames = document.groups
    return [value for i, value in enumerate(values) if i not in frames], [values[i] for i in sorted(frames)]


def document_labels(document: np.ndarray | TrialDocument) -> Tensor:
    """Return what each token but the last predicts, (T − 1,): NO_LABEL for placeholders and a prefix that all tokens
    see.
    """
    if not isinstance(document, TrialDocument):
        return torch.from_numpy(document[1:])
    not_predicted = document.at_images | (np.arange(len(document.ids)) < document.prefix)
    return torch.from_numpy(np.where(not_predicted, NO_LABEL, document.ids)[1:])
