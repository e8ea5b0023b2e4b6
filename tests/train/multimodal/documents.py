"""Documents with items: ragged, interleaved, of two modalities, at either end, nothing else at all, or none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from longspan import Document
from longspan.multimodal import MediaDocuments, MediaItem
from tests.train.multimodal.encoders import PATCH

VOCABULARY = 66  # tp 2 and 3 divide it
Spans = tuple[tuple[int, int], ...]

# Length of each document, and its items: a modality and spans.
Described = tuple[int, tuple[tuple[str, Spans], ...]]
SETS: dict[str, tuple[Described, ...]] = {
    "mixed": (
        (13, (("image", ((3, 8),)),)),
        (1, ()),
        (30, (("video", ((2, 4), (6, 8))), ("image", ((4, 6), (8, 9))), ("image", ((15, 22),)))),  # interleaved
        (7, (("image", ((0, 3),)),)),  # at its beginning alone
        (18, ()),
        (9, (("image", ((2, 3),)), ("video", ((5, 9),)))),  # up to its end
        (3, (("image", ((0, 3),)),)),  # nothing but placeholders: it has no target
        (
            24,
            (("image", ((1, 14),)), ("video", ((14, 18),)), ("image", ((19, 22),))),
        ),  # an item is most of the document
    ),
    "packed": (
        *((5 + d % 3, (("image", ((d % 2, 3 + d % 2),)),) if d % 4 else ()) for d in range(12)),
        (16, (("image", ((0, 1),)), ("image", ((1, 5),)), ("image", ((5, 7),)), ("image", ((12, 16),)))),  # touching
    ),
    "few": ((21, ()), (11, (("video", ((4, 8),)),)), (6, ())),  # fewer items than ranks; none of "image"
    "text": ((13, ()), (1, ()), (9, ())),
    "even": tuple((8, (("image", ((1, 4),)),)) for _ in range(4)),  # for mutations: any slot may stand for another
    "labelled": tuple((8, (("image", ((1, 4),)),)) for _ in range(4)),
}


def documents_of(name: str, seed: int = 0) -> MediaDocuments:
    """One of the sets with random tokens and inputs; its items are not in the order of their documents."""
    draw = np.random.default_rng(seed)
    tokens: list[Any] = [draw.integers(0, VOCABULARY, size=length) for length, _ in SETS[name]]
    if name == "labelled":  # every other token, placeholders among them; labels of other tokens; none; and without
        tokens[0] = Document(tokens[0], loss_mask=np.arange(len(tokens[0])) % 2)
        tokens[1] = Document(tokens[1], labels=np.where(draw.random(len(tokens[1])) < 0.5, tokens[1][::-1], -100))
        tokens[2] = Document(tokens[2], loss_mask=np.zeros(len(tokens[2])))
    items = [MediaItem(d, spans, kind) for d, (_, described) in enumerate(SETS[name]) for kind, spans in described]
    items = [items[i] for i in draw.permutation(len(items))]
    return MediaDocuments(tokens, items, [torch.from_numpy(draw.normal(size=(item.rows, PATCH))) for item in items])


def placeholders(length: int, items: Sequence[MediaItem]) -> np.ndarray:
    """Which positions of a document take rows of these items (its own)."""
    covered = np.zeros(length, dtype=bool)
    for item in items:
        for start, stop in item.spans:
            covered[start:stop] = True
    return covered
