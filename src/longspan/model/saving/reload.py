"""The weights of a folder, by `save_model` or stock transformers or peft, into a model that is prepared already.

Each rank reads its own part of each weight, in the prepared model's own dtype. Optimizers are in `checkpoint`.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapters import Adapter, adapter_entries, model_adapter
from longspan.model.check_folder import compare_weights
from longspan.model.lora.save import WEIGHTS, stock_name
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.saving.save import empty_stock_model
from longspan.model.weights.fill import DeferredWeights, persistent_buffers
from longspan.model.weights.folder import check_type
from longspan.model.weights.local_tensors import LocalPart, local_tensor


def load_weights(model: PreTrainedModel | PipelineModel, folder: str | Path, world: World) -> None:
    """Read a folder's weights into a prepared model; all ranks call it together.

    >>> save_model(model, "best", world)
    >>> load_weights(model, "best", world)                     # bit for bit, under any layout

    If the model has an adapter, the adapter only is read. Raises ModelError, on every rank, for a folder that lacks
    weights of the model, has them in other shapes, or cannot be read; the model's weights are then undefined.
    """
    folder = Path(folder)
    as_error = partial(_make_load_error, folder)
    if (adapter := model_adapter(model)) is not None:
        result_or_first_error(world, lambda: _read_adapter(model, adapter, folder), as_error)
        return
    empty = empty_stock_model(model)
    source = result_or_first_error(world, lambda: compare_weights(folder, empty), as_error)
    stages = [stage.model for stage in model.stages] if isinstance(model, PipelineModel) else [model]
    DeferredWeights(empty, source).fill_weights(stages, world)


@torch.no_grad()
def _read_adapter(model: PreTrainedModel | PipelineModel, adapter: Adapter, folder: Path) -> None:
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}, and the model has an adapter; give a folder of its adapter")
    tensors = adapter_entries(model, dict((*model.named_parameters(), *persistent_buffers(model))))
    with safe_open(file, framework="pt", device="cpu") as stored:
        by_name: Mapping[str, Tensor] = {stock_name(name, adapter.name): tensor for name, tensor in tensors.items()}
        if by_name.keys() != (names := set(stored.keys())):
            lacks, extra = sorted(by_name.keys() - names), sorted(names - by_name.keys())
            raise ModelError(
                f"{file} is of another adapter: it lacks {len(lacks)} of this one's tensors "
                f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} others ({', '.join(extra[:2]) or 'none'})"
            )
        for name, tensor in by_name.items():
            values = stored.get_slice(name)
            if tuple(values.get_shape()) != tuple(tensor.shape):
                raise ModelError(f"{name} is {tuple(values.get_shape())} in {file}, and {tuple(tensor.shape)} here")
            check_type(name, values, tensor.dtype, folder)
            local_tensor(tensor).copy_(values[LocalPart.of(tensor).block])


def _make_load_error(folder: Path, error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    return ModelError(f"the weights in {folder} cannot be read: {type(error).__name__}: {error}")
