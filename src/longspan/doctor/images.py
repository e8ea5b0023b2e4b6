"""Documents with images of a proof: made for a small model, and as a step and the stock model are given them."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig

from longspan.bridge import items_at_placeholders
from longspan.bridge.item_documents import ItemDocuments
from longspan.doctor.cases import IMAGES, LENGTHS
from longspan.model.small.shrink import tiny_model
from longspan.model.vision.image_tokens import image_tokens
from longspan.model.vision.take_apart import check_vision
from longspan.model.vision.trial_documents import TrialDocument, trial_documents
from longspan.train.document import Document

NO_LABEL = -100


def image_documents(config: PreTrainedConfig) -> tuple[TrialDocument, ...]:
    """Documents of LENGTHS tokens of text and IMAGES images, for a small configuration.

    Raises ModelError where `prepare(encoder=…)` refuses the model.
    """
    model = tiny_model(config, torch.float32, images=True)
    check_vision(model)
    return tuple(trial_documents(model, tuple(zip(LENGTHS, IMAGES, strict=True))))


def item_documents(config: PreTrainedConfig, documents: Sequence[TrialDocument]) -> ItemDocuments:
    """The same as `run_step` takes them."""
    ids = [document.ids for document in documents]
    items = items_at_placeholders(ids, image_tokens(config).placeholder, [document.rows for document in documents])
    images = [image for document in documents for image in document.images]
    tokens = [_labelled(document) if document.prefix else document.ids for document in documents]
    return ItemDocuments(tokens, items, images, lambda number: documents[number].positions)


def labels_of(document: np.ndarray | TrialDocument) -> np.ndarray:
    """What each token but the last predicts; placeholders and a prefix are not predicted."""
    if isinstance(document, TrialDocument):
        hidden = document.at_images | (np.arange(len(document.ids)) < document.prefix)
        return np.where(hidden, NO_LABEL, document.ids)[1:]
    return document[1:]


def _labelled(document: TrialDocument) -> Document:
    return Document(document.ids, loss_mask=np.arange(len(document.ids)) >= document.prefix)
