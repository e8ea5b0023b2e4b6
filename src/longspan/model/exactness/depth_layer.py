"""Which decoder layer depths of multi-token prediction copy, and its arguments: tried on the meta device.

It is the last layer that runs without those before it: the last layers of some Gemma 4 attend to keys and values of
earlier ones, and have none of their own.
"""

from collections.abc import Container
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.exactness.meta_pass import run_on_meta
from longspan.model.layers import decoder_layers
from longspan.model.mtp.layer_inputs import CopiedLayer, NotedLayer, copy_without_layers, depends_on_parameters


def layer_to_copy(model: PreTrainedModel) -> CopiedLayer:
    """Find the layer of a stock model that its depths copy; the last one if its forward does not run on meta tensors.

    Raises ModelError for a model whose layers take hidden states of another shape than rows of the hidden size.
    """
    last_layer = len(decoder_layers(model)) - 1
    if (noted_layers := _note_layers(model)) is None:
        return CopiedLayer(last_layer)
    _refuse_streams(model, noted_layers[last_layer])
    outputs = noted_layers[last_layer].outputs
    index = _last_independent_layer(model, last_layer, outputs)
    # With `of_tokens` the module around the layers runs again, to make the arguments of a depth's layer of its tokens.
    # A layer other than the last gets its arguments in this way too, whatever they depend on.
    of_tokens = index != last_layer or depends_on_parameters(noted_layers[index].note.call)
    return CopiedLayer(index, of_tokens, outputs)


def _note_layers(model: PreTrainedModel) -> list[NotedLayer] | None:
    """Run the model on the meta device with a stand-in for each layer, which notes its arguments; return the stand-ins.

    What the model's layers return is not known yet, so passes are tried until one succeeds: with stand-ins that return
    a tensor (`outputs` 0), then a tuple of one value, then of two. None if no pass calls every stand-in and makes rows.
    """
    for outputs in (0, 1, 2):
        embedded = _meta_rows(model)
        layerless_model, layers = copy_without_layers(model, embedded, outputs)
        with suppress(Exception):  # whatever a forward raises
            out = run_on_meta(layerless_model, None, gradients=True)[0]
            noted_layers = [layer for layer in layers if isinstance(layer, NotedLayer) and layer.note.is_set]
            if len(noted_layers) == len(layers) and out.shape[-2:] == embedded.shape[-2:]:
                return noted_layers
    return None


def _meta_rows(model: PreTrainedModel) -> Tensor:
    """Make two embedded rows (1, 2, D) on the meta device, which require a gradient."""
    weight = next(model.get_input_embeddings().parameters())
    return torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype, device="meta", requires_grad=True)


def _refuse_streams(model: PreTrainedModel, layer: NotedLayer) -> None:
    """Raise ModelError if layers take several streams of hidden states, which depths do not have."""
    states, size = layer.note.hidden_states, _meta_rows(model).shape[-1]
    shape = () if states is None else tuple(states.shape)
    if shape != (1, 2, size):
        raise ModelError(
            f"{type(model).__name__} gives its decoder layers hidden states of shape {shape} for two rows of size "
            f"{size}: several streams of each row, and a depth of multi-token prediction, whose projection makes one, "
            "has none; train it without (no add_mtp, mtp.depths = 0)"
        )


def _last_independent_layer(model: PreTrainedModel, last: int, outputs: int) -> int:
    """Return the number of the last layer that runs while stand-ins, which return `outputs` values, replace all others.

    If not even the model with all its layers runs on meta tensors, failures with stand-ins show nothing of the layers:
    `last`, the number of the last layer, is returned then, and also where no layer runs by itself.
    """
    if _runs_on_meta(model, outputs, [last]) or not _runs_on_meta(model, outputs, range(last + 1)):
        return last
    return next((index for index in range(last - 1, -1, -1) if _runs_on_meta(model, outputs, [index])), last)


def _runs_on_meta(model: PreTrainedModel, outputs: int, layers: Container[int]) -> bool:
    """Return whether the model runs on the meta device with stand-ins for all layers but these."""
    try:
        run_on_meta(copy_without_layers(model, _meta_rows(model), outputs, keep=layers)[0], None)
    except Exception:  # whatever a forward raises
        return False
    return True
