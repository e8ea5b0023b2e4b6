"""Weights of the depths of multi-token prediction: drawn, or read from a folder, now or once the model is prepared."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.hf_folder import weight_files
from longspan.model.mtp.depths import MtpDepths, mtp_blocks
from longspan.model.mtp.names import PREFIX, as_ours, own_name
from longspan.model.weights.empty import is_empty, stored_buffers
from longspan.model.weights.fill import WeightSource
from longspan.model.weights.folder import FolderWeights
from longspan.model.weights.held import HeldPart
from longspan.model.weights.random import draw


def draw_depths(model: PreTrainedModel, mtp: MtpDepths, seed: int) -> None:
    """Random weights as transformers initialises them, the same on every rank and under every home."""
    _fill(model, mtp, _Drawn(model, mtp, seed))


def read_depths(model: PreTrainedModel, mtp: MtpDepths, folder: Path) -> None:
    """The weights of a folder of safetensors files. Raises ModelError where some are missing or of other shapes."""
    layers = model.config.get_text_config().num_hidden_layers
    rename = partial(own_name, layers=layers, blocks=len(mtp_blocks(model)) // len(mtp.layers))
    source = FolderWeights(folder, weight_files(folder), model, rename=rename, view=as_ours)
    names = [f"{PREFIX}.{name}" for name in mtp.state_dict()]
    there = source.names()
    if missing := [name for name in names if name not in there]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} weights of multi-token prediction of depth "
            f"{len(mtp.layers)}: {', '.join(missing[:4])} (or model.layers.{layers}.…, mtp.fc.… or "
            "model.mtp_layers.0.… and so on for them); use a folder that has them, fewer depths, or leave weights= out "
            "for random ones"
        )
    _fill(model, mtp, source)


class _Drawn:
    """Each depth is drawn at once, for modules may draw those inside them, from a seed of its own: `seed` and its name.

    A depth is known here by its names and shapes alone, without memory, and by what buffers it has.
    """

    def __init__(self, model: PreTrainedModel, mtp: MtpDepths, seed: int) -> None:
        self._initialise, self._seed = model._init_weights, seed
        self._depths = {f"{PREFIX}.layers.{i}": deepcopy(depth).to("meta") for i, depth in enumerate(mtp.layers)}
        self._buffers = {f"{PREFIX}.{name}": buffer.clone() for name, buffer in stored_buffers(mtp)}

    def __str__(self) -> str:
        return "the drawn depths"

    def read(self, wanted: Mapping[str, HeldPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter, by name; buffers are as they are."""
        yield from ((name, buffer) for name, buffer in self._buffers.items() if name in wanted)
        for path, depth in self._depths.items():
            drawn = draw(path, depth, device, seed=self._seed, initialise=self._initialise)
            for name, tensor in drawn.named_parameters():
                if part := wanted.get(f"{path}.{name}"):
                    yield f"{path}.{name}", tensor.detach()[part.block or ...].to(part.dtype)


class _Both:
    """The weights of the model itself, then those of its depths."""

    def __init__(self, model: WeightSource, depths: WeightSource) -> None:
        self._model, self._depths = model, depths

    def __str__(self) -> str:
        return str(self._model)

    def read(self, wanted: Mapping[str, HeldPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter, by name."""
        yield from self._model.read(wanted, device)
        yield from self._depths.read(wanted, device)


@torch.no_grad()
def _fill(model: PreTrainedModel, mtp: MtpDepths, source: WeightSource) -> None:
    """Fill the depths now, or, of a model whose parameters have no memory yet, when `prepare` fills it."""
    if (weights := vars(model).get("weights_to_come")) is not None:
        weights.source = _Both(weights.source, source)
        return
    if is_empty(mtp):  # a model that stands for its names and shapes alone
        return
    tensors: dict[str, Tensor] = {f"{PREFIX}.{name}": x for name, x in mtp.state_dict(keep_vars=True).items()}
    device = next(mtp.parameters()).device
    for name, part in source.read({name: HeldPart.of(x) for name, x in tensors.items()}, device):
        tensors[name].copy_(part)
