"""What a loss of one's own is told of the rows whose log-probabilities it gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.errors import DataError
from longspan.train.loss import Targets
from longspan.train.reading.read_rows import WEIGHTS, LocalBatch, documents_and_positions, target_rows


@dataclass(frozen=True, eq=False)
class LossRows:
    """Some rows of one micro-batch that predict a token, n of them, on the model's device.

    `document` (n,) is numbered as in the plan; a row at `position` (n,) predicts the token after it, whose id is in
    `target` (n,). `at["name"]` (n,) is what came with the documents under that name, of the tokens that are predicted,
    in the dtype of the log-probabilities; `at["weights"]` are 1 in documents that give none.
    """

    document: Tensor
    position: Tensor
    target: Tensor
    values: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, name: str) -> Tensor:
        """The numbers (n,) of this name. Raises DataError where documents have none."""
        if name not in self.values:
            raise DataError(
                f"the loss asks for {name!r}, the documents of this step have {', '.join(sorted(self.values))}; give "
                f"it with each: longspan.Document(ids, {name}=…)"
            )
        return self.values[name]


class BatchTargets:
    """The targets of one micro-batch on this rank, on the host and on the device."""

    def __init__(self, batch: LocalBatch, device: torch.device) -> None:
        rows = target_rows(batch)
        self.documents, positions = (values[rows] for values in documents_and_positions(batch.shard))
        self.weights = batch.values[WEIGHTS][rows] if WEIGHTS in batch.values else np.ones(len(rows))
        self.positions = positions
        self.targets = Targets(to_device(rows, device), to_device(batch.labels[rows], device))
        self._values = {name: values[rows] for name, values in batch.values.items()} | {WEIGHTS: self.weights}
        self._device = device

    def rows(self, part: slice, dtype: torch.dtype) -> LossRows:
        """Some of them, for a loss of one's own."""
        numbers = {name: to_device(x[part], self._device).to(dtype) for name, x in self._values.items()}
        return LossRows(
            to_device(self.documents[part], self._device),
            to_device(self.positions[part], self._device),
            self.targets.ids[part],
            MappingProxyType(numbers),
        )
