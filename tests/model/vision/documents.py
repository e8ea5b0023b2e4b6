"""Documents with images for a tiny model, and what the stock model says of them, one by one in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from longspan import ItemDocuments
from longspan.bridge import items_at_placeholders
from longspan.doctor.float64 import whole_float64
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens
from tests.model.stock import gradients_of
from tests.model.vision.models import IMAGE, tiny

Grid = tuple[int, int, int]

# Tokens of text, and the images among them: 0 to 3 of other sizes, at any place but side by side.
SETS: dict[str, Sequence[tuple[int, tuple[Grid, ...]]]] = {
    "mixed": (
        (13, ()),
        (18, ((1, 4, 6),)),
        (26, ((1, 4, 4), (1, 2, 4), (1, 8, 4))),
        (7, ()),
        (21, ((1, 6, 2), (1, 4, 4))),
        (8, ((1, 2, 2),)),
    ),
    "text": ((13, ()), (9, ())),
    "even": tuple((9, ((1, 4, 4),)) for _ in range(4)),  # any document's image fits in any other
}


@dataclass(frozen=True)
class Raw:
    """One document: its ids, and of each image its grid and its pixels."""

    ids: np.ndarray
    images: tuple[ImageInput, ...]


def raw(tokens: ImageTokens, name: str = "mixed") -> list[Raw]:
    """The documents of a set for a model: with grids, or with images of one size."""
    draw = np.random.default_rng(0)
    return [_document(tokens, text, grids, draw) for text, grids in SETS[name]]


def _document(tokens: ImageTokens, text: int, grids: Sequence[Grid], draw: np.random.Generator) -> Raw:
    images = tuple(_image(tokens, grid, draw) for grid in grids)
    words = draw.integers(1, 50, size=text)
    places = np.sort(draw.choice(np.arange(1, text), size=len(images), replace=False))
    ids = list[int]()
    for part, image in zip(np.split(words, places), (*images, None), strict=True):
        ids += [*part.tolist(), *([] if image is None else [IMAGE] * tokens.rows(image.grid))]
    return Raw(np.array(ids), images)


def _image(tokens: ImageTokens, grid: Grid, draw: np.random.Generator) -> ImageInput:
    if not tokens.has_grids:
        side: int = tokens.config.vision_config.image_size  # pyright: ignore[reportOptionalMemberAccess]
        return ImageInput(torch.from_numpy(draw.normal(size=(1, 3, side, side))))
    return ImageInput(torch.from_numpy(draw.normal(size=(int(np.prod(grid)), 24))), grid)


def documents_of(tokens: ImageTokens, name: str = "mixed") -> ItemDocuments:
    """The same as `run_step` takes them."""
    documents = raw(tokens, name)
    ids = [document.ids for document in documents]
    rows = [[tokens.rows(image.grid) for image in document.images] for document in documents]
    images = [image for document in documents for image in document.images]

    def positions(d: int) -> np.ndarray | None:
        grids = [image.grid for image in documents[d].images if image.grid is not None]
        return tokens.positions(ids[d], np.array(grids))

    return ItemDocuments(ids, items_at_placeholders(ids, IMAGE, rows), images, positions)


@dataclass(frozen=True)
class Answer:
    """The mean loss and every gradient that is not zero throughout."""

    loss: float
    gradients: dict[str, Tensor]

    def errors(self, loss: float, gradients: dict[str, Tensor]) -> dict[str, float]:
        """The relative error of the loss and of each gradient; infinity for one that is missing.

        Softmax ignores biases of keys, whose gradients are rounding: the least scale is a thousandth of the largest.
        """
        least = 1e-3 * max(gradient.abs().max().item() for gradient in self.gradients.values())
        errors = {"loss": abs(loss - self.loss) / self.loss}
        for name, exact in self.gradients.items():
            scale = max(exact.abs().max().item(), least)
            errors[name] = (gradients[name] - exact).abs().max().item() / scale if name in gradients else float("inf")
        return errors


def answer_of(name: str, documents: str = "mixed", trained: Any = None, make: Any = None) -> Answer:
    """What the stock model, or the one that `make` gives, says; `trained(model)` freezes what is not trained."""
    with whole_float64():
        model = (tiny(name) if make is None else make()).train()
        if trained is not None:
            trained(model)
        of_documents = [_loss(model, document) for document in raw(image_tokens(model.config), documents)]
        loss = torch.stack([part for part, _ in of_documents]).sum() / sum(targets for _, targets in of_documents)
        loss.backward()
    gradients = {n: g for n, g in gradients_of(model).items() if g.abs().max() > 0}
    return Answer(loss.item(), gradients)


def _loss(model: PreTrainedModel, document: Raw) -> tuple[Tensor, int]:
    """The sum of the cross entropy of the tokens of text, and how many they are."""
    ids, images = torch.from_numpy(document.ids)[None], {}
    if document.images:
        images["pixel_values"] = torch.cat([image.pixels for image in document.images])
        if document.images[0].grid is not None:
            images["image_grid_thw"] = torch.tensor([image.grid for image in document.images])
            images["mm_token_type_ids"] = (ids == IMAGE).int()
    if model.config.model_type == "gemma3":  # its mask knows images by them
        images["token_type_ids"] = (ids == IMAGE).int()
    logits = model(input_ids=ids, use_cache=False, **images).logits[0]
    labels = ids[0, 1:].masked_fill(ids[0, 1:] == IMAGE, -100)
    return F.cross_entropy(logits[:-1], labels, reduction="sum"), int((labels != -100).sum())
