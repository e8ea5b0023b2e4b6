"""Weights of the depths of multi-token prediction: drawn, or read from a folder, now or once the model is prepared."""

import re
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.hf_folder import weight_files
from longspan.model.mtp.depths import PREFIX, MtpDepths
from longspan.model.weights.empty import is_empty
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
    source = FolderWeights(folder, weight_files(folder), model, rename=partial(_own_name, layers=layers))
    names = [f"{PREFIX}.{name}" for name in mtp.state_dict()]
    there = source.names()
    if missing := [name for name in names if name not in there]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} weights of multi-token prediction of depth "
            f"{len(mtp.layers)}: {', '.join(missing[:4])} (or model.layers.{layers}.… and so on for them); use a "
            "folder that has them, fewer depths, or leave weights= out for random ones"
        )
    _fill(model, mtp, source)


class _Drawn:
    """Each module that has parameters of its own is drawn from a seed of its own: `seed` and its name."""

    def __init__(self, model: PreTrainedModel, mtp: MtpDepths, seed: int) -> None:
        self._initialise, self._seed = model._init_weights, seed
        self._modules = {f"{PREFIX}.{path}": _alone(module) for path, module in mtp.named_modules() if _stored(module)}

    def __str__(self) -> str:
        return "the drawn depths"

    def read(self, wanted: Mapping[str, HeldPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter, by name."""
        for path, module in self._modules.items():
            drawn = draw(path, module, device, seed=self._seed, initialise=self._initialise)
            for name, tensor in _stored(drawn).items():
                if part := wanted.get(f"{path}.{name}"):
                    yield f"{path}.{name}", tensor.detach()[part.block or ...].to(part.dtype)


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and stored buffers of a module itself, by name."""
    buffers = {n: x for n, x in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set}
    return dict(module.named_parameters(recurse=False)) | buffers


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


def _alone(module: nn.Module) -> nn.Module:
    """The module without those inside it, and without memory for its parameters and buffers."""
    alone = copy(module)
    alone.__dict__["_modules"] = {}
    return deepcopy(alone).to("meta")


def _own_name(key: str, layers: int) -> str:
    """Our name for a depth's weight in the files of DeepSeek-V3 and models after it; another key as it is.

    >>> _own_name("model.layers.61.mlp.up_proj.weight", layers=61)
    'mtp.layers.0.mtp_block.mlp.up_proj.weight'
    >>> _own_name("model.layers.61.shared_head.norm.weight", layers=61)
    'mtp.layers.0.post_norm.weight'
    """
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", key)
    if match is None or int(match[1]) < layers:
        return key
    inside = match[2].replace("shared_head.norm.", "post_norm.", 1)
    of_depth = inside.startswith(("enorm.", "hnorm.", "eh_proj.", "post_norm."))
    return f"{PREFIX}.layers.{int(match[1]) - layers}.{'' if of_depth else 'mtp_block.'}{inside}"
