"""A batch of verl as documents, and values of documents as verl's nested tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.utils.dataset.dataset_utils import DatasetPadMode  # pyright: ignore[reportMissingImports]

from longspan.errors import DataError, plural
from longspan.layout import Integers
from longspan.model import ImageInput

_REFUSED = {  # entries of a batch, and why there is no exact answer to them
    "distillation_use_topk": "distillation by the teacher's likeliest tokens needs rows of logits, which no rank has",
    "distillation_only": "distillation without log-probabilities is not there; set distillation off",
    "routed_experts": "longspan's routers choose experts anew in each pass; set router_replay.mode to disabled",
}


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a batch: token ids (n,) and images of each, which tokens are predicted (n,), offsets (D + 1,)."""

    ids: list[Integers]
    predicted: list[Any]
    offsets: Tensor
    images: list[list[ImageInput]]

    def select(self, samples: Sequence[int]) -> "Samples":
        """Return some of the samples, in this order."""
        ids = [self.ids[i] for i in samples]
        predicted = [self.predicted[i] for i in samples]
        offsets = torch.tensor(np.cumsum([0, *map(len, ids)]))
        return Samples(ids, predicted, offsets, [self.images[i] for i in samples])

    def nest(self, rows: Tensor) -> Tensor:
        """Make verl's nested tensor of values (rows of all samples,)."""
        return torch.nested.nested_tensor_from_jagged(rows, self.offsets)


def read_samples(data: Any) -> Samples:
    """Read a batch on the host. Predicted are all tokens of its answers or, without answers (SFT), those of
    `loss_mask`; a sample's first token never is.

    Raises DataError for entries that the engine cannot follow, and for padded `input_ids`.
    """
    for name, reason in _REFUSED.items():
        if tu.get_non_tensor_data(data, name, False) is not False:
            raise DataError(f"the batch of verl has {name}: {reason}")
    pad_mode = tu.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING or not data["input_ids"].is_nested:
        raise DataError(
            f"the batch of verl is padded (pad_mode {pad_mode}); use no_padding, whose input_ids are nested"
        )
    ids = [row.numpy() for row in data["input_ids"].unbind()]
    if "responses" in data.keys():  # noqa: SIM118 (a TensorDict)
        # Padding of the answers does not count.
        answers = data["responses"]
        is_real = None if answers.is_nested else data["attention_mask"][:, -answers.shape[1] :]
        lengths = answers.offsets().diff() if is_real is None else is_real.sum(-1)
        predicted = [
            np.arange(len(row)) >= len(row) - answer for row, answer in zip(ids, lengths.tolist(), strict=True)
        ]
    else:
        predicted = [row.numpy().astype(bool) for row in data["loss_mask"].unbind()]
    for mask in predicted:
        mask[:1] = False  # nothing stands before it
    entries = [getattr(x, "data", x) or {} for x in data.get("multi_modal_inputs", [None] * len(ids))]
    images = [_read_images(i, entry) for i, entry in enumerate(entries)]
    return Samples(ids, predicted, data["input_ids"].offsets(), images)


def _read_images(sample: int, entry: dict[str, Tensor]) -> list[ImageInput]:
    """(patches, size) by grids (images, 3), or (images, 3, H, W)"""
    # The ids say which tokens are an image's.
    tensors = {name: x for name, x in entry.items() if x is not None and name != "mm_token_type_ids"}
    if further := sorted(tensors.keys() - {"pixel_values", "image_grid_thw"}):
        raise DataError(
            f"sample {sample} of verl has {', '.join(further)}; the engine reads pixel_values and image_grid_thw, of "
            "images of one tile"
        )
    if "pixel_values" not in tensors:
        return []
    pixels = tensors["pixel_values"]
    grids = tensors.get("image_grid_thw")
    if grids is None:
        return [ImageInput(image[None]) for image in pixels]
    counts = grids.prod(-1).tolist()
    if sum(counts) != len(pixels):
        raise DataError(
            f"sample {sample} of verl has {plural(len(pixels), 'patch', 'es')}, and {plural(len(counts), 'image')} of "
            f"{sum(counts)} by image_grid_thw"
        )
    sizes: list[tuple[int, int, int]] = [tuple(grid) for grid in grids.tolist()]
    return [ImageInput(image, size) for image, size in zip(pixels.split(counts), sizes, strict=True)]


def pad_answers(data: Any) -> Any:
    """Return a batch in which entries with a number for each token of an answer are padded to the longest answer.

    verl divides some losses by the width of a micro-batch, which would depend on the plan without padding.
    """
    if "responses" not in data.keys() or not data["responses"].is_nested:  # noqa: SIM118 (a TensorDict)
        return data
    lengths = data["responses"].offsets().diff()
    width = int(lengths.max())
    padded = data.clone(recurse=False)
    rows: Any
    for name, rows in data.items():
        if name in ("prompts", "responses") or not (getattr(rows, "is_nested", False) and rows.ndim == 2):
            continue
        if torch.equal(rows.offsets().diff(), lengths):
            padded[name] = torch.nested.to_padded_tensor(rows, 0, output_size=(len(lengths), width))
    tu.assign_non_tensor(padded, max_response_len=width)
    return padded
