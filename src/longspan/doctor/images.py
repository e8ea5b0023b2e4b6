"""Documents with images and videos of a proof: made for a small model, and as a step and the stock model get them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from longspan.bridge import items_at_placeholders
from longspan.bridge.item_documents import ItemDocuments
from longspan.data.document import Document
from longspan.doctor.cases import IMAGES, LENGTHS
from longspan.errors import ModelError
from longspan.model.exactness.image_trial import video_tokens
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.exactness.trial_documents import TrialDocument, make_trial_documents, make_video_document
from longspan.model.take_apart import check_vision
from longspan.model.vision.image_tokens import image_tokens

NO_LABEL = -100


def make_image_documents(config: PreTrainedConfig) -> tuple[TrialDocument, ...]:
    """Make documents with images for a small configuration, and one with videos if its model reads them.

    Those with images have LENGTHS tokens of text and IMAGES images each. Raises ModelError if `prepare(encoder=…)`
    refuses the model.
    """
    model = make_tiny_model(config, torch.float32, images=True)
    check_vision(model)
    image_trials = make_trial_documents(model, tuple(zip(LENGTHS, IMAGES, strict=True)))
    return (*image_trials, *(() if no_video_reason(config) else (make_video_document(model),)))


def no_video_reason(config: PreTrainedConfig) -> str:
    """Return why no document of a small configuration has videos; "" where one has."""
    try:
        video_tokens(config)
    except ModelError as error:
        return str(error)
    return ""


def item_documents(config: PreTrainedConfig, documents: Sequence[TrialDocument]) -> ItemDocuments:
    """Return the documents as `run_step` takes them, with images of all documents before frames of all videos."""
    ids = [document.ids for document in documents]
    of_images, of_videos = zip(*(_split_items(document, document.rows) for document in documents), strict=True)
    items = items_at_placeholders(ids, image_tokens(config).placeholder, of_images)
    if any(of_videos):
        items += items_at_placeholders(ids, video_tokens(config).placeholder, of_videos)
    # as the items are: all images (0 of `_split_items`) before all frames of videos (1)
    images = [
        image for kind in (0, 1) for document in documents for image in _split_items(document, document.images)[kind]
    ]
    tokens = [_label_document(document) if document.prefix else document.ids for document in documents]
    return ItemDocuments(tokens, items, images, lambda number: documents[number].positions)


def _split_items(document: TrialDocument, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split a document's values, one for each image or group of frames, into those of images and those of frames."""
    groups = document.groups
    return [x for i, x in enumerate(values) if i not in groups], [values[i] for i in sorted(groups)]


def document_labels(document: np.ndarray | TrialDocument) -> np.ndarray:
    """Return the labels that each token but the last predicts, (T − 1,).

    NO_LABEL stands in place of what is not predicted: placeholders of images, and the prefix that all tokens see.
    """
    if isinstance(document, TrialDocument):
        not_predicted = document.at_images | (np.arange(len(document.ids)) < document.prefix)
        return np.where(not_predicted, NO_LABEL, document.ids)[1:]
    return document[1:]


def _label_document(document: TrialDocument) -> Document:
    """Make a document with a prefix as `run_step` takes it: the tokens of the prefix are not predicted."""
    return Document(document.ids, loss_mask=np.arange(len(document.ids)) >= document.prefix)
