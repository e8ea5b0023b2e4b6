"""A batch of verl as documents, and values of documents as verl's nested tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.utils.dataset.dataset_utils import DatasetPadMode  # pyright: ignore[reportMissingImports]
from verl.utils.model import extract_multi_modal_inputs  # pyright: ignore[reportMissingImports]

from longspan.errors import DataError
from longspan.layout import Floats, Integers

_REFUSED = {  # entries of a batch, and why there is no exact answer to them
    "distillation_use_topk": "distillation by the teacher's likeliest tokens needs rows of logits, which no rank has",
    "distillation_only": "distillation without log-probabilities is not there; set distillation off",
    "routed_experts": "longspan's routers choose experts anew in each pass; set router_replay.mode to disabled",
}


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a batch: token ids (n,) of each, which tokens are predicted (n,), and verl's offsets (D + 1,)."""

    ids: list[Integers]
    predicted: list[Any]
    offsets: Tensor

    def flat_rows(self, values: Callable[[int], Floats], dtype: torch.dtype) -> Tensor:
        """Join values (n,) of rows of each sample to a tensor (rows of all samples,) on the host."""
        return torch.from_numpy(np.concatenate([values(d) for d in range(len(self.ids))])).to(dtype)

    def nest(self, flat: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)

    def cut(self, flat: Tensor) -> list[Floats]:
        """Cut values (rows of all samples,) into those of each sample (n,)."""
        return np.split(flat.double().numpy(), self.offsets[1:-1].numpy())


def read_samples(data: Any) -> Samples:
    """Read a batch on the host; predicted are all tokens of the answers, and of batches without answers (SFT) those of
    `loss_mask`.

    Raises DataError for entries that the engine cannot follow, and for padded `input_ids`.
    """
    for name, reason in _REFUSED.items():
        if tu.get_non_tensor_data(data, name, False) is not False:
            raise DataError(f"the batch of verl has {name}: {reason}")
    if images := sorted(extract_multi_modal_inputs(data.get("multi_modal_inputs", []))):
        raise DataError(f"samples of verl have {', '.join(images)}, and the engine reads texts alone; use a text model")
    pad_mode = tu.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING or not data["input_ids"].is_nested:
        raise DataError(
            f"the batch of verl is padded (pad_mode {pad_mode}); use no_padding, whose input_ids are nested"
        )
    ids = [row.numpy() for row in data["input_ids"].unbind()]
    if "responses" in data.keys():  # noqa: SIM118 (a TensorDict)
        predicted = [
            np.arange(len(row)) >= len(row) - answer for row, answer in zip(ids, _answer_lengths(data), strict=True)
        ]
    else:
        predicted = [row.numpy().astype(bool) for row in data["loss_mask"].unbind()]
    for mask in predicted:
        mask[:1] = False  # nothing stands before it
    return Samples(ids, predicted, data["input_ids"].offsets())


def _answer_lengths(data: Any) -> list[int]:
    answers = data["responses"]
    if answers.is_nested:
        return answers.offsets().diff().tolist()
    return data["attention_mask"][:, -answers.shape[1] :].sum(-1).tolist()


def read_temperature(data: Any) -> float:
    """Return the temperature of a batch. Raises DataError where samples have different ones."""
    values = torch.as_tensor(tu.get_non_tensor_data(data, "temperature", 1.0), dtype=torch.float64).flatten()
    if bool((values != values[0]).any()):
        raise DataError(
            f"the batch of verl has temperatures from {values.min():g} to {values.max():g}, and all logits of a step "
            "are divided by one; sample with one temperature"
        )
    return float(values[0])
