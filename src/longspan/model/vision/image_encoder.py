"""The tower and projector of a vision-language model as an encoder: a list of images to their rows, end to end.

The model's own `get_image_features` is called once. Towers that pack patches by cu_seqlens call `attend` over one slot:
for functions with "flash" in their name transformers does not split images, nor read lengths in every layer.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from longspan.attention import attend
from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.layers import (
    base_model,
    base_model_name,
    copy_shallow_module,
    text_model,
    towers_beside_text_model,
)
from longspan.model.vision.image_inputs import ImageInput, encoding_order, image_arguments
from longspan.plan import Group, MicroBatch


class ImageEncoder(nn.Module):
    """The module of an `Encoder` of images: ImageInputs to rows (n, D · (1 + deep layers)), parts of a row side by
    side.

    `base` is the model below the head without its text model, under the `name` of the whole model; without one (Llama
    4) its children are children of the encoder itself.
    """

    def __init__(self, base: nn.Module, name: str) -> None:
        """Take `base`, the model below the head without its text model, under its `name` in the whole model."""
        super().__init__()
        self.base_model_name = name
        if name:
            self.add_module(name, base)
        else:
            self.__dict__["_whole"] = base  # not registered: its parameters would have two names
            for part, child in base.named_children():
                self.add_module(part, child)
        vision = getattr(base.config, "vision_config", None)
        self.deep_layers: int = len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def base(self) -> Any:
        """The model below the head, without its text model."""
        if self.base_model_name:
            return self.get_submodule(self.base_model_name)
        return self.__dict__["_whole"]

    def forward(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Encode images in one call of the tower: rows (n, D · (1 + deep layers)), end to end.

        DataError if images do not fit each other, ModelError if the model gives rows for more or fewer deeper layers
        than its configuration names.
        """
        rows = encode_images(self.base, inputs)
        if len(rows) != 1 + self.deep_layers:
            raise ModelError(
                f"{type(self.base).__name__} gave {len(rows) - 1} parts for deeper layers, its configuration names "
                f"{self.deep_layers}"
            )
        return torch.cat(rows, -1)  # a copy: FSDP2 warns of views that a module returns


def encode_images(base: Any, inputs: Sequence[ImageInput]) -> list[Tensor]:
    """Encode images by a model's get_image_features: rows (n, D) end to end, and the same for each deeper layer.

    The model gets them in `encoding_order`; the rows are in the order of `inputs`.
    """
    order = encoding_order(inputs)
    arguments = image_arguments(base, [inputs[i] for i in order], next(base.parameters()))
    out = base.get_image_features(**arguments, return_dict=True)
    rows = out.pooler_output
    if rows is None:  # Llama 4, whose forward pass projects what its tower made
        rows = base.multi_modal_projector(out.last_hidden_state)
    parts = (rows, *(getattr(out, "deepstack_features", None) or ()))
    rows_of_layers = list[Tensor]()
    for layer_rows in parts:
        # a tensor for each image, in the order of encoding; models that give one of all images take `inputs` in order
        if not isinstance(layer_rows, Tensor):
            in_order = layer_rows if order == sorted(order) else [layer_rows[i] for i in np.argsort(order)]
            layer_rows = torch.cat([*in_order])
        rows_of_layers.append(layer_rows.flatten(0, -2))
    return rows_of_layers


def split_off_image_encoder(model: PreTrainedModel) -> ImageEncoder:
    """Take the encoder out of a vision-language model, in place, and return it; what stays is a language model."""
    base = base_model(model)
    text = text_model(model)
    towers = towers_beside_text_model(model)
    name_of_base = base_model_name(model)  # read now: it may differ once the towers are gone
    shell = copy_shallow_module(base)
    for name, child in list(base.named_children()):
        if child in towers:
            del base._modules[name]
        elif any(module is text for module in child.modules()):
            del shell._modules[name]
    # The base's own parameters belong to images too (a vector that ends a line of patches), and stay in the shell.
    base._parameters.clear()
    return ImageEncoder(shell, name_of_base)


IMPLEMENTATION = "longspan_packed_flash"
_NO_WORLD = -1  # no world's key: a group of one slot does not communicate
# The key is the tensor of cu_seqlens, which all layers of a call share.
_shards = WeakIdKeyDictionary()


def pack_attention(encoder: nn.Module) -> None:
    """Have towers in an encoder that pack images by cu_seqlens attend to all in one call of `attend`.

    Sets the attention implementation of their configurations, unless the user chose one that is no default.
    """
    for module in encoder.modules():
        config: Any = getattr(module, "config", None)
        if config is None:
            continue
        is_default = getattr(config, "_attn_implementation", None) in ("sdpa", None)
        if is_default and "cu_seqlens" in signature(module.forward).parameters:
            config._attn_implementation = IMPLEMENTATION


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention: q, k, v (1, N, n, H) to (1, n, N, H)."""
    if cu_seq_lens_q is None or attention_mask is not None or dropout or is_causal or len(query) != 1:
        raise ModelError(
            f"{type(module).__name__} asked {IMPLEMENTATION} for other attention than among the rows of each segment: "
            f"cu_seq_lens_q {'missing' if cu_seq_lens_q is None else 'given'}, dropout {dropout}, is_causal "
            f"{is_causal}, batch {len(query)}; give its vision_config attn_implementation 'eager'"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, _shard_of_segments(cu_seq_lens_q, q.device), causal=False, scale=scaling)[None], None


def _shard_of_segments(cu_seqlens: Tensor, device: torch.device) -> SequenceShard:
    """Made once for all layers of a call of the tower, when lengths are read from the device."""
    if cu_seqlens not in _shards:
        lengths = tuple(length for length in cu_seqlens.diff().tolist() if length)
        group = Group((0,), tuple(range(len(lengths))), lengths, partition="contiguous")
        _shards[cu_seqlens] = SequenceShard(MicroBatch((group,)), 0, _NO_WORLD, device)
    return _shards[cu_seqlens]


AttentionInterface.register(IMPLEMENTATION, _packed_attention)
