"""The layer index of attention that its model gives none: Zamba 2's shared blocks have -1, one in each layer."""

from typing import Any

from transformers import PreTrainedModel

from longspan.model.layers import decoder_layers
from longspan.model.mtp.depths import copied_layer, mtp_blocks


def number_layers(model: PreTrainedModel) -> None:
    """From here on, a module with `layer_idx` -1 has the index of the decoder layer that it is in, if of one alone.

    In a depth of multi-token prediction that of the layer that it copies.
    """
    layers_of: dict[int, tuple[Any, set[int]]] = {}
    depths = [(copied_layer(model).index, block) for block in mtp_blocks(model).values()]
    for index, layer in (*enumerate(decoder_layers(model).values()), *depths):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) == -1:
                layers_of.setdefault(id(module), (module, set()))[1].add(index)
    for module, indices in layers_of.values():
        if len(indices) == 1:
            module.layer_idx = indices.pop()
