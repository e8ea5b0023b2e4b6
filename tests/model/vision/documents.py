"""Documents with images and videos for a tiny model, and what the stock model says of them, one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import Document
from longspan.data.item_documents import items_at_placeholders
from longspan.doctor.stock import compute_in_float64
from longspan.model.vision.image_inputs import POSITIONS, ImageInput
from longspan.model.vision.image_tokens import ImageTokens, image_tokens
from longspan.model.vision.videos import Video, VideoTokens
from longspan.multimodal import MediaDocuments
from longspan.plan.shape.families import find_family
from tests.model.stock import gradients_of
from tests.model.vision.models import IMAGE, VIDEO, tiny

Grid = tuple[int, int, int]

# Tokens of text, and the images among them: 0 to 3 of other sizes, at any place but side by side; those of several
# frames are videos.
SETS: dict[str, Sequence[tuple[int, tuple[Grid, ...]]]] = {
    "mixed": (
        (13, ()),
        (18, ((1, 4, 6),)),
        (26, ((1, 4, 4), (1, 2, 4), (1, 8, 4))),
        (7, ()),
        (21, ((1, 6, 2), (1, 4, 4))),
        (8, ((1, 2, 2),)),
    ),
    "videos": (
        (13, ()),
        (12, ((3, 4, 4), (1, 4, 6))),
        (16, ((2, 2, 4), (3, 4, 2))),
        (7, ()),
        (9, ((1, 6, 2),)),
        (9, ((4, 2, 2),)),
    ),
    "even videos": tuple((9, ((2, 4, 4), (2, 4, 4))) for _ in range(4)),
    "text": ((13, ()), (9, ())),
    "even": tuple((9, ((1, 4, 4),)) for _ in range(4)),  # any document's image fits in any other
}


@dataclass(frozen=True)
class Raw:
    """One document: its ids, and of each image and each video its grid and its pixels."""

    ids: np.ndarray
    images: tuple[ImageInput, ...]
    videos: tuple[ImageInput, ...] = ()

    @property
    def clips(self) -> list[Video]:
        return [Video(video.grid, 0.8 + i) for i, video in enumerate(self.videos) if video.grid]

    @property
    def prefix(self) -> int:
        """Up to the second token after its last image: what is a prompt to models that have a prefix."""
        return int(np.flatnonzero(self.ids == IMAGE).max(initial=3)) + 3

    def labels(self, prefix: bool) -> np.ndarray:
        hidden = np.isin(self.ids, (IMAGE, VIDEO)) | (prefix & (np.arange(len(self.ids)) < self.prefix))
        return np.where(hidden, -100, self.ids)


def raw(tokens: ImageTokens, name: str = "mixed") -> list[Raw]:
    draw = np.random.default_rng(0)
    apart = "video" in name and VideoTokens.from_configuration(of_config(tokens)).apart
    return [_document(tokens, text, grids, draw, apart=apart) for text, grids in SETS[name]]


def of_config(tokens: ImageTokens) -> PreTrainedConfig:
    assert tokens.config is not None
    return tokens.config


def _document(tokens: ImageTokens, text: int, grids: Sequence[Grid], draw: np.random.Generator, *, apart: bool) -> Raw:
    images = tuple(_image(tokens, grid, draw) for grid in grids)
    words = draw.integers(1, 50, size=text)
    places = np.sort(draw.choice(np.arange(1, text), size=len(images), replace=False))
    ids = list[int]()
    for part, image in zip(np.split(words, places), (*images, None), strict=True):
        ids += [*part.tolist(), *([] if image is None else _placeholders(tokens, image, apart))]
    still, moving = (tuple(x for x in images if _is_video(x) == video) for video in (False, True))
    return Raw(np.array(ids), still, moving)


def _is_video(image: ImageInput) -> bool:
    return image.grid is not None and image.grid[0] > 1


def _placeholders(tokens: ImageTokens, image: ImageInput, apart: bool) -> list[int]:
    """The ids of an image, or of a video: where groups of frames stand apart, two tokens of text between them."""
    if not _is_video(image):
        return [IMAGE] * rows_of(tokens, image)
    groups, height, width = image.grid or (0, 0, 0)
    group = [VIDEO] * tokens.rows((1, height, width))
    return [token for i in range(groups) for token in ([3, 4] * (apart and i > 0) + group)]


def _image(tokens: ImageTokens, grid: Grid, draw: np.random.Generator) -> ImageInput:
    config = of_config(tokens)
    if "gemma4" in config.model_type:
        return _placed(grid, draw, merged=hasattr(config.vision_config, "mm_embed_dim"))
    if not tokens.has_grids:
        side: int = tokens.config.vision_config.image_size  # pyright: ignore[reportOptionalMemberAccess]
        return ImageInput(torch.from_numpy(draw.normal(size=(1, 3, side, side))))
    return ImageInput(torch.from_numpy(draw.normal(size=(int(np.prod(grid)), 24))), grid)


def _placed(grid: Grid, draw: np.random.Generator, *, merged: bool) -> ImageInput:
    """Patches of an image with their places, and padding up to 36 patches; with `merged` four are one patch."""
    merge = 2 if merged else 1
    height, width = (side // merge for side in grid[1:])
    y, x = np.divmod(np.arange(height * width), width)
    places = np.full((1, 36 // merge**2, 2), -1)
    places[0, : height * width] = np.stack([x, y], axis=1)
    pixels = draw.normal(size=(1, len(places[0]), 12 * merge**2)) * (places[:, :, :1] >= 0)
    return ImageInput(torch.from_numpy(pixels), fields={POSITIONS: torch.from_numpy(places)})


def rows_of(tokens: ImageTokens, image: ImageInput) -> int:
    if POSITIONS not in image.fields:
        return tokens.rows(image.grid)
    patches = int((image.fields[POSITIONS] >= 0).all(-1).sum())
    return patches if image.pixels.shape[-1] == 48 else patches // 4


def documents_of(tokens: ImageTokens, name: str = "mixed") -> MediaDocuments:
    documents = raw(tokens, name)
    ids = [document.ids for document in documents]
    rows = [[rows_of(tokens, image) for image in document.images] for document in documents]
    items, inputs = items_at_placeholders(ids, IMAGE, rows), [x for document in documents for x in document.images]
    videos = (
        VideoTokens.from_configuration(of_config(tokens)) if any(document.videos for document in documents) else None
    )
    if videos is not None:
        rows = [[n for video in document.clips for n in videos.rows(video.grid)] for document in documents]
        items += items_at_placeholders(ids, videos.placeholder, rows)
        whole = [video for document in documents for video in document.videos]
        inputs += [group for video in whole if video.grid for group in videos.inputs(video.pixels, video.grid)]

    def positions(d: int) -> np.ndarray | None:
        grids = np.array([image.grid for image in documents[d].images if image.grid is not None])
        return (
            tokens.positions(ids[d], grids) if videos is None else videos.positions(ids[d], grids, documents[d].clips)
        )

    if tokens.config is not None and find_family(tokens.config.model_type).prefix_rows:
        return MediaDocuments([Document(d.ids, labels=d.labels(True)) for d in documents], items, inputs, positions)
    return MediaDocuments(ids, items, inputs, positions)


@dataclass(frozen=True)
class Answer:
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
    with compute_in_float64():
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
    ids, images = torch.from_numpy(document.ids)[None], dict[str, Any]()
    if document.images:
        images["pixel_values"] = torch.cat([image.pixels for image in document.images])
        if POSITIONS in document.images[0].fields:
            images[POSITIONS] = torch.cat([image.fields[POSITIONS] for image in document.images])
            images["mm_token_type_ids"] = (ids == IMAGE).int()
        if document.images[0].grid is not None:
            images["image_grid_thw"] = torch.tensor([image.grid for image in document.images])
            images["mm_token_type_ids"] = (ids == IMAGE).int()
    if document.videos:
        images["pixel_values_videos"] = torch.cat([video.pixels for video in document.videos])
        images["video_grid_thw"] = torch.tensor([video.grid for video in document.videos])
        images["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO)
        if model.config.model_type == "qwen2_5_vl":
            images["second_per_grid_ts"] = torch.tensor([video.seconds for video in document.clips]).float()
    if model.config.model_type == "gemma3":  # its mask knows images by them
        images["token_type_ids"] = (ids == IMAGE).int()
    if prefix := find_family(model.config.model_type).prefix_rows:
        images["token_type_ids"] = (torch.arange(ids.shape[1]) >= document.prefix).int()[None]
    logits = model(input_ids=ids, use_cache=False, **images).logits[0]
    labels = torch.from_numpy(document.labels(prefix))[1:]
    return F.cross_entropy(logits[:-1], labels, reduction="sum"), int((labels != -100).sum())
