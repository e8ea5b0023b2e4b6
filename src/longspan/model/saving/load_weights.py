"""The weights of a folder, or of an adapter's files, into a prepared model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapters.adapter import Adapter, entries_trained_with_adapter
from longspan.model.adapters.adapter_files import (
    WEIGHTS,
    name_in_peft_files,
)
from longspan.model.load import checked_folder_weights
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.saving.stock_model import empty_stock_model
from longspan.model.saving.whole_weights import _models_of_stages
from longspan.model.weights.empty_model import persistent_buffers
from longspan.model.weights.fill import DeferredWeights
from longspan.model.weights.folder_weights import refuse_quantized_tensor
from longspan.model.weights.local_tensors import LocalPart, local_tensor

# ---- weights of a folder into a prepared model


def load_weights(model: PreTrainedModel | PipelineModel, folder: str | Path, world: World) -> None:
    """Read a folder's weights into a prepared model; all ranks call it together.

    >>> load_weights(model, "best", world)                     # bit for bit, under any layout

    If the model has an adapter, the adapter only is read. Raises ModelError, on every rank, for a folder that lacks
    weights of the model, has them in other shapes, or cannot be read; the model's weights are then undefined.
    """
    folder = Path(folder)

    def as_error(error: Exception) -> ModelError:
        text = f"the weights in {folder} cannot be read: {type(error).__name__}: {error}"
        return error if isinstance(error, ModelError) else ModelError(text)

    if (adapter := adapter_of_prepared_model(model)) is not None:
        result_or_first_error(world, lambda: _read_adapter(model, adapter, folder), as_error)
        return
    empty = empty_stock_model(model)
    source = result_or_first_error(world, lambda: checked_folder_weights(folder, empty), as_error)
    DeferredWeights(empty, source).fill_weights(_models_of_stages(model), world)


@torch.no_grad()
def _read_adapter(model: PreTrainedModel | PipelineModel, adapter: Adapter, folder: Path) -> None:
    """Copy an adapter's tensors, and what is trained beside it, from peft's file into this rank's parts.

    The file must have exactly these tensors, in the same shapes. Raises ModelError for another file, or none.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}, and the model has an adapter; give a folder of its adapter")
    # a tied copy is in the file under each of its names
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = entries_trained_with_adapter(model, dict((*parameters, *persistent_buffers(model))))
    with safe_open(file, framework="pt", device="cpu") as stored:
        by_name: Mapping[str, Tensor] = {
            name_in_peft_files(name, adapter.name): tensor for name, tensor in tensors.items()
        }
        if by_name.keys() != (names := set(stored.keys())):
            lacks = sorted(by_name.keys() - names)
            extra = sorted(names - by_name.keys())
            raise ModelError(
                f"{file} is of another adapter: it lacks {len(lacks)} of this one's tensors "
                f"({', '.join(lacks[:2]) or 'none'}) and has {len(extra)} others ({', '.join(extra[:2]) or 'none'})"
            )
        for name, tensor in by_name.items():
            values = stored.get_slice(name)
            if tuple(values.get_shape()) != tuple(tensor.shape):
                raise ModelError(f"{name} is {tuple(values.get_shape())} in {file}, and {tuple(tensor.shape)} here")
            refuse_quantized_tensor(name, values, tensor.dtype, folder)
            local_tensor(tensor).copy_(values[LocalPart.from_parameter(tensor).block])
